"""Which ids are text, and the tables that follow from them: each against a loop too simple to be wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.runtime.grammar.token_trie import TokenTrie
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.oracle import BOS, EOS, EOS2


def make(tokens: list[bytes], **changes: object) -> Vocabulary:
    given: dict[str, object] = {"stop_ids": [0], "special_ids": [0], "width": 64, "encode": lambda text: [], **changes}
    return Vocabulary(tokens, **given)  # type: ignore[arg-type]


def test_specials_stops_padding_and_ids_without_bytes_are_no_text(toy: Vocabulary) -> None:
    """G6."""
    assert not {EOS, EOS2, BOS} & set(toy.text_ids)
    assert all(toy.tokens[i] for i in toy.text_ids)
    v = make([b"</s>", b"a", b"", b"<x>", b"b"], special_ids=[0, 3])
    assert v.text_ids == (1, 4)
    assert len(v.tokens) == 64 and v.num_words == 2 and v.longest == 1


def test_the_embedded_models_specials_are_no_text(smollm2: Vocabulary) -> None:
    assert set(range(17)) == smollm2.special_ids
    assert not smollm2.special_ids & set(smollm2.text_ids)
    assert smollm2.stop_ids[0] == 2
    assert len(smollm2.spelled) == 256 - 21


def test_tables_equal_their_definitions(toy: Vocabulary) -> None:
    """G5."""
    tokens = {toy.tokens[i] for i in toy.text_ids}
    for prefix in {t[:n] for t in tokens for n in range(1, len(t) + 1)}:
        onward = {t[len(prefix)] for t in tokens if t.startswith(prefix) and t != prefix}
        assert toy.extends.get(prefix, 0) == sum(1 << b for b in onward)
    for byte in range(256):
        bits = np.flatnonzero(np.unpackbits(toy.starts[byte].view(np.uint8), bitorder="little")).tolist()
        assert bits == [i for i in toy.text_ids if toy.tokens[i][0] == byte]
    assert np.flatnonzero(np.unpackbits(toy.stop_mask.view(np.uint8), bitorder="little")).tolist() == [EOS, EOS2]


@given(st.lists(st.binary(min_size=1, max_size=5), max_size=40))
def test_the_trie_finds_every_token(tokens: list[bytes]) -> None:
    trie = TokenTrie([(b, 100 + i) for i, b in enumerate(tokens)])

    def below(node: int, path: bytes) -> dict[bytes, list[int]]:
        ids = trie.ids[trie.id_first[node] : trie.id_first[node] + trie.id_count[node]].tolist()
        found = {path: sorted(ids)} if ids else {}
        for child in range(trie.first[node], trie.first[node] + trie.count[node]):
            found |= below(child, path + bytes((trie.byte[child],)))
        return found

    expected: dict[bytes, list[int]] = {}
    for i, token in enumerate(tokens):
        expected.setdefault(token, []).append(100 + i)
    assert below(0, b"") == expected


def test_encode_bytes_gives_whole_characters_or_nothing(toy: Vocabulary) -> None:
    assert toy.encode_bytes("aé".encode()) == toy.encode("aé")
    assert toy.encode_bytes(b"a\xc3") is None
    assert toy.encode_bytes(b"") == []
    assert make([b"</s>", b"a"], encode=lambda text: [1]).encode_bytes(b"b") is None  # not the bytes asked for


def test_the_tail_ends_at_a_special_token(toy: Vocabulary) -> None:
    """J9."""
    a, b = toy.encode("xq")
    assert toy.tail([a, b, a, b, a, b]) == (a, b, a, b)
    assert toy.tail([a, BOS, b]) == (b,)
    assert toy.tail([a, EOS]) == () and toy.tail([]) == ()
    assert toy.tail([a, toy.width - 1, b]) == (b,)  # padding has no text


def test_the_hash_tells_vocabularies_apart() -> None:
    base = make([b"</s>", b"a"])
    assert base.hash == make([b"</s>", b"a"]).hash
    others = [
        make([b"</s>", b"b"]), make([b"</s>", b"a", b"b"]), make([b"</s>", b"a"], width=65), make([b"</s>", b"a"], stop_ids=[0, 1]),
        make([b"</s>", b"a"], special_ids=[0, 1]), make([b"</s>", b"a"], fingerprint="x"), make([b"</s>a", b""]),
    ]  # fmt: skip
    assert len({base.hash, *(v.hash for v in others)}) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 1}, "below the 2 tokens"),
        ({"stop_ids": []}, "needs a stop id"),
        ({"stop_ids": [64]}, "stop_ids holds 64"),
        ({"special_ids": [-1]}, "special_ids holds -1"),
    ],
)
def test_contradicting_data_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([b"</s>", b"a"], **changes)
