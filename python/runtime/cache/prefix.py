"""Tree and pool behind one door: what a sequence may read, what it owns, and how the two change hands.

    table of a live sequence:   [ 4  9  2 | 7  1 ]
                                  shared    own
                                  the tree's pages, on     the open page (7), listed at `lease` as a copy source,
                                  the path of `lease`      and pages for tokens that are planned

    acquire   match, lease, copy the partial page that follows          (R2, R3, R4)
    adopt     take pages that others have entered since                 (R5)
    publish   own full pages enter the tree, the lease moves behind them (R5, R6)
    release   full pages and the tail go to the tree, the rest to the free list (P4)

Knows nothing of requests, budgets or ranks: when it runs out of pages it asks the `Obtain` that the scheduler passes in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.cache.holds import HoldBook
from phloem.runtime.cache.pages import PagePool
from phloem.runtime.cache.radix import TOKEN_BYTES, Match, Node, RadixTree
from phloem.runtime.step import PageCopy

__all__ = ["Explanation", "ExplainedNode", "Grant", "Obtain", "PrefixCache"]

Obtain = Callable[[int], list[int]]  # up to so many pages


@dataclass(frozen=True, slots=True)
class ExplainedNode:
    """num_tokens of the node would hit. idle: ticks of the cache's clock since it was last used. leases: pins on it."""

    num_tokens: int
    pages: tuple[int, ...]
    idle: int
    leases: int
    is_partial: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the cache would give a prompt now (R9). num_cached <= num_tokens - 1: the last token is always computed (R4)."""

    num_tokens: int
    num_cached: int
    nodes: tuple[ExplainedNode, ...]


class Grant:
    """What one live sequence holds of the cache. `key` is the sequence's own buffer: its tokens as int32 bytes, growing."""

    __slots__ = (
        "copy",
        "key",
        "lease",
        "num_pages",
        "num_shared",
        "page_size",
        "private",
        "root",
        "source",
        "table",
        "written",
    )

    def __init__(self, root: Hashable, key: bytearray, lease: Node, max_pages: int, page_size: int) -> None:
        self.root = root
        self.key = key
        self.page_size = page_size
        self.lease = lease  # ends exactly at table[:num_shared]
        self.table: NDArray[np.int32] = np.empty(max_pages, np.int32)
        self.num_pages = 0
        self.num_shared = 0
        self.written = 0  # tokens that steps before the plan being made have written
        self.private = False  # its pages hold KV that nobody else may read
        self.copy: PageCopy | None = None
        self.source: Node | None = None  # pinned until the plan with `copy` is launched

    def add(self, pages: list[int]) -> None:
        self.table[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)

    def own_pages(self) -> list[int]:
        own: list[int] = self.table[self.num_shared : self.num_pages].tolist()
        return own

    def open_page(self) -> tuple[bytes, int]:
        if self.num_pages <= self.num_shared or self.private:
            return b"", -1
        at = self.num_shared * self.page_size
        end = min(self.written, at + self.page_size)
        return bytes(self.key[at * TOKEN_BYTES : end * TOKEN_BYTES]), int(self.table[self.num_shared])


class PrefixCache:
    """See the module's drawing. `enabled` False runs the same code: the caller then gives each sequence a root of its own."""

    def __init__(self, page_size: int, num_pages: int, *, enabled: bool = True, max_held_pages: int | None = None) -> None:
        self.page_size, self.num_pages, self.enabled = page_size, num_pages, enabled
        self.max_held_pages = num_pages if max_held_pages is None else max_held_pages
        self.evicted = self.duplicates = self.adopted = self.copied = 0
        self.reset()

    def reset(self) -> None:
        """All pages free, nothing known, nothing leased."""
        self.pool = PagePool(self.num_pages)
        self.tree = RadixTree(self.page_size, self.pool)
        self.holds = HoldBook(self.tree, self.max_held_pages)
        self._pending: list[Node] = []  # copy sources of plans not yet launched

    # ------------------------------------------------------------------------------------------------------ the plan

    def begin_plan(self) -> None:
        self.tree.begun.clear()

    def launched(self) -> None:
        """The plan is on its way: its copies run before anything planned later, so their sources may go."""
        for node in self._pending:
            self.tree.unpin(node)
        self._pending.clear()

    def take(self, need: int) -> list[int]:
        """Up to `need` pages: free ones, then those of the least recently used leaves."""
        pages = self.pool.take(need)
        while len(pages) < need and self.tree.evict():
            self.evicted += 1
            pages += self.pool.take(1)
        begun = self.tree.begun
        if begun:
            for page in pages:
                begun.pop(page, None)
        return pages

    # ------------------------------------------------------------------------------------------------- into the cache

    def acquire(
        self, root: Hashable, key: bytearray, limit: int, step: int, max_pages: int, obtain: Obtain, use_copy: bool
    ) -> tuple[Grant, int] | None:
        """A lease on what is cached of `key`, and how many tokens that covers: at most `limit`. Only leases the path beyond.

        max_pages: all it will ever need (P3); the last token drawn has no slot, so what the tree has of it is left alone.
        None: the page for the copy is not to be had; nothing has changed. Follow with `confirm` or `cancel`.
        """
        tokens, tree = bytes(key[: max_pages * self.tree.page_bytes]), self.tree
        match = tree.match(tree.root(root), tokens)
        num_pages = match.num_pages
        covered = num_pages * self.page_size
        source = None
        if use_copy and covered < limit:
            source = tree.source(match, tokens[covered * TOKEN_BYTES : limit * TOKEN_BYTES], step)
        grant = Grant(root, key, tree.pin(match), max_pages, self.page_size)
        grant.num_shared = grant.num_pages = num_pages
        if num_pages:
            grant.table[:num_pages] = np.frombuffer(match.ids, np.int32)
        self.tree.list_open(grant.lease, grant)
        if source is None:
            return grant, min(covered, limit)
        grant.source = source.node
        if source.node is not None:
            source.node.pins += 1
        pages = obtain(1)
        if not pages:
            self.cancel(grant)
            return None
        grant.add(pages)
        grant.copy = PageCopy(source.page, pages[0])
        return grant, covered + source.length

    def confirm(self, grant: Grant) -> PageCopy | None:
        """The first row is planned: the copy joins that plan."""
        copy, grant.copy = grant.copy, None
        if copy is not None:
            self.copied += 1
            if grant.source is not None:
                self._pending.append(grant.source)
        grant.source = None
        return copy

    def cancel(self, grant: Grant) -> None:
        """As if `acquire` had not happened."""
        if grant.source is not None:
            self.tree.unpin(grant.source)
        self._let_go(grant, grant.own_pages())

    def adopt(self, grant: Grant) -> int:
        """Take pages which entered the tree behind our lease instead of computing them. Returns the tokens now covered."""
        if grant.private:
            return 0
        page_bytes = self.tree.page_bytes
        tokens = bytes(grant.key[grant.num_shared * page_bytes : len(grant.table) * page_bytes])
        match = self.tree.match(grant.lease, tokens)
        if match.ids:
            self.adopted += match.num_pages
            self._share(grant, match)
        return grant.num_shared * self.page_size

    def publish(self, grant: Grant, upto: int, step: int) -> None:
        """Own pages that tokens[:upto] fill enter the tree, marked with the step that writes them.

        Where the tree has an equal page we take that one and free ours at once. Keeping ours would hold page_count + 1
        pages once our next page hangs below theirs, and a request that just fits would never end (R6).
        """
        if grant.private:
            return
        size, tree = self.page_size, self.tree
        while (grant.num_shared + 1) * size <= upto:
            at, n = grant.num_shared * size, upto // size - grant.num_shared
            tokens = bytes(grant.key[at * TOKEN_BYTES : (at + n * size) * TOKEN_BYTES])
            match = tree.match(grant.lease, tokens)
            if match.ids:
                self.duplicates += match.num_pages
                self._share(grant, match)
                continue
            ids = grant.table[grant.num_shared : grant.num_shared + n].tobytes()
            tree.begun[int(grant.table[grant.num_shared])] = max(0, grant.written - at)
            self._move(grant, tree.append(grant.lease, tokens, ids, step))
            grant.num_shared += n

    def _share(self, grant: Grant, match: Match) -> None:
        """The tree's pages replace ours, or come where we had none yet."""
        first, end = grant.num_shared, grant.num_shared + match.num_pages
        self.pool.give(grant.table[first : min(end, grant.num_pages)].tolist())
        grant.table[first:end] = np.frombuffer(match.ids, np.int32)
        grant.num_pages = max(grant.num_pages, end)
        old = grant.lease
        self._move(grant, self.tree.pin(match))
        self.tree.unpin(old)
        grant.num_shared = end

    def _move(self, grant: Grant, lease: Node) -> None:
        if lease is not grant.lease:
            self.tree.unlist_open(grant.lease, grant)
            grant.lease = lease
            self.tree.list_open(lease, grant)

    # ------------------------------------------------------------------------------------------------------- out of it

    def release(self, grant: Grant, upto: int, step: int) -> None:
        """Full pages and the tail of tokens[:upto] to the tree, the rest to the free list, the lease away: also with rows
        in flight, whose late writes land before the next owner's (P4)."""
        self.publish(grant, upto, step)
        own = grant.own_pages()
        tail = bytes(grant.key[grant.num_shared * self.page_size * TOKEN_BYTES : upto * TOKEN_BYTES])
        if own and tail and not grant.private and self.tree.add_tail(grant.lease, tail, own[0], step):
            del own[0]
        self._let_go(grant, own)

    def _let_go(self, grant: Grant, own: list[int]) -> None:
        self.tree.unlist_open(grant.lease, grant)
        self.pool.give(own)
        self.tree.unpin(grant.lease)

    def forget_since(self, step: int) -> None:
        """A forward failed: nothing that it or a later one wrote may be read again (R5)."""
        self.holds.drop(lambda hold: any(s >= step for node in self.tree.path(hold.node) for s in node.steps))
        self.tree.drop_since(step)

    def flush(self) -> int:
        """Free everything unpinned; how many pages that were."""
        before = len(self.pool.free)
        while self.tree.evict():
            pass
        return len(self.pool.free) - before

    # --------------------------------------------------------------------------------------------------------- answers

    def hold(self, name: str, root: Hashable, key: bytes, ttl: float) -> int:
        """Pin what is cached of `key`, its tail too; how many tokens that is (R7)."""
        match = self.tree.match(self.tree.root(root), key)
        num_tokens = match.num_pages * self.page_size
        tail = match.node.children.get(key[num_tokens * TOKEN_BYTES :]) if match.inside == match.node.num_pages else None
        if tail is not None:
            match, num_tokens = Match(tail, 1, tail.ids), len(key) // TOKEN_BYTES
        if match.ids:
            self.holds.take_over(name, self.tree.pin(match), ttl)
        return num_tokens

    def explain(self, root: Hashable, key: bytes, step: int) -> Explanation:
        tree, num_tokens = self.tree, len(key) // TOKEN_BYTES
        match = tree.match(tree.root(root), key)
        nodes, covered = list[ExplainedNode](), 0
        for node in tree.path(match.node):
            pages = node.pages[: match.inside] if node is match.node else node.pages
            nodes.append(ExplainedNode(len(pages) * self.page_size, tuple(pages), tree.clock - node.used, node.pins, False))
            covered += len(pages) * self.page_size
        limit = max(num_tokens - 1, 0)
        source = tree.source(match, key[covered * TOKEN_BYTES : limit * TOKEN_BYTES], step) if covered < limit else None
        if source is not None:
            owner = source.node
            idle, leases = (tree.clock - owner.used, owner.pins) if owner is not None else (0, 1)
            nodes.append(ExplainedNode(source.length, (source.page,), idle, leases, True))
            covered += source.length
        return Explanation(num_tokens, min(covered, limit), tuple(nodes))
