"""What a grammar engine is: three protocols, the registry, the limits at the door, what an audit found, the compile cache.

    GrammarSpec --backend(name).compile--> CompiledGrammar --cursor(tail)--> Cursor      one a sequence
                        |                   immutable, shared                fill, accept, forced, rollback, fork
                   CompileCache: one compile a key, however many wait; bounded in bytes

Masks are numpy int32, bit t of word t // 32: token t is legal (G4). Knows no engine by more than its name, and no torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import RequestError
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec

__all__ = [
    "BACKENDS",
    "AuditReport",
    "CompileCache",
    "CompiledGrammar",
    "Cursor",
    "GrammarBackend",
    "Limits",
    "MaskMode",
    "NotMine",
    "backend",
    "cache_key",
    "mask_mode",
    "version_of",
]

MaskMode = Literal["canonical", "permissive"]

BACKENDS = {
    "token_fsm": "token_fsm:TokenFsm",
    "xgrammar": "xgrammar:XGrammar",
    "llguidance": "llguidance:LLGuidance",
}
"""Name -> module of this package and class. A new engine is a new file and one line here."""


class NotMine(Exception):
    """This engine leaves the grammar to another: it is too large for it, or of a kind it does not take. Never a caller's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is compiled at all (C1, C2), and how large a token_fsm may become (F3, F6).

    source_bytes: of schema, regex or grammar.   depth, subschemas, enum_values (in all), properties (an object): of a schema.
    pattern_bytes: of one regex.   repeats: product of nested repeat bounds in one regex.
    cpu_seconds, worker_bytes: of one compile.   fsm_states, fsm_cells (wide states x vocabulary), choices, choice_bytes: beyond
    these token_fsm leaves it to llguidance.   wide_edges: a state with more outgoing bytes than this is wide.
    """

    source_bytes: int = 1_000_000
    depth: int = 64
    subschemas: int = 5_000
    enum_values: int = 10_000
    properties: int = 1_000
    pattern_bytes: int = 4_096
    repeats: int = 100_000
    cpu_seconds: float = 5.0
    worker_bytes: int = 1 << 30
    fsm_states: int = 2_000
    fsm_cells: int = 2_000_000
    wide_edges: int = 64
    choices: int = 4_096
    choice_bytes: int = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """Who enforces the grammar, and how. Pointers are JSON pointers into the source ("" for its root).

    lowered: (pointer, keyword) rewritten into something equivalent.   dropped: (pointer, keyword) not enforced, as strict=False
    allows; becomes Output.dropped_keywords.   whitespace: the GrammarSpec's, None where the grammar has no JSON.
    """

    backend: str
    version: str
    mask_mode: MaskMode
    whitespace: Literal["flexible", "spaced", "compact"] | None = None
    lowered: tuple[tuple[str, str], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


class Cursor(Protocol):
    """One sequence's place in a grammar: a pure function of the compiled grammar, its tail and the accepted ids (G2)."""

    @property
    def done(self) -> bool:
        """Complete, and nothing but a stop token may follow; true as well behind a stop token. Read before `fill` (G3)."""

    @property
    def dropped(self) -> int:
        """How many of the last accepted tokens are no part of the value: 1 behind one that open_end let in (G7), else 0."""

    def fill(self, row: NDArray[np.int32]) -> None:
        """Overwrite all ceil(width / 32) words: bit t is set iff accept(t) would return True (G1)."""

    def accept(self, token: int) -> bool:
        """False: illegal, and nothing has changed."""

    def forced(self) -> Sequence[int]:
        """The pending run, consumed by `accept`; empty: the model chooses (J1)."""

    def rollback(self, n: int) -> None:
        """Undo the last n accepts, runs included. Raises ValueError if there were fewer."""

    def fork(self) -> Cursor:
        """An independent cursor at the same place."""


class CompiledGrammar(Protocol):
    """Immutable, shared by all sequences that use it."""

    @property
    def nbytes(self) -> int: ...
    @property
    def report(self) -> AuditReport: ...

    def cursor(self, tail: Sequence[int] = ()) -> Cursor:
        """A cursor at the start. tail: the prompt's last ids since a special token, as `Vocabulary.tail` gives them: what
        the first tokens of a canonical run could merge with (J9, F6). Ignored in permissive mode. May take milliseconds
        for large choices: make it where the compile ran, not on the loop.
        """


class GrammarBackend(Protocol):
    """One engine. `version` is that of the engine underneath: an unaudited one gets nothing (A3)."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> CompiledGrammar:
        """Raises GrammarError for what no engine may serve, NotMine for what another should."""


def backend(name: str) -> GrammarBackend:
    """A new backend of this name. Imports its engine. Raises KeyError for an unknown name: a bug of ours."""
    module, attribute = BACKENDS[name].split(":")
    made: GrammarBackend = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)()
    return made


@functools.cache
def version_of(engine: str) -> str:
    """Of the installed distribution, read once: half a millisecond. Raises importlib.metadata.PackageNotFoundError."""
    return importlib.metadata.version(engine)


def mask_mode(spec: GrammarSpec) -> MaskMode:
    """Jump-forward "off" samples through the same canonical masks one token at a time (J3): two modes, three words."""
    return "permissive" if spec.jump_forward == "permissive" else "canonical"


def cache_key(spec: GrammarSpec, vocabulary: Vocabulary, engines: Iterable[str]) -> str:
    """All that a compiled grammar depends on (C5), the source's bytes in their order. engines: "name version" and the audit's."""
    options = (spec.strict, spec.json_whitespace, mask_mode(spec), spec.open_end)
    parts = (spec.kind, spec.source, options, vocabulary.hash, vocabulary.width, vocabulary.stop_ids, tuple(engines))
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


@dataclass(slots=True)
class _Entry:
    future: Future[CompiledGrammar]
    nbytes: int = 0
    until: float | None = None  # a failure is forgotten then


class CompileCache:
    """Compiled grammars by key: least recently used go first, beyond max_bytes. Thread-safe.

        future, mine = cache.claim(key)
        if mine: compile, then cache.resolve(key, compiled) or cache.reject(key, error)       # single-flight: one a key

    A refusal (RequestError) is kept for failure_seconds; any other failure, such as a killed worker, is told to those who
    wait and then forgotten. A grammar larger than max_bytes is handed out and not kept.
    """

    def __init__(
        self, max_bytes: int = 256 << 20, failure_seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes, self.failure_seconds, self._clock = max_bytes, failure_seconds, clock
        self.nbytes = self.hits = self.misses = self.evictions = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def claim(self, key: str) -> tuple[Future[CompiledGrammar], bool]:
        """The future of this key's grammar, and whether the caller must now compile it. The future can't be cancelled: others
        may wait for it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.until is not None and self._clock() >= entry.until:
                del self._entries[key]
                entry = None
            if entry is not None:
                self.hits += 1
                self._entries.move_to_end(key)
                return entry.future, False
            self.misses += 1
            entry = self._entries[key] = _Entry(Future())
            entry.future.set_running_or_notify_cancel()
            return entry.future, True

    def resolve(self, key: str, compiled: CompiledGrammar) -> None:
        """The claimed key's grammar is there."""
        with self._lock:
            entry = self._entries[key]
            entry.nbytes = compiled.nbytes
            self.nbytes += entry.nbytes
            self._entries.move_to_end(key)
            self._evict()
        entry.future.set_result(compiled)

    def reject(self, key: str, error: BaseException) -> None:
        """The claimed key has no grammar."""
        with self._lock:
            entry = self._entries[key]
            if isinstance(error, RequestError):
                entry.until = self._clock() + self.failure_seconds
            else:
                del self._entries[key]
        entry.future.set_exception(error)

    def _evict(self) -> None:
        for key in list(self._entries):
            if self.nbytes <= self.max_bytes:
                return
            entry = self._entries[key]
            if entry.nbytes:  # neither a compile under way nor a failure
                del self._entries[key]
                self.nbytes -= entry.nbytes
                self.evictions += 1
