"""transformers on the same files: ids, texts and renderings are equal. Skipped where it is not installed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.text.chat import Marks, _encode_marked, encode_chat, render_chat
from phloem.runtime.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "text"
CORPUS = [entry["text"] for entry in json.loads((FIXTURES / "smollm2.json").read_text(encoding="utf-8"))["corpus"]]
MARKED = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool>", " <tool> ", "wow", " wow", "<m>", "   <m>", "<s>", "</s>"]


def byte_level(tokens: list[AddedToken]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    for token in tokens:
        tokenizer.add_tokens([token])
    return tokenizer


def sentencepiece(tokens: list[AddedToken], metaspace: str | None) -> tokenizers.Tokenizer:
    """As Llama's tokenizer.json: a prefix by the normalizer, or by a Metaspace pre-tokenizer with this scheme."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    whole = json.loads(tokenizer.to_str())  # the trainer made byte tokens special; a real one has them in the vocabulary only
    whole["added_tokens"] = [t for t in whole["added_tokens"] if t["id"] < 3]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(whole))
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    for token in tokens:
        tokenizer.add_tokens([token])
    return tokenizer


ADDED = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<|endoftext|>", special=True, normalized=False),
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("wow", special=False, single_word=True),
    AddedToken("<m>", special=True, lstrip=True, normalized=False),
    AddedToken("<e>", special=True, rstrip=True, normalized=False),
]
KINDS = ["byte-level", "sentencepiece", "sentencepiece-first", "sentencepiece-always"]


@pytest.fixture(scope="module")
def auto() -> Any:
    return pytest.importorskip("transformers").AutoTokenizer


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, auto: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """(ours, transformers') from one directory."""
    kind: str = request.param
    path = tmp_path_factory.mktemp(kind)
    if kind == "byte-level":
        backend = byte_level(ADDED)
        named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    else:
        _, _, scheme = kind.partition("-")
        backend = sentencepiece(ADDED, scheme or None)
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    backend.save(str(path / "tokenizer.json"))
    size = backend.get_vocab_size()
    only_in_config = {str(size): {"content": "<late>", "special": True, "lstrip": True, "normalized": False}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "added_tokens_decoder": only_in_config}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(path), auto.from_pretrained(str(path))


def texts() -> list[str]:
    rng = random.Random(11)
    mixed = ["".join(rng.choice(CORPUS)[:12] + rng.choice(MARKED) for _ in range(rng.randint(1, 5))) for _ in range(150)]
    return CORPUS + MARKED + mixed + ["x <late> y", "wow!", "wows wow", "<e>  x"]


@pytest.mark.case("C-LOAD-12")
def test_ids_equal(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    for text in texts():
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"], text
        if not text.startswith("<s>"):  # a BOS that the text spells is not doubled: documented
            assert ours.encode(text) == theirs(text)["input_ids"], text


@pytest.mark.case("C-LOAD-12")
def test_texts_equal(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    for text in texts():
        ids = theirs(text)["input_ids"]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == expected, text


def test_special_and_named_tokens_equal(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)


CONTENTS = ["hi", "", "  x\n", "line\nline\n\n", "2024 日本 😀 👨‍👩‍👧", "say \"<b>\" & 'c'", "\ttab  ", "a </think> b"]


def conversations(count: int) -> list[list[dict[str, str]]]:
    rng = random.Random(5)
    made = []
    for _ in range(count):
        chat = [{"role": "system", "content": rng.choice(CONTENTS)}] if rng.random() < 0.4 else []
        for turn in range(rng.randint(1, 5)):
            role = ("user", "assistant")[turn % 2] if rng.random() < 0.9 else "tool"
            content = rng.choice(CONTENTS)
            if role == "assistant" and rng.random() < 0.4:
                content = f"<think>\nhm {content}\n</think>\n\n{content}"
            chat.append({"role": role, "content": content})
        made.append(chat)
    return made


@pytest.mark.parametrize("name", [None, "llama3-style", "qwen3-style"])
def test_chats_equal(pair: tuple[Tokenizer, Any], templates: dict[str, str], name: str | None) -> None:
    ours, theirs = pair
    plain = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    template = templates[name] if name else plain
    tools = [{"type": "function", "function": {"name": "f", "description": "ü <b>"}}]
    for number, messages in enumerate(conversations(60)):
        options: dict[str, Any] = {"tools": tools if number % 3 == 0 else None, "add_generation_prompt": number % 2 == 0}
        thinking = {"enable_thinking": number % 4 == 0}
        rendered = theirs.apply_chat_template(messages, chat_template=template, tokenize=False, **options, **thinking)
        assert render_chat(ours, messages, template=template, variables=thinking, **options) == rendered
        ids = theirs.apply_chat_template(messages, chat_template=template, return_dict=False, **options, **thinking)
        assert encode_chat(ours, messages, template=template, variables=thinking, **options) == ids
        # Run by run, as where contents spell control tokens: the same ids (lang H3).
        assert list(_encode_marked(ours, rendered, Marks(ours, "\uf0f0", "\uf0f1"))) == ids


def test_a_directory_without_tokenizer_json_is_converted(auto: Any, tmp_path: Path) -> None:
    whole = json.loads(byte_level([]).to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(whole["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in whole["merges"]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    ours, theirs = Tokenizer.from_directory(tmp_path), auto.from_pretrained(str(tmp_path))
    for text in CORPUS[:40]:
        assert ours.encode(text) == theirs(text)["input_ids"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        Tokenizer.from_directory(empty)
