"""GGUF metadata becomes a tokenizer, or an error that names the key."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phloem.runtime.errors import ModelLoadError, PhloemError, UnsupportedModelError
from phloem.runtime.text.gguf_tokenizer import parts_from_gguf
from phloem.runtime.text.tokenizer import Tokenizer

Make = Callable[..., dict[str, Any]]


def test_merges_apply_in_their_order(byte_metadata: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(byte_metadata(["h e", "l l", "he ll", "Ġ w"]))
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("hello w")] == ["hell", "o", "Ġw"]


def test_the_pre_tokenizer_of_the_file_is_used(byte_metadata: Make) -> None:
    together, alone = (Tokenizer.from_gguf_metadata(byte_metadata(["2 0", "20 2"], pre=pre)) for pre in ("gpt-2", "smollm"))
    assert [together.id_to_token(i) for i in together.encode("202")] == ["202"]
    assert [alone.id_to_token(i) for i in alone.encode("202")] == ["2", "0", "2"]


def best_neighbours_joined(text: str, ranked: list[str]) -> list[str]:
    """SentencePiece BPE in its plainest form: join the neighbours whose union ranks first, the leftmost of equals."""
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(ranked.index(a + b), n) for n, (a, b) in enumerate(pairwise(symbols)) if a + b in ranked]
        if not unions:
            return symbols
        n = min(unions)[1]
        symbols[n : n + 2] = [symbols[n] + symbols[n + 1]]


PIECES = ["he", "lo", "el", "hel", "▁he", "▁hel", "lolo", "▁▁", "oh", "eh", "▁lo", "ll"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="helo ", min_size=1, max_size=24), order=st.permutations(PIECES))
def test_sentencepiece_joins_the_best_scored_neighbours(spm_metadata: Make, text: str, order: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(spm_metadata(order))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == best_neighbours_joined(text, order)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_falls_back_to_bytes(spm_metadata: Make) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(spm_metadata(["he"]))
    ids = tokenizer.encode("é日", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["▁", "<0xC3>", "<0xA9>", "日"]
    assert tokenizer.decode(ids) == "é日"


def test_sentencepiece_never_joins_pieces_into_a_control_token(spm_metadata: Make) -> None:
    metadata = spm_metadata(["s>", "<s", "</s"])
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert tokenizer.encode("<s>") == [1]
    plain = tokenizer.encode("<s></s>", add_special_tokens=False, parse_special=False)
    assert tokenizer.control_ids.isdisjoint(plain)
    assert tokenizer.decode(plain) == "<s></s>"


def test_a_space_prefix_that_the_file_switches_off(spm_metadata: Make) -> None:
    on, off = (Tokenizer.from_gguf_metadata(spm_metadata(["he"], add_space_prefix=flag)) for flag in (True, False))
    assert on.id_to_token(on.encode("he", add_special_tokens=False)[0]) == "▁"
    assert off.id_to_token(off.encode("he", add_special_tokens=False)[0]) == "he"
    for tokenizer in (on, off):
        assert tokenizer.decode(tokenizer.encode(" he")) == " he"


@pytest.mark.parametrize(
    "pre, key, expected",
    [("llama-bpe", None, True), ("gpt-2", None, False), ("gpt-2", True, True), ("llama-bpe", False, False)],
)
def test_bos_is_added_as_the_file_says_else_as_its_kind_does(
    byte_metadata: Make, pre: str, key: bool | None, expected: bool
) -> None:
    keys: dict[str, Any] = {} if key is None else {"add_bos_token": key}
    metadata = byte_metadata(extra=[("<s>", 3)], pre=pre, bos_token_id=256, **keys)
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    assert (tokenizer.encode("x")[:1] == [256]) is expected
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[-1:]


def test_any_spelling_can_be_bos(byte_metadata: Make) -> None:
    for spelling in ("<s:1>", "$A", "a:b:c", "日本"):
        metadata = byte_metadata(extra=[(spelling, 3), ("$B:1", 3)], bos_token_id=256, eos_token_id=257, add_bos_token=True)
        metadata["tokenizer.ggml.add_eos_token"] = True
        tokenizer = Tokenizer.from_gguf_metadata(metadata)
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode("x")] == [spelling, "x", "$B:1"]


def test_end_ids_are_those_of_sequence_turn_and_message(byte_metadata: Make) -> None:
    extra = [("<eos>", 3), ("<eot>", 3), ("<eom>", 3)]
    metadata = byte_metadata(extra=extra, eos_token_id=256, eot_token_id=257, eom_token_id=258)
    assert Tokenizer.from_gguf_metadata(metadata).eos_ids == {256, 257, 258}


def test_named_templates_are_found(byte_metadata: Make) -> None:
    metadata = byte_metadata(chat_template="x")
    metadata["tokenizer.chat_template.tool_use"] = "y"
    assert parts_from_gguf(metadata).templates == {"default": "x", "tool_use": "y"}


BROKEN: list[tuple[str, Any, type[Exception], str]] = [
    ("model", None, ModelLoadError, r"tokenizer\.ggml\.model is missing"),
    ("model", "bert", UnsupportedModelError, "'bert'"),
    ("pre", "nonesuch", UnsupportedModelError, "'nonesuch'"),
    ("tokens", None, ModelLoadError, r"tokenizer\.ggml\.tokens is missing"),
    ("tokens", "abc", ModelLoadError, r"tokenizer\.ggml\.tokens is missing or not a list"),
    ("tokens", ["a", 5], ModelLoadError, r"tokenizer\.ggml\.tokens holds 5"),
    ("tokens", [], ModelLoadError, r"tokenizer\.ggml\.tokens"),
    ("token_type", ["x"] * 257, ModelLoadError, r"tokenizer\.ggml\.token_type holds 'x'"),
    ("merges", [5], ModelLoadError, r"tokenizer\.ggml\.merges holds 5"),
    ("bos_token_id", "x", ModelLoadError, "bos_token_id is x"),
    ("token_type", [1, 1], ModelLoadError, r"2 entries in tokenizer\.ggml\.token_type"),
    ("merges", None, ModelLoadError, r"tokenizer\.ggml\.merges"),
    ("merges", ["nospace"], ModelLoadError, "'nospace'"),
    ("merges", ["q zz"], ModelLoadError, "'q zz' does not join"),
    ("merges", ["a c"], ModelLoadError, "'a c' does not join"),
    ("merges", ["a "], ModelLoadError, "'a ' does not join"),
    ("bos_token_id", True, ModelLoadError, "bos_token_id is True"),
    ("bos_token_id", 10_000, ModelLoadError, "bos_token_id is 10000"),
    ("eos_token_id", -1, ModelLoadError, "eos_token_id is -1"),
    ("add_bos_token", True, ModelLoadError, "no tokenizer.ggml.bos_token_id"),
]


@pytest.mark.parametrize("key, value, kind, words", BROKEN, ids=[f"{key}={value!r}" for key, value, _, _ in BROKEN])
def test_broken_metadata_is_an_error_that_names_the_key(
    byte_metadata: Make, key: str, value: Any, kind: type[Exception], words: str
) -> None:
    metadata = {**byte_metadata(), f"tokenizer.ggml.{key}": value}
    with pytest.raises(kind, match=words) as caught:
        parts_from_gguf(metadata, source="model.gguf")
    assert "model.gguf" in str(caught.value) or key == "pre"


WEIRD: list[Any] = [
    None, 0, -1, 1.5, float("nan"), "", "x", "\0", [], [1], ["a"], ["a b"] * 3, [None], {}, True, 2**40, b"x",
    ["a"] * 258, [7] * 258, [-1] * 258, [True] * 258, ["é ü"], [" "], ["a b c"], ["<s> a"],
]  # fmt: skip


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_any_value_at_any_key_is_a_tokenizer_or_an_error_of_ours(byte_metadata: Make, model: str) -> None:
    """The library panics (no Exception) on some of these; a damaged file must not reach it."""
    sound = byte_metadata(extra=[("<s>", 3)], bos_token_id=256, add_bos_token=True, scores=[0.0] * 258, chat_template="x")
    sound["tokenizer.ggml.model"] = model
    built = 0
    for key in sound:
        for value in WEIRD:
            try:
                tokenizer = Tokenizer.from_gguf_metadata({**sound, key: value})
            except PhloemError:
                continue
            tokenizer.decode(tokenizer.encode("hello <s> ab é"))
            built += 1
    assert 0 < built < len(sound) * len(WEIRD)


def test_sentencepiece_needs_a_score_for_each_token(spm_metadata: Make) -> None:
    with pytest.raises(ModelLoadError, match="1 entries"):
        parts_from_gguf({**spm_metadata(), "tokenizer.ggml.scores": [0.0]})
    with pytest.raises(UnsupportedModelError, match="normalises"):
        parts_from_gguf({**spm_metadata(), "tokenizer.ggml.remove_extra_whitespaces": True})


def test_no_id_is_the_formats_all_ones(byte_metadata: Make) -> None:
    assert Tokenizer.from_gguf_metadata(byte_metadata(bos_token_id=0xFFFFFFFF)).bos_id is None
