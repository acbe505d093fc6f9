"""PagePool: a stack of pages."""

from __future__ import annotations

from phloem.runtime.cache.pages import PagePool


def test_every_page_is_handed_out_once_and_warm_ones_first() -> None:
    pool = PagePool(4)
    first = pool.take(3)
    assert sorted([*first, *pool.free]) == [0, 1, 2, 3]
    pool.give([first[1]])
    assert pool.take(1) == [first[1]]


def test_a_short_pool_gives_what_it_has() -> None:
    pool = PagePool(2)
    assert sorted(pool.take(5)) == [0, 1]
    assert pool.take(1) == [] and pool.take(0) == [] and pool.take(-1) == []
