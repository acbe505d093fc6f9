"""A Cursor over a foreign engine's matcher: runs, stop ids, open ends and undo, the same for every such engine.

    decision point --mask--> row ─┬─ canonical: the engine's own run, or the one bit that is set   -> pending run
    (no run pending)              └─ permissive: the one bit that is set, else the model chooses
    accept(t): pending -> t must be its next id, the row is not asked       else -> t's bit of the row decides (G1)

    free: inside a free string of JSON (free_text.py) neither run nor row can change: such tokens are kept, and told to the engine
          when it is asked again

The engine sees text tokens only. Stop ids and what open_end lets in are handled here: neither ever reaches a matcher, some of
which cannot be asked anything behind a stop token (G3). Decisions are made when first asked for, once a decision point (J1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import GrammarDeadEnd
from phloem.runtime.grammar.free_text import RECENT, FreeStrings, inside_value
from phloem.runtime.grammar.vocabulary import MAX_TAIL, Vocabulary

__all__ = ["EngineCursor", "Matcher", "Rules"]


class Matcher(Protocol):
    """An engine's state in one sequence. Raises GrammarError when the engine gives up (its own limits)."""

    def mask(self, row: NDArray[np.int32]) -> None:
        """Overwrite: the legal text tokens. Stop bits may be anything."""

    def complete(self) -> bool:
        """The text so far is a whole value."""

    def accept(self, token: int) -> bool:
        """A text token. False: nothing has changed."""

    def rollback(self, n: int) -> None: ...
    def fork(self) -> Matcher: ...
    def run(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """The canonical run from here (J9); empty: none."""


@dataclass(frozen=True)
class Rules:
    """What one compiled grammar's cursors have in common. free: what holds inside its strings; None: nothing that is known."""

    vocabulary: Vocabulary
    canonical: bool
    open_end: bool = False
    free: FreeStrings | None = None

    @cached_property
    def stop_words(self) -> tuple[int, ...]:
        """The words of a mask that hold stop ids."""
        return tuple(np.flatnonzero(self.vocabulary.stop_mask).tolist())


_GOING, _STOPPED, _OPENED = 0, 1, 2  # ended by a stop id, or by a token behind the value
_Before = tuple[tuple[int, ...], int, tuple[int, ...], int]
"""What accept(token) has changed: run, at, tail, ended. Of a token that was kept: _KEPT, its bytes, tail, _GOING."""
_KEPT = (-1,)
_UNKNOWN = bytes(RECENT)  # a text that nothing is known of


class EngineCursor:
    """See the module's drawing. Follows base.Cursor."""

    __slots__ = (
        "_at",
        "_complete",
        "_decided",
        "_done",
        "_ended",
        "_final",
        "_history",
        "_inside",
        "_kept",
        "_matcher",
        "_recent",
        "_room",
        "_row",
        "_row_valid",
        "_rules",
        "_run",
        "_tail",
    )

    def __init__(self, matcher: Matcher, rules: Rules, tail: Sequence[int] = ()) -> None:
        self._matcher, self._rules = matcher, rules
        self._tail: tuple[int, ...] = tuple(tail)[-MAX_TAIL:] if rules.canonical else ()
        self._run: tuple[int, ...] = ()
        self._at = 0  # of the run, how many are accepted
        self._ended = _GOING
        self._decided = self._done = self._row_valid = False
        self._complete = self._final = False  # of the row's state; _final: nothing but stop ids may follow
        self._row: NDArray[np.int32] = np.empty(rules.vocabulary.num_words, np.int32)
        self._history: list[_Before] = []
        self._recent = b""  # the end of the text, if the grammar has free strings
        self._inside: int | None = (
            None  # bytes of the string, of a value, in which the text stops. None: in none that we know of
        )
        self._room = -1  # up to so many of them, a plain token changes neither mask nor run.   -1: this is no such place
        self._kept: list[int] = []  # accepted, and not yet told to the matcher

    # -------------------------------------------------------------------------------------------------------- questions

    @property
    def done(self) -> bool:
        if not self._decided:
            self._decide()
        return self._done

    @property
    def dropped(self) -> int:
        return int(self._ended == _OPENED)

    def forced(self) -> Sequence[int]:
        if not self._decided:
            self._decide()
        return self._run[self._at :]

    def fill(self, row: NDArray[np.int32]) -> None:
        if not self._decided:
            self._decide()
        if self._ended:
            row[:] = 0
        elif self._at < len(self._run):
            row[:] = 0
            token = self._run[self._at]
            row.view(np.uint32)[token >> 5] = 1 << (token & 31)
        else:
            row[:] = self._legal()

    # ---------------------------------------------------------------------------------------------------------- changes

    def accept(self, token: int) -> bool:
        if not self._decided:
            self._decide()
        rules = self._rules
        if self._ended or not 0 <= token < rules.vocabulary.width:
            return False
        if self._inside is not None and self._room >= self._inside + (size := rules.vocabulary.plain.sizes[token]) and size:
            self._history.append((_KEPT, size, self._tail, _GOING))
            self._inside += size
            self._kept.append(token)
            if rules.canonical:
                self._tail = (*self._tail, token)[-MAX_TAIL:]
            return True
        before = (self._run, self._at, self._tail, self._ended)
        if self._kept:
            self._tell()
        if self._at < len(self._run):
            if token != self._run[self._at]:
                return False
            self._consume(token)
            self._at += 1
        else:
            if not int(self._legal()[token >> 5]) >> (token & 31) & 1:
                return False
            if token in rules.vocabulary.stop_ids:
                self._ended = _STOPPED
            elif rules.open_end and self._is_behind(token):
                self._ended = _OPENED
            else:
                self._consume(token)
        self._history.append(before)
        self._room = -1
        if rules.free is not None:
            self._read(rules.vocabulary.tokens[token])
        if rules.canonical and not self._ended:
            special = token in rules.vocabulary.special_ids
            self._tail = () if special else (*self._tail, token)[-MAX_TAIL:]
        self._row_valid = False
        if self._ended or self._at == len(self._run):
            self._run, self._at, self._decided = (), 0, False
        return True

    def rollback(self, n: int) -> None:
        if not 0 <= n <= len(self._history):
            raise ValueError(f"rollback by {n}, but only {len(self._history)} tokens were accepted.")
        while n and self._kept:  # the matcher does not know of them, and all else is as it was
            assert self._inside is not None
            _, size, self._tail, _ = self._history.pop()
            self._kept.pop()
            self._inside -= size
            n -= 1
        undo = 0
        for _ in range(n):
            undo += self._ended == _GOING
            run, at, self._tail, self._ended = self._history.pop()
            self._run, self._at = ((), 0) if run is _KEPT else (run, at)
        if undo:
            self._matcher.rollback(undo)
        if n:
            self._row_valid = False
            self._recent, self._inside, self._room = _UNKNOWN, None, -1
            # A run that was pending is still the one of its decision point; with none, asking again gives none again (J1).
            self._decided = self._at < len(self._run)
            self._done = False

    def fork(self) -> EngineCursor:
        other = EngineCursor.__new__(EngineCursor)
        other._matcher, other._rules = self._matcher.fork(), self._rules
        other._tail, other._run, other._at, other._ended = self._tail, self._run, self._at, self._ended
        other._decided, other._done, other._row_valid = self._decided, self._done, self._row_valid
        other._complete, other._final = self._complete, self._final
        other._row, other._history = self._row.copy(), list(self._history)
        other._recent, other._inside, other._room, other._kept = self._recent, self._inside, self._room, list(self._kept)
        return other

    # ----------------------------------------------------------------------------------------------------------- inside

    def _consume(self, token: int) -> None:
        if not self._matcher.accept(token):
            raise GrammarDeadEnd(
                f"the grammar engine refuses token {token}, which its own mask let through. Please report this."
            )

    def _decide(self) -> None:
        """A decision point: is it over, is something forced?"""
        self._decided, self._run, self._at = True, (), 0
        if self._ended:
            self._done = True
            return
        row = self._legal()
        num_words = np.count_nonzero(row)
        self._done = False
        if not num_words:
            raise GrammarDeadEnd(
                "no token is legal here: the grammar's language cannot be spelled any further. Please report this."
            )
        if self._complete:
            self._done = self._final  # what open_end lets in continues nothing
        elif self._rules.canonical:
            self._run = self._matcher.run(self._tail)
        if num_words == 1 and not self._run and not self._done:
            at = int(np.flatnonzero(row)[0])
            word = int(row[at]) & 0xFFFFFFFF
            if word & (word - 1) == 0:
                self._run = (at * 32 + word.bit_length() - 1,)
        rules = self._rules
        if rules.free is not None and num_words >= rules.vocabulary.plain.num_words and not self._complete and not self._run:
            self._look_inside(rules.free, row)

    def _look_inside(self, free: FreeStrings, row: NDArray[np.int32]) -> None:
        """Whether the text stops inside a free string, and how far that leads. Only there is every plain token legal."""
        plain = self._rules.vocabulary.plain.mask
        if not (plain & ~row).any():
            if self._inside is None:
                self._inside = inside_value(self._recent)
            if self._inside is not None:
                self._room = free.room(self._inside)

    def _read(self, data: bytes) -> None:
        """Follow the text, as far as it takes to know where a string was opened."""
        self._recent = (self._recent + data)[-RECENT:]
        if self._inside is not None:
            self._inside = None if b'"' in data else self._inside + len(data)

    def _tell(self) -> None:
        for token in self._kept:
            self._consume(token)
            if self._rules.free is not None:
                self._recent = (self._recent + self._rules.vocabulary.tokens[token])[-RECENT:]
        self._kept.clear()

    def _legal(self) -> NDArray[np.int32]:
        """The plain mask of this state, stop ids and open end included."""
        if not self._row_valid:
            vocabulary, row = self._rules.vocabulary, self._row
            self._matcher.mask(row)
            for at in self._rules.stop_words:
                row[at] &= ~vocabulary.stop_mask[at]
            self._complete = self._matcher.complete()
            if self._complete:
                self._final = not row.any()
                if self._rules.open_end:
                    self._open(row)
                np.bitwise_or(row, vocabulary.stop_mask, out=row)
            self._row_valid = True
        return self._row

    def _open(self, row: NDArray[np.int32]) -> None:
        """G7: beside what continues the value, every text token whose first byte cannot."""
        starts = self._rules.vocabulary.starts
        behind = ~(starts & row).any(axis=1)
        np.bitwise_or(row, np.bitwise_or.reduce(starts[behind], axis=0, initial=0), out=row)

    def _is_behind(self, token: int) -> bool:
        """Whether the engine itself does not take this legal token: open_end let it in."""
        own = np.empty_like(self._row)
        self._matcher.mask(own)
        return not int(own[token >> 5]) >> (token & 31) & 1
