"""A model's vocabulary as grammars see it: plain data. Which bytes each id is, which ids end, which are never text.

    id   0 ............... len(tokens) ......... width        a mask has ceil(width / 32) words, the tail always zero
         text | special | stop      | padding

Text tokens are what masks and tries hold: no special, no stop id, no id without bytes (G6). Knows no tokenizer: two
callables encode. Built from one above this layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.grammar.token_trie import TokenTrie

__all__ = ["MAX_TAIL", "Plain", "Vocabulary"]

MAX_TAIL = 4  # ids of left context that a canonical run may merge with (J9)


class Plain(NamedTuple):
    """sizes: bytes of each id that is one of them, else 0.   mask: [num_words], read-only; num_words of it are not 0."""

    sizes: bytes
    mask: NDArray[np.int32]
    num_words: int


class Vocabulary:
    """tokens: the bytes of each id, b"" for one without text.   stop_ids: the tokenizer's own EOS first.   special_ids: never text.

    width: of a logits row, padded; at least len(tokens).   num_words: ceil(width / 32).   longest: bytes of the longest text token.
    encode: text -> ids with no special token, no BOS and no blank put in front. fingerprint: whatever else tells one tokenizer
    from another (its merges); goes into `hash`.   text_ids: sorted.   Raises ValueError for data that contradict each other.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        *,
        stop_ids: Sequence[int],
        special_ids: Iterable[int],
        width: int,
        encode: Callable[[str], list[int]],
        fingerprint: str = "",
    ) -> None:
        if width < len(tokens):
            raise ValueError(f"width is {width}, below the {len(tokens)} tokens of the vocabulary.")
        self.tokens: tuple[bytes, ...] = (*tokens, *[b""] * (width - len(tokens)))
        self.stop_ids = tuple(dict.fromkeys(stop_ids))
        self.special_ids = frozenset(special_ids)
        self.width, self.num_words = width, -(-width // 32)
        self.encode = encode
        if not self.stop_ids:
            raise ValueError("a vocabulary needs a stop id: without one no grammar could end.")
        for name, ids in (("stop_ids", self.stop_ids), ("special_ids", self.special_ids)):
            if bad := [i for i in ids if not 0 <= i < width]:
                raise ValueError(f"{name} holds {bad[0]}; expected ids from 0 to {width - 1}.")
        never = self.special_ids.union(self.stop_ids)
        self.text_ids: tuple[int, ...] = tuple(i for i, b in enumerate(self.tokens) if b and i not in never)
        self.longest = max((len(self.tokens[i]) for i in self.text_ids), default=0)
        digest = hashlib.sha256(repr((self.stop_ids, sorted(self.special_ids), width, fingerprint)).encode())
        for token in self.tokens:
            digest.update(len(token).to_bytes(4, "little") + token)
        self.hash = digest.hexdigest()

    # ------------------------------------------------------------------------------------------------- text to ids and back

    def encode_bytes(self, data: bytes) -> list[int] | None:
        """The tokenizer's own ids of these bytes. None unless they are whole characters that it spells as they are."""
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return None
        ids = self.encode(text)
        return ids if self.join(ids) == data else None  # an <unk>, a normalizer: not the bytes that were asked for

    def join(self, ids: Iterable[int]) -> bytes:
        tokens = self.tokens
        return b"".join([tokens[i] for i in ids])

    def tail(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The last ids, at most 4, since a special token or one without text: what text that follows could merge with."""
        kept: list[int] = []
        for i in reversed(ids[-MAX_TAIL:]):
            if i in self.special_ids or i in self.stop_ids or not 0 <= i < self.width or not self.tokens[i]:
                break
            kept.append(i)
        return tuple(reversed(kept))

    # ------------------------------------------------------------------------------------------------------ derived tables

    @cached_property
    def extends(self) -> dict[bytes, int]:
        """Proper prefix of a text token -> 256-bit set of the bytes that go on from it within some token."""
        table: dict[bytes, int] = {}
        for token in {self.tokens[i] for i in self.text_ids}:
            for end in range(1, len(token)):
                prefix = token[:end]
                table[prefix] = table.get(prefix, 0) | 1 << token[end]
        return table

    @cached_property
    def starts(self) -> NDArray[np.int32]:
        """[256, num_words]: row b is the mask of the text tokens whose first byte is b. Read-only."""
        first = np.array([self.tokens[i][0] for i in self.text_ids], np.int64)
        table = np.zeros((256, self.num_words), np.uint32)
        ids = np.array(self.text_ids, np.int64)
        np.bitwise_or.at(table, (first, ids // 32), np.uint32(1) << (ids % 32).astype(np.uint32))
        table.flags.writeable = False
        return table.view(np.int32)

    @cached_property
    def stop_mask(self) -> NDArray[np.int32]:
        """[num_words]: all stop ids. Read-only."""
        row = np.zeros(self.num_words, np.uint32)
        for i in self.stop_ids:
            row[i // 32] |= np.uint32(1 << i % 32)
        row.flags.writeable = False
        return row.view(np.int32)

    @cached_property
    def plain(self) -> Plain:
        """Tokens that are characters of a JSON string as they stand: whole ones; no quote, no backslash, no control character."""
        sizes = bytearray(self.width)
        for i in self.text_ids:
            token = self.tokens[i]
            if len(token) < 256 and min(token) >= 0x20 and not {0x22, 0x5C, 0x7F} & set(token) and _is_text(token):
                sizes[i] = len(token)
        words = np.zeros(self.num_words * 32, np.bool_)
        words[np.flatnonzero(np.frombuffer(bytes(sizes), np.uint8))] = True
        mask = np.packbits(words, bitorder="little").view(np.int32)
        mask.flags.writeable = False
        return Plain(bytes(sizes), mask, int(np.count_nonzero(mask)))

    @cached_property
    def trie(self) -> TokenTrie:
        """The text tokens by their bytes."""
        return TokenTrie([(self.tokens[i], i) for i in self.text_ids])

    @cached_property
    def spelled(self) -> frozenset[int]:
        """Bytes that are text tokens by themselves."""
        return frozenset(self.tokens[i][0] for i in self.text_ids if len(self.tokens[i]) == 1)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
