"""S2: the order of the queue is exactly "longest cached prefix first", however it is kept; and nobody waits for ever."""

from __future__ import annotations

import random
from array import array

import pytest

from phloem.runtime.cache.prefix import PrefixCache
from phloem.runtime.request import Request
from phloem.runtime.scheduler.policy import WaitingQueue
from phloem.runtime.scheduler.sequence import Sequence
from tests.runtime.cache.tree_model import pack
from tests.runtime.scheduler.test_sequence import Ends

ROOT = ("", 0)


def sequence(tokens: tuple[int, ...], arrival: int, served_before: int = 0, priority: int = 0) -> Sequence:
    q = Sequence(Request(id=f"q{arrival}", token_ids=tokens), array("i", tokens), 4, 0, Ends())
    q.rank, q.served_before = (-priority, arrival), served_before
    return q


def insert(cache: PrefixCache, tokens: tuple[int, ...], step: int) -> None:
    got = cache.acquire(ROOT, bytearray(pack(tokens)), len(tokens), step, 64, cache.take, False)
    assert got is not None
    grant, _ = got
    need = -(-len(tokens) // cache.page_size) - grant.num_pages
    grant.add(cache.take(need))
    cache.release(grant, min(len(tokens), grant.num_pages * cache.page_size), step)


@pytest.mark.parametrize("seed", range(8))
def test_the_head_is_what_matching_everyone_again_would_choose(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(rng.choice((1, 2, 4)), 60)
    queue, waiting = WaitingQueue(cache, "prefix", 10**9, lambda q: ROOT), list[Sequence]()
    for i in range(600):
        tokens = tuple(rng.choice((1, 1, 2, 3)) for _ in range(rng.randrange(1, 24)))
        action = rng.random()
        if action < 0.4:
            q = sequence(tokens, i)
            waiting.append(q)
            queue.push(q)
        elif action < 0.5 and waiting:
            queue.discard(waiting.pop(rng.randrange(len(waiting))))
        elif action < 0.8:
            insert(cache, tokens, i)
        else:
            cache.tree.evict()
        cached = {q: len(cache.tree.match(cache.tree.root(ROOT), bytes(q.key)).pages) for q in waiting}
        want = min(waiting, key=lambda q: (-cached[q], q.rank), default=None)
        assert queue.head(0, False) is want
        assert len(queue) == len(waiting)
    assert len(queue._order) <= 4 * len(waiting) + 64


def test_only_what_has_changed_is_matched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: the cost follows what changes, not how many wait."""
    cache, rng = PrefixCache(4, 4096), random.Random(0)
    queue = WaitingQueue(cache, "prefix", 10**9, lambda q: ROOT)
    for i in range(500):
        queue.push(sequence((i % 50, *(rng.randrange(100) for _ in range(30))), i))
    queue.head(0, False)
    matches = 0
    real = queue._match

    def counted(place: object) -> None:
        nonlocal matches
        matches += 1
        real(place)  # type: ignore[arg-type]

    monkeypatch.setattr(queue, "_match", counted)
    for step in range(20):
        insert(cache, tuple(rng.randrange(100) for _ in range(30)), step)
        queue.head(0, False)
    assert matches == 0, "none of these prompts waits"
    first = queue.head(0, False)
    assert first is not None
    insert(cache, tuple(first.tokens), 21)
    queue.head(0, False)
    assert 1 <= matches < 20


def test_whoever_waits_too_long_comes_first() -> None:
    cache = PrefixCache(1, 64)
    queue = WaitingQueue(cache, "prefix", 100, lambda q: ROOT)
    insert(cache, (1, 2, 3, 4), 1)
    cold, hot = sequence((9, 9), 0, served_before=0), sequence((1, 2, 3, 4), 1, served_before=50)
    queue.push(cold)
    queue.push(hot)
    assert queue.head(100, False) is hot
    assert queue.head(101, False) is cold
    resumed = sequence((7,), 7)
    resumed.started = True
    queue.push(resumed)
    assert queue.head(101, False) is cold and queue.head(101, True) is resumed
    queue.discard(cold)
    assert queue.head(101, False) is resumed, "resumed ones come before fresh ones"
    queue.discard(resumed)
    assert queue.head(101, True) is None and queue.head(101, False) is hot


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2]), ("priority", [2, 1, 0]), ("prefix", [1, 0, 2])])
def test_policies(policy: str, order: list[int]) -> None:
    cache = PrefixCache(1, 64)
    insert(cache, (5, 5), 1)
    queue, got = WaitingQueue(cache, policy, 10**9, lambda q: ROOT), list[int]()
    for i in range(3):
        queue.push(sequence((5, 5) if i == 1 else (9, i), i, priority=i if policy == "priority" else 0))
    while (q := queue.head(0, False)) is not None:
        got.append(q.rank[1])
        queue.discard(q)
    assert got == order


def test_new_roots_are_matched_afresh() -> None:
    cache, version = PrefixCache(1, 64), 0
    queue = WaitingQueue(cache, "prefix", 10**9, lambda q: ("", version))
    insert(cache, (1, 2), 1)
    cold, hot = sequence((9,), 0), sequence((1, 2), 1)
    queue.push(cold)
    queue.push(hot)
    assert queue.head(0, False) is hot
    version = 1
    queue.rebuild()
    assert queue.head(0, False) is cold
    for q in (cold, hot):
        queue.discard(q)
    assert not cache.tree.stale and not any(node.watchers for node in cache.tree.nodes())
