"""One cursor for every grammar that is an automaton over tokens: token_fsm's and the canonical trie of choices.

    place -> place -> place          accept links a new place to the last; rollback walks back; fork shares them all
    state, tail, pending run

Places never change, so a fork costs a pointer (G2). Owns J1: a run is computed where none is pending, and kept until consumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.grammar.vocabulary import MAX_TAIL, Vocabulary

__all__ = ["DEAD", "ENDED", "OVERRUN", "Automaton", "StateCursor"]

DEAD, ENDED, OVERRUN = 0, -1, -2  # no state; behind a stop id; behind a token that open_end let in (G7)


class Automaton(Protocol):
    """States are positive, but for the three above. All of it is a function of its arguments."""

    @property
    def start(self) -> int: ...
    @property
    def vocabulary(self) -> Vocabulary: ...
    def step(self, state: int, token: int) -> int:
        """The state behind `token`, DEAD if it is not legal. Any integer may be asked for."""

    def fill(self, state: int, row: NDArray[np.int32]) -> None: ...
    def done(self, state: int) -> bool: ...
    def forced(self, state: int, tail: tuple[int, ...]) -> tuple[int, ...]:
        """The run from here on; empty: the model chooses."""


class _Place(NamedTuple):
    back: _Place | None
    state: int
    tail: tuple[int, ...]
    run: tuple[int, ...]
    at: int  # tokens of the run consumed


class StateCursor:
    """See the module's drawing. `Cursor` of base.py. fill and accept take one or two microseconds."""

    __slots__ = ("_automaton", "_place")

    def __init__(self, automaton: Automaton, tail: tuple[int, ...] = ()) -> None:
        self._automaton = automaton
        self._place = _Place(None, automaton.start, tail, automaton.forced(automaton.start, tail), 0)

    @property
    def done(self) -> bool:
        return self._automaton.done(self._place.state)

    @property
    def dropped(self) -> int:
        return int(self._place.state == OVERRUN)

    def fill(self, row: NDArray[np.int32]) -> None:
        place = self._place
        if place.run:
            token = place.run[place.at]
            row.fill(0)
            row.view(np.uint32)[token >> 5] = 1 << (token & 31)
        else:
            self._automaton.fill(place.state, row)

    def accept(self, token: int) -> bool:
        automaton, place = self._automaton, self._place
        at, run = place.at, place.run
        if run and token != run[at]:
            return False
        state = automaton.step(place.state, token)
        if state == DEAD:
            return False
        tail = (*place.tail, token)[-MAX_TAIL:]
        if at + 1 < len(run):
            self._place = _Place(place, state, tail, run, at + 1)
        else:
            self._place = _Place(place, state, tail, automaton.forced(state, tail), 0)
        return True

    def forced(self) -> Sequence[int]:
        return self._place.run[self._place.at :]

    def rollback(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"cannot undo {n} tokens.")
        place = self._place
        for done in range(n):
            if place.back is None:
                raise ValueError(f"cannot undo {n} tokens: only {done} were accepted.")
            place = place.back
        self._place = place

    def fork(self) -> StateCursor:
        twin = StateCursor.__new__(StateCursor)
        twin._automaton, twin._place = self._automaton, self._place
        return twin
