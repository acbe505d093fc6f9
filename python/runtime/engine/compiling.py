"""Sequences that wait for their grammar. Compiling happens elsewhere; the loop polls, and never sees what a compiler raises (C6)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phloem.runtime.errors import GrammarError
from phloem.runtime.request import Request
from phloem.runtime.scheduler.scheduler import Scheduler
from phloem.runtime.scheduler.sequence import Cursor, Sequence

__all__ = ["COMPILE_BOUNDS", "FILL_BOUNDS", "Compiling", "GrammarCounters", "GrammarService", "PendingCursor", "Times"]


COMPILE_BOUNDS = tuple(0.00125 * 2**k for k in range(18))  # 1.25 ms ... 163.84 s
FILL_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0)


class Times(msgspec.Struct):
    """A histogram: how many took at most each bound, and longer than the one before; the last count is of longer than all."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> Times:
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


@dataclass(frozen=True, slots=True)
class GrammarCounters:
    """Seconds spent on masks (on the loop) and on compiling (off it), how many masks, and what the cache of compiled grammars did.

    refused, timeouts: of the misses, how many came to nothing, and of these how many for the time or memory that they took.
    """

    fill_seconds: float = 0.0
    compile_seconds: float = 0.0
    fills: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    refused: int = 0
    timeouts: int = 0


class PendingCursor(Protocol):
    """A grammar that compiles off the loop."""

    def ready(self) -> bool: ...
    def cursor(self) -> Cursor:
        """Once ready. Raises a PhloemError if the grammar is of no use."""

    def cancel(self) -> None: ...


class GrammarService(Protocol):
    """What turns a request's GrammarSpec into a cursor. eos_id: the tokenizer's own end token, appended by J8."""

    @property
    def eos_id(self) -> int | None: ...
    def begin(self, request: Request) -> PendingCursor:
        """Start compiling. Raises a PhloemError at once for what is refused at the door."""

    def counters(self) -> GrammarCounters: ...


class Compiling:
    def __init__(self, service: GrammarService | None, scheduler: Scheduler) -> None:
        self.service, self.scheduler = service, scheduler
        self.pending: dict[Sequence, PendingCursor] = {}

    def __len__(self) -> int:
        return len(self.pending)

    def begin(self, request: Request) -> PendingCursor | None:
        """None: the request has no grammar. Raises what the service refuses it with."""
        if request.grammar is None:
            return None
        if self.service is None:
            raise GrammarError("this engine was built without grammars; leave the constraint out.", param="grammar")
        return self.service.begin(request)

    def counters(self) -> GrammarCounters:
        return self.service.counters() if self.service is not None else GrammarCounters()

    def wait_for(self, q: Sequence, pending: PendingCursor) -> None:
        q.compiling = True
        self.pending[q] = pending

    def poll(self) -> None:
        for q, pending in list(self.pending.items()):
            if not pending.ready():
                continue
            del self.pending[q]
            q.compiling = False
            try:
                q.cursor = pending.cursor()
            except Exception as error:
                self.scheduler.fail(q, error)
            else:
                self.scheduler.start(q)

    def forget(self, q: Sequence) -> None:
        pending = self.pending.pop(q, None)
        if pending is not None:
            pending.cancel()
