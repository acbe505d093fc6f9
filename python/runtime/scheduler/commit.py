"""What a finished step means, in this order:

scored     logprobs of known tokens: of prompts, and of forced runs
failures   end their requests alone
sampled    tokens in, forced runs behind them, ends found; a probe gives a logprob only
rows       what has become whole is published; who waited for nothing else is ready again
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phloem.runtime.errors import PhloemError
from phloem.runtime.scheduler.flight import Flight
from phloem.runtime.scheduler.sequence import Sequence
from phloem.runtime.step import Row, RowFailure, Sampled, StepResult

if TYPE_CHECKING:
    from phloem.runtime.scheduler.scheduler import Scheduler

__all__ = ["apply_result"]


def apply_result(scheduler: Scheduler, flight: Flight, result: StepResult) -> None:
    for row, q in zip(flight.plan.rows, flight.sequences):
        q.in_flight -= 1
        q.version = scheduler.version
        if q.state == "running":
            q.computed = row.end
        if row.targets and q.state != "done":
            _score(scheduler, q, row, result)
    for failure in result.failures:
        scheduler.fail(_whose(flight, failure), failure.error)
    for sampled in result.sampled:
        _take(scheduler, flight, sampled)
    for q in flight.draws.values():  # no draw came: its failure, told above, or a bug of the executor
        q.drawing = False
        scheduler.fail(q, PhloemError("the device gave no token for this request. Please report this."))
    for q in flight.sequences:
        if q.state != "done":
            _after_row(scheduler, q, flight.plan.step)


def _score(scheduler: Scheduler, q: Sequence, row: Row, result: StepResult) -> None:
    scored = result.scored.get(q.request.id, [])
    if len(scored) == len(row.targets):
        scheduler.touched[q] = None
        for position, logprob in enumerate(scored, row.logits_from + 1):
            q.score(position, logprob)
    elif not any(failure.request_id == q.request.id for failure in result.failures):
        what = f"the device gave {len(scored)} logprobs for {len(row.targets)} tokens. Please report this."
        scheduler.fail(q, PhloemError(what))


def _whose(flight: Flight, failure: RowFailure) -> Sequence:
    """Of a draw, or of a row that was scored."""
    owner = flight.draws.get(failure.request_id)
    owner = owner or next((q for q in flight.sequences if q.request.id == failure.request_id), None)
    assert owner is not None, f"the device tells of a failure of {failure.request_id!r}, which has no row in that step"
    return owner


def _take(scheduler: Scheduler, flight: Flight, sampled: Sampled) -> None:
    q, position = flight.draws.pop(sampled.request_id), flight.probes.get(sampled.request_id)
    if position is not None:
        if q.state != "done" and sampled.logprob is not None:
            q.score(position, sampled.logprob)
            scheduler.touched[q] = None
        return
    q.drawing = False
    if q.state == "done":
        scheduler.counters.surplus_tokens += 1
        return
    scheduler.touched[q] = None
    q.version = scheduler.version  # a sibling has no row here
    try:
        reason = q.accept(sampled.token, sampled.logprob)
    except Exception as error:  # whatever a grammar engine raises concerns this request alone
        scheduler.fail(q, error)
        return
    scheduler.conclude(q, reason)
    scheduler.settle(q)


def _after_row(scheduler: Scheduler, q: Sequence, step: int) -> None:
    if q.ending is not None and q.first_wanted() is None:
        scheduler.finish(q, q.ending)
    elif q.state == "waiting":
        scheduler.settle(q)
    elif q.max_tokens == 0 and q.computed >= q.num_prompt:
        scheduler.finish(q, "length")
    else:
        grant, upto = q.grant, min(q.computed, len(q.tokens))
        assert grant is not None
        if (grant.num_shared + 1) * scheduler.page_size <= upto:
            scheduler.cache.publish(grant, upto, step)
