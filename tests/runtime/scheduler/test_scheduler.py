"""Scheduler: plans by hand. S1, S3, P4 and the head of the queue."""

from __future__ import annotations

import random
from array import array
from typing import Any

from phloem.runtime.cache.prefix import PrefixCache
from phloem.runtime.request import Request, SamplingParams
from phloem.runtime.scheduler import audit
from phloem.runtime.scheduler.flight import Flight
from phloem.runtime.scheduler.scheduler import Scheduler
from phloem.runtime.scheduler.sequence import Sequence
from phloem.runtime.step import FUTURE, Sampled, StepResult
from tests.runtime.scheduler.test_sequence import Ends


def make(num_pages: int = 64, page_size: int = 4, **kwargs: Any) -> Scheduler:
    options: dict[str, Any] = {
        "max_running": 8,
        "max_step_tokens": 32,
        "policy": "fcfs",
        "max_wait": 10**9,
        "vocab_size": 50,
        "width": 64,
    }
    return Scheduler(PrefixCache(page_size, num_pages), **(options | kwargs))


def add(s: Scheduler, length: int, seed: int, max_tokens: int = 8, **request: Any) -> Sequence:
    rng = random.Random(seed)
    ids = tuple(rng.randrange(1, 50) for _ in range(length))
    r = Request(id=f"q{seed}", token_ids=ids, sampling=SamplingParams(ignore_eos=True), **request)
    q = Sequence(r, array("i", ids), max_tokens, 0, Ends())
    q.need_pages = -(-(length + max_tokens - 1) // s.page_size)
    s.add(q)
    return q


def launch(s: Scheduler) -> Flight:
    flight = s.plan()
    s.cache.launched()
    return flight


def land(s: Scheduler, flight: Flight, token: int = 9) -> None:
    s.commit(flight, StepResult(flight.plan.step, [Sampled(name, token) for name in list(flight.draws)]))


def step(s: Scheduler) -> Flight:
    flight = launch(s)
    s.sample_spec(flight)
    land(s, flight)
    audit.check(s)
    return flight


def spans(flight: Flight) -> list[tuple[str, int, int]]:
    return [(row.request_id, row.start, row.end) for row in flight.plan.rows]


def test_decodes_come_first_and_chunks_end_where_the_budget_does() -> None:
    """S1."""
    s = make(max_step_tokens=10)
    add(s, 3, 1)
    step(s)
    add(s, 30, 2)
    assert spans(step(s)) == [("q1", 3, 4), ("q2", 0, 9)]
    assert spans(step(s)) == [("q1", 4, 5), ("q2", 9, 18)]


def test_a_row_draws_only_where_its_prompt_ends() -> None:
    s = make(max_step_tokens=10)
    add(s, 15, 1)
    first = launch(s)
    assert first.plan.rows[0].logits_from == 10 and not s.sample_spec(first).rows
    land(s, first)
    second = launch(s)
    row = second.plan.rows[0]
    assert (row.start, row.end, row.logits_from) == (10, 15, 14)
    (draw,) = s.sample_spec(second).rows
    assert (draw.row, draw.position, draw.num_prompt, draw.slot) == (0, 0, 15, row.slot)
    assert list(draw.block) == list(range(50, 64)), "padded ids"


def test_with_a_draw_in_flight_the_next_row_is_future() -> None:
    s = make()
    q = add(s, 5, 1)
    first = launch(s)
    s.sample_spec(first)
    second = launch(s)
    (row,) = second.plan.rows
    assert list(row.tokens) == [FUTURE] and (row.start, row.end) == (5, 6) and row.slot == first.plan.rows[0].slot
    land(s, first, 7)
    assert q.tokens[-1] == 7
    assert s.sample_spec(second).rows[0].position == 1


def test_an_end_found_late_leaves_a_surplus_row_that_draws_nothing() -> None:
    """P4, S6."""
    s = make()
    q = add(s, 5, 1)
    first = launch(s)
    s.sample_spec(first)
    second = launch(s)
    s.finish(q, "abort")
    land(s, first)
    assert s.sample_spec(second).rows == [] and s.counters.surplus_rows == 1 and s.counters.surplus_tokens == 1
    land(s, second)
    assert q.num_new == 0
    audit.check(s)


def test_the_last_in_rank_gives_up_its_pages_and_resumes_where_it_was() -> None:
    """S3."""
    s = make(num_pages=6, page_size=4)
    a, b = add(s, 8, 1, max_tokens=9), add(s, 8, 2, max_tokens=9)
    while s.counters.preemptions == 0:
        step(s)
    assert a.state == "running" and b.state == "waiting" and b.preempted and b.num_new > 0
    tokens = list(b.tokens)
    while a.state != "done":
        step(s)
    flight = step(s)
    assert b.state == "running" and b.tokens[: len(tokens)] == tokens
    assert s.counters.recomputed <= flight.plan.num_tokens, "what the tree kept is not computed again"


def test_a_sequence_with_a_row_in_the_plan_is_no_victim() -> None:
    s = make(num_pages=4, page_size=1, max_step_tokens=8)
    a, b = add(s, 1, 1, max_tokens=4), add(s, 1, 2, max_tokens=4)
    while a.state != "done" or b.state != "done":
        rows = [row.request_id for row in step(s).plan.rows]
        assert len(rows) == len(set(rows))
    assert s.counters.preemptions > 0


def test_the_head_that_does_not_fit_is_not_passed_by() -> None:
    s = make(num_pages=8, page_size=4)
    add(s, 20, 1, max_tokens=12)
    step(s)
    big, small = add(s, 28, 2), add(s, 2, 3)
    s.cache.take(2)  # one page is left, for the one that runs
    assert [name for name, *_ in spans(launch(s))] == ["q1"]
    assert big.state == small.state == "waiting"


def test_slots_are_held_while_running_and_free_afterwards() -> None:
    s = make(max_running=2)
    for i in range(4):
        add(s, 3, i, max_tokens=3)
    for _ in range(12):
        flight = step(s)
        slots = [row.slot for row in flight.plan.rows]
        assert len(set(slots)) == len(slots) and set(slots) <= {0, 1}
    assert sorted(s.slots) == [0, 1] and not s.running and not s.waiting


def test_a_missing_draw_is_an_error_of_that_request_not_a_hang() -> None:
    s = make()
    q = add(s, 3, 1)
    flight = launch(s)
    s.sample_spec(flight)
    s.commit(flight, StepResult(flight.plan.step))
    assert q.finish == "error" and q.error is not None and "no token" in q.error.message
    audit.check(s)


def test_targets_that_come_back_short_are_an_error_of_that_request() -> None:
    s = make()
    r = Request(id="s", token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    q = Sequence(r, array("i", r.token_ids), 0, 0, Ends())
    q.need_pages = 1
    s.add(q)
    flight = launch(s)
    assert list(flight.plan.rows[0].targets) == [2, 3]
    s.commit(flight, StepResult(flight.plan.step))
    assert q.finish == "error" and "logprobs" in (q.error.message if q.error else "")
