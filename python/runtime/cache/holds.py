"""What clients have pinned (R7): named leases with a deadline and a cap. They yield before a request that fits would wait.

oldest -> {"chat-17": node, until 60.0}, {"rl-3": node, until 90.0} <- newest        broken from the oldest end

Pages under holds are counted as holds come and go. `Node.held` is how many holds end at a node plus how many of its children
are held, so a walk up stops at the first node that something else holds, and the cost is that of the pages gained or lost:

    root 1 -- [ABCD] 2 --+-- [EFGH] 1   a hold ends here
                         +-- [IJKL] 1   and here: 3 nodes are counted, [ABCD] once
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phloem.runtime.cache.radix import Node, RadixTree

__all__ = ["Hold", "HoldBook"]


@dataclass(slots=True)
class Hold:
    """One pin on `node` for `ttl` seconds. `until`: when it lapses; None until the clock was first told."""

    node: Node
    ttl: float
    until: float | None = None


class HoldBook:
    """The holds of one tree, oldest first. `broken` counts those that ended for want of pages or of room under the cap."""

    def __init__(self, tree: RadixTree, max_pages: int) -> None:
        self.tree = tree
        self.max_pages = max_pages
        self.holds: dict[str, Hold] = {}
        self.broken = 0
        self._num_pages = 0

    def __len__(self) -> int:
        return len(self.holds)

    def take_over(self, name: str, node: Node, ttl: float) -> None:
        """The pin on `node` that the caller has becomes a hold. A hold of the same name is replaced."""
        self.release(name)
        self.holds[name] = Hold(node, ttl)
        self._count(node)
        while self._num_pages > self.max_pages:
            self.break_oldest()

    def release(self, name: str) -> bool:
        """True if there was one."""
        hold = self.holds.pop(name, None)
        if hold is not None:
            self._discount(hold.node)
            self.tree.unpin(hold.node)
        return hold is not None

    def break_oldest(self) -> bool:
        """Give up the oldest hold. False: there is none."""
        for name in self.holds:
            self.broken += 1
            return self.release(name)
        return False

    def drop(self, doomed: Callable[[Hold], bool] = lambda hold: True) -> None:
        for name in [name for name, hold in self.holds.items() if doomed(hold)]:
            self.release(name)

    def expire(self, now: float) -> None:
        """Those whose time is over end."""
        for hold in self.holds.values():
            if hold.until is None:
                hold.until = now + hold.ttl
        if self.holds:
            self.drop(lambda hold: hold.until is not None and hold.until <= now)

    def num_pages(self) -> int:
        """Pages under any hold, each counted once."""
        return self._num_pages

    # A held node has a pin of the hold's below it or on it, so it neither grows nor shrinks; a split shares it out.

    def _count(self, end: Node) -> None:
        node: Node | None = end
        while node is not None:
            node.held += 1
            if node.held > 1:
                return
            self._num_pages += node.num_pages
            node = node.parent

    def _discount(self, end: Node) -> None:
        node: Node | None = end
        while node is not None:
            node.held -= 1
            if node.held:
                return
            self._num_pages -= node.num_pages
            node = node.parent
