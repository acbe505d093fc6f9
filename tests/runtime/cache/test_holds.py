"""R7: named pins with a deadline and a cap."""

from __future__ import annotations

from phloem.runtime.cache.holds import HoldBook
from phloem.runtime.cache.pages import PagePool
from phloem.runtime.cache.radix import Node, RadixTree
from tests.runtime.cache.tree_model import pack


def known(tree: RadixTree, tokens: tuple[int, ...]) -> Node:
    """`tokens` inserted; a lease on them."""
    lease = tree.pin(tree.match(tree.root("r"), b""))
    return tree.append(lease, pack(tokens), tree.pool.take(len(tokens)), 1)


def test_a_hold_keeps_its_path_until_it_is_released() -> None:
    tree = RadixTree(1, PagePool(8))
    book = HoldBook(tree, max_pages=8)
    book.take_over("a", known(tree, (1, 2, 3)), ttl=5.0)
    assert not tree.evict() and book.num_pages() == 3 and len(book) == 1
    assert book.release("a") and not book.release("a")
    assert tree.evict()


def test_over_the_cap_the_oldest_goes() -> None:
    tree = RadixTree(1, PagePool(16))
    book = HoldBook(tree, max_pages=5)
    book.take_over("a", known(tree, (1, 2, 3)), ttl=5.0)
    book.take_over("b", known(tree, (4, 5, 6)), ttl=5.0)
    assert list(book.holds) == ["b"] and book.broken == 1
    book.take_over("c", known(tree, (7, 8, 9, 10, 11, 12)), ttl=5.0)
    assert not book.holds and book.broken == 3, "one that is over the cap by itself is not kept"


def test_shared_pages_count_once() -> None:
    tree = RadixTree(1, PagePool(16))
    book = HoldBook(tree, max_pages=4)
    lease = known(tree, (1, 2, 3))
    book.take_over("a", lease, ttl=1.0)
    book.take_over("b", tree.pin(tree.match(tree.root("r"), pack((1, 2, 3)))), ttl=2.0)
    assert book.num_pages() == 3 and book.broken == 0
    book.expire(100.0)
    book.expire(101.0)
    assert list(book.holds) == ["b"], "seconds count from when the clock was first told"
    book.drop()
    assert not book.holds


def test_the_same_name_replaces_its_hold() -> None:
    tree = RadixTree(1, PagePool(16))
    book = HoldBook(tree, max_pages=16)
    first = known(tree, (1, 2))
    book.take_over("a", first, ttl=1.0)
    book.take_over("a", known(tree, (3, 4)), ttl=1.0)
    assert first.pins == 0 and len(book) == 1
    assert book.break_oldest() and not book.break_oldest()
