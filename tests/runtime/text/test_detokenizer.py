"""Deltas are whole characters, and their concatenation is the decoding of everything at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from phloem.runtime.text.detokenizer import Detokenizer
from phloem.runtime.text.tokenizer import Tokenizer

Make = Callable[..., dict[str, Any]]

TEXTS = [
    "👨‍👩‍👧‍👦",
    "🇩🇪🇫🇷",
    "가나다라",
    "क्षत्रिय ज़िंदगी",
    "e\u0301 cafe\u0301",
    "a😀b",
    "日本語のテキスト",
    "x" * 50,
]


def streamed(detokenizer: Detokenizer, chunks: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` in pieces, as long as `cuts` says and the rest one by one."""
    chunks, at = [], 0
    for size in cuts:
        chunks.append(ids[at : at + size])
        at += size
    return chunks + [[i] for i in ids[at:]]


@pytest.mark.case("C-STOP-06")
@pytest.mark.parametrize("text", TEXTS)
def test_characters_split_over_tokens_arrive_whole(embedded: Tokenizer, text: str) -> None:
    deltas = streamed(embedded.detokenizer(), [[i] for i in embedded.encode(text)])
    assert "".join(deltas) == text
    assert "\ufffd" not in "".join(deltas)
    assert deltas[-1] == "", "nothing is held when the last character is complete"


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49_300), max_size=40), cuts=st.lists(st.integers(0, 5), max_size=20), skip=st.booleans())
@example(ids=[6004, 216, 34], cuts=[], skip=True)
def test_any_ids_in_any_chunks_equal_decoding_all_at_once(
    embedded: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    raw = b"".join(b"" if skip and i in embedded.special_ids else embedded.token_bytes(i) for i in ids)
    expected = raw.decode("utf-8", "replace")
    assert "".join(streamed(embedded.detokenizer(skip), cut(ids, cuts))) == expected
    assert embedded.decode(ids, skip) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=30), cuts=st.lists(st.integers(0, 3), max_size=10))
def test_bytes_that_are_no_text_become_replacement_characters_as_in_one_piece(data: bytes, cuts: list[int]) -> None:
    pieces = [bytes([b]) for b in range(256)]
    deltas = streamed(Detokenizer(pieces), cut(list(data), cuts))
    assert "".join(deltas) == data.decode("utf-8", "replace")


def test_a_delta_never_ends_inside_a_character(embedded: Tokenizer) -> None:
    detokenizer = embedded.detokenizer()
    ids = embedded.encode("😀")
    assert len(ids) > 1
    assert [detokenizer.push([i]) for i in ids] == [""] * (len(ids) - 1) + ["😀"]


def test_flush_gives_the_unfinished_character_and_starts_anew(embedded: Tokenizer) -> None:
    detokenizer = embedded.detokenizer()
    assert detokenizer.push(embedded.encode("a😀")[:-1]) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push(embedded.encode("b")) == "b"


def test_special_tokens_are_hidden_or_shown(embedded: Tokenizer) -> None:
    ids = [1, *embedded.encode("hi"), 2]
    assert "".join(streamed(embedded.detokenizer(True), [ids])) == "hi"
    assert "".join(streamed(embedded.detokenizer(False), [ids])) == "<|im_start|>hi<|im_end|>"


# -- SentencePiece: the blank at the start of a text ------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 300), max_size=12), cuts=st.lists(st.integers(0, 4), max_size=6), skip=st.booleans())
def test_sentencepiece_ids_in_any_chunks_equal_decoding_all_at_once(
    spm_metadata: Make, ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(spm_metadata(["he", "▁he", "▁▁"]))
    whole = b"".join(b"" if skip and i in tokenizer.special_ids else tokenizer.token_bytes(i) for i in ids)
    for continuation in (False, True):
        expected = whole if continuation else whole.removeprefix(b" ")
        deltas = streamed(tokenizer.detokenizer(skip, continuation), cut(ids, cuts))
        assert "".join(deltas) == expected.decode("utf-8", "replace")


def test_only_the_first_blank_of_the_text_goes(spm_metadata: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(spm_metadata(["he", "▁he"]))
    he, bos = tokenizer.token_to_id("▁he"), tokenizer.bos_id
    assert he is not None and bos is not None
    assert streamed(tokenizer.detokenizer(), [[bos], [he], [he]]) == ["", "he", " he", ""]
    assert streamed(tokenizer.detokenizer(continuation=True), [[he], [he]]) == [" he", " he", ""]


def test_byte_fallback_makes_characters(spm_metadata: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(spm_metadata())
    ids = [3 + b for b in "é😀".encode()]
    assert streamed(tokenizer.detokenizer(), [[i] for i in ids]) == ["", "é", "", "", "", "😀", ""]


def test_work_does_not_grow_with_the_text(embedded: Tokenizer) -> None:
    """Linear, by counting table look-ups: no token is ever decoded again."""

    class Counting(list[bytes]):
        reads = 0

        def __getitem__(self, i: Any) -> Any:
            Counting.reads += 1
            return super().__getitem__(i)

    ids = embedded.encode("word 😀 " * 500)
    detokenizer = Detokenizer(Counting(map(embedded.token_bytes, range(embedded.vocab_size))))
    text = "".join(detokenizer.push([i]) for i in ids)
    assert text == "word 😀 " * 500
    assert Counting.reads == len(ids)
