"""A vocabulary of 300 ids, and masks by brute force: what any grammar's cursor must do, whichever engine made it.

    language (a finite set of texts) + vocabulary --> legal ids behind a text: too simple to be wrong

A token is legal if the text with it can still be completed, over whole tokens, to a text of the language (F4); a stop id if
the text is one. Used for all engines: pass any CompiledGrammar whose language you can list.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from phloem.runtime.grammar.base import CompiledGrammar, Cursor
from phloem.runtime.grammar.vocabulary import Vocabulary

EOS, EOS2, BOS = 0, 1, 2
WIDTH = 312  # 300 ids and padding, no multiple of 32

MERGES = [
    "a b", "ab ab", "b a", "a a", "aa aa", "y e", "ye s", "n o", "t e", "te r", "yes ter", "t r", "tr u", "tru e", "f a", "l s",
    "fa ls", "fals e", "1 2", "12 3", "0 .", "0. 5", ". 5", "2 0", "- 1", '" :', '" a', '": 1', '{ "', "[ 1", ", 1", '" }', "1 }",
]  # fmt: skip


class ToyBpe:
    """Byte-pair encoding in ten lines: merges by rank, leftmost first. Bytes in `missing` have no token of their own."""

    def __init__(self, merges: Sequence[tuple[bytes, bytes]], missing: frozenset[int] = frozenset()) -> None:
        self.specials = {EOS: b"<eos>", EOS2: b"<end>", BOS: b"<bos>"}
        self.tokens: list[bytes] = [self.specials[i] for i in sorted(self.specials)]
        self.tokens += [bytes((b,)) for b in range(256) if b not in missing]
        self.rank: dict[tuple[bytes, bytes], int] = {}
        for left, right in merges:
            self.rank[left, right] = len(self.rank)
            if left + right not in self.tokens:
                self.tokens.append(left + right)
        self.ids = {b: i for i, b in reversed(list(enumerate(self.tokens))) if i not in self.specials}

    def encode(self, text: str) -> list[int]:
        parts = [bytes((b,)) for b in text.encode()]
        while True:
            ranked = [(self.rank[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in self.rank]
            if not ranked:
                return [self.ids[p] for p in parts if p in self.ids]
            _, i = min(ranked)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


def merges_of(spelled: Iterable[str]) -> list[tuple[bytes, bytes]]:
    pairs = (pair.split(" ", 1) for pair in spelled)
    return [(left.encode(), right.encode()) for left, right in pairs]


BYTE_MERGES = [
    (b"\xc3", b"\xa9"),
    (b"\xf0", b"\x9f"),
    (b"\xf0\x9f", b"\x98"),
    (b"\xe4", b"\xb8"),
    (b"a", b"\xc3"),
    (b"\xa9", b"\xc3"),
]


def toy_vocabulary(
    missing: Iterable[int] = (), merges: Iterable[str] = MERGES, extra: Iterable[bytes] = (b"ab",), width: int = WIDTH
) -> Vocabulary:
    """Bytes, merges, characters cut in two, two ids with the same bytes, two stop ids, specials that look like text."""
    bpe = ToyBpe([*merges_of(merges), *BYTE_MERGES], frozenset(missing))
    tokens = [*bpe.tokens, *extra]
    return Vocabulary(
        tokens, stop_ids=(EOS, EOS2), special_ids=(EOS, EOS2, BOS), width=max(width, len(tokens)), encode=bpe.encode
    )


class Oracle:
    """legal(text): ids by brute force over every token."""

    def __init__(self, language: Iterable[bytes], vocabulary: Vocabulary, open_end: bool = False) -> None:
        self.language, self.vocabulary, self.open_end = frozenset(language), vocabulary, open_end
        self._prefixes = {word[:n] for word in self.language for n in range(len(word) + 1)}
        self._known: dict[bytes, bool] = {}

    def completable(self, text: bytes) -> bool:
        if text not in self._prefixes:
            return False
        if text not in self._known:
            tokens = {self.vocabulary.tokens[i] for i in self.vocabulary.text_ids}
            self._known[text] = text in self.language or any(self.completable(text + t) for t in tokens)
        return self._known[text]

    def legal(self, text: bytes) -> set[int]:
        v = self.vocabulary
        found = {i for i in v.text_ids if self.completable(text + v.tokens[i])}
        if text in self.language:
            found |= set(v.stop_ids)
            if self.open_end:
                found |= {i for i in v.text_ids if text + v.tokens[i][:1] not in self._prefixes}
        return found


def bits_of(cursor: Cursor, vocabulary: Vocabulary) -> set[int]:
    row = np.full(vocabulary.num_words, -1, np.int32)  # fill has to overwrite all of it
    cursor.fill(row)
    set_bits = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    assert all(i < vocabulary.width for i in set_bits), "a bit beyond the width"
    return set(set_bits.tolist())


def check_place(cursor: Cursor, text: bytes, oracle: Oracle, *, exact: bool = True) -> set[int]:
    """G1 at one place; the legal ids there. exact=False: an engine whose own masks are canonical may leave spellings out."""
    v, expected = oracle.vocabulary, oracle.legal(text)
    plain = expected if not oracle.open_end else Oracle(oracle.language, v).legal(text)
    assert cursor.done == (text in oracle.language and plain <= set(v.stop_ids)), f"done is {cursor.done} behind {text!r}"
    bits = bits_of(cursor, v)
    run = list(cursor.forced())
    if run:
        assert bits == {run[0]}, f"a run is pending behind {text!r}, and the mask holds {bits}"
    elif exact:
        assert bits == expected, f"behind {text!r}: extra {bits - expected}, missing {expected - bits}"
    assert bits, f"a dead end behind {text!r}"
    assert bits <= expected, f"behind {text!r} the mask lets {bits - expected} through"
    for i in [-1, *range(v.width), v.width, v.width + 7]:
        probe = cursor.fork()
        assert probe.accept(i) == (i in bits), f"accept({i}) behind {text!r} is not what the mask says"
        if i not in bits:
            assert bits_of(probe, v) == bits, f"refusing {i} behind {text!r} has changed the cursor"
            assert list(probe.forced()) == run
    assert bits_of(cursor, v) == bits, "a fork has touched its origin"
    return bits


def check_masks(
    grammar: CompiledGrammar, oracle: Oracle, *, paths: int = 6, seed: int = 0, tail: Sequence[int] = (), exact: bool = True
) -> set[bytes]:
    """Random legal walks to the end, every bit checked on the way. The texts that came out, all in the language."""
    v, rng, texts = oracle.vocabulary, random.Random(seed), set()
    for _ in range(paths):
        cursor, text = grammar.cursor(tail), b""
        for _ in range(200):
            legal = check_place(cursor, text, oracle, exact=exact)
            if cursor.done:
                break
            token = rng.choice(sorted(legal))
            assert cursor.accept(token)
            if token in v.stop_ids or cursor.dropped:
                assert cursor.done and not cursor.forced()
                break
            text += v.tokens[token]
        assert text in oracle.language, f"{text!r} is not of the language"
        texts.add(text)
    return texts
