"""R5, exactly-once prefill: whatever the arrival order, the chunking or the policy, each full page of a shared prefix is
computed once. On the scripted device, so thousands of tries of prompts can be counted to the token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime.step import Row
from tests.drive import Driver
from tests.fakes import History

PAGE = 16


def trie_tokens(prompts: list[tuple[int, ...]]) -> int:
    """Unique prefixes: the tokens that anyone has to compute at least once."""
    return len({p[:n] for p in prompts for n in range(1, len(p) + 1)})


class Counted(Driver):
    """Counts how often each full page of a prompt is written, by its last slot."""

    def __init__(self, **settings: object) -> None:
        self.lengths: dict[str, int] = {}
        self.written: dict[History, int] = {}
        super().__init__(device={"on_write": self._wrote}, **settings)  # type: ignore[arg-type]

    def _wrote(self, row: Row, position: int, history: History) -> None:
        if position < self.lengths[row.request_id] and (position + 1) % self.settings.page_size == 0:
            self.written[history] = self.written.get(history, 0) + 1

    def add_prompt(self, ids: tuple[int, ...], **kwargs: object) -> str:
        r = self.request(ids, **kwargs)  # type: ignore[arg-type]
        self.lengths[r.id] = len(ids)
        return self.add(r)


def shared_prompts(count: int, shared: int, own: int) -> list[tuple[int, ...]]:
    rng = random.Random(1)
    stem = tuple(rng.randrange(1, 64) for _ in range(shared))
    return [(*stem, *(rng.randrange(1, 64) for _ in range(own))) for _ in range(count)]


@pytest.mark.parametrize("budget", [64, 256, 4096])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["prefix", "fcfs"])
def test_64_requests_at_once_share_1000_tokens(budget: int, overlap: bool, policy: str) -> None:
    prompts = shared_prompts(64, 1000, 20)
    d = Counted(
        page_size=PAGE, num_pages=1024, max_step_tokens=budget, max_running=64, overlap=overlap, policy=policy, check=False
    )
    names = [d.add_prompt(p, max_tokens=2) for p in prompts]
    d.finish()
    stats = d.core.stats()
    assert stats.prefill_tokens <= trie_tokens(prompts) + 64 * (PAGE - 1)
    stem_pages = [n for history, n in d.written.items() if history.length <= 1000 // PAGE * PAGE]
    assert len(stem_pages) == 62 and set(stem_pages) == {1}, "a page of the shared prefix was computed twice"
    assert all(d.said[name].finish == "length" for name in names) and stats.preemptions == stats.evicted_pages == 0
    assert stats.prefill_tokens + stats.cached_tokens == 64 * 1020
    d.core.check()
    d.assert_no_leak()


@pytest.mark.parametrize("budget", [64, 256, 4096])
def test_64_requests_one_after_another_compute_each_token_of_the_trie_once(budget: int) -> None:
    """R2 and R4: token-exact, plus one token for each prompt found whole."""
    prompts = shared_prompts(62, 1000, 20)
    prompts += [prompts[0], prompts[1][:1000]]
    d = Counted(page_size=PAGE, num_pages=2048, max_step_tokens=budget, check=False)
    for p in prompts:
        d.add_prompt(p, max_tokens=1)
        d.finish()
    assert d.core.stats().prefill_tokens == trie_tokens(prompts) + 2
    d.assert_no_leak()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from((1, 4, 16)),
    budget=st.sampled_from((7, 64, 256, 4096)),
    overlap=st.booleans(),
    at_once=st.booleans(),
    policy=st.sampled_from(("prefix", "fcfs")),
)
def test_random_tries(seed: int, size: int, budget: int, overlap: bool, at_once: bool, policy: str) -> None:
    rng = random.Random(seed)
    prompts = list[tuple[int, ...]]()
    for _ in range(rng.randrange(1, 20)):
        stem = rng.choice(prompts) if prompts and rng.random() < 0.8 else ()
        prompts.append((*stem[: rng.randrange(len(stem) + 1)], *(rng.randrange(1, 5) for _ in range(rng.randrange(1, 50)))))
    d = Counted(page_size=size, num_pages=8192 // size, max_step_tokens=budget, overlap=overlap, policy=policy, check=False)
    seen, whole = set[tuple[int, ...]](), 0
    for p in prompts:
        d.add_prompt(p, max_tokens=1)
        if not at_once:
            d.finish()
            whole += p in seen
            seen |= {p[:n] for n in range(1, len(p) + 1)}
    d.finish()
    stats = d.core.stats()
    assert set(d.written.values()) <= {1}, "R5: a full page of a prompt was computed twice"
    if at_once:
        assert stats.prefill_tokens <= trie_tokens(prompts) + len(prompts) * max(size - 1, 1)
    else:
        assert stats.prefill_tokens == trie_tokens(prompts) + whole
    d.assert_no_leak()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_pages", [70, 90, 130])
def test_in_a_pool_that_must_evict_and_preempt_the_shared_pages_are_computed_once(overlap: bool, num_pages: int) -> None:
    """While a request holds them. Outputs are unchanged, and recomputed tokens are counted apart."""
    prompts = shared_prompts(64, 1000, 20)
    d = Counted(page_size=PAGE, num_pages=num_pages, max_step_tokens=256, max_running=64, overlap=overlap, check=False)
    names = [d.add_prompt(p, max_tokens=30) for p in prompts]
    d.finish()
    stats = d.core.stats()
    assert stats.preemptions + stats.evicted_pages > 0, "the pool was meant to be too small"
    stem = [n for history, n in d.written.items() if history.length <= 1000 // PAGE * PAGE]
    assert set(stem) == {1}
    assert stats.prefill_tokens + stats.cached_tokens <= 64 * 1020
    alone = Counted(page_size=PAGE, num_pages=2048, check=False)
    for i in (0, 13, 63):
        name = alone.add_prompt(prompts[i], max_tokens=30)
        alone.finish()
        assert alone.said[name].tokens == d.said[names[i]].tokens
    d.assert_no_leak()
