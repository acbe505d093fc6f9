r"""Sets of characters as sorted code point ranges, and what `\d \w \s` mean under three readings at once.

Python's `re` reads `\w` as Unicode or, by a flag, as ASCII; ECMA-262 as ASCII; and each has its own `\s`. A class is kept as
what it is under each, and what a pattern accepts is what all of them accept: so it passes whoever checks it (F1).

    \D   all but Python's decimal digits, all but 0-9, all but 0-9    ->   no digit of any script
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce

import numpy as np

__all__ = ["ANY", "DOT", "Class", "Ranges", "complement", "shorthand", "union"]

Ranges = tuple[tuple[int, int], ...]
MAX_CHAR, SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
ANY: Ranges = ((0, 0xD7FF), (0xE000, MAX_CHAR))


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, disjoint, not adjacent; surrogates left out: they are no characters."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    cut: list[tuple[int, int]] = []
    for low, high in merged:
        if low < SURROGATES[0]:
            cut.append((low, min(high, SURROGATES[0] - 1)))
        if high > SURROGATES[1]:
            cut.append((max(low, SURROGATES[1] + 1), high))
    return tuple(cut)


def complement(ranges: Ranges) -> Ranges:
    out, at = [], 0
    for low, high in ranges:
        if at < low:
            out.append((at, low - 1))
        at = high + 1
    if at <= MAX_CHAR:
        out.append((at, MAX_CHAR))
    return union(out)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    return complement(union(complement(one) + complement(other)))


class Class:
    """under(r): the class under reading r of READINGS, computed when asked for.   plain: no negation in it."""

    def __init__(self, under: Callable[[int], Ranges], plain: bool) -> None:
        self.under, self.plain = under, plain

    @staticmethod
    def of(ranges: Ranges) -> Class:
        """The same under every reading."""
        return Class(lambda reading: ranges, True)

    @staticmethod
    def union(members: Sequence[Class]) -> Class:
        return Class(lambda reading: union(r for m in members for r in m.under(reading)), all(m.plain for m in members))

    def negated(self) -> Class:
        return Class(lambda reading: complement(self.under(reading)), False)

    @property
    def ranges(self) -> Ranges:
        """What is in it under every reading."""
        if self.plain:
            return self.under(ASCII)  # the least of every shorthand, and nothing turns that around
        return reduce(intersection, map(self.under, READINGS))


# The line ends that a dot leaves out: Python's is "\n" alone, ECMA's are four.
DOT: Ranges = complement(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))

READINGS = ASCII, PYTHON, ECMA = range(3)
_ASCII: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
_ECMA_BLANKS = union(
    [*_ASCII["s"], *((c, c) for c in (0xA0, 0x1680, 0x202F, 0x205F, 0x3000, 0xFEFF)), (0x2000, 0x200A), (0x2028, 0x2029)]
)


def shorthand(letter: str) -> Class:
    """Of `\\d \\w \\s \\D \\W \\S`."""
    small = letter.lower()

    def under(reading: int) -> Ranges:
        if reading == PYTHON:
            return _unicode(small)
        return _ECMA_BLANKS if reading == ECMA and small == "s" else _ASCII[small]

    found = Class(under, True)
    return found if letter == small else found.negated()


@lru_cache(maxsize=3)
def _unicode(letter: str) -> Ranges:
    """As this Python has it: found by its own `re` in one text of all characters, 20 ms."""
    text = np.arange(MAX_CHAR + 1, dtype="<u4").tobytes().decode("utf-32-le", "surrogatepass")
    return union((m.start(), m.end() - 1) for m in re.finditer(rf"\{letter}+", text))
