"""Compiling: the engines of a route in turn and the first mask; for grammars of strangers, first in a process that can be killed.

    engine process                                    worker (worker.py), spawned when first needed
    thread of the service ──job: spec, limits──────>  route, compile, first mask        at 5 s of CPU or 1 GiB: killed
       compile again, from  <─────────vetted: route─
       what is now known
    static.py ──job: the route's spec, static──────>  xgrammar's static grammar, when nobody waits for a compiler (F7, C4)
                            <─static: seconds, blob─

A thread inside C++ cannot be stopped; a process can. One job at a time each, so a killed worker takes nobody else's with it (C2).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from phloem.runtime.errors import EngineClosedError, GrammarError, PhloemError, RequestError
from phloem.runtime.grammar.audit import AUDITED, ENGINES_OF, Route, is_audited
from phloem.runtime.grammar.base import AuditReport, CompiledGrammar, Cursor, GrammarBackend, Limits, NotMine, backend
from phloem.runtime.grammar.limits import refuse_schema
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec

__all__ = [
    "Broken", "Hello", "Job", "Ready", "Refused", "Served", "Static", "Vetted", "WARM_SPEC", "Workers", "read_frame", "serve", "write_frame",
]  # fmt: skip

WALL_FACTOR, LEAST_WALL = 6, 10.0
"""A worker that has used neither its CPU time nor its memory is killed after so many times its CPU limit, in seconds at least the second."""
START_SECONDS = 60.0
"""A worker loads its engines within a second of CPU; it has this long for it, however loaded the machine is."""
QUIET_SECONDS = 0.25
"""Since the last job of a request: a static grammar before that would keep the next of a burst of new schemas waiting, by some 6 ms."""
WARM_SPEC = GrammarSpec(
    kind="json_schema",
    source='{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"], '
    '"additionalProperties": false}',
)
"""What every engine takes: serving it once loads the engine and builds what its first mask needs."""


# ----------------------------------------------------------------------------------------------------------------- compiling


@dataclass(frozen=True, slots=True)
class Served:
    """A compiled grammar, and what the audit did before it. Follows base.CompiledGrammar."""

    compiled: CompiledGrammar
    report: AuditReport

    @property
    def nbytes(self) -> int:
        return self.compiled.nbytes

    def cursor(self, tail: Sequence[int] = ()) -> Cursor:
        return self.compiled.cursor(tail)


def serve(path: Route, vocabulary: Vocabulary, limits: Limits, make: Callable[[str], GrammarBackend] = backend) -> Served:
    """Compile with the first of the route's engines that takes it, and make its first mask (C3).

    Raises GrammarError for what none of them serves.
    """
    refusal: GrammarError | None = None
    for name in path.engines:
        try:
            compiled = make(name).compile(path.spec, vocabulary, limits)
            served = Served(compiled, replace(compiled.report, lowered=path.lowered, dropped=path.dropped))
            _check_first_mask(served, vocabulary, path.spec.kind)
        except NotMine:
            continue
        except GrammarError as error:
            if name == "token_fsm":  # what it refuses, it refuses for all
                raise
            refusal = error
        else:
            return served
    if path.fallback is not None:
        return serve(path.fallback, vocabulary, limits, make)
    kind = path.spec.kind
    if refusal is not None and path.unproved and "oneOf" in refusal.message:
        pointer, keyword = path.unproved[0]
        refuse_schema(
            pointer,
            f"{keyword!r} has options that may overlap, and no engine here checks that only one of them fits. Use anyOf, tell them "
            "apart by a required property with a const, or ask for strict=False.",
        )
    absent = [name for name in ENGINES_OF[kind] if not is_audited(name)]
    if absent and refusal is None:
        wanted = " or ".join(f"{name} {' or '.join(AUDITED[name])}" for name in absent)
        raise GrammarError(
            f"this {kind.replace('_', ' ')} needs {wanted}, the versions that were audited. Install one.", param=kind
        )
    raise refusal or GrammarError(
        f"no engine takes this {kind.replace('_', ' ')}: it is too large, or of a kind that none knows. Simplify it.",
        param=kind,
    )


def _check_first_mask(compiled: CompiledGrammar, vocabulary: Vocabulary, kind: str) -> None:
    try:
        cursor = compiled.cursor()
        row = np.empty(vocabulary.num_words, np.int32)
        if not cursor.done:
            cursor.fill(row)
            if not row.any():
                raise GrammarError("nothing can match: the constraint allows no text at all.")
    except RequestError as error:
        code = "invalid_json_schema" if kind == "json_schema" else "invalid_grammar"
        raise GrammarError(f"the constraint cannot be served: {error.message}", param=kind, code=code) from None


# ------------------------------------------------------------------------------------------------------------ words on the pipe


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame to a worker: the vocabulary as data."""

    tokens: list[bytes]
    stop_ids: list[int]
    special_ids: list[int]
    width: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The first frame from a worker: its engines are loaded."""


class Job(msgspec.Struct, frozen=True, tag=True):
    """static: make xgrammar's static grammar of this vetted spec; else see whether it can be served at all."""

    spec: GrammarSpec
    limits: dict[str, int | float]
    static: bool = False


class Vetted(msgspec.Struct, frozen=True, tag=True):
    """It compiles, and its first mask is there. engine: that did it.   spec: with the lowered source."""

    spec: GrammarSpec
    engine: str
    lowered: tuple[tuple[str, str], ...]
    dropped: tuple[tuple[str, str], ...]


class Static(msgspec.Struct, frozen=True, tag=True):
    """xgrammar's static grammar took so long. blob: the grammar itself, where compiling it again would take longer than reading it."""

    seconds: float
    blob: str | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None
    code: str | None


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Something that should not happen did. message: what."""

    message: str


Word = Hello | Ready | Job | Vetted | Static | Refused | Broken
_decoder = msgspec.msgpack.Decoder(Word)


def write_frame(fd: int, word: Any) -> None:
    """Length in 8 bytes, then msgpack. Raises OSError when the other side is gone."""
    data = msgspec.msgpack.encode(word)
    view = memoryview(len(data).to_bytes(8, "little") + data)
    while view:
        view = view[os.write(fd, view) :]


def read_frame(fd: int, deadline: float | None = None) -> Any:
    """The next word. Raises EOFError when the other side is gone, TimeoutError at the deadline (time.monotonic)."""
    size = int.from_bytes(_read(fd, 8, deadline), "little")
    return _decoder.decode(_read(fd, size, deadline))


def _read(fd: int, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise TimeoutError
        piece = os.read(fd, size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


# ------------------------------------------------------------------------------------------------------------------- workers


class Workers:
    """At most `most` processes that compile, started when needed and kept. Thread-safe; `vet` and `static` block their thread.

    killed: how many had to be, of those that vetted.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: Limits, most: int = 2) -> None:
        self.limits, self.killed = limits, 0
        self._vocabulary, self._most = vocabulary, most
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._starting = self._waiting = 0
        self._vetted_at = time.monotonic()  # when a request last had to do with a worker
        self._failure: BaseException | None = None  # of a start, to be told to one that waits
        self._closed = False

    def vet(self, spec: GrammarSpec) -> Route:
        """Compile once where that can be killed. Raises GrammarError for what was refused, or took too much."""
        worker = self._take()
        try:
            word = self._ask(worker, Job(spec, self._bounds()))
        except (EOFError, OSError, TimeoutError):
            raise self._lost(worker, spec.kind) from None
        except BaseException:
            self._drop(worker)
            raise
        self._give(worker)
        if isinstance(word, Refused):
            raise GrammarError(word.message, param=word.param, code=word.code)
        if isinstance(word, Broken):
            raise PhloemError(f"compiling the {spec.kind.replace('_', ' ')} failed: {word.message[:300]}. Please report this.")
        assert isinstance(word, Vetted)
        return Route(word.spec, (word.engine,), word.lowered, word.dropped)

    def static(self, spec: GrammarSpec, quiet: float = QUIET_SECONDS) -> Static | None:
        """xgrammar's static grammar of a vetted spec, once no request had to do with a worker for `quiet` seconds. May wait for long.

        None: it took too much, or the workers were closed. The dynamic grammar serves on.
        """
        worker = self._take_quietly(quiet)
        if worker is None:
            return None
        try:
            word = self._ask(worker, Job(spec, self._bounds(), static=True))
        except BaseException as error:
            self._drop(worker, counts=False)
            if isinstance(error, (EOFError, OSError, TimeoutError)):
                return None
            raise
        self._give(worker, of_request=False)
        return word if isinstance(word, Static) else None

    def warm(self) -> None:
        """Have one of them started, without waiting for it."""
        with self._changed:
            if not self._all and not self._starting:
                self._start_one()

    def close(self) -> None:
        """Kill them all. Who waits gets EngineClosedError."""
        with self._changed:
            self._closed = True
            workers = list(self._all)
            self._changed.notify_all()
        for worker in workers:
            worker.kill()
        with self._changed:
            self._all.clear()
            self._idle.clear()

    def num_alive(self) -> int:
        with self._changed:
            return len(self._all)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _bounds(self) -> dict[str, int | float]:
        return {name: getattr(self.limits, name) for name in self.limits.__dataclass_fields__}

    def _ask(self, worker: _Worker, job: Job) -> Any:
        worker.send(job)
        return worker.read(max(self.limits.cpu_seconds * WALL_FACTOR, LEAST_WALL))

    def _take(self) -> _Worker:
        """An idle one; else whichever comes first, one that is given back or one that is started."""
        with self._changed:
            self._waiting += 1
            try:
                while not self._closed:
                    if self._idle:
                        return self._idle.pop()
                    if self._failure is not None:
                        failure, self._failure = self._failure, None
                        raise failure
                    if self._starting < self._waiting:
                        self._start_one()
                    self._changed.wait()
                raise EngineClosedError("the engine was closed.")
            finally:
                self._waiting -= 1
                self._vetted_at = time.monotonic()

    def _take_quietly(self, quiet: float) -> _Worker | None:
        """An idle one, when no other is busy and no request was there for so long. Starts none. None: closed."""
        with self._changed:
            while not self._closed:
                left = self._vetted_at + quiet - time.monotonic()
                if self._waiting or not self._idle or len(self._idle) < len(self._all):
                    self._changed.wait()  # whoever gives a worker back says so
                elif left > 0:
                    self._changed.wait(left)
                else:
                    return self._idle.pop()
            return None

    def _start_one(self) -> None:
        if len(self._all) + self._starting < self._most and not self._closed:
            self._starting += 1
            threading.Thread(target=self._start, name="phloem-grammar-start", daemon=True).start()

    def _start(self) -> None:
        worker, failure = None, None
        try:
            worker = _Worker(self._vocabulary(), self.limits)
        except BaseException as error:
            failure = error
        with self._changed:
            self._starting -= 1
            closed = self._closed
            if worker is not None and not closed:
                self._all.add(worker)
                self._idle.append(worker)
            elif self._waiting:
                self._failure = failure
            self._changed.notify_all()
        if worker is not None and closed:
            worker.kill()

    def _give(self, worker: _Worker, of_request: bool = True) -> None:
        with self._changed:
            if not self._closed:
                self._idle.append(worker)
            if of_request:
                self._vetted_at = time.monotonic()
            self._changed.notify_all()

    def _drop(self, worker: _Worker, counts: bool = True) -> None:
        worker.kill()
        with self._changed:
            self._all.discard(worker)
            self.killed += counts and not self._closed
            self._changed.notify_all()

    def _lost(self, worker: _Worker, kind: str) -> PhloemError:
        self._drop(worker)
        if self._closed:
            return EngineClosedError("the engine was closed.")
        ended = worker.process.returncode
        why = f"more than {self.limits.cpu_seconds:g} s" if ended == -signal.SIGPROF else "too much time or memory"
        return GrammarError(
            f"the {kind.replace('_', ' ')} cannot be served: compiling it took {why}. Simplify it: fewer alternatives, lower bounds, "
            "shorter enums.",
            param=kind,
            code="invalid_json_schema" if kind == "json_schema" else "invalid_grammar",
        )


class _Worker:
    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        # Not multiprocessing: its spawn would run the user's main module again.
        code = f"import sys; sys.path[:] = {sys.path!r}; from phloem.runtime.grammar.worker import main; main()"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._out, self._in = self.process.stdin.fileno(), self.process.stdout.fileno()
        hidden = sorted(vocabulary.special_ids)
        try:
            self.send(Hello(list(vocabulary.tokens), list(vocabulary.stop_ids), hidden, vocabulary.width))
            self.read(START_SECONDS)
        except (EOFError, OSError, TimeoutError):
            self.kill()
            raise PhloemError("the process that compiles grammars did not start. Please report this.") from None
        except BaseException:
            self.kill()
            raise

    def send(self, word: Any) -> None:
        write_frame(self._out, word)

    def read(self, seconds: float) -> Any:
        return read_frame(self._in, time.monotonic() + seconds)

    def kill(self) -> None:
        """At once, whatever it does. May be called again."""
        with suppress(OSError):
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
