"""B1 on the whole engine: tokens and logprobs are equal, by ==, however the work was batched, cut, placed or cached.

One reference per weight format: each request alone, cold, on a fresh tree. Everything else must give the same bits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

import phloem as ph

Bits = list[tuple[tuple[int, ...], tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]]]

SHARED = " ".join(
    f"Note {i}: the {w} is kept in box {i * 7 % 13}."
    for i, w in enumerate(["lamp", "rope", "coin", "seed", "bell", "knife", "map", "drum"])
)


def requests() -> list[tuple[str, ph.SamplingParams]]:
    """Greedy and seeded, penalised and filtered, short and long, some behind a shared prefix that ends inside a page."""
    rng = random.Random(7)
    out: list[tuple[str, ph.SamplingParams]] = []
    for i in range(12):
        prompt = SHARED + f" Question {i}: where is it?" if i % 3 else f"{'Once upon a time ' * rng.randrange(1, 9)}{i}"
        out.append(
            (
                prompt,
                ph.SamplingParams(
                    max_tokens=rng.choice((3, 9, 17)),
                    temperature=(0.0, 0.8, 1.3)[i % 3],
                    seed=i,
                    top_p=(1.0, 0.9)[i % 2],
                    top_k=(0, 40)[i // 2 % 2],
                    repetition_penalty=(1.0, 1.2)[i // 3 % 2],
                    ignore_eos=True,
                    logprobs="model",
                    top_logprobs=i % 3,
                ),
            )
        )
    return out


def bits(outputs: list[ph.Output]) -> Bits:
    return [(tuple(o.token_ids), tuple((e.token_id, e.logprob, e.top) for e in o.logprobs or ())) for o in outputs]


def together(engine: ph.Engine) -> Bits:
    prompts, params = zip(*requests())
    return bits(engine.generate(list(prompts), list(params)))


def alone(engine: ph.Engine) -> Bits:
    outputs = []
    for prompt, params in requests():
        engine.flush()
        outputs.append(engine.generate(prompt, params))
    return bits(outputs)


@pytest.fixture(scope="module", params=["auto", "f32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(dtype: str) -> Iterator[Bits]:
    with ph.Engine(dtype=dtype, kv_tokens=4096, threads=2) as engine:
        yield alone(engine)


@pytest.mark.parametrize(
    "config",
    [
        {"threads": 1},
        {"page_size": 1},
        {"page_size": 4},
        {"page_size": 64},
        {"max_step_tokens": 5},
        {"max_step_tokens": 64},
        {"max_step_tokens": 1024},
        {"overlap": True},
        {"overlap": True, "max_step_tokens": 33, "page_size": 4},
        {"cache_mode": "off"},
        {"max_running": 2},
        {"policy": "fcfs"},
        {"kv_dtype": "f32"},
    ],
    ids=lambda c: ",".join(f"{k}={v}" for k, v in c.items()),
)
def test_a_batch_equals_each_request_alone(dtype: str, reference: Bits, config: dict[str, object]) -> None:
    with ph.Engine(dtype=dtype, **{"kv_tokens": 4096, "threads": 2, **config}) as engine:
        assert together(engine) == reference


def test_cached_and_copied_equal_cold(dtype: str, reference: Bits) -> None:
    with ph.Engine(dtype=dtype, kv_tokens=8192) as engine:
        assert together(engine) == reference
        before = engine.stats()
        assert together(engine) == reference, "everything cached, last tokens recomputed"
        after = engine.stats()
        assert after.cached_tokens > before.cached_tokens
        prompts, params = zip(*requests())
        for prompt, one, want in zip(prompts, params, reference):
            engine.generate(prompt + " And then", ph.SamplingParams(max_tokens=2, temperature=0))
            assert bits([engine.generate(prompt, one)]) == [want], "copy-on-write from a longer neighbour"
        assert engine.stats().copied_pages > 0


def test_preempted_equals_undisturbed(dtype: str, reference: Bits) -> None:
    with ph.Engine(dtype=dtype, kv_tokens=144, page_size=4, max_running=8) as engine:
        assert together(engine) == reference
        assert engine.stats().preemptions > 0, "the pool was meant to be too small"
        engine.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_async_equals_sync(dtype: str, reference: Bits, overlap: bool) -> None:
    async def run() -> list[ph.Output]:
        async with ph.AsyncEngine(dtype=dtype, kv_tokens=4096, overlap=overlap) as engine:
            return list(await asyncio.gather(*[engine.generate(prompt, params) for prompt, params in requests()]))

    assert bits(asyncio.run(run())) == reference


def test_streamed_equals_whole(dtype: str, reference: Bits) -> None:
    with ph.Engine(dtype=dtype, kv_tokens=4096) as engine:
        for (prompt, params), want in zip(requests()[:5], reference):
            ids = [t for delta in engine.stream(prompt, params) for t in delta.token_ids]
            assert tuple(ids) == want[0]


@pytest.mark.case("C-CACHE-06")
def test_prompt_logprobs_do_not_depend_on_what_ran_before(dtype: str) -> None:
    a, b = SHARED + " The lamp is red.", SHARED + " The bell is old and green."
    seen = []
    for order, config in (((a, b), {}), ((b, a), {}), ((a, b), {"cache_mode": "off"}), ((a, b, a, b), {"page_size": 4})):
        with ph.Engine(dtype=dtype, kv_tokens=2048, **config) as engine:
            scores = {text: tuple(engine.score(engine.tokenizer.encode(text), 0)) for text in order}
            seen.append((scores[a], scores[b]))
    assert all(s == seen[0] for s in seen)
    assert all(e is None or -60 < e.logprob < 0 for e in seen[0][0])


@pytest.mark.case("C-SAMP-07")
def test_penalties_see_the_same_history_cached_or_not(dtype: str) -> None:
    prompt = "the cat and the dog and the cat and the bird and " * 5
    params = ph.SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=30)
    got = []
    with ph.Engine(dtype=dtype, kv_tokens=2048) as engine:
        got += [engine.generate(prompt, params).token_ids for _ in range(3)]
    for config in ({"cache_mode": "off"}, {"max_step_tokens": 16}):
        with ph.Engine(dtype=dtype, kv_tokens=2048, **config) as engine:
            got.append(engine.generate(prompt, params).token_ids)
    assert all(ids == got[0] for ids in got)
