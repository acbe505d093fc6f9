"""Which pages are free. Knows nothing of tokens, trees or tensors.

A stack, so that warm pages go first:

    free: [7, 3, 9]     take(2) -> [3, 9]     free: [7]     give([5])     free: [7, 5]
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["PagePool"]


class PagePool:
    """The free list of pages 0 .. num_pages - 1. Whoever takes a page owns it until it is given back (P2)."""

    __slots__ = ("free", "num_pages")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.free = list(range(num_pages - 1, -1, -1))

    def take(self, need: int) -> list[int]:
        """`need` pages, or all there are if those are fewer."""
        if need <= 0:
            return []
        pages = self.free[-need:]
        del self.free[-need:]
        return pages

    def give(self, pages: Iterable[int]) -> None:
        self.free.extend(pages)
