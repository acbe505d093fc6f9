"""Texts that begin alike are encoded once as far as they do: a batch of prompts behind one set of examples, a corpus asked many things.

    "examples … Q: why?"    whole, the first time
    "examples … Q: who?"    its common beginning with the one before, cut where a run of blanks begins: once more, and kept
    "examples … Q: how?"    what is kept, and `encode` of " how?"

Exact where a tokenizer gives the same ids for a text and for its two halves cut at a blank; `Markup.cuts_at_blanks` asks it (X2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["SharedBeginnings", "common_length", "cut_at_blank"]

SHORTEST = 256
"""Characters. Shorter beginnings cost less than looking for them."""


class SharedBeginnings:
    """Of one kind of text: first, rest: encode a text, and one that goes on behind it. Not for two threads at once."""

    def __init__(self, first: Callable[[str], list[int]], rest: Callable[[str], list[int]]) -> None:
        self._first, self._rest = first, rest
        self._last = self._beginning = ""
        self._ids: list[int] = []

    def encode(self, text: str) -> list[int]:
        """As first(text)."""
        if len(text) < SHORTEST:
            return self._first(text)
        last, self._last = self._last, text
        known = len(self._beginning)
        fits = known > 0 and text.startswith(self._beginning) and _splits(text, known)
        if not fits or len(text) - known > known:
            at = cut_at_blank(text[: common_length(last, text)])
            if at >= SHORTEST and not (fits and at <= known):
                self._beginning, fits, known = text[:at], True, at
                self._ids = self._first(self._beginning)
        return self._ids + self._rest(text[known:]) if fits and known < len(text) else self._first(text)


def _splits(text: str, at: int) -> bool:
    return at < len(text) and text[at].isspace()


def common_length(a: Sequence[Any], b: Sequence[Any], limit: int | None = None) -> int:
    """Of the common beginning, at most `limit`. a, b: of one type. Slices are compared in C, halving."""
    limit = min(len(a), len(b)) if limit is None else min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def cut_at_blank(text: str) -> int:
    """Where the last run of blanks begins; 0 if there is none."""
    at = len(text)
    while at and not text[at - 1].isspace():
        at -= 1
    while at and text[at - 1].isspace():
        at -= 1
    return at
