"""Ids, spellings and bytes, on small tokenizers and on the embedded model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.text.parts import TokenizerParts
from phloem.runtime.text.pieces import byte_level_alphabet
from phloem.runtime.text.tokenizer import Tokenizer

Make = Callable[..., dict[str, Any]]


def test_ids_of_the_corpus_equal_transformers(embedded: Tokenizer, smollm2_fixture: dict[str, Any]) -> None:
    assert len(smollm2_fixture["corpus"]) > 100
    for entry in smollm2_fixture["corpus"]:
        assert embedded.encode(entry["text"]) == entry["ids"], entry["text"]
        assert embedded.decode(entry["ids"], skip_special_tokens=False) == entry["text"]


def test_every_digit_is_a_token_of_its_own(embedded: Tokenizer) -> None:
    assert [embedded.id_to_token(i) for i in embedded.encode("in 2024")] == ["in", "Ġ", "2", "0", "2", "4"]


def test_bytes_of_every_token_decode_to_its_text(embedded: Tokenizer) -> None:
    assert embedded.vocab_size == 49152
    for i in range(embedded.vocab_size):
        assert embedded.decode([i], skip_special_tokens=False) == embedded.token_bytes(i).decode("utf-8", "replace")


def test_bytes_of_ids_join_to_the_text(embedded: Tokenizer, smollm2_fixture: dict[str, Any]) -> None:
    for entry in smollm2_fixture["corpus"]:
        assert b"".join(map(embedded.token_bytes, entry["ids"])) == entry["text"].encode()


def test_special_ids_of_the_embedded_model(embedded: Tokenizer) -> None:
    assert (embedded.bos_id, embedded.eos_id, embedded.pad_id, embedded.unk_id) == (1, 2, 2, 0)
    assert embedded.eos_ids == {2}
    assert embedded.special_ids == embedded.control_ids == set(range(17))
    assert embedded.named_tokens["bos_token"] == "<|im_start|>"


# -- markup and text -----------------------------------------------------------------------------------------------------


def test_raw_text_is_parsed_for_special_tokens(embedded: Tokenizer) -> None:
    assert embedded.encode("<|im_start|>user")[0] == 1
    assert embedded.encode("x<|im_end|>")[-1] == 2


@pytest.fixture(scope="session")
def known_bytes(embedded: Tokenizer) -> set[int]:
    """The vocabulary lacks a token for some bytes that no text has (0x06, …); every tokenizer of it drops them."""
    pieces = map(embedded.token_bytes, range(embedded.vocab_size))
    return {piece[0] for piece in pieces if len(piece) == 1}


control_spellings = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "end|>", "<repo_name>", "<", "|>"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=6), control_spellings), max_size=8).map("".join))
def test_text_of_a_user_never_becomes_control(embedded: Tokenizer, known_bytes: set[int], text: str) -> None:
    ids = embedded.encode(text, parse_special=False)
    assert embedded.control_ids.isdisjoint(ids)
    if known_bytes.issuperset(text.encode()):
        assert embedded.decode(ids) == text
    if not any(token in text for token in embedded.control_tokens):
        assert ids == embedded.encode(text)


def test_a_word_of_the_models_own_vocabulary_that_spells_a_control_token(byte_metadata: Make) -> None:
    """With ignore_merges a whole word of the vocabulary is one token, and merges may lead to one: both are scrubbed."""
    metadata = byte_metadata(["E O", "EO T"], extra=[("STOP", 3)], pre="llama-bpe")
    metadata["tokenizer.ggml.token_type"][metadata["tokenizer.ggml.tokens"].index("EOT")] = 3
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    for word in ("EOT", "STOP"):
        control = tokenizer.token_to_id(word)
        assert tokenizer.encode(word) == [control]
        plain = tokenizer.encode(word, parse_special=False)
        assert control not in plain
        assert tokenizer.decode(plain) == word
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("EOT", parse_special=False)] == ["EO", "T"]


def test_markup_that_the_template_writes_is_control_and_runs_of_blanks_are_not(byte_metadata: Make) -> None:
    metadata = byte_metadata(
        extra=[("<s>", 3), ("<think>", 4), ("   ", 4), ("role", 4)],
        chat_template="{{ '<think>' }}   {{ messages[0].role }}",
    )
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.control_ids == {256, 257}, "`role` is a name in the template's code, not what it writes"
    assert tokenizer.special_ids == {256}
    assert tokenizer.encode("<think>   role") == [257, 258, 259]
    plain = tokenizer.encode("<think>   role", parse_special=False)
    assert plain[-2:] == [258, 259]
    assert 257 not in plain


def byte_tokenizer(added: list[AddedToken]) -> Tokenizer:
    """A model of single bytes, `added` numbered behind it as in a tokenizer.json."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for token in added:
        backend.add_tokens([token])
    return Tokenizer(TokenizerParts(backend, {}, frozenset()))


@pytest.mark.case("C-LOAD-12")
def test_added_tokens_beyond_the_models_vocabulary_keep_their_ids_in_plain_text() -> None:
    added = [
        AddedToken("<a>", special=True),
        AddedToken("  ", special=False),
        AddedToken("<b>", special=True),
        AddedToken("wow"),
    ]
    tokenizer = byte_tokenizer(added)
    assert tokenizer.encode("<a>  <b>wow") == [256, 257, 258, 259]
    assert tokenizer.encode("  wow", parse_special=False) == [257, 259]
    assert tokenizer.decode([256, 257, 258, 259]) == "  wow"
    assert tokenizer.decode([256, 257, 258, 259], skip_special_tokens=False) == "<a>  <b>wow"


@pytest.mark.case("C-LOAD-12")
def test_an_added_token_stands_for_what_it_spells() -> None:
    tokenizer = byte_tokenizer([AddedToken("éa", special=False), AddedToken("Ġx", special=True)])
    assert tokenizer.token_bytes(256) == "éa".encode()
    assert tokenizer.decode([256, 257], skip_special_tokens=False) == "éaĠx"


def test_an_added_token_may_be_normalized() -> None:
    tokenizer = metaspace_tokenizer("always", normalizers.Prepend("▁"))
    assert tokenizer.id_to_token(6) == "▁wow"
    assert tokenizer.token_bytes(6) == b" wow"


# -- BOS and EOS -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-LOAD-09")
def test_bos_stands_once(byte_metadata: Make) -> None:
    metadata = byte_metadata(extra=[("<s>", 3), ("</s>", 3)], bos_token_id=256, eos_token_id=257, add_bos_token=True)
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    x = tokenizer.token_to_id("x")
    assert tokenizer.encode("x") == [256, x]
    assert tokenizer.encode("<s>x") == [256, x], "already spelled: not doubled"
    assert tokenizer.encode("<s>x", add_special_tokens=False) == [256, x]
    assert tokenizer.encode("x", add_special_tokens=False) == [x]
    assert tokenizer.encode("") == [256]
    assert tokenizer.encode("x", parse_special=False) == [256, x]
    assert tokenizer.encode("<s>x", parse_special=False)[0] == 256
    assert 256 not in tokenizer.encode("<s>x", parse_special=False)[1:]


@pytest.mark.case("C-LOAD-09")
def test_bos_that_only_the_text_writes_is_left_alone(embedded: Tokenizer) -> None:
    assert embedded.encode("<|im_start|><|im_start|>x")[:2] == [1, 1], "this tokenizer adds none, so none is one too many"


@pytest.mark.case("C-LOAD-09")
def test_a_tokenizer_that_adds_eos_too(byte_metadata: Make) -> None:
    keys = {"bos_token_id": 256, "eos_token_id": 257, "add_bos_token": True, "add_eos_token": True}
    tokenizer = Tokenizer.from_gguf_metadata(byte_metadata(extra=[("<s>", 3), ("</s>", 3)], **keys))
    x = tokenizer.token_to_id("x")
    for parse in (True, False):
        assert tokenizer.encode("x", parse_special=parse) == [256, x, 257]
        assert tokenizer.encode("x", add_special_tokens=False, parse_special=parse) == [x]
    assert tokenizer.encode_continuation("x") == [x]


# -- continuations ---------------------------------------------------------------------------------------------------------


def test_a_continuation_gets_no_blank_in_front(spm_metadata: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(spm_metadata(["he", "▁he"]))
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("he")] == ["<s>", "▁he"]
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode_continuation("he")] == ["he"]
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode_continuation(" he")] == ["▁he"]


def test_a_continuation_of_byte_level_text_is_the_text(embedded: Tokenizer) -> None:
    assert embedded.encode_continuation(" world") == embedded.encode(" world")


def metaspace_tokenizer(scheme: str, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "▁", "a", "b", "▁a"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("wow", normalized=True)])
    return Tokenizer(TokenizerParts(backend, {"bos_token": "<s>"}, frozenset()))


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_runs_between_control_tokens_equal_encoding_the_whole(scheme: str) -> None:
    tokenizer = metaspace_tokenizer(scheme)
    whole = tokenizer.encode("a<s>a b<s>b", add_special_tokens=False)
    runs = [tokenizer.encode_run(text, at_start=n == 0) for n, text in enumerate(["a", "a b", "b"])]
    assert whole == [*runs[0], 1, *runs[1], 1, *runs[2]]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_metaspace_text_survives_the_round_trip(scheme: str) -> None:
    tokenizer = metaspace_tokenizer(scheme)
    for text in ("a b", " a", "ab a"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        expected = tokenizer._backend.decode(ids)
        assert tokenizer.decode(ids) == expected


# -- bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-LOAD-08")
def test_padded_ids_have_no_text_and_foreign_ids_are_refused(byte_metadata: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(byte_metadata(), width=320)
    assert tokenizer.vocab_size == 257
    assert tokenizer.decode([319, 257]) == ""
    assert tokenizer.token_bytes(300) == b""
    assert tokenizer.id_to_token(300) is None
    x = tokenizer.encode("x")
    assert tokenizer.decode([*x, 300, *x]) == "xx"
    for bad in ([320], [-1], [1, 2**40]):
        with pytest.raises(InvalidRequestError, match="0 to 319") as caught:
            tokenizer.decode(bad)
        assert caught.value.param == "token_ids"
    with pytest.raises(InvalidRequestError, match="no integer"):
        tokenizer.check_ids(["1"], param="stop_token_ids")  # type: ignore[list-item]


def test_without_a_known_width_only_what_can_be_no_id_is_refused(byte_metadata: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(byte_metadata())
    assert tokenizer.decode([100_000]) == ""
    for bad in (-1, 2**31):
        with pytest.raises(InvalidRequestError):
            tokenizer.token_bytes(bad)


@pytest.mark.parametrize("parse_special", [True, False])
def test_text_that_is_none_is_refused(embedded: Tokenizer, parse_special: bool) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate pair at character 2"):
        embedded.encode("ab\ud800", parse_special=parse_special)
    with pytest.raises(InvalidRequestError, match="is a bytes"):
        embedded.encode(b"ab", parse_special=parse_special)  # type: ignore[arg-type]


def test_two_ids_may_be_spelled_alike(byte_metadata: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(byte_metadata(extra=[("twin", 1), ("twin", 1)]))
    assert [tokenizer.token_bytes(i) for i in (256, 257)] == [b"twin", b"twin"]


def test_a_normalizer_that_prefixes_is_taken_off_for_continuations_only() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"▁": 0, "a": 1}, merges=[]))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = Tokenizer(TokenizerParts(backend, {}, frozenset()))
    assert tokenizer.encode("a a") == [0, 1, 0, 1]
    assert tokenizer.encode_continuation("a a") == [1, 0, 1]
    assert json.loads(backend.to_str())["normalizer"]["normalizers"][0]["type"] == "Prepend", "the original is untouched"
