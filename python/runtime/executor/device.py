"""DeviceExecutor: plans in, tokens out, on a device that runs behind the host. What LocalExecutor promises, without its worker thread.

    host      launch n ─ stage ─┐    sample n ─ prepare ─┐     launch n+1 ...   collect n ─ wait for ●, read
    compute   ──────────────────└─ forward n ────────────└─ draw n ─ FUTURE ─┬─ forward n+1 ─
    copies                                                                   └─ ids and logprobs to pinned memory ─ ●

The caller's thread enqueues and never waits but in `collect`. FUTURE tokens never leave the device: the draw writes `last_token`, the
next forward reads it, in stream order. `stall_seconds` is what the device had nothing to do because the host was late: before a forward
that was launched while the step before was not collected, and between a forward and its draw.

    device    draw n-1 ──│ gap │── forward n ──│ gap │── draw n ──       the arrays' copies lie in the gaps: some microseconds, always
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from phloem.runtime.backends.base import Model
from phloem.runtime.backends.cuda.lanes import Event
from phloem.runtime.backends.cuda.runner import CudaRunner
from phloem.runtime.errors import EngineClosedError
from phloem.runtime.executor.base import Ticket
from phloem.runtime.executor.batch import PackedRows, Part, first_logit, pack, split
from phloem.runtime.executor.device_sampler import DeviceDraw, DeviceSampler, DeviceScore
from phloem.runtime.executor.local import add_failure, score_rows
from phloem.runtime.executor.sampler import not_finite
from phloem.runtime.request import TokenLogprob
from phloem.runtime.step import NO_SLOT, RowFailure, SampleSpec, StepPlan, StepResult

if TYPE_CHECKING:
    from phloem.runtime.models.live import LiveWeights

__all__ = ["DeviceExecutor", "DeviceTicket"]


@dataclass(slots=True)
class _Scored:
    work: DeviceScore
    spans: list[tuple[str, int, str]]


@dataclass(slots=True, eq=False)
class DeviceTicket:
    """A launched step. logits: once enqueued work has run; the tensors are kept until collected, for the copies stream reads them."""

    plan: StepPlan
    result: StepResult
    draw_rows: dict[int, int] = field(default_factory=dict)
    logits: Tensor | None = None
    scored: list[_Scored] = field(default_factory=list)
    draw: DeviceDraw | None = None
    start: Event | None = None  # of the forward, its arrays and plans behind it
    forwarded: Event | None = None
    drawing: Event | None = None
    end: Event | None = None  # of the last compute work
    copied: Event | None = None
    behind: DeviceTicket | None = None  # the step before, if it was not collected at launch
    collected: bool = False


class DeviceExecutor:
    """Runs StepPlans on a CudaRunner. One caller thread. See executor/base.py for the promise.

    host_wait_seconds: of the caller in `collect`.   device_stall_seconds: of the device (see above).   device_seconds: of forwards and
    draws, without the gaps.   steps: collected.
    """

    def __init__(
        self,
        runner: CudaRunner,
        sampler: DeviceSampler,
        *,
        page_size: int,
        num_pages: int,
        width: int,
        max_running: int,
        max_logits: int,
        overlap: bool = True,
        weights: LiveWeights | None = None,
    ) -> None:
        """overlap: False waits for each forward and draw at once, for comparing.   weights: those of the runner's model."""
        self.page_size, self.num_pages, self.width = page_size, num_pages, width
        self.device = runner.device
        self.last_token = torch.zeros(max_running, dtype=torch.int32, device=self.device.torch_device)
        self.host_wait_seconds = self.device_stall_seconds = self.device_seconds = 0.0
        self.steps = 0
        self.weights = weights
        self._runner, self._sampler, self._max_logits, self._overlap = runner, sampler, max_logits, overlap
        self._compute, self._copies = runner.stream, self.device.stream("copies")
        self.device.synchronize()  # last_token was filled on another stream
        self._newest: DeviceTicket | None = None
        self._broken: Exception | None = None
        self._closed = False
        self._pid = os.getpid()

    def launch(self, plan: StepPlan) -> DeviceTicket:
        """Raises EngineClosedError after close() and in a fork()ed child. Everything else that goes wrong is in the result."""
        self._check_open()
        before = self._newest
        ticket = DeviceTicket(
            plan, StepResult(plan.step), behind=before if before is not None and not before.collected else None
        )
        self._newest = ticket
        try:
            if self._broken is not None:
                raise self._broken
            if self.weights is not None:
                self.weights.ensure_valid()
            self._launch(ticket)
        except Exception as error:
            self._fail(ticket, error)
        return ticket

    def sample(self, ticket: Ticket, spec: SampleSpec) -> None:
        self._check_open()
        assert isinstance(ticket, DeviceTicket)
        assert ticket is self._newest, "a later forward was launched: these logits are gone"
        assert ticket.draw is None and not ticket.collected, "a step draws once, before it is collected"
        if ticket.result.failed is not None or not ticket.plan.rows:
            return
        try:
            for row in spec.rows:
                assert row.row in ticket.draw_rows, f"plan row {row.row} has no logits to draw from"
                assert row.slot == NO_SLOT or 0 <= row.slot < len(self.last_token), f"slot {row.slot} of {len(self.last_token)}"
            self._sample(ticket, self._sampler.prepare(spec, [ticket.draw_rows[row.row] for row in spec.rows]))
        except Exception as error:
            self._fail(ticket, error)

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, DeviceTicket)
        result = ticket.result
        if not ticket.collected:
            self._check_open()
            if result.failed is None:
                try:
                    self._collect(ticket)
                except Exception as error:  # what a kernel did wrong surfaces where the host waits
                    self._fail(ticket, error)
        ticket.collected, ticket.logits, ticket.draw, ticket.behind = True, None, None, None
        ticket.scored = []
        return result

    def reset(self) -> None:
        """Waits for what is in flight, then forgets the failure. A device that cannot go on (a bad address) raises here."""
        self._check_open()
        self.device.synchronize()
        self._broken = None

    def serve(self, model: Model) -> None:
        """Another model of the same shape from the next step on, over the same pages. Nothing is in flight."""
        self._runner.rebind(model)

    def discard_kv(self) -> int:
        """Give the pool's memory back to the system: bytes. Nothing is in flight."""
        return self._runner.discard_kv()

    def restore_kv(self) -> None:
        self._runner.restore_kv()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True

    # ---------------------------------------------------------------------------------------------------------- inside

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this executor was closed. Make a new engine.")
        if self._pid != os.getpid():
            raise EngineClosedError(
                "this executor belongs to the process that made it; a fork()ed child must make its own engine."
            )

    def _launch(self, ticket: DeviceTicket) -> None:
        plan = ticket.plan
        if not plan.rows:
            assert not plan.copies, "copies without a row: no forward would run them"
            return
        parts, copies = split(plan.rows, self._max_logits, self.page_size), plan.copies
        packed: list[tuple[Part, PackedRows]] = []
        for part in parts:
            packed.append((part, pack(part.rows, copies, self.page_size, self.num_pages)))
            copies = []
        rows = [b for b, row in enumerate(plan.rows) if row.end - first_logit(row) > len(row.targets)]
        one = len(parts) == 1
        ticket.draw_rows = (
            {b: packed[0][1].logit_indptr[b + 1] - 1 for b in rows} if one else {b: i for i, b in enumerate(rows)}
        )
        for part, arrays in packed:
            self._launch_part(ticket, part, arrays, one)
        ticket.end = ticket.forwarded = self.device.record(self._compute, timed=True)
        self._copy_back(ticket, [scored.work.fetch for scored in ticket.scored])
        if not self._overlap:
            ticket.end.wait()

    def _launch_part(self, ticket: DeviceTicket, part: Part, packed: PackedRows, one: bool) -> None:
        from_slot = np.full(len(packed.batch.token_ids), -1, np.int32)
        from_slot[packed.future_at] = packed.future_slots
        staged = self._runner.stage(packed.batch, from_slot)
        rows, spans = score_rows(part, packed)
        score = self._sampler.prepare_score(rows) if rows else None
        if score is not None:
            ticket.scored.append(_Scored(score, spans))
            self.device.run(self._compute, score.bundle.upload)
            self._sampler.sent(score, self._compute)
        self._runner.launch(
            staged, self.last_token, partial(self._take, ticket, part, packed, one, score), partial(self._begin, ticket)
        )

    def _begin(self, ticket: DeviceTicket) -> None:
        """The first part's forward is enqueued next. What the host did for it until now is in front of the mark."""
        if ticket.start is None:
            ticket.start = self.device.record(self._compute, timed=True)

    def _take(
        self, ticket: DeviceTicket, part: Part, packed: PackedRows, one: bool, score: DeviceScore | None, logits: Tensor
    ) -> None:
        """Within Device.run. Of several parts, logits to draw from are kept beside those that the next part overwrites."""
        if score is not None:
            score.compute(logits)
        if one:
            ticket.logits = logits
            return
        if ticket.logits is None:
            ticket.logits = torch.empty((len(ticket.draw_rows), self.width), device=self.device.torch_device)
        for i, (source, row) in enumerate(zip(part.source, part.rows)):
            if source in ticket.draw_rows and row.end == ticket.plan.rows[source].end:
                ticket.logits[ticket.draw_rows[source]].copy_(logits[packed.logit_indptr[i + 1] - 1])

    def _sample(self, ticket: DeviceTicket, draw: DeviceDraw) -> None:
        ticket.draw = draw

        def work() -> None:
            assert ticket.logits is not None
            draw.compute(ticket.logits)
            draw.keep_tokens(self.last_token)

        self.device.run(self._compute, draw.bundle.upload)
        self._sampler.sent(draw, self._compute)
        ticket.drawing = self.device.record(self._compute, timed=True)
        self.device.run(self._compute, work)
        ticket.end = self.device.record(self._compute, timed=True)
        self._copy_back(ticket, [draw.fetch])
        if not self._overlap:
            ticket.end.wait()

    def _copy_back(self, ticket: DeviceTicket, fetches: list[Callable[[], None]]) -> None:
        assert ticket.end is not None
        if not fetches:
            ticket.copied = ticket.copied or ticket.end
            return
        self.device.wait(self._copies, ticket.end)
        for fetch in fetches:
            self.device.run(self._copies, fetch)
        ticket.copied = self.device.record(self._copies)

    def _collect(self, ticket: DeviceTicket) -> None:
        result = ticket.result
        if ticket.copied is None or ticket.start is None or ticket.end is None:  # nothing was planned
            return
        began = time.perf_counter()
        ticket.end.wait()
        ticket.copied.wait()
        self.host_wait_seconds += time.perf_counter() - began
        self.steps += 1
        result.device_seconds = ticket.end.seconds_since(ticket.start)
        if ticket.drawing is not None and ticket.forwarded is not None:
            gap = max(0.0, ticket.drawing.seconds_since(ticket.forwarded))
            result.device_seconds -= gap
            result.stall_seconds += gap if self._overlap else 0.0  # without overlap the device is meant to wait
        self.device_seconds += result.device_seconds
        if ticket.behind is not None and ticket.behind.end is not None and ticket.behind.result.failed is None:
            result.stall_seconds += max(0.0, ticket.start.seconds_since(ticket.behind.end))
        self.device_stall_seconds += result.stall_seconds
        for scored in ticket.scored:
            self._read_scores(scored, result)
        if ticket.draw is not None:
            self._read_draws(ticket.draw, result)

    def _read_scores(self, scored: _Scored, result: StepResult) -> None:
        found = iter(scored.work.outcomes())
        for request_id, count, positions in scored.spans:
            these = [next(found) for _ in range(count)]
            good: list[TokenLogprob] = [score for score in these if score is not None]
            if len(good) < count:
                add_failure(result, not_finite(request_id, positions))
            result.scored.setdefault(request_id, []).extend(good)
        for failure in result.failures:
            result.scored.pop(failure.request_id, None)

    def _read_draws(self, draw: DeviceDraw, result: StepResult) -> None:
        failed = {failure.request_id for failure in result.failures}
        for outcome in draw.outcomes():
            if isinstance(outcome, RowFailure):
                add_failure(result, outcome)
            elif outcome.request_id not in failed:
                result.sampled.append(outcome)

    def _fail(self, ticket: DeviceTicket, error: Exception) -> None:
        result = ticket.result
        if result.failed is None:
            result.failed = error
        self._broken = self._broken or error
        result.sampled, result.scored, result.failures = [], {}, []
