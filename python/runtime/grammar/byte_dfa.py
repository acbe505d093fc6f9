"""A deterministic automaton over bytes: the one shape that regexes and byte tries of choices come to.

state 0 is dead, state 1 the start                      table[s, classes[b]] -> state
bytes that no state tells apart share a column          every state but 0 leads to an accepting one
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEAD", "START", "ByteDfa", "dfa_of_texts"]

DEAD, START = 0, 1


@dataclass(frozen=True)
class ByteDfa:
    """table: [states, columns] int32.   classes: [256] uint8, a byte's column.   accept: [states] bool. See the drawing."""

    table: NDArray[np.int32]
    classes: NDArray[np.uint8]
    accept: NDArray[np.bool_]

    @property
    def num_states(self) -> int:
        return len(self.table)

    @property
    def is_empty(self) -> bool:
        """Nothing matches."""
        return self.num_states == 1

    @cached_property
    def num_edges(self) -> NDArray[np.int64]:
        """[states]: bytes that lead on from each."""
        sizes = np.bincount(self.classes, minlength=self.table.shape[1])
        edges: NDArray[np.int64] = ((self.table != DEAD) * sizes).sum(1)
        return edges

    @cached_property
    def flat(self) -> memoryview:
        """The table for plain Python: flat[s * columns + class]. Indexing numpy by single integers takes five times as long."""
        return memoryview(self.table.ravel().data)

    @cached_property
    def columns(self) -> bytes:
        return self.classes.tobytes()

    def walk(self, state: int, data: bytes) -> int:
        """The state behind `data`; DEAD if there is none."""
        flat, columns, width = self.flat, self.columns, self.table.shape[1]
        for byte in data:
            state = flat[state * width + columns[byte]]
            if not state:
                break
        return state

    def following(self, state: int) -> int:
        """256-bit set of the bytes that lead on."""
        row = self.table[state][self.classes] != DEAD
        return int.from_bytes(np.packbits(row, bitorder="little").tobytes(), "little")

    @staticmethod
    def made(rows: Sequence[Mapping[int, int]], classes: NDArray[np.uint8], accepting: Iterable[int]) -> ByteDfa:
        """rows: of states 1, 2, …, column -> state. States that lead to no accepting one become dead, and are renumbered."""
        back: list[list[int]] = [[] for _ in range(len(rows) + 1)]
        for s, row in enumerate(rows, 1):
            for target in row.values():
                back[target].append(s)
        live = set(accepting)
        final, todo = frozenset(live), list(live)
        while todo:
            for s in back[todo.pop()]:
                if s not in live:
                    live.add(s)
                    todo.append(s)
        if START not in live:
            return ByteDfa(np.zeros((1, 1), np.int32), np.zeros(256, np.uint8), np.zeros(1, np.bool_))
        number = {s: i for i, s in enumerate(sorted(live), 1)}
        table = np.zeros((len(live) + 1, int(classes.max()) + 1), np.int32)
        accept = np.zeros(len(live) + 1, np.bool_)
        for s, i in number.items():
            accept[i] = s in final
            row = rows[s - 1]
            if row:
                table[i, list(row)] = [number.get(target, DEAD) for target in row.values()]
        return ByteDfa(table, classes, accept)


def dfa_of_texts(texts: Iterable[bytes]) -> ByteDfa:
    """Exactly these texts, as a trie."""
    used = bytearray(256)
    rows: list[dict[int, int]] = [{}]
    accepting = []
    for text in texts:
        state = START
        for byte in text:
            used[byte] = 1
            row = rows[state - 1]
            target = row.get(byte)
            if target is None:
                rows.append({})
                target = row[byte] = len(rows)
            state = target
        accepting.append(state)
    # Column 0 is for bytes of no text, but there are 256 columns at most: if all are used none is needed.
    column = np.cumsum(np.frombuffer(bytes(used), np.uint8)) - (min(used) == 1)
    classes = np.where(np.frombuffer(bytes(used), np.uint8) == 1, column, 0).astype(np.uint8)
    return ByteDfa.made([{int(classes[b]): s for b, s in row.items()} for row in rows], classes, accepting)
