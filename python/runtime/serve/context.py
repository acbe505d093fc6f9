"""One HTTP request on its way through a handler: its id, its key, its notes, its record. And how a handler ends it.

    open_request ─> handler(context) ─> Response ─> the record goes to the observer, whatever happened

A waiting client's disconnect aborts its samples like a reader's (L7): `watched` looks for it beside the handler's own wait.
"""

from __future__ import annotations

import asyncio
import secrets
import string
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phloem.runtime.errors import EngineDeadError
from phloem.runtime.request import Usage
from phloem.runtime.serve.body import Notes
from phloem.runtime.serve.errors import ApiError, failure_of
from phloem.runtime.serve.guard import Keys
from phloem.runtime.serve.host import Host, RequestRecord, Served
from phloem.runtime.serve.jobs import Job, Wakeups

if TYPE_CHECKING:
    from phloem.runtime.serve.prompts import Prompts

__all__ = ["Context", "Gone", "Reply", "check_life", "error_response", "new_id", "watched"]

_BASE62 = string.digits + string.ascii_letters
JSON = "application/json"


class Gone(Exception):
    """The client went away before its reply: 499."""


def new_id() -> str:
    """22 base62 characters: 130 bits. One draw of the system's, not one a character."""
    number, found = secrets.randbits(192), []
    for _ in range(22):
        number, digit = divmod(number, 62)
        found.append(_BASE62[digit])
    return "".join(found)


class Context:
    """name: the 22 characters of this request's ids.   endpoint: the route's pattern."""

    def __init__(
        self, host: Host, request: Request, endpoint: str, key: str, prompts: Prompts | None, wakeups: Wakeups, keys: Keys
    ) -> None:
        self.host, self.request, self.endpoint, self.key = host, request, endpoint, key
        self.name = new_id()
        self.notes = Notes()
        self.headers: dict[str, str] = {}
        self._prompts, self.wakeups, self.keys = prompts, wakeups, keys
        self.finishes: dict[int, str] = {}  # of choices, in the words of the wire
        self.created = int(time.time())
        headers = request.headers
        self.record = RequestRecord(
            id=f"req_{self.name}", endpoint=endpoint, key=key, client_id=headers.get("x-request-id", ""), trace=headers.get("traceparent")
        )  # fmt: skip

    @property
    def prompts(self) -> Prompts:
        if self._prompts is None:
            check_life(self.host)
            raise ApiError(503, "loading", "the model is still loading. Try again soon.")
        return self._prompts

    @property
    def model(self) -> Served:
        return self.prompts.model

    @property
    def strict(self) -> bool:
        return self.host.config.strict_params

    def reply_headers(self) -> dict[str, str]:
        return {"x-request-id": self.record.id, **self.notes.headers(), **self.headers}

    def job(self, *, partial: bool = False) -> Job:
        return Job(self.host, self.wakeups, self.record, partial=partial)

    def warn_of_ignored(self) -> None:
        """W3: one line a name and process."""
        for name in sorted(self.notes.ignored)[:32]:
            self.host.warn_once(f"{self.endpoint} {name}", f"parameter {name!r} of {self.endpoint} has no effect here")

    def complete(self, status: int, code: str | None = None) -> None:
        """Hands the record to the observer. Once."""
        record = self.record
        if not record.ended:
            record.ended, record.status, record.code = time.perf_counter(), status, code
            record.ignored = tuple(sorted(self.notes.ignored))
            record.clipped = "max_tokens.clipped" in self.notes.warnings
            self.host.observer.request(record)

    def count(self, job: Job, finishes: Mapping[int, str] = {}) -> None:
        """What the samples came to, into the record."""
        record, seen = self.record, set[int]()
        record.num_choices = len(job.samples)
        for s in job.samples:
            usage = s.output.usage if s.output is not None else Usage(len(s.request.token_ids), 0, s.num_tokens)
            record.completion_tokens += usage.completion_tokens
            record.forced_tokens += usage.forced_tokens
            record.discarded_tokens += s.num_dropped
            if s.number not in seen:  # with n the prompt counts once
                seen.add(s.number)
                record.prompt_tokens += usage.prompt_tokens
                record.cached_tokens += usage.cached_tokens
            reason = s.output.finish_reason if s.output is not None else "abort"
            word = {"eos": "stop", "stop_token": "stop", "stop_string": "stop", "grammar": "stop"}.get(reason, reason)
            record.finish.append(self.finishes.get(s.index, word))


def check_life(host: Host) -> None:
    """Raises 503 while nothing can be served."""
    life = host.life
    if life.phase == "loading":
        raise ApiError(503, "loading", f"the model is loading{f' ({life.progress})' if life.progress else ''}. Try again soon.")
    if life.phase == "draining":
        raise ApiError(
            503, "draining", "the server is shutting down and takes no new requests. Use another one, or try again soon."
        )
    if life.phase == "dead":
        raise EngineDeadError("the engine is gone. The server ends, or starts it anew; try again soon.")
    if life.asleep:
        raise ApiError(503, "sleeping", "the engine has handed back its memory. Resume it first, or try again soon.")


def error_response(error: BaseException, host: Host, headers: Mapping[str, str]) -> Response:
    failure = failure_of(error, retry_after=host.retry_after())
    extra = {"connection": "close"} if failure.status in (408, 413) else {}  # what is still being sent is never read
    return Response(failure.body, failure.status, {**headers, **failure.headers, **extra}, JSON)


async def watched(receive: Receive, gone: Callable[[], Any], wait: Any) -> None:
    """Await `wait`, and meanwhile look whether the client is still there: if it is not, `gone` is called, once.

    One task a request, none a token. Call it when the body was read: `receive` then waits for the disconnect.
    """
    watch = asyncio.ensure_future(_until_gone(receive, gone))
    try:
        await wait
    finally:
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


async def _until_gone(receive: Receive, gone: Callable[[], Any]) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            gone()
            return


class Reply(Response):
    """A whole reply that tells the context when it has left."""

    def __init__(self, context: Context, body: bytes, status: int = 200) -> None:
        super().__init__(body, status, context.reply_headers(), JSON)
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().__call__(scope, receive, send)
        self._context.complete(self.status_code)
