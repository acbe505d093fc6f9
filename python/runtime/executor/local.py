"""LocalExecutor: plans in, tokens out, on one device of this process. Mechanism only: knows no request, queue or page owner.

    launch(n) ── pack ──► | forward n | draw n |    one lane, in launch order: the caller's thread (overlap off),
    sample(n) ─ prepare ───────────────► |          or one worker thread that takes jobs first in, first out (overlap on)
    launch(n+1) ──────────────────────────► | forward n+1 |      FUTURE tokens are read from `last_token` here
    collect(n) ◄── tokens, logprobs, failures

Both lanes run the same jobs in the same order on the same arrays, so their results are equal bit for bit. What needs no device,
packing and preparing draws, happens in the caller's thread; so nothing that the caller may change later is read by the worker.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import ConfigError, EngineClosedError, PhloemError
from phloem.runtime.executor.base import Ticket
from phloem.runtime.executor.batch import PackedRows, Part, first_logit, pack, split
from phloem.runtime.executor.sampler import Draw, Sampler, ScoreRow, not_finite
from phloem.runtime.request import TokenLogprob
from phloem.runtime.step import NO_SLOT, RowFailure, SampleSpec, StepPlan, StepResult

if TYPE_CHECKING:
    from torch import Tensor

    from phloem.runtime.backends.base import Model, Runner
    from phloem.runtime.models.live import LiveWeights

__all__ = ["LocalExecutor", "LocalTicket", "add_failure", "score_rows"]

JOIN_SECONDS = 1.0
Job = Callable[[], None]


@dataclass(slots=True)
class _Forward:
    """One call of the runner. scores: logits rows to be scored; spans: (request, its number of scores, its positions)."""

    part: Part
    packed: PackedRows
    scores: list[ScoreRow]
    spans: list[tuple[str, int, str]]


@dataclass(slots=True, eq=False)
class LocalTicket:
    """A launched step. The worker writes `result` and `logits`; `forwarded` and `drawn` say when they may be read."""

    plan: StepPlan
    parts: list[_Forward]
    draw_rows: dict[int, int]  # plan row -> its row of `logits` to draw from
    result: StepResult
    forwarded: threading.Event = field(default_factory=threading.Event)
    drawn: threading.Event | None = None
    collected: bool = False
    logits: Tensor | None = None


class LocalExecutor:
    """Runs StepPlans on a Runner. One caller thread. See executor/base.py for the promise.

    width: logits a row.   max_running: slots 0 .. max_running - 1.   max_logits: of the runner's Limits.
    overlap: launch returns at once and a worker thread does the rest; else launch and sample do it themselves.
    """

    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        *,
        page_size: int,
        num_pages: int,
        width: int,
        max_running: int,
        max_logits: int,
        overlap: bool = False,
        weights: LiveWeights | None = None,
    ) -> None:
        """weights: those of the runner's model, if they can be looked at and changed."""
        self.weights = weights
        self.page_size, self.num_pages, self.width = page_size, num_pages, width
        self.last_token: NDArray[np.int32] = np.zeros(max_running, np.int32)
        self._runner, self._sampler, self._max_logits = runner, sampler, max_logits
        self._newest: LocalTicket | None = None
        self._broken: Exception | None = None
        self._closed = False
        self._pid = os.getpid()
        self._lane = _Worker() if overlap else None
        # Also at interpreter exit, before the modules that the worker needs are torn down.
        self._stop = weakref.finalize(self, self._lane.stop) if self._lane is not None else None

    def launch(self, plan: StepPlan) -> LocalTicket:
        """Raises EngineClosedError after close() and in a fork()ed child. Everything else that goes wrong is in the result."""
        self._check_open()
        ticket = LocalTicket(plan, [], {}, StepResult(plan.step))
        self._newest = ticket
        try:
            self._pack(ticket)
        except Exception as error:
            # In the lane, not here: steps launched before must still succeed, those after must fail.
            self._run(partial(self._fail, ticket, error))
        else:
            self._run(partial(self._forward, ticket))
        return ticket

    def sample(self, ticket: Ticket, spec: SampleSpec) -> None:
        self._check_open()
        assert isinstance(ticket, LocalTicket)
        assert ticket is self._newest, "a later forward was launched: these logits are gone"
        assert ticket.drawn is None and not ticket.collected, "a step draws once, before it is collected"
        ticket.drawn = threading.Event()
        try:
            for row in spec.rows:
                assert row.row in ticket.draw_rows or not ticket.parts, f"plan row {row.row} has no logits to draw from"
                assert row.slot == NO_SLOT or 0 <= row.slot < len(self.last_token), f"slot {row.slot} of {len(self.last_token)}"
            # Without parts packing failed: the result says so already.
            draw = self._sampler.prepare(spec, [ticket.draw_rows[row.row] for row in spec.rows]) if ticket.parts else None
        except Exception as error:
            self._run(partial(self._fail, ticket, error, drawn=True))
        else:
            self._run(partial(self._draw, ticket, spec, draw))

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, LocalTicket)
        done = ticket.forwarded if ticket.drawn is None else ticket.drawn
        if not done.is_set():
            self._check_open()
            # In slices: close() by a signal handler or another thread must not leave this waiting for ever.
            while not done.wait(0.1):
                self._check_open()
        ticket.collected, ticket.logits = True, None
        return ticket.result

    def reset(self) -> None:
        """Waits for what is in flight, then forgets the failure."""
        self._check_open()
        if self._lane is not None:
            idle = threading.Event()
            self._lane.put(idle.set)
            while not idle.wait(0.1):
                self._check_open()
        self._broken = None

    def serve(self, model: Model) -> None:
        """Another model of the same shape from the next step on, over the same pages. Nothing is in flight."""
        self._runner.rebind(model)  # type: ignore[attr-defined]

    def discard_kv(self) -> int:
        """Hand the pages' memory back; the bytes. Nothing is in flight, and nothing in them is wanted again."""
        discard = getattr(self._runner.kv, "discard", None)
        if discard is None:
            raise ConfigError("this device cannot hand its KV pool back; close the engine instead.", param="suspend")
        freed: int = discard()
        return freed

    def restore_kv(self) -> None:
        self._runner.kv.restore()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Idempotent. Queued steps are dropped; waits up to a second for the one that runs."""
        self._closed = True
        if self._stop is not None and self._pid == os.getpid():
            self._stop()

    # ------------------------------------------------------------------------------------------ in the caller's thread

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("this executor was closed. Make a new engine.")
        if self._pid != os.getpid():
            raise EngineClosedError(
                "this executor belongs to the process that made it; a fork()ed child must make its own engine."
            )

    def _pack(self, ticket: LocalTicket) -> None:
        plan = ticket.plan
        if not plan.rows:
            assert not plan.copies, "copies without a row: no forward would run them"
            return
        parts = split(plan.rows, self._max_logits, self.page_size)
        copies = plan.copies
        for part in parts:
            packed = pack(part.rows, copies, self.page_size, self.num_pages)
            ticket.parts.append(_Forward(part, packed, *score_rows(part, packed)))
            copies = []
        # A row all of whose logits have targets is not there to draw from.
        rows = [b for b, row in enumerate(plan.rows) if row.end - first_logit(row) > len(row.targets)]
        if len(parts) == 1:
            indptr = ticket.parts[0].packed.logit_indptr
            ticket.draw_rows = {b: indptr[b + 1] - 1 for b in rows}
        else:
            ticket.draw_rows = {b: i for i, b in enumerate(rows)}

    def _run(self, job: Job) -> None:
        if self._lane is not None:
            self._lane.put(job)
        else:
            job()

    # ------------------------------------------------------------------------------------------------------ in the lane

    def _forward(self, ticket: LocalTicket) -> None:
        result, started = ticket.result, time.perf_counter()
        try:
            if self._broken is not None:
                raise self._broken
            if self._closed:
                raise EngineClosedError("the executor was closed before this step ran.")
            if self.weights is not None:
                self.weights.ensure_valid()
            if len(ticket.parts) == 1:
                ticket.logits = self._forward_part(ticket.parts[0].packed)
                self._score(ticket.parts[0], ticket.logits, result)
            elif ticket.parts:
                self._forward_parts(ticket)
        except BaseException as error:
            self._caught(ticket, error)
        finally:
            result.device_seconds += time.perf_counter() - started
            ticket.forwarded.set()

    def _forward_part(self, packed: PackedRows) -> Tensor:
        if len(packed.future_at):
            packed.batch.token_ids[packed.future_at] = self.last_token[packed.future_slots]
        return self._runner.forward(packed.batch)

    def _forward_parts(self, ticket: LocalTicket) -> None:
        """Logits to draw from are kept beside the runner's buffer, which the next part overwrites; scored ones are reduced."""
        import torch

        kept = torch.empty((len(ticket.draw_rows), self.width), dtype=torch.float32)
        rows = ticket.plan.rows
        for forward in ticket.parts:
            part, packed = forward.part, forward.packed
            logits = self._forward_part(packed)
            for i, (source, row) in enumerate(zip(part.source, part.rows)):
                if source in ticket.draw_rows and row.end == rows[source].end:
                    kept[ticket.draw_rows[source]] = logits[packed.logit_indptr[i + 1] - 1]
            self._score(forward, logits, ticket.result)
        ticket.logits = kept

    def _score(self, forward: _Forward, logits: Tensor, result: StepResult) -> None:
        if not forward.scores:
            return
        scores = iter(self._sampler.score(logits, forward.scores))
        for request_id, count, positions in forward.spans:
            found = [next(scores) for _ in range(count)]
            good: list[TokenLogprob] = [score for score in found if score is not None]
            if len(good) < count:
                add_failure(result, not_finite(request_id, positions))
            result.scored.setdefault(request_id, []).extend(good)
        for failure in result.failures:
            result.scored.pop(failure.request_id, None)

    def _draw(self, ticket: LocalTicket, spec: SampleSpec, draw: Draw | None) -> None:
        result, started = ticket.result, time.perf_counter()
        try:
            if result.failed is not None or draw is None or ticket.logits is None:
                return
            failed = {failure.request_id for failure in result.failures}
            for row, outcome in zip(spec.rows, draw(ticket.logits), strict=True):
                if isinstance(outcome, RowFailure):
                    add_failure(result, outcome)
                elif row.request_id not in failed:
                    result.sampled.append(outcome)
                if row.slot != NO_SLOT:
                    # A failed request may have a row in flight that reads its slot: any id of the vocabulary will do.
                    self.last_token[row.slot] = 0 if isinstance(outcome, RowFailure) else outcome.token
        except BaseException as error:
            self._caught(ticket, error)
        finally:
            result.device_seconds += time.perf_counter() - started
            assert ticket.drawn is not None
            ticket.drawn.set()

    def _caught(self, ticket: LocalTicket, error: BaseException) -> None:
        if isinstance(error, Exception):
            return self._fail(ticket, error)
        # Ctrl-C in the caller's thread: the step is half done, and the caller must know.
        self._fail(ticket, PhloemError(f"the step was interrupted by {type(error).__name__}. Submit its requests again."))
        if self._lane is None:
            raise error

    def _fail(self, ticket: LocalTicket, error: Exception, drawn: bool = False) -> None:
        result = ticket.result
        if result.failed is None:
            result.failed = error
        self._broken = self._broken or error
        result.sampled, result.scored, result.failures, ticket.logits = [], {}, [], None
        ticket.forwarded.set()
        if drawn and ticket.drawn is not None:
            ticket.drawn.set()


def score_rows(part: Part, packed: PackedRows) -> tuple[list[ScoreRow], list[tuple[str, int, str]]]:
    scores, spans = list[ScoreRow](), list[tuple[str, int, str]]()
    for i, row in enumerate(part.rows):
        if len(row.targets):
            first = packed.logit_indptr[i]
            under = row.under or [None] * len(row.targets)
            scores.extend(ScoreRow(first + j, int(t), row.top_logprobs, u) for j, (t, u) in enumerate(zip(row.targets, under)))
            spans.append((row.request_id, len(row.targets), f"between positions {first_logit(row)} and {row.end - 1}"))
    return scores, spans


def add_failure(result: StepResult, failure: RowFailure) -> None:
    if all(known.request_id != failure.request_id for known in result.failures):
        result.failures.append(failure)


class _Worker:
    """One thread, jobs in order. A daemon, so that a crash of the main thread never hangs the interpreter; stop() joins it."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="phloem-executor", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # a fork()ed child has no such thread
                self._thread.join(JOIN_SECONDS)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    # Holds the queue alone: an executor that nobody closed can still be collected, and its finalizer ends this.
    while True:
        job = jobs.get()
        if job is None:
            return
        job()
        del job
