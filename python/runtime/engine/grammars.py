"""The GrammarService: a request's GrammarSpec in, a cursor out, without the loop ever waiting for a compiler.

    begin ── key ──> CompileCache ──hit──────────────────────────────────────────> cursor(tail) ──> PendingCursor.ready
                          └─miss──> thread: route (audit, lower) ─> vet in a worker ─> compile ─> first mask ─┘

Owns which engine serves a grammar, the threads and workers that compile, and what masks cost. Knows no tokenizer but as the data
that `vocabulary_of` makes of one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.engine.compiling import COMPILE_BOUNDS, FILL_BOUNDS, GrammarCounters, Times
from phloem.runtime.errors import EngineClosedError, GrammarError
from phloem.runtime.grammar.audit import AUDIT_VERSION, AUDITED, Route, is_audited, route
from phloem.runtime.grammar.base import (
    AuditReport,
    CompileCache,
    CompiledGrammar,
    Cursor,
    GrammarBackend,
    Limits,
    backend,
    cache_key,
)
from phloem.runtime.grammar.compile import WARM_SPEC, Workers, serve
from phloem.runtime.grammar.static import Statics
from phloem.runtime.grammar.thoughts import ThoughtsFirst
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.grammar.xgrammar import XGrammar, XGrammarGrammar
from phloem.runtime.request import GrammarSpec, Request

if TYPE_CHECKING:
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Grammars", "vocabulary_of"]

SLOW_FILL, MAX_SLOW_FILLS = 0.2, 5
"""Seconds of one mask, and how many such masks end a request (C6)."""
VETTED = ("choices", "json_object")
"""Kinds that need no worker: their size bounds what they cost."""
INLINE_CHOICES = 4_096
"""Characters of choices beyond which even a cached grammar's cursor is made off the loop: their trie depends on the prompt."""


def vocabulary_of(tokenizer: Tokenizer, eos_ids: Iterable[int], width: int) -> Vocabulary:
    """The tokenizer as grammars see it. eos_ids: all that end the model's text; the tokenizer's own goes first."""
    stops = [*([] if tokenizer.eos_id is None else [tokenizer.eos_id]), *sorted(eos_ids)]
    return Vocabulary(
        [tokenizer.token_bytes(i) for i in range(min(tokenizer.vocab_size, width))],
        stop_ids=[i for i in stops if i < width],
        special_ids=[i for i in tokenizer.control_ids if i < width],
        width=width,
        encode=tokenizer.encode_continuation,
    )


class Grammars:
    """Follows compiling.GrammarService. Threads and workers start with the first grammar.

    vocabulary: makes it, in a compiling thread.   eos_id: the tokenizer's own end token (J8).
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        eos_id: int | None,
        *,
        limits: Limits | None = None,
        cache_bytes: int = 256 << 20,
        threads: int = 2,
    ) -> None:
        self.eos_id = eos_id
        self.cache = CompileCache(cache_bytes)
        self._limits = limits or Limits()
        self._make_vocabulary, self._vocabulary = vocabulary, None
        self._lock = threading.Lock()
        self._threads, self._pool = threads, None
        self._workers = Workers(self.vocabulary, self._limits)
        self._statics = Statics(self._workers, self.vocabulary)
        self._fills, self._fill_seconds, self._compile_seconds = 0, 0.0, 0.0
        self._refused = self._timeouts = 0
        self._compile_times, self._fill_times = Times.of(COMPILE_BOUNDS), dict[str, Times]()
        self._closed = False

    _vocabulary: Vocabulary | None
    _pool: ThreadPoolExecutor | None

    def begin(self, request: Request) -> Pending:
        spec = request.grammar
        assert spec is not None
        if self.eos_id is None:
            raise GrammarError("this model's tokenizer has no end token: no constrained text could end.", param=spec.kind)
        if len(spec.source) > self._limits.source_bytes:
            raise GrammarError(
                f"the {spec.kind.replace('_', ' ')} has {len(spec.source)} characters; at most {self._limits.source_bytes} are compiled.",
                param=spec.kind,
            )
        pending = Pending(self, spec, request.token_ids[-8:])
        if self._vocabulary is None:
            self._executor().submit(self._find, pending)
        else:
            self._find(pending)
        return pending

    def warm(self) -> None:
        """Make, in the background, what the first requests would wait for: the vocabulary, `json_object`, the engines, a worker (C5).
        For servers."""
        if self.eos_id is not None:
            self._executor().submit(self._find, Pending(self, GrammarSpec(kind="json_object", source=""), ()))
            self._executor().submit(self._workers.warm)
            self._executor().submit(self._load)

    def counters(self) -> GrammarCounters:
        return GrammarCounters(
            self._fill_seconds,
            self._compile_seconds,
            self._fills,
            self.cache.hits,
            self.cache.misses,
            self._refused,
            self._timeouts,
        )

    def times(self) -> tuple[Times, dict[str, Times]]:
        """How long compiling took, and filling a mask by backend."""
        return self._compile_times, self._fill_times

    def close(self) -> None:
        """Stop compiling. What is pending fails with EngineClosedError."""
        with self._lock:
            self._closed, pool = True, self._pool
        self._workers.close()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine was closed.")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="phloem-grammar")
            return self._pool

    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def _find(self, pending: Pending) -> None:
        try:
            vocabulary = self.vocabulary()
            key = cache_key(
                pending.spec, vocabulary, (AUDIT_VERSION, *(f"{name} {versions}" for name, versions in AUDITED.items()))
            )
            future, mine = self.cache.claim(key)
            if mine:
                self._executor().submit(self._compile, key, pending.spec)
            if future.done() and len(pending.spec.source) > INLINE_CHOICES and pending.spec.kind == "choices":
                self._executor().submit(pending.take, future)
            else:
                future.add_done_callback(pending.take)
        except Exception as error:
            pending.fail(error)

    def _compile(self, key: str, spec: GrammarSpec) -> None:
        start, killed = time.perf_counter(), self._workers.killed
        try:
            vetted = None if spec.trusted or spec.kind in VETTED else self._workers.vet(spec)
            path, make = (route(spec, self._limits), backend) if vetted is None else (vetted, _quickly)
            compiled = serve(path, self.vocabulary(), self._limits, make)
        except Exception as error:
            self._refused += 1
            self._timeouts += self._workers.killed > killed
            self.cache.reject(key, error)
        else:
            self.cache.resolve(key, compiled)
            if vetted is not None and isinstance(compiled.compiled, XGrammarGrammar):
                self._statics.want(compiled.compiled, vetted.spec)
        self._compile_times.add(time.perf_counter() - start)
        self._compile_seconds += time.perf_counter() - start

    def _load(self) -> None:
        """xgrammar here too: it takes a second. llguidance comes with json_object."""
        if is_audited("xgrammar"):
            serve(Route(WARM_SPEC, ("xgrammar",)), self.vocabulary(), self._limits, _quickly)


def _quickly(name: str) -> GrammarBackend:
    """Engines for a grammar that is vetted: xgrammar's static form comes later (static.py)."""
    return XGrammar(static_seconds=0) if name == "xgrammar" else backend(name)


class Pending:
    """Follows compiling.PendingCursor. Written by the thread that compiles, read by the loop."""

    def __init__(self, service: Grammars, spec: GrammarSpec, prompt_end: tuple[int, ...]) -> None:
        self.spec = spec
        self._service, self._prompt_end = service, prompt_end
        self._cursor: Timed | None = None
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._cancelled = False

    def ready(self) -> bool:
        return self._done.is_set()

    def cursor(self) -> Timed:
        if self._error is not None:
            raise self._error
        assert self._cursor is not None
        return self._cursor

    def cancel(self) -> None:
        """Nobody waits any more. The grammar goes on into the cache: others may ask for it."""
        self._cancelled = True

    def wait(self, timeout: float | None = None) -> bool:
        return self._done.wait(timeout)

    # ---- for the service ----------------------------------------------------------------------------------------------

    def take(self, future: Future[CompiledGrammar]) -> None:
        try:
            if not self._cancelled:
                compiled = future.result()
                vocabulary, close = self._service.vocabulary(), self.spec.thoughts_close
                if close is None:
                    cursor = compiled.cursor(vocabulary.tail(self._prompt_end))
                else:
                    cursor = ThoughtsFirst(compiled.cursor(), vocabulary, close, self.spec.thoughts_open)
                self._cursor = Timed(cursor, self._service, compiled.report)
        except BaseException as error:
            self._error = error
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()


class Timed:
    """A cursor whose masks are counted, and whose request ends when they are too slow for its neighbours (C6)."""

    __slots__ = ("_cursor", "_service", "_slow", "_times", "report")

    def __init__(self, cursor: Cursor, service: Grammars, report: AuditReport) -> None:
        self._cursor, self._service, self.report, self._slow = cursor, service, report, 0
        self._times = service._fill_times.setdefault(report.backend, Times.of(FILL_BOUNDS))

    @property
    def done(self) -> bool:
        start = time.perf_counter()
        done = self._cursor.done
        self._count(time.perf_counter() - start)
        return done

    @property
    def dropped(self) -> int:
        return self._cursor.dropped

    @property
    def dropped_keywords(self) -> tuple[tuple[str, str], ...]:
        return self.report.dropped

    def fill(self, row: NDArray[np.int32]) -> None:
        start = time.perf_counter()
        self._cursor.fill(row)
        seconds = time.perf_counter() - start
        self._times.add(seconds)
        self._service._fills += 1
        self._count(seconds)

    def accept(self, token: int) -> bool:
        return self._cursor.accept(token)

    def forced(self) -> Sequence[int]:
        return self._cursor.forced()

    def rollback(self, n: int) -> None:
        self._cursor.rollback(n)

    def fork(self) -> Timed:
        return Timed(self._cursor.fork(), self._service, self.report)

    def _count(self, seconds: float) -> None:
        self._service._fill_seconds += seconds
        if seconds > SLOW_FILL:
            self._slow += 1
            if self._slow >= MAX_SLOW_FILLS:
                raise GrammarError(
                    f"{self._slow} masks of this constraint took over {SLOW_FILL:g} s each, too slow for the requests beside it. "
                    "Simplify it."
                )
