"""The process that compiles grammars of strangers: one job at a time, under a limit of CPU time and memory. Ends with its pipe.

    stdin  Hello, Job, Job, …       stdout  Ready, then Vetted | Static | Refused | Broken, for each job

Never imports torch: xgrammar asks for it, and for transformers, for conveniences that nobody uses here.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import sys
import threading
import time
from types import ModuleType
from typing import Any

from phloem.runtime.errors import GrammarError, PhloemError
from phloem.runtime.grammar.audit import Route, is_audited, route
from phloem.runtime.grammar.base import GrammarBackend, Limits, backend
from phloem.runtime.grammar.compile import (
    WARM_SPEC,
    Broken,
    Hello,
    Job,
    Ready,
    Refused,
    Static,
    Vetted,
    read_frame,
    serve,
    write_frame,
)
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec

__all__ = ["main"]

CHEAP_SECONDS = 0.1
"""A static grammar that took less is compiled again rather than sent: it is quicker than reading it (C4)."""


def main() -> None:
    jobs, replies = 0, os.dup(1)
    os.dup2(2, 1)  # whatever an engine prints must not fall between the frames
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs, inbox), daemon=True).start()
    vocabulary = vocabulary_of(inbox.get())
    _warm(vocabulary)
    write_frame(replies, Ready())
    while True:
        job = inbox.get()
        _limit(job.limits)
        write_frame(replies, answer(job, vocabulary))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _listen(fd: int, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(read_frame(fd))
    except EOFError:
        os._exit(0)  # the engine is gone, and nobody waits for what is being compiled


def _warm(vocabulary: Vocabulary) -> None:
    """Engines are loaded before the first job, whose time and memory theirs is not. With a mask: xgrammar's first one takes 150 ms."""
    for name in ("llguidance", "xgrammar"):
        if is_audited(name):
            # A vocabulary may lack the bytes of this grammar (32 ids that spell sums): the engine is loaded all the same.
            with contextlib.suppress(GrammarError):
                serve(Route(WARM_SPEC, (name,)), vocabulary, Limits(), _make)


def _limit(limits: dict[str, int | float]) -> None:
    """CPU time from now on: SIGPROF ends the process even inside C++. Memory: what is mapped already and the job's share."""
    signal.setitimer(signal.ITIMER_PROF, float(limits["cpu_seconds"]))
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + int(limits["worker_bytes"]), resource.RLIM_INFINITY))


def vocabulary_of(hello: Hello) -> Vocabulary:
    """The engine's vocabulary, but for its tokenizer: texts are spelled greedily, since only time and size are of interest here."""
    ids = {word: i for i, word in reversed(list(enumerate(hello.tokens))) if word}
    longest = max(map(len, ids), default=1)

    def encode(text: str) -> list[int]:
        data, at, found = text.encode(), 0, list[int]()
        while at < len(data):
            size = next((n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in ids), 0)
            if size:
                found.append(ids[data[at : at + size]])
            at += max(size, 1)
        return found

    return Vocabulary(hello.tokens, stop_ids=hello.stop_ids, special_ids=hello.special_ids, width=hello.width, encode=encode)


def answer(job: Job, vocabulary: Vocabulary) -> Vetted | Static | Refused | Broken:
    limits = Limits(**job.limits)  # type: ignore[arg-type]
    try:
        return _static(job.spec, vocabulary) if job.static else _vetted(job.spec, vocabulary, limits)
    except PhloemError as error:
        return Refused(error.message, error.param, error.code)
    except MemoryError:
        return Refused("the constraint cannot be served: compiling it took too much memory. Simplify it.", job.spec.kind, None)
    except Exception as error:
        return Broken(f"{type(error).__name__}: {error}")


def _vetted(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> Vetted:
    path = route(spec, limits)
    served = serve(path, vocabulary, limits, _make)
    taken = path if path.fallback is None or served.report.dropped == path.dropped else path.fallback
    return Vetted(taken.spec, served.report.backend, taken.lowered, taken.dropped)


def _make(name: str) -> GrammarBackend:
    if name != "xgrammar":
        return backend(name)
    without_torch()
    from phloem.runtime.grammar.xgrammar import XGrammar

    return XGrammar(static_seconds=0)


def _static(spec: GrammarSpec, vocabulary: Vocabulary) -> Static:
    without_torch()
    from phloem.runtime.grammar.xgrammar import compile_static

    start = time.perf_counter()
    grammar = compile_static(spec, vocabulary)
    seconds = time.perf_counter() - start
    return Static(seconds, None if seconds < CHEAP_SECONDS else str(grammar.serialize_json()))


def without_torch() -> None:
    """Let xgrammar be imported with stand-ins for torch and transformers, of which it needs a few names and no more."""
    if "xgrammar" in sys.modules:
        return
    assert "torch" not in sys.modules, "a worker has imported torch"
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi does without
    import tvm_ffi  # noqa: F401

    sys.modules["torch"], sys.modules["transformers"] = _StandIn("torch"), _StandIn("transformers")
    try:
        import xgrammar  # noqa: F401
    finally:
        sys.modules["torch"] = sys.modules["transformers"] = None  # type: ignore[assignment]


class _StandIn(ModuleType):
    """Names for annotations and base classes. What is called gives None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *values, **options: None) if name == "tensor" else object
