"""Rows of masks: which tokens lead on from each state of a byte automaton, for many states at once, and how they are kept.

    frontier of (state, trie node) pairs, one depth at a time:  a pair dies with its state; at a node with ids, they are legal
    a row with at most 64 ids is kept as its non-zero words; a longer one as it is

Knows no grammar and no cursor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.grammar.byte_dfa import DEAD, ByteDfa
from phloem.runtime.grammar.token_trie import TokenTrie

__all__ = ["Row", "row_of_ids", "row_of_words", "token_edges", "wide_masks"]

SPARSE_IDS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """sole: its only id, or -1.   words: [num_words], or those at `where`.   where: None for a whole row."""

    count: int
    sole: int
    words: NDArray[np.int32]
    where: NDArray[np.intp] | None

    def fill(self, row: NDArray[np.int32]) -> None:
        if self.where is None:
            row[:] = self.words
        else:
            row.fill(0)
            row[self.where] = self.words

    @property
    def nbytes(self) -> int:
        return 200 + self.words.nbytes + (0 if self.where is None else self.where.nbytes)


def row_of_ids(ids: Iterable[int], num_words: int) -> Row:
    """Of distinct ids."""
    ids = sorted(ids)
    if len(ids) > SPARSE_IDS:
        words = np.zeros(num_words, np.uint32)
        at = np.array(ids, np.int64)
        np.bitwise_or.at(words, at >> 5, np.uint32(1) << (at & 31).astype(np.uint32))
        return row_of_words(words.view(np.int32))
    packed: dict[int, int] = {}
    for i in ids:
        packed[i >> 5] = packed.get(i >> 5, 0) | 1 << (i & 31)
    where, kept = np.array(list(packed), np.intp), np.array(list(packed.values()), np.uint32)
    return Row(len(ids), ids[0] if len(ids) == 1 else -1, kept.view(np.int32), where)


def row_of_words(words: NDArray[np.int32]) -> Row:
    """Of a whole mask, kept in whichever form is smaller."""
    (where,) = np.nonzero(words)
    kept = words[where]
    count = int(np.bitwise_count(kept.view(np.uint32)).sum())
    if count > SPARSE_IDS:
        return Row(count, -1, words.copy(), None)
    sole = int(where[0]) * 32 + int(kept.view(np.uint32)[0]).bit_length() - 1 if count == 1 else -1
    return Row(count, sole, kept, where)


def token_edges(
    dfa: ByteDfa, trie: TokenTrie, states: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
    """Every (index into states, id, state behind it) that does not die within the token. In no order that means anything."""
    at = np.arange(len(states), dtype=np.int64)
    state = np.asarray(states, np.int32)
    node: NDArray[np.int64] = np.zeros(len(states), np.int64)
    found: list[tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]] = []
    flat, width = dfa.table.ravel(), np.int32(dfa.table.shape[1])
    column = dfa.classes.astype(np.int32)[trie.byte]
    while len(node):
        pair, child = _spread(trie.first[node], trie.count[node])
        target = flat[state[pair] * width + column[child]]
        (live,) = np.nonzero(target != DEAD)
        at, state, node = at[pair[live]], target[live], child[live]
        (ending,) = np.nonzero(trie.id_count[node])
        if len(ending):
            pair, slot = _spread(trie.id_first[node[ending]], trie.id_count[node[ending]])
            found.append((at[ending][pair], trie.ids[slot], state[ending][pair]))
    if not found:
        return np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32)
    return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found]), np.concatenate([f[2] for f in found])


def wide_masks(
    dfa: ByteDfa, trie: TokenTrie, states: Sequence[int], alive: NDArray[np.bool_], num_bits: int
) -> NDArray[np.bool_]:
    """[states, num_bits]: which ids end in a state that is alive. For states that most tokens survive in: no pair is dropped,
    and the whole trie is walked level by level, which takes a third of the time then."""
    legal = np.zeros((len(states), num_bits), np.bool_)
    width = dfa.table.shape[1]
    flat, column = dfa.table.ravel().astype(np.intp), dfa.classes.astype(np.intp)[trie.byte]
    at = np.asarray(states, np.intp)[:, None] * width
    slot = 0
    for (above, _), (begin, end) in pairwise(trie.levels):
        state = flat[at[:, trie.parent[begin:end] - above] + column[begin:end]]
        stop = slot + int(trie.id_count[begin:end].sum())
        legal[:, trie.ids[slot:stop]] = alive[state[:, trie.id_node[slot:stop] - begin]]
        at, slot = state * width, stop
    return legal


def _spread(first: NDArray[np.int32], count: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For ranges [first, first + count): the range each element comes from, and the element."""
    pair = np.repeat(np.arange(len(count)), count)
    begins = np.cumsum(count, dtype=np.int64) - count
    return pair, np.arange(len(pair)) + (first - begins)[pair]
