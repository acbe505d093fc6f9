"""Our logits against transformers', on tiny random models of every architecture: the arithmetic of config and model files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phloem.runtime.backends import create_backend
from phloem.runtime.models.loader import load_model
from tests.paged_runs import all_logits
from tests.tiny_models import tiny_config, tiny_tensors, write_gguf, write_hf

IDS = [(7 * i * i + 3 * i + 1) % 96 for i in range(40)]
LONG_IDS = [(5 * i * i + 11 * i + 3) % 96 for i in range(1501)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


@torch.inference_mode()
def transformers_logits(folder: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


def our_logits(path: Path, ids: list[int], **how: Any) -> Tensor:
    backend = create_backend("reference")
    loaded = load_model(str(path), backend)
    return all_logits(backend, loaded.model, loaded.config, ids, **how)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    scale = theirs.abs().max()
    assert (ours - theirs).abs().max() <= 1e-4 * scale
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(tiny_config("llama"), id="llama"),
        pytest.param(tiny_config("llama", tie_word_embeddings=True), id="llama tied"),
        pytest.param(tiny_config("llama", attention_bias=True, num_key_value_heads=4), id="llama with biases, no groups"),
        pytest.param(
            tiny_config("llama", head_dim=24, num_key_value_heads=1), id="llama with a head_dim of its own, one kv head"
        ),
        pytest.param(tiny_config("mistral"), id="mistral"),
        pytest.param(tiny_config("mistral", sliding_window=7), id="mistral window"),
        pytest.param(tiny_config("mistral", sliding_window=1), id="mistral window of one"),
        pytest.param(tiny_config("qwen2", tie_word_embeddings=True), id="qwen2"),
        pytest.param(
            tiny_config("qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1), id="qwen2 window above"
        ),
        pytest.param(
            tiny_config("qwen2", use_sliding_window=False, sliding_window=5, max_window_layers=0), id="qwen2 window off"
        ),
        pytest.param(tiny_config("qwen3", tie_word_embeddings=True), id="qwen3"),
        pytest.param(tiny_config("qwen3", attention_bias=True), id="qwen3 with biases"),
    ],
)
def test_logits_agree(config: dict[str, Any], tmp_path: Path) -> None:
    write_hf(tmp_path, config)
    assert_close(our_logits(tmp_path, IDS), transformers_logits(tmp_path, IDS))


@pytest.mark.case("C-LOAD-07")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rope_theta": 500.0}, id="theta"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": 2.0}}, id="linear, transformers 4 spelling"),
        pytest.param({"rope_scaling": LLAMA3}, id="llama3"),
        pytest.param({"rope_scaling": YARN}, id="yarn"),
        pytest.param({"rope_scaling": {**YARN, "factor": None}}, id="yarn, factor from the contexts"),
        pytest.param({"rope_scaling": YARN, "original_max_position_embeddings": 64}, id="yarn, original context outside"),
        pytest.param(
            {"rope_scaling": {**YARN, "attention_factor": 0.8, "beta_fast": 20, "beta_slow": 2}}, id="yarn attention factor"
        ),
        pytest.param(
            {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}}, id="yarn mscale, not truncated"
        ),
        pytest.param(
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1234.5}}, id="nested default"
        ),
        pytest.param({"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 99.0}}, id="nested llama3"),
        pytest.param({"rope_theta": None, "rope_parameters": {**YARN, "rope_theta": 777.0}}, id="nested yarn"),
        pytest.param(
            {"rope_theta": 77.0, "rope_parameters": {"rope_type": "linear", "factor": 3.0}}, id="nested linear, theta outside"
        ),
    ],
)
def test_rope_agrees_near_and_far(changes: dict[str, Any], tmp_path: Path) -> None:
    # One head of 32, since every one of 1,501 tokens attends to all before it.
    small = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 32}
    write_hf(tmp_path, tiny_config("llama", **small, **changes))
    ours, theirs = our_logits(tmp_path, LONG_IDS), transformers_logits(tmp_path, LONG_IDS)
    for position in (10, 1500):
        assert (ours[position] - theirs[position]).abs().max() <= 1e-3
    plain = write_hf(tmp_path / "plain", tiny_config("llama", **small))
    assert (our_logits(plain, LONG_IDS[:200])[199] - ours[199]).abs().max() > 1e-2, (
        "the scaling changed nothing: the test is blind"
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_gives_the_same_logits_as_its_directory(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, tie_word_embeddings=family == "qwen3")
    tensors = tiny_tensors(config)
    write_hf(tmp_path / "hf", config, tensors)
    gguf = write_gguf(tmp_path / "model.gguf", config, tensors)
    assert torch.equal(our_logits(gguf, IDS), our_logits(tmp_path / "hf", IDS))


def test_shards_give_the_same_logits(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    write_hf(tmp_path / "one", config)
    write_hf(tmp_path / "three", config, shards=3)
    assert torch.equal(our_logits(tmp_path / "three", IDS), our_logits(tmp_path / "one", IDS))


@pytest.mark.case("C-LOAD-02")
def test_tied_with_a_copy_of_the_head_and_untied_with_another_head(tmp_path: Path) -> None:
    tied = tiny_config("llama", tie_word_embeddings=True)
    tensors = tiny_tensors(tied)
    write_hf(tmp_path / "tied", tied, tensors)
    write_hf(tmp_path / "copy", tied, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert torch.equal(our_logits(tmp_path / "copy", IDS), our_logits(tmp_path / "tied", IDS))

    head = tiny_tensors(tiny_config("llama"), seed=1)["lm_head.weight"]
    write_hf(tmp_path / "untied", {**tied, "tie_word_embeddings": False}, {**tensors, "lm_head.weight": head})
    ours = our_logits(tmp_path / "untied", IDS)
    assert_close(ours, transformers_logits(tmp_path / "untied", IDS))
    assert not torch.allclose(ours, our_logits(tmp_path / "tied", IDS))


@pytest.mark.case("C-LOAD-08")
def test_a_padded_vocabulary_is_as_wide_as_its_rows(tmp_path: Path) -> None:
    config = tiny_config("llama", vocab_size=160)
    write_hf(tmp_path, config)
    ours = our_logits(tmp_path, IDS)
    assert ours.shape == (len(IDS), 160)
    assert_close(ours, transformers_logits(tmp_path, IDS))


def test_linear_scaling_in_gguf_metadata_equals_the_config_json_one(tmp_path: Path) -> None:
    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    linear = {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}
    yarn = {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0, ".rope.scaling.original_context_length": 256}
    for name, metadata, scaling in (
        ("linear", linear, {"type": "linear", "factor": 4.0}),
        ("yarn", yarn, YARN),
        ("old", {".rope.scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
    ):
        folder = write_hf(tmp_path / name, {**config, "rope_scaling": scaling}, tensors)
        gguf = write_gguf(tmp_path / f"{name}.gguf", config, tensors, metadata=metadata)
        assert torch.equal(our_logits(gguf, IDS), our_logits(folder, IDS))


def test_rope_factors_of_a_gguf_file_equal_llama3_scaling(tmp_path: Path) -> None:
    from phloem.runtime.layers.rope import RopeConfig, rope_table

    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    folder = write_hf(tmp_path / "hf", {**config, "rope_scaling": LLAMA3}, tensors)
    scaled = RopeConfig(theta=1e4, kind="llama3", factor=8.0, original_context=256)
    # The converter stores plain / scaled frequency; at position 1 the angle is the frequency.
    angle = [
        torch.atan2(t.sin[1].double(), t.cos[1].double())
        for t in (rope_table(RopeConfig(theta=1e4), 16, 2), rope_table(scaled, 16, 2))
    ]
    factors = (angle[0] / angle[1]).float().numpy()
    gguf = write_gguf(tmp_path / "m.gguf", config, tensors, extra={"rope_freqs.weight": factors})
    assert (our_logits(gguf, IDS) - our_logits(folder, IDS)).abs().max() < 1e-3


def test_the_config_is_written_as_transformers_reads_it(tmp_path: Path) -> None:
    """The oracle must really use the field under test: transformers' own parse of what write_hf wrote."""
    from transformers import AutoConfig

    write_hf(tmp_path, tiny_config("mistral", sliding_window=7))
    assert AutoConfig.from_pretrained(tmp_path).sliding_window == 7
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 7
