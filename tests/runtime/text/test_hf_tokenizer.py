"""A model's directory becomes a tokenizer, or an error that names the file."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.text.pieces import byte_level_alphabet
from phloem.runtime.text.tokenizer import Tokenizer

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A directory with a tokenizer of 256 bytes and `ab` (256), the files given as JSON, and <s> (257), </s> (258) added."""

    def make(*, tokenizer: bool = True, **files: Any) -> Path:
        if tokenizer:
            vocab = {**byte_level_alphabet(), "ab": 256}
            backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
            backend.enable_truncation(4)
            backend.enable_padding(length=4)
            backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return make


def test_truncation_and_padding_that_a_trainer_saved_are_off(write: Write) -> None:
    tokenizer = Tokenizer.from_directory(write())
    assert len(tokenizer.encode("x" * 10)) == 10
    assert len(tokenizer.encode("x")) == 1


def test_named_tokens_and_end_ids(write: Write) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None}
    tokenizer = Tokenizer.from_directory(write(tokenizer_config=config, generation_config={"eos_token_id": [258, 97]}))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (257, 258, None)
    assert tokenizer.eos_ids == {258, 97}
    assert tokenizer.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"generation_config": {"eos_token_id": 5}, "config": {"eos_token_id": 6}}, {258, 5}),
        ({"generation_config": {}, "config": {"eos_token_id": [6, 7]}}, {258, 6, 7}),
        ({}, {258}),
    ],
)
def test_end_ids_come_from_generation_config_else_config(write: Write, files: dict[str, Any], expected: set[int]) -> None:
    assert Tokenizer.from_directory(write(tokenizer_config={"eos_token": "</s>"}, **files)).eos_ids == expected


@pytest.mark.case("C-LOAD-12")
def test_tokens_that_only_the_configuration_adds(write: Write) -> None:
    added = {
        "259": {"content": "<tool>", "special": True},
        "260": {"content": "wow", "special": False, "normalized": False},
        "261": {"content": "<m>", "lstrip": True, "special": True, "normalized": False},
    }
    tokenizer = Tokenizer.from_directory(write(tokenizer_config={"added_tokens_decoder": added}))
    assert tokenizer.encode("<tool>wow  <m>") == [259, 260, 261], "<m> swallows the blanks on its left"
    assert tokenizer.special_ids == {257, 258, 259, 261}
    assert tokenizer.decode([259, 260, 261, 258]) == "wow"
    assert tokenizer.decode([259, 260], skip_special_tokens=False) == "<tool>wow"


def test_older_files_add_tokens_too(write: Write) -> None:
    files = {"added_tokens": {"<x>": 259}, "special_tokens_map": {"eos_token": "<x>", "additional_special_tokens": ["<y>"]}}
    tokenizer = Tokenizer.from_directory(write(**files))
    assert tokenizer.encode("<x><y>") == [259, 260]
    assert tokenizer.eos_id == 259
    assert {259, 260} <= tokenizer.special_ids


def test_a_named_token_of_the_vocabulary_becomes_special(write: Write) -> None:
    tokenizer = Tokenizer.from_directory(write(tokenizer_config={"eos_token": "ab"}))
    assert tokenizer.eos_id == 256
    assert 256 in tokenizer.special_ids
    assert 256 not in tokenizer.encode("ab", parse_special=False)


def test_files_of_two_tokenizers_are_refused(write: Write) -> None:
    config = {"added_tokens_decoder": {"300": {"content": "<late>", "special": True}}}
    with pytest.raises(ModelLoadError, match=r"'<late>' at id 300, tokenizer.json at 259"):
        Tokenizer.from_directory(write(tokenizer_config=config))


@pytest.mark.case("C-LOAD-09")
def test_add_bos_token_of_the_configuration_counts(write: Write) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    tokenizer = Tokenizer.from_directory(write(tokenizer_config=config))
    assert tokenizer.encode("x") == [257, *tokenizer.encode("x", add_special_tokens=False)]
    both = Tokenizer.from_directory(write(tokenizer_config={**config, "add_eos_token": True}))
    assert (both.encode("x")[0], both.encode("x")[-1]) == (257, 258)


def test_templates_in_order_of_precedence(write: Write) -> None:
    path = write(tokenizer_config={"chat_template": "config"})
    assert Tokenizer.from_directory(path).templates == {"default": "config"}
    (path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer.from_directory(path).templates == {"default": "json"}
    (path / "chat_template.jinja").write_text("jinja")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert Tokenizer.from_directory(path).templates == {"default": "jinja", "tool_use": "tools"}


def test_a_list_of_templates(write: Write) -> None:
    listed = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert Tokenizer.from_directory(write(tokenizer_config={"chat_template": listed})).templates == {
        "default": "d",
        "tool_use": "t",
    }


@pytest.mark.parametrize("entry", [None, "text", {}, {"name": "default"}, {"name": 1, "template": "x"}])
def test_a_list_of_templates_that_is_none_is_refused(write: Write, entry: Any) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template"):
        Tokenizer.from_directory(write(tokenizer_config={"chat_template": [entry]}))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[1]", '{"model": 1}'])
def test_a_damaged_file_is_named(write: Write, name: str, content: str) -> None:
    path = write()
    (path / name).write_text(content)
    if name != "tokenizer.json" and content.startswith('{"'):
        Tokenizer.from_directory(path)  # sound JSON that says nothing about tokens
        return
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        Tokenizer.from_directory(path)


@pytest.mark.parametrize("value", [5, {"lstrip": True}, ["<s>"]])
def test_a_special_token_that_is_none(write: Write, value: Any) -> None:
    with pytest.raises(ModelLoadError, match="special token"):
        Tokenizer.from_directory(write(tokenizer_config={"bos_token": value}))


def test_without_tokenizer_json_and_without_transformers(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json.*pip install transformers"):
        Tokenizer.from_directory(write(tokenizer=False))
