"""The radix tree beside something too simple to be wrong: a dictionary from whole prefixes to pages.

    model.pages: {(root, (1, 2, 3, 4)): Page(id 7, step 3, used 12)}     the key is everything up to the end of the page

`Pair` does each operation on both and compares; tests drive it with hypothesis, and with a seeded generator for a long time.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from phloem.runtime.cache.pages import PagePool
from phloem.runtime.cache.radix import TOKEN_BYTES, Node, RadixTree

Path = tuple[str, tuple[int, ...]]


def pack(tokens: tuple[int, ...]) -> bytes:
    return array("i", tokens).tobytes()


@dataclass
class Page:
    id: int
    step: int
    used: int


class Owner:
    """A live sequence: what it has written of the page behind its lease."""

    def __init__(self, tokens: bytes, page: int) -> None:
        self.tokens, self.page = tokens, page

    def open_page(self) -> tuple[bytes, int]:
        return self.tokens, self.page


@dataclass
class Lease:
    node: Node
    path: Path


class Pair:
    """A RadixTree and its model. Every method compares; `check` compares everything that is left."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.size = page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size, self.pool)
        self.num_pages = num_pages
        self.pages: dict[Path, Page] = {}
        self.leases: list[Lease] = []
        self.watched: dict[int, tuple[Path, int]] = {}  # watcher -> what it asks for, pages it was told
        self.places: dict[int, tuple[Node, bytes]] = {}
        self.clock = self.step = self.next_watcher = 0

    # ------------------------------------------------------------------------------------------------------- the model

    def longest(self, path: Path) -> Path:
        """The whole pages of `path` that are known."""
        root, tokens = path
        end = 0
        while end + self.size <= len(tokens) and (root, tokens[: end + self.size]) in self.pages:
            end += self.size
        return root, tokens[:end]

    def pages_of(self, path: Path) -> list[int]:
        root, tokens = path
        return [self.pages[root, tokens[:end]].id for end in range(self.size, len(tokens) + 1, self.size)]

    def touch(self, path: Path) -> None:
        """Using a path uses everything above it."""
        self.clock += 1
        root, tokens = path
        for end in (*range(self.size, len(tokens), self.size), len(tokens)):
            if (root, tokens[:end]) in self.pages:
                self.pages[root, tokens[:end]].used = self.clock

    def below(self, path: Path) -> list[Path]:
        """What hangs below a path of whole pages; below a tail, nothing, whatever starts with its tokens."""
        if self.is_tail(path):
            return []
        return [p for p in self.pages if p[0] == path[0] and len(p[1]) > len(path[1]) and p[1][: len(path[1])] == path[1]]

    def is_pinned(self, path: Path) -> bool:
        return not self.is_tail(path) and any(
            x.path[0] == path[0] and x.path[1][: len(path[1])] == path[1] for x in self.leases
        )

    def is_tail(self, path: Path) -> bool:
        return len(path[1]) % self.size != 0

    def best_run(self, path: Path, rest: tuple[int, ...], step: int) -> int:
        """The longest run of `rest` that one page below `path` spells, written before `step`."""
        best = 0
        for below in self.below(path):
            if len(below[1]) - len(path[1]) <= self.size and self.pages[below].step < step:
                best = max(best, common(below[1][len(path[1]) :], rest))
        return best

    # -------------------------------------------------------------------------------------------------- the operations

    def match(self, path: Path) -> None:
        before = self.tree.clock, self.tree.num_nodes
        match = self.tree.match(self.tree.root(path[0]), pack(path[1]))
        found = self.longest(path)
        assert match.pages == self.pages_of(found)
        rest = path[1][len(found[1]) :]
        source = self.tree.source(match, pack(rest), self.step + 1)
        assert (source.length if source else 0) == self.best_run(found, rest, self.step + 1)
        if source is not None:
            owner = [p for p, page in self.pages.items() if page.id == source.page]
            assert owner and owner[0][1][: len(found[1]) + source.length] == path[1][: len(found[1]) + source.length]
        assert (self.tree.clock, self.tree.num_nodes) == before, "R3: match changed something"

    def lease(self, path: Path) -> None:
        found = self.longest(path)
        node = self.tree.pin(self.tree.match(self.tree.root(path[0]), pack(path[1])))
        self.leases.append(Lease(node, found))
        self.touch(found)

    def release(self, i: int) -> None:
        if self.leases:
            lease = self.leases.pop(i % len(self.leases))
            self.tree.unpin(lease.node)
            self.touch(lease.path)

    def insert(self, path: Path, allow: int, with_tail: bool, keep: bool) -> None:
        """What a sequence does: match, lease, pages for the rest, at most `allow` of them to be had; then its tail."""
        self.step += 1
        found = self.longest(path)
        node = self.tree.pin(self.tree.match(self.tree.root(path[0]), pack(path[1])))
        self.leases.append(Lease(node, found))
        self.touch(found)
        rest = path[1][len(found[1]) :]
        n = min(len(rest) // self.size, allow)
        ids = self.pool.take(n)
        n = len(ids)
        end = found
        if n:
            new = self.tree.append(node, pack(rest[: n * self.size]), pack(ids), self.step)
            for k, page in enumerate(ids, 1):
                end = (path[0], found[1] + rest[: k * self.size])
                self.pages[end] = Page(page, self.step, 0)
            self.touch(end)
            if new is not node:
                self.touch(found)
            self.leases[-1] = Lease(new, end)
            node = new
        tail = rest[n * self.size :][: self.size - 1]
        if with_tail and tail and self.pool.free:
            self._add_tail(node, end, tail)
        if not keep:
            self.release(len(self.leases) - 1)

    def _add_tail(self, node: Node, end: Path, tail: tuple[int, ...]) -> None:
        spelled = any(p[1][len(end[1]) :][: len(tail)] == tail for p in self.below(end) if len(p[1]) - len(end[1]) <= self.size)
        (page,) = self.pool.take(1)
        taken = self.tree.add_tail(node, pack(tail), page, self.step)
        assert taken is not spelled
        if not taken:
            self.pool.give([page])
            return
        for n in range(1, len(tail)):
            shorter = (end[0], end[1] + tail[:n])
            if shorter in self.pages and self.is_tail(shorter) and not self.is_pinned(shorter):
                del self.pages[shorter]
        self.pages[end[0], end[1] + tail] = Page(page, self.step, 0)
        self.touch((end[0], end[1] + tail))

    def evict(self) -> None:
        leaves = [p for p in self.pages if not self.below(p) and not self.is_pinned(p)]
        before = set(self.pool.free)
        evicted = self.tree.evict()
        assert evicted is bool(leaves)
        if evicted:
            victim = min(leaves, key=lambda p: self.pages[p].used)
            assert set(self.pool.free) - before == {self.pages[victim].id}, "R7: not the least recently used leaf"
            del self.pages[victim]

    def drop_since(self, step: int) -> None:
        """As after a failed forward: leases on what goes have been given back before."""
        doomed = [p for p, page in self.pages.items() if page.step >= step]
        doomed += [q for p in doomed for q in self.below(p)]
        for lease in [x for x in self.leases if x.path in doomed]:
            self.release(self.leases.index(lease))
        self.tree.drop_since(step)
        for p in set(doomed):
            del self.pages[p]

    def watch(self, path: Path) -> None:
        watcher, self.next_watcher = self.next_watcher, self.next_watcher + 1
        self._watch(watcher, path)

    def _watch(self, watcher: int, path: Path) -> None:
        match = self.tree.match(self.tree.root(path[0]), pack(path[1]))
        at = len(match.pages) * self.size
        self.watched[watcher] = path, len(match.pages)
        self.places[watcher] = self.tree.watch(match, pack(path[1][at : at + self.size]), watcher)

    def unwatch(self, i: int) -> None:
        if self.watched:
            watcher = list(self.watched)[i % len(self.watched)]
            self.tree.unwatch(*self.places.pop(watcher), watcher)
            del self.watched[watcher]

    # ----------------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        tree = self.tree
        owned = list(self.pool.free)
        pins = dict.fromkeys(map(id, tree.nodes()), 0)
        for lease in self.leases:
            pins[id(lease.node)] += 1
            path = tree.path(lease.node)
            assert [page for node in path for page in node.pages] == self.pages_of(lease.path), "a lease moved"
        known: dict[int, bytes] = {}
        for node in tree.nodes():
            owned += node.pages
            assert node.pins == pins[id(node)] and not node.dead
            assert sorted(node.children) == list(node.order)
            if node.heir is not None:
                first = node.heir.tokens[: self.size * TOKEN_BYTES]
                assert len(first) == self.size * TOKEN_BYTES and node.children[first] is node.heir
            prefix = b"".join(n.tokens for n in tree.path(node))
            for k, page in enumerate(node.pages, 1):
                above = len(prefix) - len(node.tokens)
                known[page] = prefix[: above + min(k * self.size * TOKEN_BYTES, len(node.tokens))]
        assert sorted(owned) == list(range(self.num_pages)), "P2"
        assert known == {page.id: pack(p[1]) for p, page in self.pages.items()}
        assert tree.num_pages == len(self.pages)
        assert tree.num_nodes == sum(node.parent is not None for node in tree.nodes())
        for name, root in tree.roots.items():
            assert root.children or root.pins or root.watchers, f"an idle root was kept: {name}"
        for watcher, (path, told) in list(self.watched.items()):
            if watcher in tree.stale:
                del tree.stale[watcher]
                self._watch(watcher, path)
            else:
                assert len(self.longest(path)[1]) // self.size == told, "a watcher was not woken"

    def drain(self) -> None:
        """Nothing leaks: without leases everything can go."""
        while self.leases:
            self.release(0)
        while self.watched:
            self.unwatch(0)
        while self.tree.evict():
            pass
        assert sorted(self.pool.free) == list(range(self.num_pages)) and not self.tree.roots and not self.tree.num_nodes


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return n


def random_path(rng: random.Random, size: int) -> Path:
    """Few tokens, so that prefixes collide in the middle of pages."""
    root = "b" if rng.random() < 0.1 else "a"
    return root, tuple(rng.choice((0, 0, 0, 1, 2, 300)) for _ in range(rng.randrange(0, 6 * size + 2)))


def random_operation(rng: random.Random, pair: Pair) -> Callable[[], None]:
    path, n = random_path(rng, pair.size), rng.randrange(1 << 16)
    allow = rng.choice((99, 99, 99, 0, 1, 2))  # an allocation that fails half way
    return rng.choices(
        (
            lambda: pair.match(path),
            lambda: pair.lease(path),
            lambda: pair.release(n),
            lambda: pair.insert(path, allow, rng.random() < 0.7, rng.random() < 0.2),
            pair.evict,
            lambda: pair.drop_since(pair.step - n % 4),
            lambda: pair.watch(path),
            lambda: pair.unwatch(n),
        ),
        (20, 8, 14, 30, 20, 1, 4, 4),
    )[0]
