"""Small tokenizers made from nothing, and the embedded model's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.embedded import find_embedded
from phloem.runtime.models.gguf import GgufFile
from phloem.runtime.text.pieces import byte_level_alphabet
from phloem.runtime.text.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "text"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@pytest.fixture(scope="session")
def embedded() -> Tokenizer:
    try:
        file = find_embedded()
    except ModelLoadError as error:
        pytest.skip(str(error))
    return Tokenizer.from_gguf_metadata(GgufFile(file).metadata)


@pytest.fixture(scope="session")
def smollm2_fixture() -> dict[str, Any]:
    """Ids and renderings by transformers: scripts/make_text_fixtures.py."""
    parsed: dict[str, Any] = json.loads((FIXTURES / "smollm2.json").read_text(encoding="utf-8"))
    return parsed


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return {file.stem: file.read_text(encoding="utf-8") for file in FIXTURES.glob("*.jinja")}


@pytest.fixture
def byte_metadata() -> Callable[..., dict[str, Any]]:
    """GGUF metadata of a byte-level BPE: 256 bytes, then `merges` ("h e"), then `extra` (spelling, token type)."""

    def make(merges: Sequence[str] = (), extra: Sequence[tuple[str, int]] = (), **keys: Any) -> dict[str, Any]:
        tokens = list(byte_level_alphabet())
        tokens += [rule.replace(" ", "") for rule in merges]
        types = [NORMAL] * len(tokens) + [kind for _, kind in extra]
        tokens += [spelling for spelling, _ in extra]
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": list(merges) or ["a b"],
        }
        if not merges:
            tokens.append("ab")
            types.append(NORMAL)
        return {**metadata, **{f"tokenizer.{'' if k == 'chat_template' else 'ggml.'}{k}": v for k, v in keys.items()}}

    return make


@pytest.fixture
def spm_metadata() -> Callable[..., dict[str, Any]]:
    """GGUF metadata of a SentencePiece BPE: <unk> <s> </s>, 256 byte tokens, characters, then `pieces`, best first."""

    def make(pieces: Sequence[str] = (), **keys: Any) -> dict[str, Any]:
        tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
        types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
        normal = list(dict.fromkeys([*pieces, *"▁abcdefghijklmnopqrstuvwxyz<>/日"]))
        scores = [0.0] * len(tokens) + [-float(n) for n in range(len(normal))]
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens + normal,
            "tokenizer.ggml.token_type": types + [NORMAL] * len(normal),
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            **{f"tokenizer.{'' if k == 'chat_template' else 'ggml.'}{k}": v for k, v in keys.items()},
        }

    return make
