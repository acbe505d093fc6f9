"""What a draw could have given, between the samplers' bit rows and `request.Support`; equal ones are one object.

    bit row, uint32 words ──few──► Support("ids")     ──many──► Support("bits")     all logits of the row ──► None

A grammar's state has one mask, so all draws of a batch from it share one Support (rl L4). Knows no logits.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.request import SamplingParams, Support

__all__ = ["Supports", "cuts"]

MAX_REMEMBERED = 1024


def cuts(s: SamplingParams, vocab_size: int) -> bool:
    """A filter is on, so that what could be drawn depends on the logits."""
    return s.temperature == 0.0 or 0 < s.top_k < vocab_size or s.top_p < 1.0 or s.min_p > 0.0


class Supports:
    """Makes Supports of one vocabulary. width: logits a row; where it is more than the vocabulary, something is always cut."""

    def __init__(self, vocab_size: int, width: int) -> None:
        self.vocab_size, self.num_words = vocab_size, -(-vocab_size // 32)
        self._is_whole = vocab_size == width
        self._known: OrderedDict[bytes, Support] = OrderedDict()
        self.everything = self._pack(np.ones(vocab_size, np.bool_))

    def of(self, legal: NDArray[np.bool_]) -> Support | None:
        """legal: [vocab_size]."""
        return self.of_words(self._pack(legal))

    def of_words(self, words: NDArray[np.uint32]) -> Support | None:
        """words: [ceil(vocab_size / 32)], without bits beyond the vocabulary."""
        data = words.tobytes()
        known = self._known.get(data)
        if known is not None:
            self._known.move_to_end(data)
            return known
        if self._is_whole and data == self.everything.tobytes():
            return None
        made = Support("bits", data)
        if int.from_bytes(data, "little").bit_count() < self.num_words:
            made = Support("ids", np.flatnonzero(self._unpack(words)).astype("<i4").tobytes())
        self._known[data] = made
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return made

    def words(self, support: Support | None) -> NDArray[np.uint32]:
        """[ceil(vocab_size / 32)]. Ids outside the vocabulary name nothing."""
        if support is None:
            return self.everything
        if support.kind == "bits":
            words = np.zeros(self.num_words, "<u4")
            given = np.frombuffer(support.data, "<u4")[: self.num_words]
            words[: len(given)] = given
            return words & self.everything
        ids = np.frombuffer(support.data, "<i4").astype(np.int64)
        ids = ids[(ids >= 0) & (ids < self.vocab_size)]
        words = np.zeros(self.num_words, np.uint32)
        np.bitwise_or.at(words, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
        return words

    def mask(self, support: Support | None) -> NDArray[np.bool_]:
        """[vocab_size]."""
        return self._unpack(self.words(support))

    def _pack(self, legal: NDArray[np.bool_]) -> NDArray[np.uint32]:
        padded = np.zeros(32 * self.num_words, np.bool_)
        padded[: len(legal)] = legal
        return np.packbits(padded, bitorder="little").view(np.uint32)

    def _unpack(self, words: NDArray[np.uint32]) -> NDArray[np.bool_]:
        return np.unpackbits(words.view(np.uint8), bitorder="little")[: self.vocab_size].astype(np.bool_)
