"""The radix tree against a dictionary of prefixes; named cases beside it. Rules R1-R3, R5, R7, R8 of engine.md."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phloem.runtime.cache import radix
from phloem.runtime.cache.pages import PagePool
from phloem.runtime.cache.radix import Node, RadixTree, common_run
from tests.runtime.cache.tree_model import Owner, Pair, Path, pack, random_operation

TOKENS = st.lists(st.sampled_from((0, 0, 0, 1, 2, 300)), max_size=14).map(tuple)
PATHS = st.tuples(st.sampled_from(("a", "a", "b")), TOKENS)


class TreeMachine(RuleBasedStateMachine):
    pair: Pair

    @initialize(size=st.sampled_from((1, 2, 4)), num_pages=st.integers(1, 24))
    def start(self, size: int, num_pages: int) -> None:
        self.pair = Pair(size, num_pages)

    @rule(path=PATHS)
    def match(self, path: Path) -> None:
        self.pair.match(path)

    @rule(path=PATHS)
    def lease(self, path: Path) -> None:
        self.pair.lease(path)

    @rule(i=st.integers(0, 99))
    def release(self, i: int) -> None:
        self.pair.release(i)

    @rule(path=PATHS, allow=st.sampled_from((0, 1, 2, 99)), with_tail=st.booleans(), keep=st.booleans())
    def insert(self, path: Path, allow: int, with_tail: bool, keep: bool) -> None:
        self.pair.insert(path, allow, with_tail, keep)

    @rule()
    def evict(self) -> None:
        self.pair.evict()

    @rule(back=st.integers(0, 4))
    def drop_since(self, back: int) -> None:
        self.pair.drop_since(self.pair.step - back)

    @rule(path=PATHS)
    def watch(self, path: Path) -> None:
        self.pair.watch(path)

    @rule(i=st.integers(0, 99))
    def unwatch(self, i: int) -> None:
        self.pair.unwatch(i)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.drain()


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_tree_agrees_with_a_dict_of_prefixes = TreeMachine.TestCase


def run_long(operations: int, seed: int) -> None:
    rng = random.Random(seed)
    done = 0
    while done < operations:
        pair = Pair(rng.choice((1, 2, 4, 16)), rng.choice((3, 12, 40)))
        for _ in range(500):
            random_operation(rng, pair)()
            pair.check()
            done += 1
        pair.drain()


def test_a_long_run_of_operations_agrees_with_a_dict_of_prefixes() -> None:
    run_long(20_000, seed=1)


def test_edges_that_may_not_grow_become_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(radix, "MAX_GROWN_PAGES", 1)
    run_long(3000, seed=3)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_million_operations_agree_with_a_dict_of_prefixes() -> None:
    run_long(1_000_000, seed=2)


# ----------------------------------------------------------------------------------------------------------- named cases


def insert(tree: RadixTree, tokens: tuple[int, ...], step: int = 1) -> list[int]:
    match = tree.match(tree.root("r"), pack(tokens))
    lease = tree.pin(match)
    rest = tokens[len(match.pages) * tree.page_size :]
    pages = tree.pool.take(len(rest) // tree.page_size)
    if pages:
        lease = tree.append(lease, pack(rest[: len(pages) * tree.page_size]), pack(pages), step)
    tree.unpin(lease)
    return pages


@pytest.mark.case("C-CACHE-04")
@pytest.mark.parametrize("size", [1, 4])
def test_a_split_under_a_pin_keeps_the_accounts(size: int) -> None:
    def spread(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(t * 10 + k for t in tokens for k in range(size))  # each id becomes a page

    def counts() -> tuple[int, int]:
        pinned = {id(n) for node in tree.nodes() if node.pins for n in tree.path(node)}
        held = sum(len(node.pages) for node in tree.nodes() if id(node) in pinned)
        return held, tree.num_pages - held

    tree = RadixTree(size, PagePool(64))
    first, second = spread((1, 2, 3, 4, 5, 6)), spread((1, 2, 3, 7, 8, 9))
    pages = insert(tree, first)
    lease = tree.pin(tree.match(tree.root("r"), pack(first)))
    assert counts() == (6, 0)
    pages += insert(tree, second)  # splits the leased node at 3
    assert counts() == (6, 3)
    assert [p for node in tree.path(lease) for p in node.pages] == pages[:6], "the lower half kept the lease"
    tree.unpin(lease)
    assert counts() == (0, 9)
    lease = tree.pin(tree.match(tree.root("r"), pack(second)))
    assert counts() == (6, 3)
    tree.unpin(lease)
    assert counts() == (0, 9)
    before = set(tree.pool.free)
    while tree.evict():
        assert min(counts()) >= 0
    assert counts() == (0, 0) and set(tree.pool.free) - before == set(pages) and len(tree.pool.free) == 64


def test_eviction_takes_the_least_recently_used_leaf_from_its_end() -> None:
    tree = RadixTree(2, PagePool(16))
    a, b = insert(tree, (1, 1, 2, 2, 3, 3)), insert(tree, (7, 7, 8, 8))
    lease = tree.pin(tree.match(tree.root("r"), pack((1, 1, 2, 2, 3, 3))))
    tree.unpin(lease)  # a is younger than b now
    order = []
    while True:
        before = set(tree.pool.free)
        if not tree.evict():
            break
        order += list(set(tree.pool.free) - before)
    assert order == [b[1], b[0], a[2], a[1], a[0]]


def test_the_copy_source_is_of_an_earlier_step() -> None:
    """R2: copies run before the forward, so of a page that this plan completes only what was there before counts."""
    tree = RadixTree(4, PagePool(8))
    page, *_ = insert(tree, (1, 2, 3, 4), step=5)
    match = tree.match(tree.root("r"), pack((1, 2, 3, 9)))
    assert tree.source(match, pack((1, 2, 3, 9)), step=5) is None
    tree.begun[page] = 2
    source = tree.source(match, pack((1, 2, 3, 9)), step=5)
    assert source is not None and source.length == 2
    source = tree.source(match, pack((1, 2, 3, 9)), step=6)
    assert source is not None and source.length == 3


def test_a_page_of_this_plan_does_not_hide_an_older_one_behind_it() -> None:
    """The best neighbour may be unusable; the search goes on past it."""
    tree = RadixTree(4, PagePool(8))
    insert(tree, (1, 2, 3, 4), step=9)
    insert(tree, (1, 2, 5, 5), step=1)
    insert(tree, (1, 2, 2, 9), step=9)
    source = tree.source(tree.match(tree.root("r"), pack((1, 2, 3, 0))), pack((1, 2, 3, 0)), step=9)
    assert source is not None and source.length == 2


def test_the_open_page_of_a_live_sequence_is_a_source() -> None:
    tree = RadixTree(4, PagePool(8))
    lease = tree.pin(tree.match(tree.root("r"), b""))
    tree.list_open(lease, Owner(pack((1, 2, 3)), 5))
    source = tree.source(tree.match(tree.root("r"), pack((1, 2, 9))), pack((1, 2, 9)), step=1)
    assert source is not None and (source.page, source.length, source.node) == (5, 2, None)


class Counting(dict[bytes, Node]):
    """A node's children: how often they were looked into, or gone through."""

    looked = 0

    def get(self, key: bytes, default: Node | None = None) -> Node | None:  # type: ignore[override]
        Counting.looked += 1
        return super().get(key, default)

    def __getitem__(self, key: bytes) -> Node:
        Counting.looked += 1
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("a match goes through the children of no node")

    keys = values = items = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize("num_siblings", [3, 3000])
def test_a_match_costs_the_same_among_few_prompts_and_among_many(num_siblings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: a walk looks a page up only where it leaves the heirs, and a copy source is sought among neighbours."""
    tree, stem = RadixTree(4, PagePool(4 * num_siblings + 100)), tuple(range(1, 81))
    insert(tree, stem)
    for i in range(num_siblings):  # below the root, and below the stem's fifth page, in both sorted orders
        insert(tree, (1000 + i * 7919 % 50_000, 0, 0, 0))
        insert(tree, (*stem[:20], 21, 22, i, 0))
    for cut in range(4, 80, 4):  # the stem becomes a path of twenty nodes
        insert(tree, (*stem[:cut], 0, 0, 0, 0))
    for node in list(tree.nodes()):
        node.children = Counting(node.children)
    runs: list[int] = []
    monkeypatch.setattr(radix, "common_run", lambda a, b: runs.append(common_run(a, b)) or runs[-1])

    def look(tokens: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Pages matched, tokens of the copy source; children looked up, runs counted."""
        Counting.looked = 0
        runs.clear()
        match = tree.match(tree.root("r"), pack(tokens))
        source = tree.source(match, pack(tokens[match.num_pages * 4 :]), step=2)
        return match.num_pages, source.length if source else 0, Counting.looked, len(runs)

    assert look(stem) == (20, 0, 0, 0), "the heirs all the way: no page is hashed"
    pages, length, looked, num_runs = look((*stem[:20], 21, 22, 1, 9))
    assert (pages, length) == (5, 3) and looked <= 4 and num_runs <= 4
    pages, length, looked, num_runs = look((*stem[:20], 21, 22, 1, 0, 5))
    assert (pages, length) == (6, 0) and looked <= 3 and num_runs == 0
    pages, length, looked, num_runs = look((1000, 0, 5, 5))
    assert (pages, length) == (0, 2) and looked <= 4 and num_runs <= 4


def test_the_first_child_that_goes_is_no_heir_any_more() -> None:
    tree = RadixTree(2, PagePool(16))
    insert(tree, (1, 1, 2, 2))
    insert(tree, (1, 1, 3, 3))  # [1, 1] -> [2, 2], the heir, and [3, 3]
    upper = tree.match(tree.root("r"), pack((1, 1))).node
    assert upper.heir is not None and upper.heir.tokens == pack((2, 2))
    assert tree.evict() and upper.heir is None
    assert tree.match(tree.root("r"), pack((1, 1, 3, 3))).num_pages == 2
    assert tree.match(tree.root("r"), pack((1, 1, 2, 2))).num_pages == 1
    insert(tree, (1, 1, 2, 2))
    assert upper.heir is not None and upper.heir.tokens == pack((2, 2))


def test_a_tail_is_no_heir() -> None:
    """It would pass for a whole page of whatever goes on from it."""
    tree = RadixTree(4, PagePool(16))
    lease = tree.pin(tree.match(tree.root("r"), b""))
    assert tree.add_tail(lease, pack((1, 2)), tree.pool.take(1)[0], 1)
    assert tree.match(lease, pack((1, 2, 3, 4))).num_pages == 0 and lease.heir is None


def test_roots_do_not_see_each_other() -> None:
    """R8."""
    tree = RadixTree(1, PagePool(8))
    insert(tree, (1, 2, 3))
    assert len(tree.match(tree.root("r"), pack((1, 2, 3))).pages) == 3
    assert tree.match(tree.root("other"), pack((1, 2, 3))).pages == []
    assert set(tree.roots) == {"r"}, "asking for a root does not make one"


def test_without_pressure_the_heap_of_leaves_stays_small() -> None:
    tree = RadixTree(1, PagePool(8))
    insert(tree, (1, 2, 3))
    for _ in range(10_000):
        tree.unpin(tree.pin(tree.match(tree.root("r"), pack((1, 2, 3)))))
    assert len(tree._lru) < 100


@pytest.mark.parametrize(
    ("a", "b", "run"),
    [
        ((), (1,), 0),
        ((1, 2), (1, 2), 2),
        ((1, 2, 3), (1, 2), 2),
        ((256, 1), (256, 257), 1),
        ((1,), (257,), 0),
        ((65536,), (0,), 0),
    ],
)
def test_common_run_counts_tokens_not_bytes(a: tuple[int, ...], b: tuple[int, ...], run: int) -> None:
    assert common_run(pack(a), pack(b)) == run
