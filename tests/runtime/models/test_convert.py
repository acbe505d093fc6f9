"""The table of `dtype`: every stored kind under every option, and fused parts of one kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phloem.runtime.backends.base import Weight
from phloem.runtime.backends.blocks import BLOCK_BYTES, dequantise, quantise
from phloem.runtime.errors import UnsupportedModelError
from phloem.runtime.models.convert import Dtype, as_weights, target_kind
from phloem.runtime.models.gguf import GgufFile
from phloem.runtime.models.stored import Stored
from tests.tiny_models import tiny_config, tiny_tensors, write_gguf


@pytest.mark.parametrize(
    "stored, auto, q8, q4, q4_table",
    [
        ("f32", "f32", "q8_0", "q4_0", "q8_0"),
        ("bf16", "bf16", "q8_0", "q4_0", "q8_0"),
        ("f16", "f32", "q8_0", "q4_0", "q8_0"),
        ("q8_0", "q8_0", "q8_0", "q4_0", "q8_0"),
        ("q4_0", "q4_0", "q8_0", "q4_0", "q4_0"),
        ("q4_1", "q4_1", "q8_0", "q4_1", "q4_1"),
        ("q6_k", "f32", "q8_0", "q4_0", "q8_0"),
    ],
)
def test_the_table(stored: str, auto: str, q8: str, q4: str, q4_table: str) -> None:
    for table in (False, True):
        assert target_kind(stored, "auto", is_table=table) == auto
        assert target_kind(stored, "f32", is_table=table) == "f32"
        assert target_kind(stored, "bf16", is_table=table) == "bf16"
        assert target_kind(stored, "q8", is_table=table) == q8
    assert target_kind(stored, "q4", is_table=False) == q4
    assert target_kind(stored, "q4", is_table=True) == q4_table


def stored(tmp_path: Path, **kinds: str) -> dict[str, Stored]:
    return GgufFile(write_gguf(tmp_path / "m.gguf", tiny_config(), kinds=kinds)).tensors


def value(weight: Weight) -> torch.Tensor:
    return dequantise(weight.kind, weight.data) if weight.kind in BLOCK_BYTES else weight.data.float()


@pytest.mark.parametrize(
    "dtype, gate, up, kind",
    [
        ("auto", "q4_0", "q4_0", "q4_0"),
        ("auto", "q4_0", "q4_1", "q4_1"),
        ("auto", "q4_0", "q8_0", "f32"),
        ("auto", "f16", "bf16", "f32"),
        ("q4", "q4_1", "q4_0", "q4_1"),
        ("q4", "q4_1", "f32", "q4_1"),
        ("q8", "q8_0", "bf16", "q8_0"),
        ("bf16", "q8_0", "f32", "bf16"),
    ],
)
def test_fused_parts_are_of_one_kind(tmp_path: Path, dtype: Dtype, gate: str, up: str, kind: str) -> None:
    tensors = stored(tmp_path, ffn_gate=gate, ffn_up=up)
    parts = [tensors["blk.0.ffn_gate.weight"], tensors["blk.0.ffn_up.weight"]]
    weights = as_weights(parts, dtype)
    assert [w.kind for w in weights] == [kind, kind]
    for weight, part in zip(weights, parts):
        exact = part.float32()
        if kind in ("f32", part.kind) or (part.kind, kind) == ("q4_0", "q4_1"):
            assert torch.equal(value(weight), exact)
        elif kind == "bf16":
            assert torch.equal(weight.data, exact.bfloat16())
        else:
            assert torch.equal(weight.data, quantise(kind, exact))


def test_f16_becomes_f32_exactly(tmp_path: Path) -> None:
    (weight,) = as_weights([stored(tmp_path, **{"*": "f16"})["blk.1.ffn_down.weight"]], "auto")
    assert weight.kind == "f32" and torch.equal(
        weight.data, tiny_tensors(tiny_config())["model.layers.1.mlp.down_proj.weight"].half().float()
    )


def test_rows_that_cannot_be_cut_into_blocks_are_named(tmp_path: Path) -> None:
    tensors = GgufFile(write_gguf(tmp_path / "m.gguf", tiny_config(intermediate_size=80))).tensors
    dtypes: tuple[Dtype, ...] = ("q8", "q4")
    for dtype in dtypes:
        with pytest.raises(UnsupportedModelError, match=r"blk.0.ffn_down.weight has rows of 80.*dtype='f32'"):
            as_weights([tensors["blk.0.ffn_down.weight"]], dtype)
