"""Who draws from a launched step, decided after the commit of the step before it, so that masks see the accepted token.

row ends at the last known token          draws; the samples that waited for it draw from the same logits row (S4)
row ends before it                        a chunk, or a forced run came meanwhile: it draws nothing, but the logprob of
                                          the run's first token may be wanted: a probe, a draw with one legal token
its sequence has ended                    a surplus row
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.scheduler.flight import Flight
from phloem.runtime.scheduler.sequence import Sequence
from phloem.runtime.step import NO_SLOT, SampleRow, SampleSpec

if TYPE_CHECKING:
    from phloem.runtime.scheduler.scheduler import Scheduler

__all__ = ["SpecBuilder"]


class SpecBuilder:
    """Makes one SampleSpec. Marks who draws; lets go of siblings."""

    def __init__(self, scheduler: Scheduler, flight: Flight) -> None:
        self.scheduler, self.flight = scheduler, flight
        self.spec = SampleSpec()
        self.masks: NDArray[np.int32] | None = None  # as many as fit, from the first one on; num_masks of them are used
        self.num_masks = 0

    def build(self) -> SampleSpec:
        for i, (row, q) in enumerate(zip(self.flight.plan.rows, self.flight.sequences)):
            if q.state == "done":
                self.scheduler.counters.surplus_rows += 1
            elif row.end == len(q.tokens):
                if q.may_draw():
                    self._draw(i, q)
                    self._list_siblings(i, q)
            elif row.end in q.unscored and len(row.targets) < row.end - row.logits_from:
                self._probe(i, q, row.end)
        if self.masks is not None and self.num_masks:
            self.spec.masks = self.masks[: self.num_masks]
        return self.spec

    def _draw(self, i: int, q: Sequence) -> None:
        mask = None
        if q.cursor is not None:
            try:
                q.cursor.fill(self._next_mask())
            except Exception as error:  # whatever a grammar engine raises concerns this request alone
                self.scheduler.fail(q, error)
                return
            mask = self.num_masks
            self.num_masks += 1
        block = self.scheduler.padding
        if q.num_new < q.request.sampling.min_tokens and q.cursor is None:  # a grammar outranks min_tokens (M1)
            block = (*block, *q.ends)
        self._add(i, q, q.num_new, q.slot if q.state == "running" else NO_SLOT, mask, block)
        q.drawing = q.started = True

    def _list_siblings(self, i: int, leader: Sequence) -> None:
        """One logits row, listed once a sample. Whoever is not in step with its leader after all goes its own way."""
        for each in leader.siblings:
            each.leader = None
            if each.compiling or each.unscored or each.key != leader.key or not each.may_draw():
                self.scheduler.settle(each)
            else:
                self._draw(i, each)
        leader.siblings = []
        group = leader.request.group
        if group is not None and self.scheduler.leaders.get(group) is leader:
            del self.scheduler.leaders[group]

    def _probe(self, i: int, q: Sequence, position: int) -> None:
        token, bits = q.tokens[position], self._next_mask()
        bits[:] = 0
        bits.view(np.uint32)[token // 32] = 1 << (token % 32)
        self.num_masks += 1
        self.flight.probes[q.request.id] = position
        self._add(i, q, position - q.num_prompt, NO_SLOT, self.num_masks - 1, ())

    def _next_mask(self) -> NDArray[np.int32]:
        """The row behind the used ones, to be overwritten."""
        if self.masks is None:
            self.masks = np.empty((len(self.flight.sequences), self.scheduler.words), np.int32)
        elif self.num_masks == len(self.masks):  # siblings draw from their leader's row
            self.masks = np.concatenate([self.masks, np.empty_like(self.masks)])
        row: NDArray[np.int32] = self.masks[self.num_masks]
        return row

    def _add(self, i: int, q: Sequence, position: int, slot: int, mask: int | None, block: tuple[int, ...]) -> None:
        r = q.request
        row = SampleRow(i, r.id, slot, position, q.seed, r.sample, r.sampling, q.tokens, q.num_prompt, mask, block)
        self.spec.rows.append(row)
        self.flight.draws[r.id] = q
