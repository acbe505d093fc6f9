"""Which words a name cuts a text into; the pieces are written down by hand."""

from __future__ import annotations

import pytest

from phloem.runtime.errors import UnsupportedModelError
from phloem.runtime.text.pieces import byte_level_alphabet
from phloem.runtime.text.pretokenizers import pre_tokenizer_named

TABLE = [
    ("smollm", "in 2024!", ["in", " ", "2", "0", "2", "4", "!"]),
    ("starcoder", "a12 b", ["a", "1", "2", " b"]),
    ("gpt-2", "in 2024!", ["in", " 2024", "!"]),
    ("gpt-2", "I'LL they're  x\n\n", ["I", "'", "LL", " they", "'re", " ", " x", "\n\n"]),
    ("llama-bpe", "in 2024!", ["in", " ", "202", "4", "!"]),
    ("llama-bpe", "I'LL (x)\n y", ["I", "'LL", " (", "x", ")\n", " y"]),
    ("qwen2", "in 2024!\n\n  z", ["in", " ", "2", "0", "2", "4", "!\n\n", " ", " z"]),
    ("qwen2", "e\u0301x", ["e", "\u0301x"]),
    ("qwen35", "e\u0301x", ["e\u0301x"]),
    ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
    ("gpt-4o", "it's HelloWorld 1234", ["it's", " Hello", "World", " ", "123", "4"]),
    ("default", "a1234!=b", ["a", "123", "4", "!=", "b"]),
]


@pytest.mark.parametrize("name, text, words", TABLE, ids=[f"{name}: {text!r}" for name, text, _ in TABLE])
def test_a_name_cuts_text_into_its_words(name: str, text: str, words: list[str]) -> None:
    spelled = [word for word, _ in pre_tokenizer_named(name).build().pre_tokenize_str(text)]
    alphabet = byte_level_alphabet()
    assert [bytes(alphabet[c] for c in word).decode() for word in spelled] == words


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'smolm'.*smollm"):
        pre_tokenizer_named("smolm")
