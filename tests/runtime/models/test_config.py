"""config.json: both spellings read alike, and nothing that changes the arithmetic is defaulted away."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.layers.rope import RopeConfig
from phloem.runtime.models.config import ModelConfig, config_from_hf
from tests.tiny_models import tiny_config


def read(family: str = "llama", **changes: Any) -> ModelConfig:
    return config_from_hf(tiny_config(family, **changes), "config.json")


def test_the_plain_fields() -> None:
    config = read("llama", num_key_value_heads=None, eos_token_id=[2, 5])
    assert (config.num_kv_heads, config.head_dim, config.q_width, config.kv_width) == (4, 16, 64, 64)
    assert config.windows == (0, 0) and config.eos_ids == (2, 5) and config.bos_ids == (1,) and not config.tied
    assert config.kv_bytes_per_token_f32 == 2 * 2 * 64 * 4
    assert read("qwen3", head_dim=None).head_dim == 128
    assert read("qwen2").qkv_bias and not read("qwen2").output_bias and read("qwen3").qk_norm
    assert read("llama", attention_bias=True).output_bias


@pytest.mark.parametrize(
    "family, changes, windows",
    [
        ("mistral", {"sliding_window": 9}, (9, 9)),
        ("mistral", {"sliding_window": None}, (0, 0)),
        ("llama", {"sliding_window": 9}, (0, 0)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (0, 9)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, (0, 0)),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
            (9, 0),
        ),
    ],
)
def test_windows(family: str, changes: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert read(family, **changes).windows == windows


@pytest.mark.case("C-LOAD-07")
def test_transformers_4_and_5_spell_the_same_rope() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    expected = RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_context=256)
    for spelling in (
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}},
        {"rope_theta": 1.0, "rope_scaling": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}},
    ):
        assert read("llama", **spelling).rope == expected
    assert read("llama", rope_theta=None).rope == RopeConfig(theta=10_000.0)
    assert read("llama", rope_scaling={"type": "default", "factor": 1.0}).rope.kind == "default"


@pytest.mark.case("C-LOAD-07")
@pytest.mark.parametrize(
    "changes, word",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 2.0}}, "rope type"),
        ({"rope_parameters": {"rope_type": "no such rope"}}, "no such rope"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "surprise": 1}}, "surprise"),
        ({"rope_scaling": {"factor": 2.0}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "layer type"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"head_dim": 15}, "head_dim is 15"),
    ],
)
def test_what_we_lack_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        read("llama", **changes)


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 63}, "not a multiple of num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_key_value_heads": 3}, "not a multiple of 3 KV heads"),
        ({"num_hidden_layers": -1}, "it has -1 layers"),
        ({"num_hidden_layers": 2**40}, "expected 1 to 4096"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"layer_types": [{}, {}]}, "layer_types is"),
        ({"rope_theta": 0}, "theta is 0"),
        ({"rope_theta": -1.0}, "theta is -1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "theta is 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": -1}}, "beta_slow is -1"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 2**70}}, "original_max_position_embeddings is"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rms_norm_eps": 0}, "epsilon is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_scaling": [1]}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope factor 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "low < high"),
    ],
)
def test_malformed_fields_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelLoadError, match=word) as caught:
        read("llama", **changes)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_window_that_layer_types_need_must_be_there() -> None:
    with pytest.raises(ModelLoadError, match="sliding_attention"):
        read("qwen2", layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ModelLoadError, match="layer_types"):
        read("qwen2", layer_types=["full_attention"])
