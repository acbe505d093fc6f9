"""Which token prefixes are known, and which pages hold their keys and values. Bytes and page ids only: no tensors.

page_size 4, letters are tokens (four bytes each, little-endian), [..] is a page:

    root ("", version 0)                a root per (namespace, weights version): a hit never crosses roots (R8)
     |
     +-- [ABCD|EFGH]                    an edge: whole pages, found by the bytes of its first page
     |     +-- [IJKL]                   children differ in their first page; two may share its first tokens
     |     +-- [IJXY|....]
     |     +-- [IJ]                     a tail: fewer than page_size tokens, always a leaf
     |     `-- open: [IJKM             the page a live sequence still writes: a copy source, owned by the sequence
     `-- [ABQR]

Splitting, when a lease must end inside an edge; the lower half keeps its identity, so leases on it stay right (R3):

    P --[ABCD|EFGH|IJKL] n         P --[ABCD] new --[EFGH|IJKL] n

Growing: a leaf which only its writer leases grows in place. Trimming: eviction takes a leaf's last page (R7).

    n [ABCD]  append EFGH  ->  n [ABCD|EFGH]         n [ABCD|EFGH]  evict  ->  n [ABCD]

A lease is one pin on the deepest node of a path: only leaves are evicted, so it protects the whole path. `children` holds
edges and tails, told apart by the length of the key; `order` holds the same keys sorted, where the longest common run of
anything with anything below a node is with a neighbour. `heir` is the edge that a walk tries before it hashes a page: in a
long path most nodes come of splits, and go on as they did. Page ids lie packed, like tokens. Rules R1-R8 are engine.md's; docs/radix-tree.md tells the story.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from types import MappingProxyType
from typing import Any, Protocol, cast

from phloem.runtime.cache.pages import PagePool

__all__ = ["TOKEN_BYTES", "Match", "Node", "OpenPage", "RadixTree", "Source", "common_run", "pack"]

TOKEN_BYTES = 4
ID_BYTES = 4
_read_id = Struct("i").unpack_from
MAX_GROWN_PAGES = 1024  # growing copies the edge's bytes: beyond this a new child is cheaper than the copy


# Most nodes are leaves that nobody writes to or waits for: own containers, four a node, would keep the garbage collector busy
# with nothing (8 of 50 us a prompt of 2,048 tokens). Read-only, so a write to them is an error.
_EMPTY = cast("dict[Any, Any]", MappingProxyType({}))
_NO_KEYS = cast("list[bytes]", ())


class OpenPage(Protocol):
    """A live sequence as the tree sees it: the partial page behind its lease."""

    def open_page(self) -> tuple[bytes, int]:
        """(tokens that earlier steps have written, page); (b"", -1) if there is none."""


def pack(numbers: Iterable[int]) -> bytes:
    """Tokens, or ids of pages, as int32."""
    return array("i", numbers).tobytes()


class Node:
    """One edge and what hangs below it. `steps[i]` is the step that writes `pages[i]`; `name` is a root's key.

    `ids` are the pages, packed: a list's ints lie anywhere, and in a tree of 5,000 prompts each read of one misses the cache.
    `held` is the HoldBook's: holds that end here, and children that are held.
    """

    __slots__ = (
        "children",
        "dead",
        "heir",
        "held",
        "ids",
        "name",
        "open",
        "order",
        "parent",
        "pins",
        "steps",
        "tokens",
        "used",
        "watchers",
    )

    def __init__(self, parent: Node | None, tokens: bytes, ids: bytes, steps: list[int], name: Hashable = None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.ids = ids
        self.steps = steps
        self.name = name
        self.children: dict[bytes, Node] = _EMPTY
        self.heir: Node | None = None
        self.order: list[bytes] = _NO_KEYS
        self.open: dict[OpenPage, None] = _EMPTY
        self.watchers: dict[bytes, dict[Any, None]] = _EMPTY
        self.pins = self.held = 0
        self.used = 0
        self.dead = False

    @property
    def pages(self) -> list[int]:
        return memoryview(self.ids).cast("i").tolist()

    @property
    def num_pages(self) -> int:
        return len(self.ids) // ID_BYTES

    def page(self, i: int) -> int:
        return cast("int", _read_id(self.ids, i * ID_BYTES)[0])


@dataclass(slots=True)
class Match:
    """Where a walk ended: after the first `inside` pages of `node`. `ids` are the pages found, packed, from the walk's start."""

    node: Node
    inside: int
    ids: bytes

    @property
    def pages(self) -> list[int]:
        return memoryview(self.ids).cast("i").tolist()

    @property
    def num_pages(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(slots=True)
class Source:
    """The page whose first `length` tokens continue a match (R2). `node` owns it; None: it is an open page."""

    page: int
    length: int
    node: Node | None


def common_run(a: bytes, b: bytes) -> int:
    """How many leading tokens two short byte strings share: the lowest set bit of their xor is the first difference."""
    n = min(len(a), len(b))
    x = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    return ((x & -x).bit_length() - 1) // 32 if x else n // TOKEN_BYTES


class RadixTree:
    """Prefixes over pages. Every method that takes tokens takes them as bytes, relative to the node it starts from."""

    def __init__(self, page_size: int, pool: PagePool) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.pool = pool
        self.roots: dict[Hashable, Node] = {}
        self.clock = 0  # logical: it ticks when something is touched, so tests are deterministic
        self.num_nodes = 0  # roots not counted
        self.num_pages = 0
        self.begun: dict[int, int] = {}  # page published by the plan being made -> tokens that earlier steps wrote to it
        self.stale: dict[Any, None] = {}  # watchers whose match may have changed
        self._lru: list[tuple[int, int, Node]] = []  # (used, serial, leaf), lazily deleted: O(log n) a page
        self._serial = 0

    # ------------------------------------------------------------------------------------------- reading (R3: no change)

    def root(self, name: Hashable) -> Node:
        """The root of `name`; one that is not yet part of the tree if nothing hangs below it."""
        root = self.roots.get(name)
        return root if root is not None else Node(None, b"", b"", [], name)

    def match(self, node: Node, tokens: bytes) -> Match:
        """Whole pages of `tokens` below the end of `node`, whoever writes them: launched, or planned in this plan (R5)."""
        size, end, done = self.page_bytes, len(tokens), 0
        found: list[bytes] = []
        while end - done >= size:  # never less than a page: it might spell a tail
            child = node.heir
            if child is None or not tokens.startswith(child.tokens, done):
                child = node.children.get(tokens[done : done + size])
                if child is None:
                    break
                if not tokens.startswith(child.tokens, done):
                    inside = self._pages_in_common(child, tokens, done)
                    found.append(child.ids[: inside * ID_BYTES])
                    return Match(child, inside, b"".join(found))
            node = child
            found.append(child.ids)
            done += len(child.tokens)
        return Match(node, len(node.ids) // ID_BYTES, b"".join(found))

    def _pages_in_common(self, child: Node, tokens: bytes, done: int) -> int:
        """Pages of `child` that tokens[done:] spells; the first is known to be one. Bisection: each probe is a memcmp."""
        size, edge = self.page_bytes, child.tokens
        low, high = 1, min(child.num_pages, (len(tokens) - done) // size)
        while low < high:
            middle = (low + high + 1) // 2
            if tokens.startswith(edge[low * size : middle * size], done + low * size):
                low = middle
            else:
                high = middle - 1
        return low

    def source(self, match: Match, rest: bytes, step: int) -> Source | None:
        """The longest run of `rest`, what follows the match, to copy. Its writer must be of a step before `step` (R2)."""
        node, rest = match.node, rest[: self.page_bytes]
        best: Source | None = None
        length = 0
        if match.inside < node.num_pages:  # inside an edge there is one candidate
            at = match.inside * self.page_bytes
            run = common_run(node.tokens[at : at + self.page_bytes], rest)
            run = self._written(node, match.inside, run, step)
            return Source(node.page(match.inside), run, node) if run else None
        middle = bisect_left(node.order, rest)
        for indices in (range(middle, len(node.order)), range(middle - 1, -1, -1)):
            for i in indices:  # a neighbour is best; we go on only past pages that this very plan writes
                run = common_run(node.order[i], rest)
                if run <= length:
                    break
                child = node.children[node.order[i]]
                run = self._written(child, 0, run, step)
                if run > length:
                    best, length = Source(child.page(0), run, child), run
        for sequence in node.open:  # at most max_running of them
            tokens, page = sequence.open_page()
            run = common_run(tokens, rest)
            if run > length:
                best, length = Source(page, run, None), run
        return best

    def _written(self, node: Node, i: int, run: int, step: int) -> int:
        """How much of a run earlier steps wrote: copies run before the forward, so this plan's own tokens are not there."""
        return run if node.steps[i] < step else min(run, self.begun.get(node.page(i), 0))

    # ---------------------------------------------------------------------------------------------------------- leases

    def pin(self, match: Match) -> Node:
        """Lease the path of a match: the node that now ends exactly there."""
        node = match.node
        if node.parent is None:
            self.roots.setdefault(node.name, node)
        elif match.inside < node.num_pages:
            node = self._split(node, match.inside)
        node.pins += 1
        self.touch(node)
        return node

    def unpin(self, node: Node) -> None:
        node.pins -= 1
        assert node.pins >= 0, "a lease was given back twice"
        self.touch(node)
        self._offer(node)

    def _split(self, node: Node, n: int) -> Node:
        cut, at = n * self.page_bytes, n * ID_BYTES
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.tokens[:cut], node.ids[:at], node.steps[:n])
        upper.used, upper.held = node.used, int(node.held > 0)
        parent.children[upper.tokens[: self.page_bytes]] = upper
        if parent.heir is node:
            parent.heir = upper
        node.parent, node.tokens, node.ids, node.steps = upper, node.tokens[cut:], node.ids[at:], node.steps[n:]
        key = node.tokens[: self.page_bytes]
        upper.children, upper.order, upper.heir = {key: node}, [key], node
        self.num_nodes += 1
        self._wake(node)
        return upper

    # --------------------------------------------------------------------------------------------------------- writing

    def append(self, node: Node, tokens: bytes, ids: bytes, step: int) -> Node:
        """Hang whole pages (`ids`: packed) below `node`, which the caller leases; returns the node to which that lease has moved."""
        first, n = tokens[: self.page_bytes], len(ids) // ID_BYTES
        assert first not in node.children and len(tokens) == n * self.page_bytes
        self.num_pages += n
        if node.pins == 1 and node.parent is not None and not node.children and node.num_pages < MAX_GROWN_PAGES:
            node.tokens += tokens
            node.ids += ids
            node.steps += [step] * n
            self._wake(node, first)
            self.touch(node)
            return node
        child = Node(node, tokens, ids, [step] * n)
        self._attach(child, first)
        self._wake(node, first)
        child.pins = 1
        self.touch(child)
        self.unpin(node)
        return child

    @staticmethod
    def list_open(node: Node, owner: OpenPage) -> None:
        """`owner` writes the page behind its lease on `node`: a copy source for others, not the tree's."""
        if not node.open:
            node.open = {}
        node.open[owner] = None

    @staticmethod
    def unlist_open(node: Node, owner: OpenPage) -> None:
        del node.open[owner]

    def add_tail(self, node: Node, tokens: bytes, page: int, step: int) -> bool:
        """Give a partial page to the tree. False: something here already starts with these tokens (R6)."""
        at = bisect_left(node.order, tokens)
        if at < len(node.order) and node.order[at].startswith(tokens):
            return False
        for cut in range(TOKEN_BYTES, len(tokens), TOKEN_BYTES):
            shorter = node.children.get(tokens[:cut])
            if shorter is not None and not shorter.pins:
                self._remove(shorter)
        tail = Node(node, tokens, pack((page,)), [step])
        self.num_pages += 1
        self._attach(tail, tokens)
        self.touch(tail)
        self._offer(tail)
        return True

    def _attach(self, child: Node, key: bytes) -> None:
        parent = child.parent
        assert parent is not None
        if not parent.children:
            parent.children, parent.order = {}, []
        parent.children[key] = child
        insort(parent.order, key)
        if parent.heir is None and len(key) == self.page_bytes:  # a tail ends a walk, whatever follows it
            parent.heir = child
        self.num_nodes += 1

    # --------------------------------------------------------------------------------------------------- eviction (R7)

    def touch(self, node: Node) -> None:
        self.clock += 1
        node.used = self.clock

    def evict(self) -> bool:
        """Free one page: the last one of the least recently used unpinned leaf. False: nothing can go."""
        while self._lru:
            used, _, node = heapq.heappop(self._lru)
            if node.dead or node.pins or node.children or node.used != used:
                continue
            if node.num_pages > 1:  # from the edge's end: a leaf of 2,000 tokens is not lost for one page
                self._trim(node, node.num_pages - 1)
            else:
                self._remove(node)
            return True
        return False

    def _trim(self, node: Node, n: int) -> None:
        assert not node.held, "a hold survived into a trimmed node"
        self.pool.give(node.pages[n:])
        self.num_pages -= node.num_pages - n
        node.ids = node.ids[: n * ID_BYTES]
        del node.steps[n:]
        node.tokens = node.tokens[: n * self.page_bytes]
        self._wake(node)
        self._offer(node)

    def _remove(self, node: Node) -> None:
        parent, key = node.parent, node.tokens[: self.page_bytes]
        assert parent is not None and not node.children and not node.pins, "a lease survived into a dropped node"
        self.pool.give(node.pages)
        self.num_pages -= node.num_pages
        self.num_nodes -= 1
        node.dead = True
        del parent.children[key], parent.order[bisect_left(parent.order, key)]
        if parent.heir is node:
            parent.heir = None
        self._wake(node)
        parent.used = max(parent.used, node.used)  # so touching the deepest node is as good as touching the path
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """`node` may have become something that eviction can take, or a root that nothing needs any more."""
        if node.pins or node.children or node.dead:
            return
        if node.parent is None:
            if not node.watchers and self.roots.get(node.name) is node:
                del self.roots[node.name]
            return
        self._serial += 1
        heapq.heappush(self._lru, (node.used, self._serial, node))
        if len(self._lru) > 2 * self.num_nodes + 64:  # without pressure nobody pops, and the stale entries would pile up
            live = [(n.used, i, n) for i, n in enumerate(self.nodes()) if n.parent and not n.pins and not n.children]
            self._lru, self._serial = live, len(live) + self._serial
            heapq.heapify(self._lru)

    def drop_since(self, step: int) -> None:
        """A forward failed: every page written by `step` or later goes, and all below it (R5). Rare: it walks the tree."""
        for node in reversed(list(self.nodes())):  # children before parents
            bad = next((i for i, s in enumerate(node.steps) if s >= step), None)
            if bad is None or node.dead:
                continue
            for below in reversed(list(self.nodes(node))):  # what leans on a dropped page is dropped
                if below is not node:
                    self._remove(below)
            if bad == 0:
                self._remove(node)
            else:
                self._trim(node, bad)

    def drop_root(self, name: Hashable) -> None:
        """Forget everything below one root, at once."""
        if name in self.roots:
            for node in reversed(list(self.nodes(self.roots[name]))):
                if node.parent is not None:
                    self._remove(node)

    # --------------------------------------------------------------------------------------------------------- watching

    def watch(self, match: Match, following: bytes, watcher: Any) -> tuple[Node, bytes]:
        """Put `watcher` into `stale` once its match may have changed: `following`, its next page, came, or `node` shrank.

        So a queue of thousands is re-matched only where the tree has changed (S2). Returns the arguments of `unwatch`.
        """
        node = match.node
        if node.parent is None:
            self.roots.setdefault(node.name, node)
        if not node.watchers:
            node.watchers = {}
        node.watchers.setdefault(following, {})[watcher] = None
        return node, following

    def unwatch(self, node: Node, following: bytes, watcher: Any) -> None:
        self.stale.pop(watcher, None)
        same = node.watchers.get(following)
        if same is not None:
            same.pop(watcher, None)
            if not same:
                del node.watchers[following]
                if node.parent is None:
                    self._offer(node)

    def _wake(self, node: Node, following: bytes | None = None) -> None:
        if node.watchers:
            if following is None:
                for same in node.watchers.values():
                    self.stale.update(same)
                node.watchers = _EMPTY
            else:
                self.stale.update(node.watchers.pop(following, {}))

    # --------------------------------------------------------------------------------------------------------- walking

    def nodes(self, start: Node | None = None) -> Iterator[Node]:
        """Every node, roots too, parents before children; or those of one subtree."""
        stack = [start] if start is not None else list(self.roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    @staticmethod
    def path(node: Node) -> list[Node]:
        """From below the root down to `node`."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]
