"""A chat template that a request brought, rendered in a process of its own that can be killed (G5, C-OPS-09).

    server, in a thread:  frame(source, variables) ──stdin──> child: jinja2's immutable sandbox, limits on CPU and memory
                          <──stdout── frame(text | error)             killed after SECONDS

A loop in a template cannot be stopped from outside its process. Frames are a length and JSON; nothing is unpickled.
"""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.text.template import ChatTemplate

__all__ = ["KillableTemplate"]

SECONDS = 2.0
START_SECONDS = 30.0
MAX_OUTPUT = 4 << 20
MAX_MEMORY = 1 << 30


class KillableTemplate(ChatTemplate):
    """As ChatTemplate, for a source that nobody vouches for. Blocks: call it in a thread, and `close` it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises InvalidRequestError (code chat_template_error): the template is none, refuses, or takes too much of anything."""
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        deadline = time.monotonic() + SECONDS
        try:
            child.stdin.write(_frame({"source": self.source, "variables": dict(variables)}))
            child.stdin.flush()
            answer = msgspec.json.decode(_read(child, deadline))
        except (TimeoutError, OSError, EOFError):
            self.close()
            raise _refused(
                f"the request's chat template took more than {SECONDS:g} seconds, or more memory than it may; simplify it."
            ) from None
        if "error" in answer:
            raise _refused(answer["error"])
        return str(answer["text"])

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "phloem.runtime.serve.sandbox"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            _read(child, time.monotonic() + START_SECONDS)
        except BaseException:
            child.kill()
            child.wait()
            raise
        return child

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what was not yet written goes nowhere
                        pipe.close()


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="chat_template", code="chat_template_error")


def _frame(value: Any) -> bytes:
    data = msgspec.json.encode(value)
    return len(data).to_bytes(4, "big") + data


def _read(child: subprocess.Popen[bytes], deadline: float) -> bytes:
    """One frame. Raises TimeoutError, EOFError."""
    assert child.stdout is not None
    size = int.from_bytes(_exactly(child.stdout, 4, deadline), "big")
    if size > 2 * MAX_OUTPUT:
        raise EOFError
    return _exactly(child.stdout, size, deadline)


def _exactly(pipe: BinaryIO | Any, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            raise TimeoutError
        part = os.read(pipe.fileno(), size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


# ---- the child ----------------------------------------------------------------------------------------------------------


def _answer(asked: Any) -> dict[str, str]:
    try:
        text = ChatTemplate(asked["source"]).render(asked["variables"])
    except InvalidRequestError as error:
        return {"error": error.message}
    except MemoryError:
        return {"error": "the request's chat template took more memory than it may; simplify it."}
    if len(text) > MAX_OUTPUT:
        return {"error": f"the request's chat template wrote {len(text)} characters; at most {MAX_OUTPUT}."}
    return {"text": text}


def main() -> None:
    """Answers frames until its parent closes the pipe."""
    ChatTemplate("{{ 1 }}").render({})  # imports what it needs, before the limits
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    target.write(_frame({}))
    target.flush()
    while head := source.read(4):
        answer = _answer(msgspec.json.decode(source.read(int.from_bytes(head, "big"))))
        target.write(_frame(answer))
        target.flush()


if __name__ == "__main__":
    main()
