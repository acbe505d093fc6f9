"""Rotary tables against transformers' frequencies; the models' own tests compare whole logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phloem.runtime.layers.rope import RopeConfig, rope_table

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.case("C-LOAD-07")
@pytest.mark.parametrize(
    "ours, theirs",
    [
        (RopeConfig(theta=5e5, kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
        (RopeConfig(theta=5e5, kind="llama3", factor=32.0, original_context=8192), {"rope_type": "llama3", **LLAMA3}),
        (RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_context=32768), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
        (
            RopeConfig(theta=1e4, kind="yarn", factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=0.7, truncate=False, beta_fast=16),
            {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False, "beta_fast": 16},
        ),
        (
            RopeConfig(theta=1e4, kind="yarn", factor=2.0, original_context=512, truncate=False, beta_fast=1),
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "truncate": False, "beta_fast": 1},
        ),
        (
            RopeConfig(theta=1e4, kind="yarn", factor=0.5, original_context=64, attention_factor=0.3),
            {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64, "attention_factor": 0.3},
        ),
    ],
)  # fmt: skip
def test_equal_to_transformers(ours: RopeConfig, theirs: dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**theirs, "rope_theta": ours.theta}
    config = SimpleNamespace(
        rope_parameters=parameters,
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        standardize_rope_params=lambda: None,
    )
    frequencies, attention = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config)
    angles = torch.arange(2000).float()[:, None] * frequencies
    table = rope_table(ours, 64, 2000)
    assert table.cos.shape == (2000, 32) and table.cos.is_contiguous()
    torch.testing.assert_close(table.cos, angles.cos() * attention, rtol=0, atol=0)
    torch.testing.assert_close(table.sin, angles.sin() * attention, rtol=0, atol=0)


def test_the_default_and_factors() -> None:
    table = rope_table(RopeConfig(theta=100.0, factors=(1.0, 2.0)), 4, 3)
    expected = torch.tensor([[1.0, 100**-0.5 / 2]]) * torch.arange(3)[:, None]
    torch.testing.assert_close(table.cos, expected.cos())
    torch.testing.assert_close(table.sin, expected.sin())
