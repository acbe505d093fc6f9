"""Bytes of tokens, read off a decoder."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.runtime.errors import UnsupportedModelError
from phloem.runtime.text.pieces import ByteRules, byte_level_alphabet, rules_of_decoder

BYTE_LEVEL = {"type": "ByteLevel"}
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


def test_the_alphabet_has_every_byte_once() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["a"]) == (0x20, 0x0A, 0x61)


def test_the_table_equals_one_piece_at_a_time() -> None:
    rules = ByteRules(byte_level=True)
    tokens = ["Ġhello", "Ċ", "", "ÿ", "plain text", "日本", "\0x", "Ń"]
    for chosen in (tokens, [t for t in tokens if "\0" not in t]):
        assert rules.table(chosen) == [rules.piece(t) for t in chosen]
    assert rules.piece("Ġh") == b" h"
    assert rules.piece("日本") == "日本".encode(), "no byte spelling: it stands for itself"
    assert rules.table([None, "a"]) == [b"", b"a"]


def test_sentencepiece_rules() -> None:
    rules = rules_of_decoder(sequence(REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP), "x")
    assert rules == ByteRules(replace=(("▁", " "),), byte_fallback=True, strip_blanks=1)
    assert [rules.piece(t) for t in ("▁a▁", "<0xE2>", "<0xZZ>", "<0x0A>>")] == [b" a ", b"\xe2", b"<0xZZ>", b"<0x0A>>"]


def test_metaspace_drops_its_mark_in_the_first_token() -> None:
    rules = rules_of_decoder({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}, "x")
    assert (rules.piece("▁a"), rules.piece("▁a", first=True)) == (b" a", b"a")
    never = rules_of_decoder({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}, "x")
    assert never.piece("▁a", first=True) == b" a"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        sequence(STRIP, {"type": "Fuse"}),
        sequence(BYTE_LEVEL, REPLACE),
    ],
    ids=["none", "wordpiece", "strip of each token", "replace after bytes"],
)
def test_a_decoder_that_is_not_token_wise_is_refused(decoder: dict[str, Any] | None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tok\.json"):
        rules_of_decoder(decoder, "tok.json")
