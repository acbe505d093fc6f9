"""In what order waiting sequences are admitted (S2), at a cost that follows what changes, not how many wait.

    urgent   resumed and aged ones, by rank                                      first
    fresh    the rest: longest cached prefix first, then rank      heap of (-cached, rank); `watch`ed in the tree, so that
             ("fcfs", "priority": rank alone)                      only those whose match may have changed are matched again

Ageing: whoever has seen max_wait tokens served since it arrived becomes urgent, so nobody is overtaken for longer. Holds
ready sequences only: those with a draw in flight, a leader at work or a grammar compiling are with the scheduler.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable

from phloem.runtime.cache.prefix import PrefixCache
from phloem.runtime.cache.radix import Node
from phloem.runtime.scheduler.sequence import Sequence

__all__ = ["WaitingQueue"]

Rank = tuple[int, int]  # (priority, arrival)


class _Place:
    """A fresh sequence's standing: its cached pages, and where in the tree it is watched."""

    __slots__ = ("cached", "sequence", "watched")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.cached = 0
        self.watched: tuple[Node, bytes] | None = None


class WaitingQueue:
    """Ready sequences in the order of the module's table. `root_of` names the tree root of a sequence (R8)."""

    def __init__(self, cache: PrefixCache, policy: str, max_wait: int, root_of: Callable[[Sequence], Hashable]) -> None:
        self.cache, self.max_wait, self.root_of = cache, max_wait, root_of
        self.by_prefix = policy == "prefix" and cache.enabled
        self.urgent: list[tuple[Rank, Sequence]] = []  # sorted by rank, which is unique
        self.fresh: dict[Rank, _Place] = {}
        self._order: list[tuple[int, Rank]] = []  # heap of (-cached, rank), lazily deleted
        self._ages: list[tuple[int, Rank]] = []  # heap of (served_before, rank), lazily deleted

    def __len__(self) -> int:
        return len(self.urgent) + len(self.fresh)

    def push(self, sequence: Sequence) -> None:
        sequence.queued = True
        if sequence.started:
            insort(self.urgent, (sequence.rank, sequence))
            return
        place = self.fresh[sequence.rank] = _Place(sequence)
        heapq.heappush(self._ages, (sequence.served_before, sequence.rank))
        if self.by_prefix:
            self._match(place)
        heapq.heappush(self._order, (-place.cached, sequence.rank))
        self._compact()

    def discard(self, sequence: Sequence) -> None:
        sequence.queued = False
        place = self.fresh.pop(sequence.rank, None)
        if place is not None:
            self._unwatch(place)
        else:
            at = bisect_left(self.urgent, (sequence.rank,))
            assert self.urgent[at][1] is sequence, "the queue lost a sequence"
            del self.urgent[at]

    def head(self, served: int, started_only: bool) -> Sequence | None:
        """Who comes next. `served`: the clock of ageing."""
        while self._ages and served - self._ages[0][0] > self.max_wait:
            place = self.fresh.pop(heapq.heappop(self._ages)[1], None)
            if place is not None:
                self._unwatch(place)
                insort(self.urgent, (place.sequence.rank, place.sequence))
        if started_only:
            return next((sequence for _, sequence in self.urgent if sequence.started), None)
        if self.urgent:
            return self.urgent[0][1]
        self._match_stale()
        while self._order:
            cached, rank = self._order[0]
            place = self.fresh.get(rank)
            if place is not None and place.cached == -cached:
                return place.sequence
            heapq.heappop(self._order)
        return None

    def rebuild(self) -> None:
        """The roots have changed (R8): everything is matched again."""
        again = [place.sequence for place in self.fresh.values()]
        for place in self.fresh.values():
            self._unwatch(place)
        self.fresh, self._order, self._ages = {}, [], []
        for sequence in again:
            self.push(sequence)

    # ------------------------------------------------------------------------------------------------- longest prefix

    def _unwatch(self, place: _Place) -> None:
        if place.watched is not None:
            self.cache.tree.unwatch(*place.watched, place)
            place.watched = None

    def _match(self, place: _Place) -> None:
        tree, key = self.cache.tree, bytes(place.sequence.key)
        match = tree.match(tree.root(self.root_of(place.sequence)), key)
        place.cached = len(match.pages)
        at = place.cached * tree.page_bytes
        following = key[at : at + tree.page_bytes]
        place.watched = tree.watch(match, following, place)

    def _match_stale(self) -> None:
        tree = self.cache.tree
        if not tree.stale:
            return
        stale, tree.stale = tree.stale, {}
        for place in stale:
            before = place.cached
            self._match(place)
            if place.cached != before:
                heapq.heappush(self._order, (-place.cached, place.sequence.rank))
        self._compact()

    def _compact(self) -> None:
        """Entries that were overtaken stay in a heap until they reach its top."""
        if len(self._ages) > 4 * len(self.fresh) + 64:
            self._ages = [(place.sequence.served_before, rank) for rank, place in self.fresh.items()]
            heapq.heapify(self._ages)
        if len(self._order) > 4 * len(self.fresh) + 64:
            self._order = [(-place.cached, rank) for rank, place in self.fresh.items()]
            heapq.heapify(self._order)
