"""Which pages are free. Knows nothing of tokens, trees or tensors.

free: [7, 3, 9]     take() -> 9     free: [7, 3]     give([5]) -> free: [7, 3, 5]        a stack: warm pages first
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

    def take(self) -> int:
        """One page. Callers look at `free` first: an empty pool is an IndexError, a bug of ours."""
        return self.free.pop()

    def give(self, pages: Iterable[int]) -> None:
        self.free.extend(pages)
