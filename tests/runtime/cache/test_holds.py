"""R7: named pins with a deadline and a cap."""

from __future__ import annotations

import random

import pytest

from phloem.runtime.cache import radix
from phloem.runtime.cache.holds import HoldBook
from phloem.runtime.cache.pages import PagePool
from phloem.runtime.cache.prefix import PrefixCache
from phloem.runtime.cache.radix import TOKEN_BYTES, Node, RadixTree
from tests.runtime.cache.tree_model import pack


def known(tree: RadixTree, tokens: tuple[int, ...]) -> Node:
    """`tokens` inserted; a lease on them."""
    lease = tree.pin(tree.match(tree.root("r"), b""))
    return tree.append(lease, *pack_pages(tree, tokens))


def pack_pages(tree: RadixTree, tokens: tuple[int, ...]) -> tuple[bytes, bytes, int]:
    """The last arguments of `append`."""
    return pack(tokens), pack(tuple(tree.pool.take(len(tokens)))), 1


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


def counted(book: HoldBook) -> int:
    """What `num_pages` promises, by walking every path."""
    return sum(len(node.pages) for node in {node for hold in book.holds.values() for node in book.tree.path(hold.node)})


@pytest.mark.parametrize("seed", range(4))
def test_the_count_of_held_pages_survives_splits_eviction_and_failed_steps(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(2, 48, max_held_pages=30)
    most = 0
    for step in range(1, 1500):
        key = bytearray(pack(tuple(rng.choice((0, 0, 1, 2)) for _ in range(rng.randrange(2, 14)))))
        num_tokens = len(key) // TOKEN_BYTES
        what = rng.random()
        if what < 0.4:
            got = cache.acquire("r", key, num_tokens - 1, step, num_tokens // 2 + 1, cache.take, True)
            if got is not None:
                grant = got[0]
                cache.confirm(grant)
                grant.add(cache.take(num_tokens // 2 + 1 - grant.num_pages))
                upto = min(num_tokens, grant.num_pages * 2)
                cache.publish(grant, upto, step)
                cache.launched()
                cache.release(grant, upto, step)
        elif what < 0.7:
            cache.hold(f"h{rng.randrange(12)}", "r", bytes(key), ttl=rng.random() * 200)
        elif what < 0.8:
            cache.holds.release(f"h{rng.randrange(12)}")
        elif what < 0.85:
            cache.holds.expire(float(step))
        elif what < 0.87:
            cache.holds.break_oldest()
        elif what < 0.88:
            cache.forget_since(step - 3)
        else:
            cache.tree.evict()
        assert cache.holds.num_pages() == counted(cache.holds) <= 30
        most = max(most, len(cache.holds))
    assert most > 4 and cache.holds.broken
    cache.holds.drop()
    assert cache.holds.num_pages() == 0 and not any(node.held for node in cache.tree.nodes())
    cache.flush()
    assert len(cache.pool.free) == 48


def test_a_hold_costs_its_own_path_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of holds in a pool that is full to its cap: each one taken breaks the oldest, and counts no other again."""
    writes = 0

    class Counting(Node):
        __slots__ = ("_held",)

        @property
        def held(self) -> int:
            return self._held

        @held.setter
        def held(self, value: int) -> None:
            nonlocal writes
            writes += 1
            self._held = value

    monkeypatch.setattr(radix, "Node", Counting)

    def cost(num_holds: int) -> int:
        nonlocal writes
        tree = RadixTree(1, PagePool(8 * num_holds))
        book = HoldBook(tree, max_pages=2 + 2 * num_holds)
        tree.unpin(known(tree, (7, 8)))
        for i in range(num_holds):
            lease = tree.pin(tree.match(tree.root("r"), pack((7, 8))))
            book.take_over(f"old {i}", tree.append(lease, *pack_pages(tree, (10 + i, 9))), ttl=1.0)
        assert book.num_pages() == 2 + 2 * num_holds and not book.broken
        nodes, writes = tree.num_nodes, 0
        for i in range(num_holds):
            lease = tree.pin(tree.match(tree.root("r"), pack((7, 8))))
            book.take_over(f"new {i}", tree.append(lease, *pack_pages(tree, (10 + num_holds + i, 9))), ttl=1.0)
        assert book.broken == num_holds == len(book) and tree.num_nodes == nodes + num_holds
        return writes - num_holds  # a new node begins with none

    assert cost(2000) == 20 * cost(100) <= 4 * 2000
