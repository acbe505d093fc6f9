"""EngineCore over a device that checks every read: the promises that a caller sees. Rules of engine.md by name, cases by id."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from phloem.runtime.errors import (
    CapacityError,
    ContextLengthError,
    EngineBusyError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    NumericalError,
    PhloemError,
)
from phloem.runtime.request import OutputDelta
from tests.drive import Driver, Said

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 64) for _ in range(length)]


def cold(prompt: list[int], **kwargs: object) -> Said:
    """The same on a new engine with nothing else running."""
    return Driver(num_pages=1024).run(prompt, **kwargs)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- the cache


@pytest.mark.case("C-CACHE-02")
def test_an_evicted_prefix_is_out_of_reach() -> None:
    d = Driver(page_size=16, num_pages=40)
    x = ids(1, 80)
    first = d.run(x, max_tokens=16)
    for i in range(30):
        d.run(ids(100 + i, 96), max_tokens=4)
    assert d.core.explain(x).num_cached == 0
    again = d.run(x, max_tokens=16)
    assert again.usage.cached_tokens == 0 and again.tokens == first.tokens == cold(x, max_tokens=16).tokens
    longer = d.run([*x, 63], max_tokens=16)
    assert longer.usage.cached_tokens == 80 and longer.tokens == cold([*x, 63], max_tokens=16).tokens
    d.assert_idle()


@pytest.mark.case("C-CACHE-10")
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prompt_that_is_cached_whole_still_computes_one_token(page_size: int) -> None:
    """R4: one token, not a page; and later hits do not shrink."""
    d, p = Driver(page_size=page_size, num_pages=1024), ids(2, 64)
    runs = [d.run(p, max_tokens=20) for _ in range(3)]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert [r.usage.cached_tokens for r in runs] == [0, 63, 63]
    other = [(t + 1) % 64 for t in runs[0].tokens[:10]]
    assert d.run([*p, *other], max_tokens=4).usage.cached_tokens == 64
    assert d.run(p[:48], max_tokens=4).usage.cached_tokens == 47
    one = d.run(p[:1], max_tokens=4)
    assert one.usage.cached_tokens == 0
    for prompt, said in ((p, runs[2]), (p[:1], one)):
        assert said.tokens == cold(prompt, max_tokens=len(said.tokens)).tokens
    assert d.core.stats().prefill_tokens == 64 + 1 + 1 + 10 + 1 + 1
    d.assert_idle()


@pytest.mark.case("C-CACHE-12")
@OVERLAP
def test_a_page_that_output_has_filled_is_matched_for_what_it_holds(overlap: bool) -> None:
    d, a = Driver(page_size=16, overlap=overlap), ids(3, 40)
    first = d.run(a, max_tokens=30)
    b, c = a[:36] + ids(4, 10), a + first.tokens[:3] + [(first.tokens[3] + 1) % 64, *ids(5, 4)]
    for prompt, cached in ((b, 36), (c, 43), (a, 39)):
        said = d.run(prompt, max_tokens=8)
        assert said.usage.cached_tokens == cached
        assert said.tokens == cold(prompt, max_tokens=8).tokens


@pytest.mark.case("C-CACHE-13")
@OVERLAP
def test_an_abort_in_the_middle_of_a_chunked_prompt_frees_everything(overlap: bool) -> None:
    d = Driver(page_size=16, num_pages=128, max_step_tokens=32, overlap=overlap)
    for i in range(20):
        name = d.submit(ids(1000 + i, 400), max_tokens=8)
        for _ in range(1 + i % 13):
            d.step()
        d.core.abort(name)
        d.step()
        assert d.said[name].finish == "abort" and not d.said[name].tokens[1:]
    names = [d.submit(ids(2000 + i, 400), max_tokens=8) for i in range(4)]
    d.step()
    for name in names:
        d.core.abort(name)
    d.finish()
    assert {d.said[name].finish for name in names} == {"abort"}
    d.assert_idle()
    assert d.run(ids(7, 100), max_tokens=8).tokens == cold(ids(7, 100), max_tokens=8).tokens
    d.assert_no_leak()


@pytest.mark.case("C-CACHE-06")
def test_prompt_logprobs_do_not_depend_on_what_ran_before() -> None:
    s, a, b = ids(8, 48), ids(9, 7), ids(10, 9)
    prompts, results = (s + a, s + b), list[list[object]]()
    for order, enabled in (((0, 1), True), ((1, 0), True), ((0, 1), False)):
        d = Driver(page_size=16, cache_enabled=enabled)
        said = {i: d.run(prompts[i], max_tokens=0, prompt_logprobs=0) for i in order}
        assert [len(said[i].prompt_logprobs) for i in (0, 1)] == [54, 56]
        results.append([said[i].prompt_logprobs for i in (0, 1)])
        assert d.core.stats().pages_live == 0
    assert results[0] == results[1] == results[2]


def test_scoring_from_a_position_computes_from_there_only() -> None:
    """M4: what lies before comes from the cache; recomputed positions write to the scratch page, never to the tree's."""
    d, p = Driver(page_size=16), ids(11, 100)
    d.run(p, max_tokens=1)
    before = d.core.stats()
    said = d.run(p, max_tokens=0, prompt_logprobs=90)
    after = d.core.stats()
    assert after.prefill_tokens - before.prefill_tokens == 11 and said.usage.cached_tokens == 89
    assert after.scratch_tokens - before.scratch_tokens == 7  # 89 .. 95 lie in a page of the tree
    assert said.prompt_logprobs == cold(p, max_tokens=0, prompt_logprobs=0).prompt_logprobs[-10:]


@pytest.mark.case("C-SCHED-11")
@pytest.mark.parametrize("length", [65, 128, 500])
def test_with_the_cache_off_the_same_code_gives_the_same_tokens_and_no_hits(length: int) -> None:
    p, peak = ids(12, length), 0
    d = Driver(page_size=16, max_step_tokens=64, cache_enabled=False)
    name = d.submit(p, max_tokens=20)
    while d.core.has_work:
        d.step()
        peak = max(peak, 256 - d.core.stats().pages_free)
    assert d.said[name].tokens == cold(p, max_tokens=20).tokens
    assert peak <= -(-(length + 20) // 16) and d.core.stats().pages_free == 256
    again = d.run(p, max_tokens=20)
    assert again.usage.cached_tokens == 0 and again.tokens == d.said[name].tokens
    assert d.core.stats().cached_tokens == 0


def test_explain_says_what_would_hit() -> None:
    """R9."""
    d, p = Driver(page_size=16), ids(13, 40)
    d.run(p, max_tokens=1)
    clock = d.core.scheduler.cache.tree.clock
    explained = d.core.explain([*p, 1, 2])
    assert (explained.num_tokens, explained.num_cached) == (42, 40)
    assert [(n.num_tokens, n.is_partial, n.leases) for n in explained.nodes] == [(32, False, 0), (8, True, 0)]
    assert all(0 <= n.idle <= clock for n in explained.nodes)
    assert d.core.explain(p).num_cached == 39, "R4"
    assert d.core.explain(p, "other").num_cached == 0, "R8"
    assert d.core.scheduler.cache.tree.clock == clock
    assert d.run([*p, 1, 2], max_tokens=1).usage.cached_tokens == 40


@pytest.mark.parametrize("ids_", [[], [-1], [5, 2**31 - 1], [2**40], [1.5]])
def test_explain_and_hold_refuse_what_add_refuses(ids_: list[int]) -> None:
    d = Driver()
    for ask in (d.core.explain, lambda i: d.core.hold("mine", i)):
        with pytest.raises(InvalidRequestError, match="prompt"):
            ask(ids_)
    with pytest.raises(InvalidRequestError, match="namespace"):
        d.core.explain([1], [])  # type: ignore[arg-type]


def test_flush_frees_what_nobody_holds() -> None:
    d = Driver()
    d.run(ids(14, 40), max_tokens=4)
    held = d.core.hold("mine", ids(14, 40)[:20])
    assert held == 20
    assert d.core.flush() == 6 and d.core.stats().pages_tree == 5
    assert d.core.release("mine") and not d.core.release("mine")
    assert d.core.flush() == 5
    d.submit(ids(14, 40), max_tokens=4)
    with pytest.raises(EngineBusyError):
        d.core.flush()


# ------------------------------------------------------------------------------------------------------------- the queue


@pytest.mark.case("C-SCHED-02")
def test_a_request_that_can_never_fit_is_refused_alone() -> None:
    d = Driver(page_size=16, num_pages=32)
    big = d.submit(ids(20, 700), max_tokens=8)
    small = [d.submit(ids(21 + i, 20), max_tokens=8) for i in range(10)]
    d.finish()
    assert isinstance(d.said[big].error, CapacityError) and "700" in str(d.said[big].error) and "512" in str(d.said[big].error)
    assert {d.said[name].finish for name in small} == {"length"}


@pytest.mark.case("C-SCHED-02")
def test_a_request_that_does_not_fit_now_waits_and_is_served() -> None:
    d = Driver(page_size=16, num_pages=32, max_step_tokens=256)
    running = [d.submit(ids(30 + i, 200), max_tokens=50) for i in range(2)]
    d.step()
    d.step()
    big = d.submit(ids(33, 450), max_tokens=8)
    small = [d.submit(ids(34 + i, 20), max_tokens=8) for i in range(10)]
    d.finish()
    assert {d.said[name].finish for name in (*running, big, *small)} == {"length"}
    assert d.said[big].tokens == cold(ids(33, 450), max_tokens=8).tokens
    assert all(len(d.said[name].tokens) == 50 for name in running), "and the running ones were not the worse for it"
    d.assert_no_leak()


@pytest.mark.case("C-SCHED-09")
@pytest.mark.parametrize("policy", ["prefix", "fcfs"])
def test_a_cold_request_is_not_starved_by_hot_ones(policy: str) -> None:
    """S2: nobody is overtaken by later arrivals for more than max_wait served tokens."""
    d = Driver(page_size=16, max_running=2, max_step_tokens=256, policy=policy, max_wait=200)
    h = ids(40, 200)
    d.run(h, max_tokens=1)
    alive, done, cold_name, first_token = list[str](), 0, "", None
    for step in range(400):
        while len(alive) < 12:
            alive.append(d.submit([*h, len(alive), step % 64], max_tokens=16))
        if step == 20:
            cold_name, served, hot_before = d.submit(ids(41, 30), max_tokens=4), d.core.scheduler.served, done
        d.step()
        done += sum(d.said[n].last is not None for n in alive if n in d.said)
        alive = [n for n in alive if n not in d.said or d.said[n].last is None]
        if cold_name and first_token is None and cold_name in d.said and d.said[cold_name].tokens:
            first_token = step
            assert d.core.scheduler.served - served <= 200 + 2 * (16 + 200) + 30
            assert done - hot_before < 30
            return
    raise AssertionError("the cold request starved")


def test_priority_is_for_the_policy_of_that_name() -> None:
    for policy, expected in (("priority", ["c", "b", "a"]), ("fcfs", ["a", "b", "c"])):
        d, order = Driver(max_running=1, policy=policy), list[str]()
        for i, name in enumerate("abc"):
            d.submit(ids(i, 5), id=name, max_tokens=1, request={"priority": i})
        while d.core.has_work:
            order += [x.request_id for x in d.step() if x.finish_reason]
        assert order == expected


@pytest.mark.case("C-SCHED-06")
@OVERLAP
def test_nothing_is_said_before_the_prompt_is_computed(overlap: bool) -> None:
    d = Driver(page_size=16, max_step_tokens=32, overlap=overlap)
    name = d.submit(ids(50, 200), max_tokens=10, logprobs=True)
    for _ in range(6):
        assert d.step() == []
    d.finish()
    said = d.said[name]
    assert len(said.tokens) == len(said.logprobs) == 10 and [x.token_id for x in said.logprobs] == said.tokens
    assert said.tokens == cold(ids(50, 200), max_tokens=10).tokens


@OVERLAP
def test_a_long_prompt_does_not_stall_a_stream(overlap: bool) -> None:
    """S1: decodes are served first, in every step."""
    d = Driver(page_size=16, num_pages=512, max_step_tokens=32, overlap=overlap)
    stream = d.submit(ids(51, 10), max_tokens=60)
    d.step()
    d.step()
    d.submit(ids(52, 1500), max_tokens=1)
    d.finish()
    steps = d.said[stream].steps
    assert steps == list(range(steps[0], steps[0] + 60))


@pytest.mark.case("C-SCHED-10")
@OVERLAP
@pytest.mark.parametrize("place", [0, 2])
def test_after_an_abort_nothing_more_is_said(overlap: bool, place: int) -> None:
    for late in range(1, 8):
        d = Driver(page_size=16, max_step_tokens=32, overlap=overlap)
        others = [d.submit(ids(60 + i, 10), max_tokens=12) for i in range(place)]
        name = d.submit(ids(70, 90), max_tokens=12)
        for _ in range(late):
            d.step()
        delivered = len(d.said[name].tokens) if name in d.said else 0
        d.core.abort(name)
        d.finish()
        said = d.said[name]
        assert said.finish == "abort" and len(said.tokens) == delivered == said.usage.completion_tokens
        for i, other in enumerate(others):
            assert d.said[other].tokens == cold(ids(60 + i, 10), max_tokens=12).tokens
        d.assert_no_leak()


@pytest.mark.case("C-SCHED-12")
@pytest.mark.parametrize(
    ("length", "max_tokens", "outcome"),
    [
        (511, 1, 1), (512, 1, ContextLengthError), (513, 1, ContextLengthError), (512, 0, 0), (513, 0, ContextLengthError),
        (507, 4, 4), (507, 5, 5), (507, 6, ContextLengthError), (507, 100, ContextLengthError), (507, None, 5), (512, None, ContextLengthError),
        (100, None, 128), (1, 511, 511),
    ],
)  # fmt: skip
def test_the_border_of_the_context(length: int, max_tokens: int | None, outcome: int | type[Exception]) -> None:
    d = Driver(page_size=16, max_context=512)
    said = d.run(ids(80, length), max_tokens=max_tokens)
    if isinstance(outcome, int):
        assert (len(said.tokens), said.finish) == (outcome, "length")
    else:
        assert isinstance(said.error, outcome) and "512" in str(said.error)


@pytest.mark.parametrize(
    ("length", "max_tokens", "outcome"),
    [(64, 1, 1), (65, 1, CapacityError), (65, 0, CapacityError), (60, 5, 5), (60, 6, CapacityError), (60, None, 5), (64, 0, 0)],
)
def test_the_border_of_the_pool(length: int, max_tokens: int | None, outcome: int | type[Exception]) -> None:
    """P3: the last token drawn needs no slot."""
    said = Driver(page_size=16, num_pages=4).run(ids(81, length), max_tokens=max_tokens)
    if isinstance(outcome, int):
        assert (len(said.tokens), said.finish) == (outcome, "length")
    else:
        assert isinstance(said.error, outcome)


@pytest.mark.case("C-SCHED-13")
def test_a_second_request_with_a_live_id_is_refused_and_the_first_goes_on() -> None:
    d = Driver()
    a = d.submit(ids(90, 20), id="dup", max_tokens=20)
    d.step()
    d.core.add(d.request(ids(91, 20), id="dup", max_tokens=20))
    (refusal, *_) = [x for x in d.core.step(2.0) if x.finish_reason == "error"]
    assert refusal.error is not None and refusal.error.code == "duplicate_request_id"
    d.said[a] = Said()
    d.finish()
    assert d.said[a].finish == "length" and d.said[a].usage.completion_tokens == 20
    assert d.run(ids(92, 20), id="dup2", max_tokens=3).tokens == cold(ids(92, 20), max_tokens=3).tokens
    del d.said["dup"]
    assert d.run(ids(92, 20), id="dup", max_tokens=3).finish == "length", "an id is free again once its request has ended"
    for odd in ("", "x" * 10_000, "a\nb"):
        assert d.run(ids(93, 5), id=odd or None, max_tokens=1).finish == "length"
    d.assert_no_leak()


@pytest.mark.case("C-OPS-13")
@OVERLAP
def test_recomputed_tokens_are_neither_hits_nor_prefill(overlap: bool) -> None:
    d = Driver(page_size=4, num_pages=30, max_running=8, max_step_tokens=64, overlap=overlap)
    names = [d.submit(ids(500 + i, 24), max_tokens=24) for i in range(30)]
    d.finish()
    stats = d.core.stats()
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0, "the pool was meant to be too small"
    by_chance = sum(d.said[name].usage.cached_tokens for name in names)  # a common first token or two
    assert stats.cached_tokens == by_chance < 30
    assert stats.prefill_tokens == 30 * 24 - by_chance
    for i, name in enumerate(names):
        assert d.said[name].tokens == cold(ids(500 + i, 24), max_tokens=24).tokens
    d.assert_no_leak()


# -------------------------------------------------------------------------------------------------------- how they end


def scripted(tokens: list[int], start: int) -> Callable[..., list[float]]:
    """A model that says `tokens` after a prompt of length `start`, then 1 for ever."""

    def logits(history: object, width: int) -> list[float]:
        i = history.length - start  # type: ignore[attr-defined]
        out = [0.0] * width
        out[tokens[i] if i < len(tokens) else 1] = 9.0
        return out

    return logits


@OVERLAP
def test_eos_stop_token_and_length(overlap: bool) -> None:
    def run(**kwargs: object) -> tuple[list[int], str | None]:
        said = Driver(overlap=overlap, device={"logits": scripted([5, 6, 0, 7], 3)}).run([1, 2, 3], max_tokens=8, **kwargs)
        return said.tokens, said.finish

    assert run(ignore_eos=False) == ([5, 6, 0], "eos")
    assert run(ignore_eos=True) == ([5, 6, 0, 7, 1, 1, 1, 1], "length")
    assert run(ignore_eos=False, stop_token_ids=[6]) == ([5, 6], "stop_token")
    assert run(ignore_eos=True, stop_token_ids=[0]) == ([5, 6, 0], "stop_token")
    tokens, finish = run(ignore_eos=False, stop_token_ids=[6], min_tokens=4)
    assert 6 not in tokens[:4] and 0 not in tokens[:4], "M1: masked before min_tokens"
    assert finish == "length" and len(tokens) == 8


@OVERLAP
def test_a_stop_string_ends_the_request_where_the_collector_says(overlap: bool) -> None:
    """S6: what was drawn beyond reaches neither Output nor usage, and is counted apart."""
    d = Driver(overlap=overlap)
    name = d.submit(ids(95, 10), max_tokens=50)
    while name not in d.said or len(d.said[name].tokens) < 5:
        d.step()
    d.core.stop(name, 3)
    d.core.stop(name, 2)
    d.core.stop("nobody", 1)
    d.finish()
    said = d.said[name]
    assert (said.finish, said.usage.completion_tokens) == ("stop_string", 3)
    assert said.last is not None and said.last.token_ids == []
    assert d.core.stats().surplus_tokens >= 2
    d.assert_no_leak()


def test_a_refused_request_is_answered_in_the_next_step_and_never_raises() -> None:
    """S6, and every value that indexes something is range-checked (C-SAMP-05, C-SAMP-06, C-API-14)."""
    d = Driver(vocab_size=60, width=64)
    bad: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"ids": []}, InvalidRequestError, "token_ids"),
        ({"ids": [60]}, InvalidRequestError, "token_ids"),
        ({"ids": [-1]}, InvalidRequestError, "token_ids"),
        ({"ids": [2**40]}, InvalidRequestError, "token_ids"),
        ({"ids": ["a"]}, InvalidRequestError, "token_ids"),
        ({"ids": [1.5]}, InvalidRequestError, "token_ids"),
        ({"stop_token_ids": [60]}, InvalidRequestError, "stop_token_ids"),
        ({"allowed_token_ids": [60]}, InvalidRequestError, "allowed_token_ids"),
        ({"logit_bias": {60: 1.0}}, InvalidRequestError, "logit_bias"),
        ({"min_tokens": 200}, InvalidRequestError, "min_tokens"),
        ({"prompt_logprobs": 3}, InvalidRequestError, "prompt_logprobs"),
        ({"request": {"sample": -1}}, InvalidRequestError, "sample"),
        ({"request": {"namespace": 3}}, InvalidRequestError, "namespace"),
        ({"request": {"priority": "high"}}, InvalidRequestError, "priority"),
        ({"request": {"group": 3}}, InvalidRequestError, "group"),
    ]
    for kwargs, kind, param in bad:
        name = d.submit(kwargs.pop("ids", [1, 2, 3]), **kwargs)  # type: ignore[arg-type]
        d.hear(d.core.drain())
        error = d.said[name].error
        assert isinstance(error, kind) and error.param == param, (kwargs, error)
    assert d.core.stats().refused == len(bad) and not d.core.has_work
    assert d.run([1, 2, 59], max_tokens=3).finish == "length"
    assert all(t < 60 for said in d.said.values() for t in said.tokens), "padded ids are never drawn"


def test_a_grammar_without_a_grammar_service_is_refused() -> None:
    from phloem.runtime.request import GrammarSpec

    d = Driver()
    said = d.run([1], request={"grammar": GrammarSpec(kind="regex", source="a")})
    assert type(said.error).__name__ == "GrammarError"


# ------------------------------------------------------------------------------------------------------- what goes wrong


@OVERLAP
def test_a_row_that_fails_fails_alone(overlap: bool) -> None:
    d = Driver(overlap=overlap)
    names = [d.submit(ids(110 + i, 10), max_tokens=12) for i in range(3)]
    for _ in range(4):
        d.step()
    d.device.row_errors[names[1]] = NumericalError("the logits of this row are not finite.")
    d.finish()
    assert isinstance(d.said[names[1]].error, NumericalError)
    for i in (0, 2):
        assert d.said[names[i]].tokens == cold(ids(110 + i, 10), max_tokens=12).tokens
    d.assert_no_leak()


@OVERLAP
def test_a_failed_forward_is_planned_again(overlap: bool) -> None:
    """R5: it voids its step and those launched since; what committed steps wrote stays; tokens are unchanged."""
    d = Driver(overlap=overlap, max_step_tokens=16)
    names = [d.submit(ids(120 + i, 30), max_tokens=12) for i in range(3)]
    for i in range(60):
        if i % 5 == 2:
            d.device.fail_next = RuntimeError(f"failure {i}")
        d.step()
    d.finish()
    stats = d.core.stats()
    assert stats.failed_steps > 3 and stats.recomputed_tokens > 0
    for i, name in enumerate(names):
        assert d.said[name].tokens == cold(ids(120 + i, 30), max_tokens=12).tokens
    assert stats.prefill_tokens + stats.cached_tokens == 90
    d.assert_no_leak()


@OVERLAP
def test_a_forward_that_always_fails_ends_its_requests_and_not_the_engine(overlap: bool) -> None:
    d = Driver(overlap=overlap)
    name = d.submit(ids(130, 10), max_tokens=4)
    for _ in range(20):
        if d.core.has_work:
            d.device.fail_next = RuntimeError("out of memory")
            d.step()
    d.device.fail_next = None
    assert "out of memory" in str(d.said[name].error) and d.core.stats().failed_steps == 3
    assert d.run(ids(131, 10), max_tokens=4).finish == "length"
    d.assert_no_leak()


@OVERLAP
@pytest.mark.parametrize("where", ["launch", "sample", "collect"])
def test_an_executor_that_raises_is_a_failed_forward(overlap: bool, where: str) -> None:
    d, raised = Driver(overlap=overlap), 0
    real = getattr(d.device, where)

    def sometimes(*args: object) -> object:
        nonlocal raised
        if d.steps == 4 and not raised:
            raised = 1
            raise RuntimeError(f"{where} raised")
        return real(*args)

    setattr(d.device, where, sometimes)
    name = d.submit(ids(140, 10), max_tokens=12)
    d.finish()
    assert raised and d.core.stats().failed_steps == 1
    assert d.said[name].tokens == cold(ids(140, 10), max_tokens=12).tokens


def test_a_device_that_cannot_be_reset_ends_everything_with_a_reply() -> None:
    d = Driver()
    names = [d.submit(ids(150 + i, 10), max_tokens=4) for i in range(3)]
    d.step()

    def dead() -> None:
        raise RuntimeError("gone")

    d.device.reset = dead  # type: ignore[method-assign]
    d.device.fail_next = RuntimeError("fell off the bus")
    d.step()
    assert all(isinstance(d.said[name].error, EngineDeadError) for name in names)
    with pytest.raises(EngineClosedError):
        d.core.step()


def test_broken_accounting_isolates_the_running_and_spares_the_rest() -> None:
    """P2: found, counted, rebuilt; the engine lives."""
    d = Driver(max_running=2)
    names = [d.submit(ids(160 + i, 10), max_tokens=8) for i in range(4)]
    d.step()
    d.step()
    d.core.scheduler.cache.pool.free.pop()  # a page that nobody owns any more
    d.hear(d.core.step())
    assert d.core.stats().violations == 1 and "P2" in str(d.core.last_violation)
    d.core.last_violation = None
    d.finish()
    assert [d.said[name].finish for name in names] == ["error", "error", "length", "length"]
    assert d.said[names[2]].tokens == cold(ids(162, 10), max_tokens=8).tokens
    d.assert_no_leak()


def test_a_bug_that_a_waiting_request_keeps_setting_off_ends_in_replies_not_in_a_loop() -> None:
    d = Driver(max_running=2)
    names = [d.submit(ids(165 + i, 10), max_tokens=8) for i in range(3)]
    real = d.core.scheduler.cache.acquire

    def acquire(root: object, key: bytearray, *args: object) -> object:
        if bytes(key).startswith(bytes(d.core._live[names[1]].key)):
            raise ValueError("a bug of ours")
        return real(root, key, *args)  # type: ignore[arg-type]

    d.core.scheduler.cache.acquire = acquire  # type: ignore[assignment, method-assign]
    for _ in range(10):
        if d.core.has_work:
            d.hear(d.core.step())
    d.core.scheduler.cache.acquire = real  # type: ignore[method-assign]
    assert not d.core.has_work and {d.said[name].finish for name in names} == {"error"}
    d.core.last_violation = None
    assert d.run(ids(169, 10), max_tokens=8).tokens == cold(ids(169, 10), max_tokens=8).tokens
    d.assert_no_leak()


def test_close_answers_everyone() -> None:
    d = Driver(overlap=True)
    names = [d.submit(ids(170 + i, 10), max_tokens=8) for i in range(3)]
    d.step()
    d.core.close()
    d.core.close()
    d.hear(d.core.drain())
    assert {d.said[name].finish for name in names} == {"abort"} and d.device.closed and not d.core.has_work
    late = d.submit(ids(1, 3))
    d.hear(d.core.drain())
    assert isinstance(d.said[late].error, EngineClosedError)


# -------------------------------------------------------------------------------------------------------- seeds, samples


def test_a_seed_is_drawn_reported_and_enough_to_repeat_the_output() -> None:
    """M2."""
    d = Driver()
    first = d.run(ids(180, 10), max_tokens=12, temperature=1.0)
    second = d.run(ids(180, 10), max_tokens=12, temperature=1.0)
    assert first.last is not None and second.last is not None and first.last.seed != second.last.seed
    assert first.tokens != second.tokens
    assert d.run(ids(180, 10), max_tokens=12, temperature=1.0, seed=first.last.seed).tokens == first.tokens
    assert Driver().run(ids(180, 10), max_tokens=12, temperature=1.0).tokens == first.tokens, (
        "the settings' seed fixes the stream"
    )


@OVERLAP
def test_samples_of_a_prompt_compute_it_once(overlap: bool) -> None:
    """S4: the last row is listed once a sample; the partial page is copied; no prompt token is computed again."""
    d = Driver(page_size=16, overlap=overlap)
    p = ids(190, 40)
    names = [d.submit(p, max_tokens=8, temperature=1.0, request={"group": "g", "sample": i}) for i in range(6)]
    d.finish()
    stats = d.core.stats()
    assert stats.prefill_tokens == 40
    assert stats.copied_pages == 5
    seeds = {d.said[name].last.seed for name in names}  # type: ignore[union-attr]
    assert len(seeds) == 1, "a group shares the seed that was drawn"
    assert len({tuple(d.said[name].tokens) for name in names}) == 6, "and its samples differ"
    for i, name in enumerate(names):
        alone = cold(p, max_tokens=8, temperature=1.0, seed=seeds.copy().pop(), request={"sample": i})
        assert d.said[name].tokens == alone.tokens
    assert not d.core.scheduler.leaders and not d.core._seeds.groups
    d.assert_no_leak()


@OVERLAP
@pytest.mark.parametrize("max_tokens", [1, 3])
def test_usage_of_samples_adds_up_to_what_was_computed(overlap: bool, max_tokens: int) -> None:
    """S4: no prompt token is computed for a sample that takes its first token from its leader's row, also if that is its last."""
    d = Driver(page_size=16, overlap=overlap)
    p = ids(190, 40)
    names = [d.submit(p, max_tokens=max_tokens, temperature=1.0, request={"group": "g", "sample": i}) for i in range(6)]
    d.finish()
    stats = d.core.stats()
    assert [d.said[name].usage.cached_tokens for name in names] == [0] + [40] * 5
    assert (stats.prefill_tokens, stats.cached_tokens) == (40, 200)


@pytest.mark.case("C-SCHED-08")
def test_more_samples_than_seats() -> None:
    d = Driver(page_size=16, max_running=4)
    names = [d.submit(ids(191, 40), max_tokens=4, temperature=1.0, request={"group": "g", "sample": i}) for i in range(40)]
    d.finish()
    assert all(d.said[name].finish == "length" for name in names) and d.core.stats().prefill_tokens == 40


@OVERLAP
def test_when_the_leader_goes_the_next_sample_leads(overlap: bool) -> None:
    for late in range(1, 6):
        d = Driver(page_size=16, max_step_tokens=16, overlap=overlap)
        names = [d.submit(ids(192, 60), max_tokens=6, seed=3, request={"group": "g", "sample": i}) for i in range(3)]
        for _ in range(late):
            d.step()
        d.core.abort(names[0])
        d.finish()
        for i in (1, 2):
            assert d.said[names[i]].tokens == cold(ids(192, 60), max_tokens=6, seed=3, request={"sample": i}).tokens
        assert d.core.stats().prefill_tokens <= 60 + 1, "R5: launched pages stay; R4: one token for the logits"
        d.assert_no_leak()


def test_requests_that_only_look_like_a_group_go_their_own_way() -> None:
    """Another prompt, logprobs of the prompt, no token to draw: none of these can draw from the leader's row."""
    d, p = Driver(page_size=16), ids(193, 40)
    group = {"group": "g"}
    a = d.submit(p, max_tokens=5, request=group)
    b = d.submit(ids(194, 40), max_tokens=5, request=group)
    c = d.submit(p, max_tokens=5, prompt_logprobs=0, request=group)
    e = d.submit(p, max_tokens=0, request=group)
    d.finish()
    assert d.said[a].tokens == d.said[c].tokens == cold(p, max_tokens=5).tokens
    assert d.said[b].tokens == cold(ids(194, 40), max_tokens=5).tokens
    assert len(d.said[c].prompt_logprobs) == 39 and d.said[e].tokens == []


# --------------------------------------------------------------------------------------------------------- holds, weights


def test_a_request_can_hold_what_it_has_cached() -> None:
    """R7: pinned at its end, tail included, until released, lapsed or broken."""
    d = Driver(page_size=4, num_pages=32, hold_ttl=500.0, hold_share=1.0)
    p = ids(200, 30)
    held = d.run(p, id="mine", max_tokens=4, request={"hold": True})
    assert d.core.stats().holds == 1
    for i in range(20):
        d.run(ids(210 + i, 30), max_tokens=4)
    assert d.core.explain([*p, *held.tokens[:3], 1, 2]).num_cached >= 33, "eviction passed it by"
    assert d.core.stats().held_pages == 9
    d.step(now=1000.0)
    assert d.core.stats().holds == 0, "its time is over"
    d.assert_no_leak()


def test_a_hold_yields_before_a_request_that_fits_would_wait() -> None:
    d = Driver(page_size=4, num_pages=16, hold_share=1.0)
    d.run(ids(220, 30), id="mine", max_tokens=4, request={"hold": True})
    said = d.run(ids(221, 60), max_tokens=5)
    assert said.finish == "length" and d.core.stats().broken_holds == 1
    d.assert_no_leak()


def test_holds_are_capped() -> None:
    d = Driver(page_size=4, num_pages=40, hold_share=0.5)
    for i in range(4):
        d.run(ids(230 + i, 30), id=f"h{i}", max_tokens=4, request={"hold": True})
        assert d.core.stats().held_pages <= 20
    assert d.core.stats().holds == 2 and d.core.stats().broken_holds == 2
    assert not d.core.release("h0") and d.core.release("h3")


@pytest.mark.case("C-CACHE-08", "C-CACHE-09")
@OVERLAP
def test_new_weights_never_meet_old_pages(overlap: bool) -> None:
    """R8 (C-CACHE-09): the salt of the device changes with the version, so a hit across versions is a wrong read."""
    d, p = Driver(page_size=16, overlap=overlap), ids(240, 100)
    first = d.run(p, max_tokens=16)
    d.core.commit_weights()
    second = d.run(p, max_tokens=16)
    assert first.tokens != second.tokens and second.usage.cached_tokens == 0
    assert second.last is not None and second.last.weights_version == 1
    assert d.run(p, max_tokens=16).usage.cached_tokens == 99


@OVERLAP
def test_requests_in_flight_at_a_change_of_weights(overlap: bool) -> None:
    """rl W6."""

    def start() -> tuple[Driver, list[str]]:
        d = Driver(overlap=overlap, max_running=2)
        names = [d.submit(ids(250 + i, 20), max_tokens=12) for i in range(3)]
        for _ in range(5):
            d.step()
        return d, names

    d, names = start()
    with pytest.raises(EngineBusyError, match=names[0]):
        d.core.commit_weights()
    with pytest.raises(InvalidRequestError):
        d.core.commit_weights("perhaps")  # type: ignore[arg-type]
    d.core.commit_weights("finish")
    late = d.submit(ids(260, 10), max_tokens=3)
    d.finish()
    for i in (0, 1):
        assert d.said[names[i]].tokens == cold(ids(250 + i, 20), max_tokens=12).tokens
    assert d.core.weights_version == 1
    assert d.said[late].last.weights_version == d.said[names[2]].last.weights_version == 1  # type: ignore[union-attr]

    d, names = start()
    d.core.commit_weights("abort")
    d.finish()
    assert {d.said[name].finish for name in names} == {"abort"} and d.core.weights_version == 1

    d, names = start()
    delivered = len(d.said[names[0]].tokens)
    d.core.commit_weights("recompute")
    spans = list[tuple[int, int]]()
    while d.core.has_work:
        spans += [(x.weights_version, len(x.token_ids)) for x in d.step() if x.request_id == names[0] and x.token_ids]
    assert d.said[names[0]].tokens[:delivered] == cold(ids(250, 20), max_tokens=12).tokens[:delivered]
    assert len(d.said[names[0]].tokens) == 12 and {v for v, _ in spans} <= {0, 1} and spans[-1][0] == 1

    d, names = start()
    d.core.commit_weights("finish")
    d.core.commit_weights("abort")  # the one that waited is met by this one, and nothing waits for ever
    d.finish()
    assert {d.said[name].finish for name in names} == {"abort"} and d.core.weights_version == 1 and not d.core.has_work


# ----------------------------------------------------------------------------------------------------------------- stats


def test_wasted_slots_stay_below_a_page_a_sequence() -> None:
    """Memory: at most page_size - 1 slots a live sequence are allocated and not in use, on a chat-like mix of lengths."""
    rng = random.Random(5)
    d = Driver(page_size=16, num_pages=2048, max_running=32, max_step_tokens=512)
    for i in range(80):
        d.submit(ids(300 + i, int(rng.lognormvariate(4.5, 0.9)) + 1), max_tokens=int(rng.lognormvariate(3.5, 0.8)) + 1)
    worst = 0.0
    while d.core.has_work:
        d.step()
        stats = d.core.stats()
        assert stats.wasted_slots <= 15 * stats.running
        if stats.running == 32:
            worst = max(worst, stats.wasted_slots / (2048 * 16))
    assert 0 < worst < 0.02


def test_stats_add_up() -> None:
    d = Driver(page_size=4, num_pages=64, max_running=2)
    for i in range(5):
        d.submit(ids(310 + i, 20), max_tokens=10)
    d.step(now=10.0)
    d.step(now=12.0)
    stats = d.core.stats()
    assert (stats.running, stats.waiting, stats.requests) == (2, 3, 5)
    assert stats.pages_free + stats.pages_tree + stats.pages_live == 64
    assert stats.oldest_wait_seconds == 2.0 and stats.oldest_wait_tokens == d.core.scheduler.served
    d.finish()
    stats = d.core.stats()
    assert stats.prefill_tokens + stats.cached_tokens == 100
    assert stats.decode_tokens == 5 * 9, "the last token drawn is never computed"
    assert stats.finished == {"length": 5} and stats.steps == d.steps


def test_one_prompt_of_each_length_and_page_size_agrees() -> None:
    for page_size in (1, 2, 8, 64):
        d = Driver(page_size=page_size, num_pages=4096 // page_size)
        for length in (1, 2, 7, 8, 9, 63, 64, 65):
            assert d.run(ids(320, length), max_tokens=5).tokens == cold(ids(320, length), max_tokens=5).tokens
        d.assert_no_leak()


def test_errors_know_who_is_to_blame() -> None:
    d = Driver()
    assert d.run(ids(1, 5), max_tokens=1).finish == "length"

    class Odd:
        id, token_ids = "odd", 7

    d.core.add(Odd())  # type: ignore[arg-type]
    deltas: list[OutputDelta] = d.core.drain()
    assert deltas[0].finish_reason == "error"
    assert issubclass(PhloemError, Exception)


def test_steps_that_plan_nothing_are_not_counted() -> None:
    """A loop that polls while a grammar compiles, or drains the last step, has done no step."""
    d = Driver(page_size=4, num_pages=32)
    d.run(ids(300, 10), max_tokens=3)
    before = d.core.stats().steps
    for _ in range(5):
        d.step()
    assert d.core.stats().steps == before == 3
