"""How often a live request's tokens have occurred, kept up to date one token at a time.

    history  [5, 9, 5 | 7, 5, 7]      num_prompt = 3
    counts   ids 5 9 7   in_output 1 0 2       every id of prompt and output once; how often the *output* has it

The whole history counts, cached prompt or not (M3): it comes from the request, never from what was computed. A token costs one
dictionary look-up, not a walk over the history. Entries are told apart by request id and checked against the history given;
one that does not continue what was counted is counted anew. The least recently used beyond `capacity` are dropped.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["CountsCache", "TokenCounts"]


class TokenCounts:
    """Counts of one history. ids: distinct ids of the vocabulary, in order of first occurrence."""

    __slots__ = ("_counts", "_history", "_ids", "_index", "_last", "_num_prompt", "_seen")

    def __init__(self, history: Sequence[int], num_prompt: int, vocab_size: int) -> None:
        tokens = np.fromiter(history, np.int64, len(history))
        legal = (tokens >= 0) & (tokens < vocab_size)
        kept = tokens[legal]
        distinct, first, inverse = np.unique(kept, return_index=True, return_inverse=True)
        order = np.argsort(first)
        in_output = np.bincount(inverse[np.count_nonzero(legal[:num_prompt]) :], minlength=len(distinct))
        capacity = max(64, 2 * len(distinct))
        self._ids, self._counts = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
        self._ids[: len(distinct)], self._counts[: len(distinct)] = distinct[order], in_output[order]
        self._index = {token: i for i, token in enumerate(distinct[order].tolist())}
        self._history, self._num_prompt, self._seen = history, num_prompt, len(history)
        self._last = int(tokens[-1]) if len(tokens) else -1

    def continues(self, history: Sequence[int], num_prompt: int) -> bool:
        """True if `history` is what was counted, plus new tokens at its end. O(1) for a list that grows in place."""
        seen = self._seen
        if num_prompt != self._num_prompt or len(history) < seen or (seen and history[seen - 1] != self._last):
            return False
        return history is self._history or list(history[:seen]) == list(self._history[:seen])

    def update(self, history: Sequence[int], vocab_size: int) -> None:
        for i in range(self._seen, len(history)):
            token = self._last = int(history[i])
            if not 0 <= token < vocab_size:
                continue
            at = self._index.get(token)
            if at is None:
                at = self._index[token] = len(self._index)
                if at == len(self._ids):
                    self._ids, self._counts = (np.concatenate([a, np.zeros_like(a)]) for a in (self._ids, self._counts))
                self._ids[at] = token
            if i >= self._num_prompt:
                self._counts[at] += 1
        self._history, self._seen = history, len(history)

    def arrays(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Copies of (ids, times in the output), both int32 [distinct]."""
        n = len(self._index)
        return self._ids[:n].copy(), self._counts[:n].copy()


class CountsCache:
    """TokenCounts of the requests that were asked for last. One thread at a time."""

    def __init__(self, vocab_size: int, capacity: int) -> None:
        self._vocab_size, self._capacity = vocab_size, capacity
        self._entries: OrderedDict[str, TokenCounts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str, history: Sequence[int], num_prompt: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(ids of prompt and output, times in the output), int32, each id once; ids outside the vocabulary left out."""
        entry = self._entries.pop(request_id, None)
        if entry is not None and entry.continues(history, num_prompt):
            entry.update(history, self._vocab_size)
        else:
            entry = TokenCounts(history, num_prompt, self._vocab_size)
        self._entries[request_id] = entry
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return entry.arrays()
