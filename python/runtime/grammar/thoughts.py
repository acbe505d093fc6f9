"""A constraint that holds from behind a model's thoughts on: free text up to the token that closes them, then the grammar.

    opener None:  free ──close──> grammar            the prompt has opened the thoughts
    opener id:    start ─┬─ opener ──> free ──close──> grammar
                         └─ what the grammar allows ──> grammar       the model may think, or say it at once

Matched as ids, never as text: inside a string of the grammar the mark is text. Stop ids are not legal in thoughts, which no value
has followed yet (G1). The grammar starts behind a token that nothing merges with, so its tail is empty.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Cursor
from phloem.runtime.grammar.vocabulary import Vocabulary

__all__ = ["ThoughtsFirst"]

_free_rows: weakref.WeakKeyDictionary[Vocabulary, NDArray[np.int32]] = weakref.WeakKeyDictionary()


def _free_row(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """Every token but stop ids and padding: as free as text without a constraint, but for its end."""
    row = _free_rows.get(vocabulary)
    if row is None:
        words = np.zeros(vocabulary.num_words * 32, np.bool_)
        words[list(vocabulary.text_ids)] = True
        words[sorted(vocabulary.special_ids.difference(vocabulary.stop_ids))] = True
        row = _free_rows[vocabulary] = np.packbits(words, bitorder="little").view(np.int32)
    return row


class ThoughtsFirst:
    """Follows base.Cursor. cursor: the grammar's, at its start.   Raises GrammarError for marks that are no tokens of text."""

    __slots__ = ("_close", "_cursor", "_free", "_num_free", "_num_inside", "_opener", "_place", "_start")

    def __init__(self, cursor: Cursor, vocabulary: Vocabulary, close: int, opener: int | None = None) -> None:
        self._free = _free_row(vocabulary)
        for name, mark in (("thoughts_close", close), ("thoughts_open", opener)):
            if mark is not None and not (0 <= mark < vocabulary.width and _has(self._free, mark)):
                raise GrammarError(
                    f"{name} is {mark}; expected the id of a token that is neither padding nor an end.", param="grammar"
                )
        self._cursor, self._close, self._opener = cursor, close, opener
        self._place: Literal["start", "free", "inside"] = "free" if opener is None else "start"
        self._start = self._place
        self._num_free = self._num_inside = 0  # tokens accepted: opener, thoughts and mark; the grammar's

    @property
    def done(self) -> bool:
        return self._place == "inside" and self._cursor.done

    @property
    def dropped(self) -> int:
        return self._cursor.dropped if self._place == "inside" else 0

    def fill(self, row: NDArray[np.int32]) -> None:
        if self._place == "free":
            row[:] = self._free
            return
        self._cursor.fill(row)
        if self._place == "start":
            assert self._opener is not None
            row.view(np.uint32)[self._opener >> 5] |= np.uint32(1 << (self._opener & 31))

    def accept(self, token: int) -> bool:
        if self._place == "start" and token == self._opener:
            self._place = "free"
        elif self._place == "free":
            if not 0 <= token < 32 * len(self._free) or not _has(self._free, token):
                return False
            if token == self._close:
                self._place = "inside"
        else:
            if not self._cursor.accept(token):
                return False
            self._place = "inside"
            self._num_inside += 1
            return True
        self._num_free += 1
        return True

    def forced(self) -> Sequence[int]:
        return self._cursor.forced() if self._place == "inside" else ()

    def rollback(self, n: int) -> None:
        if not 0 <= n <= self._num_free + self._num_inside:
            raise ValueError(f"rollback by {n}, but only {self._num_free + self._num_inside} tokens were accepted.")
        inside = min(n, self._num_inside)
        if inside:
            self._cursor.rollback(inside)
        self._num_inside -= inside
        if n > inside:
            self._num_free -= n - inside
            self._place = "free"
        if not self._num_free and not self._num_inside:
            self._place = self._start

    def fork(self) -> ThoughtsFirst:
        other = ThoughtsFirst.__new__(ThoughtsFirst)
        other._cursor, other._close, other._opener = self._cursor.fork(), self._close, self._opener
        other._free, other._place, other._start = self._free, self._place, self._start
        other._num_free, other._num_inside = self._num_free, self._num_inside
        return other


def _has(row: NDArray[np.int32], token: int) -> bool:
    return bool(int(row[token >> 5]) >> (token & 31) & 1)
