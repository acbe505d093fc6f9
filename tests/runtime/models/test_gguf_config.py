"""GGUF metadata: the numbers, and the refusals."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.layers.rope import RopeConfig
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.gguf_config import config_from_gguf

PLAIN: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.context_length": 512,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 5,
}


def read(factors: tuple[float, ...] = (), **changes: Any) -> ModelConfig:
    metadata = {**PLAIN, **{f"llama.{k}" if k != "general.architecture" else k: v for k, v in changes.items()}}
    metadata = {k: v for k, v in metadata.items() if v is not None}
    return config_from_gguf(
        metadata, "m.gguf", tied=True, vocabulary=99, qkv_bias=False, output_bias=False, rope_factors=factors
    )


def test_the_plain_keys() -> None:
    config = read()
    assert config.head_dim == 16 and config.vocabulary == 99 and config.tied and config.eos_ids == (2, 5)
    assert config.rope == RopeConfig(theta=10_000.0) and config.windows == (0, 0)
    assert read(**{"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32}).head_dim == 32
    assert read(**{"attention.sliding_window": 7}).windows == (7, 7)
    assert read(**{"rope.freq_base": 5}).rope.theta == 5.0
    assert read((1.0,) * 8).rope.factors == (1.0,) * 8
    yarn = read(**{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}).rope
    assert (yarn.kind, yarn.factor, yarn.original_context) == ("yarn", 4.0, 128)


@pytest.mark.case("C-LOAD-07")
@pytest.mark.parametrize(
    "changes",
    [
        {"general.architecture": "mamba"},
        {"rope.scaling.type": "longrope"},
        {"rope.scaling.type": "dynamic"},
        {"rope.scaling.attn_factor": 2.0},
        {"rope.dimension_count": 8},
        {"attention.value_length": 8},
        {"expert_count": 8},
        {"attention.causal": False},
        {"final_logit_softcapping": 30.0},
        {"embedding_scale": 12.0},
    ],
    ids=str,
)
def test_what_we_lack_is_refused_by_name(changes: dict[str, Any]) -> None:
    value = next(iter(changes.values()))
    with pytest.raises(UnsupportedModelError, match=f"{str(value).lower()}|{value}") as caught:
        read(**changes)
    assert "m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"embedding_length": None},
        {"embedding_length": "64"},
        {"block_count": 0},
        {"block_count": 2 + 2**31},  # a flipped bit: its list of windows would be 17 GB
        {"rope.freq_base": 0.0},
        {"rope.freq_base": float("nan")},
        {"rope.scaling.type": "linear", "rope.scaling.factor": float("inf")},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_beta_fast": 0.0},
        {"attention.head_count": 0},
        {"attention.head_count": [4, 4]},
        {"attention.layer_norm_rms_epsilon": None},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0},
    ],
    ids=str,
)
def test_malformed_keys_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        read(**changes)


def test_rope_factors_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight has 3 numbers; expected 8"):
        read((1.0, 2.0, 3.0))
