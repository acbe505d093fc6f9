r"""Sets of characters as sorted code point ranges, and what `\d \w \s` mean under two readings at once.

Python's `re` reads `\w` as Unicode, ECMA-262 as ASCII. A class is therefore a pair: `sure` is in it under both readings,
`maybe` under at least one. Negation swaps them, so what a pattern accepts is accepted by whoever checks it (F1).

    \d   sure 0-9   maybe every decimal digit          \D   sure: not any decimal digit   maybe: not 0-9
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

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


class Class:
    """See the module's drawing. `sure` is a subset of `maybe`; either may be computed when it is first asked for."""

    def __init__(self, sure: Ranges | Callable[[], Ranges], maybe: Ranges | Callable[[], Ranges] | None = None) -> None:
        self._sure, self._maybe = sure, sure if maybe is None else maybe

    @property
    def sure(self) -> Ranges:
        return self._sure() if callable(self._sure) else self._sure

    @property
    def maybe(self) -> Ranges:
        return self._maybe() if callable(self._maybe) else self._maybe

    def negated(self) -> Class:
        return Class(lambda: complement(self.maybe), lambda: complement(self.sure))

    @staticmethod
    def union(members: Sequence[Class]) -> Class:
        return Class(lambda: union(r for m in members for r in m.sure), lambda: union(r for m in members for r in m.maybe))


# The line ends that a dot leaves out: Python's is "\n" alone, ECMA's are four.
DOT: Ranges = complement(((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))

_ASCII: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": ((0x09, 0x0D), (0x20, 0x20)),
}
_UNICODE: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda c: c.isalnum() or c == "_",
    "s": lambda c: c.isspace() or c == "\ufeff",  # which is a blank to ECMA alone
}


def shorthand(letter: str) -> Class:
    """Of `\\d \\w \\s \\D \\W \\S`."""
    small = letter.lower()
    found = Class(_ASCII[small], lambda: _unicode(small))
    return found if letter == small else found.negated()


@lru_cache(maxsize=3)
def _unicode(letter: str) -> Ranges:
    # A scan of all characters, 0.1 s: only negated classes need it, and once.
    holds = _UNICODE[letter]
    return union((c, c) for c in range(MAX_CHAR + 1) if holds(chr(c)))
