"""PrefixCache: what one sequence reads, owns and gives back. R2, R4, R5, R6 for two sequences by hand."""

from __future__ import annotations

import pytest

from phloem.runtime.cache.prefix import Grant, PrefixCache
from tests.runtime.cache.tree_model import pack

ROOT = ("", 0)


def acquire(cache: PrefixCache, tokens: tuple[int, ...], step: int = 9, use_copy: bool = True) -> tuple[Grant, int] | None:
    return cache.acquire(ROOT, bytearray(pack(tokens)), len(tokens) - 1, step, 64, cache.take, use_copy)


def fill(cache: PrefixCache, tokens: tuple[int, ...], step: int) -> None:
    """A sequence that computes `tokens` and ends."""
    got = acquire(cache, tokens, step)
    assert got is not None
    grant, _ = got
    cache.confirm(grant)
    cache.launched()
    grant.add(cache.take(-(-len(tokens) // cache.page_size) - grant.num_pages))
    cache.release(grant, len(tokens), step)


def test_the_partial_page_is_copied_and_the_copy_is_ours() -> None:
    """R2: reuse is exact to the token; the source stays the tree's."""
    cache = PrefixCache(4, 8)
    fill(cache, (1, 2, 3, 4, 5, 6, 7), step=1)
    got = acquire(cache, (1, 2, 3, 4, 5, 6, 9, 9))
    assert got is not None
    grant, covered = got
    copy = cache.confirm(grant)
    assert covered == 6 and grant.num_shared == 1 and copy is not None
    assert copy.dst == grant.own_pages()[0] and copy.src != copy.dst
    assert cache.tree.num_pages == 2 and len(cache.pool.free) == 5


def test_a_copy_source_stays_until_the_plan_is_launched() -> None:
    cache = PrefixCache(4, 3)
    fill(cache, (1, 2, 3), step=1)
    got = acquire(cache, (1, 2, 9, 9))
    assert got is not None
    cache.confirm(got[0])
    assert len(cache.take(5)) == 1 and cache.tree.num_pages == 1, "the tail is the copy's source"
    cache.launched()
    assert len(cache.take(1)) == 1 and cache.evicted == 1


def test_without_a_page_for_the_copy_nothing_has_changed() -> None:
    cache = PrefixCache(4, 1)
    fill(cache, (1, 2, 3), step=1)
    before = cache.tree.num_nodes, cache.tree.num_pages, list(cache.pool.free)
    assert acquire(cache, (1, 2, 9, 9)) is None, "its only page is the source that the copy pins"
    assert (cache.tree.num_nodes, cache.tree.num_pages, list(cache.pool.free)) == before
    got = acquire(cache, (1, 2, 9, 9), use_copy=False)
    assert got is not None and got[1] == 0
    cache.cancel(got[0])
    assert not any(node.pins for node in cache.tree.nodes())


def test_a_prompt_that_ends_with_a_cached_page_leases_it_and_computes_its_last_token() -> None:
    """R4: no copy, no duplicate."""
    cache = PrefixCache(4, 8)
    fill(cache, (1, 2, 3, 4, 5, 6, 7, 8), step=1)
    got = acquire(cache, (1, 2, 3, 4, 5, 6, 7, 8))
    assert got is not None
    grant, covered = got
    assert (covered, grant.num_shared, grant.num_pages) == (7, 2, 2) and cache.confirm(grant) is None


def test_an_equal_page_is_taken_and_ours_is_free_at_once() -> None:
    """R6: kept, it would be a page more than P3 counted."""
    cache = PrefixCache(4, 8)
    tokens = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    a, b = acquire(cache, tokens), acquire(cache, tokens)
    assert a is not None and b is not None
    for grant, _ in (a, b):
        grant.add(cache.take(3))
    free = len(cache.pool.free)
    cache.publish(a[0], 8, 9)
    cache.publish(b[0], 8, 9)
    assert cache.duplicates == 2 and len(cache.pool.free) == free + 2
    assert a[0].table[:2].tolist() == b[0].table[:2].tolist() and b[0].lease is a[0].lease


def test_pages_entered_since_are_adopted() -> None:
    """R5: taken instead of computed, in place of own pages and beyond them."""
    cache = PrefixCache(4, 16)
    tokens = tuple(range(1, 14))
    a, b = acquire(cache, tokens), acquire(cache, tokens)
    assert a is not None and b is not None
    a[0].add(cache.take(4))
    b[0].add(cache.take(1))
    cache.publish(a[0], 12, 9)
    assert cache.adopt(b[0]) == 12 and cache.adopted == 3
    assert b[0].num_pages == b[0].num_shared == 3 and b[0].own_pages() == []
    assert cache.adopt(b[0]) == 12 and cache.adopted == 3


def test_a_release_gives_full_pages_and_the_tail_to_the_tree() -> None:
    cache = PrefixCache(4, 8)
    got = acquire(cache, (1, 2, 3, 4, 5, 6, 7))
    assert got is not None
    got[0].add(cache.take(3))
    cache.release(got[0], 7, 9)
    assert cache.tree.num_pages == 2 and len(cache.pool.free) == 6
    assert cache.explain(ROOT, pack((1, 2, 3, 4, 5, 6, 7, 8)), 10).num_cached == 7
    assert not any(node.pins or node.open for node in cache.tree.nodes())


def test_the_tail_of_a_hold_is_held() -> None:
    cache = PrefixCache(4, 8)
    fill(cache, (1, 2, 3, 4, 5, 6), step=1)
    assert cache.hold("a", ROOT, pack((1, 2, 3, 4, 5, 6)), 1.0) == 6
    assert cache.flush() == 0
    assert cache.hold("a", ROOT, pack((1, 2, 3, 4, 7)), 1.0) == 4
    assert cache.flush() == 1
    assert cache.hold("b", ROOT, pack((9, 9)), 1.0) == 0 and len(cache.holds) == 1


def test_what_a_failed_step_wrote_is_forgotten_with_the_holds_on_it() -> None:
    cache = PrefixCache(4, 8)
    fill(cache, (1, 2, 3, 4), step=1)
    fill(cache, (1, 2, 3, 4, 5, 6, 7, 8), step=5)
    cache.hold("old", ROOT, pack((1, 2, 3, 4)), 1.0)
    cache.hold("new", ROOT, pack((1, 2, 3, 4, 5, 6, 7, 8)), 1.0)
    cache.forget_since(5)
    assert list(cache.holds.holds) == ["old"] and cache.tree.num_pages == 1


@pytest.mark.parametrize("size", [1, 2, 16])
def test_explain_agrees_with_what_acquire_gives(size: int) -> None:
    """R9."""
    cache = PrefixCache(size, 64)
    fill(cache, tuple(range(1, 20)), step=1)
    for n in (1, 2, 5, 16, 17, 19):
        tokens = (*range(1, n + 1), 50, 51)
        explained = cache.explain(ROOT, pack(tokens), 9)
        got = acquire(cache, tokens)
        assert got is not None and explained.num_cached == got[1] == n
        assert sum(node.num_tokens for node in explained.nodes) == n
        cache.cancel(got[0])
