"""R5 on the real engine: N requests with a shared prefix compute each of its tokens once, whatever the order and chunking."""

from __future__ import annotations

import random

import pytest

import phloem as ph

NONE = ph.SamplingParams(max_tokens=1, temperature=0)


def trie_tokens(prompts: list[list[int]]) -> int:
    """Tokens in the trie of the prompts: what an ideal cache computes."""
    return len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})


def shared_prompts(seed: int, count: int, shared: int, own: int) -> list[list[int]]:
    rng = random.Random(seed)
    stem = [rng.randrange(1000, 40000) for _ in range(shared)]
    return [stem + [rng.randrange(1000, 40000) for _ in range(own)] for _ in range(count)]


@pytest.mark.parametrize("budget", [64, 256, 4096])
def test_64_at_once(budget: int) -> None:
    prompts = shared_prompts(budget, 64, 1000, 6)
    with ph.Engine(kv_tokens=16_384, max_step_tokens=budget) as engine:
        engine.generate(prompts, NONE)
        computed, page = engine.stats().prefill_tokens, engine.config.page_size
    assert trie_tokens(prompts) <= computed <= trie_tokens(prompts) + 64 * (page - 1)


def test_64_one_after_another() -> None:
    prompts = shared_prompts(1, 64, 1000, 3)
    again = [prompts[5], prompts[17][:500]]  # found whole: R4's one token each
    with ph.Engine(kv_tokens=16_384) as engine:
        for prompt in [*prompts, *again]:
            engine.generate(prompt, NONE)
        assert engine.stats().prefill_tokens == trie_tokens(prompts) + len(again)


def test_a_pool_that_must_evict_or_preempt_still_computes_the_shared_pages_once() -> None:
    prompts = shared_prompts(2, 24, 1000, 40)
    params = ph.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with ph.Engine(kv_tokens=16_384) as roomy:
        want = [o.token_ids for o in roomy.generate(prompts, params)]
    with ph.Engine(kv_tokens=1000 + 12 * 64, max_running=16) as engine:
        assert [o.token_ids for o in engine.generate(prompts, params)] == want
        stats, page = engine.stats(), engine.config.page_size
        assert stats.preemptions or stats.evicted_pages
        assert stats.prefill_tokens <= trie_tokens(prompts) + 24 * (page - 1), "recomputed tokens are counted apart"
        engine.check()


def test_slots_wasted_are_fewer_than_a_page_a_sequence() -> None:
    """Memory: a ShareGPT-like mix of lengths, looked at after every step."""
    rng = random.Random(3)
    lengths = [max(4, min(700, int(rng.lognormvariate(4.4, 0.9)))) for _ in range(24)]
    seen = 0
    with ph.Engine(kv_tokens=32_768, max_running=24) as engine:
        handles = [
            engine.stream([rng.randrange(1000, 40000) for _ in range(n)], ph.SamplingParams(max_tokens=12, ignore_eos=True))
            for n in lengths
        ]
        for _ in range(10):
            for handle in handles:
                next(handle, None)
                stats = engine.stats()
                assert stats.wasted_slots <= (engine.config.page_size - 1) * max(stats.running, 1)
                seen = max(seen, stats.running)
        for handle in handles:
            handle.close()
    assert seen >= 8
