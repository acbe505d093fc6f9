"""fp8 checkpoints: the same model as the plain checkpoint of their values, bit for bit, on the CPU; kept fp8 on cuda."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phloem.runtime.backends.base import KVSpec, Limits
from phloem.runtime.backends.cuda import Cuda
from phloem.runtime.backends.cuda.matrices import Fp8Matrix, PlainMatrix
from phloem.runtime.backends.reference import Reference
from phloem.runtime.engine.gpu import gpu_dtype
from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.models.loader import load_model, open_model
from tests.fake_device import FakeDevice, FakeFlashInfer
from tests.paged_runs import Piece, make_batch
from tests.tiny_models import tiny_config, tiny_tensors, write_hf

CONFIG = tiny_config(hidden_size=128, intermediate_size=208, num_attention_heads=4, num_key_value_heads=2)
BLOCK = (128, 48)  # divides neither side of every matrix

FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CT = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}


def compressed(**weights: Any) -> dict[str, Any]:
    return {**CT, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}}}


def write_fp8(folder: Path, said: dict[str, Any], scale: str, shape: str) -> dict[str, Tensor]:
    """A checkpoint whose projections are fp8; returns the plain tensors that it means. shape: of the scales."""
    rng, stored, plain = torch.Generator().manual_seed(5), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tiny_tensors(CONFIG).items():
        if "_proj.weight" not in name:
            stored[name] = plain[name] = tensor
            continue
        rows, columns = tensor.shape
        values = (torch.randn(rows, columns, generator=rng) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
        blocks = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
        size = {"matrix": (), "one": (1,), "row": (rows, 1), "rows": (rows,), "blocks": blocks}[shape]
        scales = torch.rand(size, generator=rng) * 4e-3 + 1e-4
        stem = name.removesuffix(".weight")
        stored |= {name: values, f"{stem}.{scale}": scales, f"{stem}.input_scale": torch.ones(())}
        if shape == "blocks":
            scales = scales.repeat_interleave(BLOCK[0], 0)[:rows].repeat_interleave(BLOCK[1], 1)[:, :columns]
        plain[name] = values.float() * (scales[:, None] if scales.dim() == 1 and len(scales) > 1 else scales)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": said}))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


LAYOUTS = [
    (FP8, "weight_scale", "matrix"),
    ({**FP8, "activation_scheme": "static"}, "weight_scale", "one"),
    ({"quant_method": "fbgemm_fp8"}, "weight_scale", "row"),
    (compressed(strategy="channel"), "weight_scale", "rows"),
    ({**FP8, "weight_block_size": list(BLOCK)}, "weight_scale_inv", "blocks"),
    (compressed(strategy="block", block_structure=list(BLOCK)), "weight_scale", "blocks"),
]


@pytest.mark.parametrize(("said", "scale", "shape"), LAYOUTS)
def test_it_is_the_model_of_its_values(tmp_path: Path, said: dict[str, Any], scale: str, shape: str) -> None:
    plain = write_fp8(tmp_path / "q", said, scale, shape)
    write_hf(tmp_path / "p", CONFIG, plain)
    logits = []
    for folder in ("q", "p"):
        loaded = load_model(str(tmp_path / folder), Reference(), "f32")
        spec = KVSpec(2, 2, 32, 8, 4, "f32")
        runner = Reference().bind(loaded.model, spec, Limits(max_tokens=16, max_rows=2, max_logits=16, max_pages=16))
        logits.append(runner.forward(make_batch([Piece([5, 9, 11], 0, [3], logits=3)], spec)).clone())
    assert torch.equal(*logits)


@pytest.mark.parametrize(("said", "scale", "shape"), LAYOUTS)
def test_on_cuda_its_bytes_stay(tmp_path: Path, said: dict[str, Any], scale: str, shape: str) -> None:
    """auto keeps bytes and scales, except blocks, which no kernel here has; bf16 rounds the values."""
    plain = write_fp8(tmp_path / "q", said, scale, shape)
    want = torch.cat([plain[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])
    opened = open_model(str(tmp_path / "q"))

    def matrix(dtype: Any) -> Any:
        loaded = load_model(opened, Cuda(device=FakeDevice(), flashinfer=FakeFlashInfer()), gpu_dtype(dtype, opened))
        return loaded.model.layers[1].qkv  # type: ignore[attr-defined]

    kept = matrix("auto")
    if shape == "blocks":
        assert isinstance(kept, PlainMatrix) and torch.equal(kept.data, want.bfloat16())
        scaled = matrix("fp8")
        assert isinstance(scaled, Fp8Matrix)
        torch.testing.assert_close(scaled.dequantised(), want, rtol=0.07, atol=2e-3 * float(want.abs().max()))
    else:
        assert isinstance(kept, Fp8Matrix) and torch.equal(kept.dequantised(), want)
        assert torch.equal(matrix("fp8").dequantised(), want)
        assert opened.weight_bytes(gpu_dtype("auto", opened)) < opened.weight_bytes("bf16")
    assert torch.equal(matrix("bf16").data, want.bfloat16())


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        (compressed(num_bits=4, type="int"), "expected num_bits 8 and type 'float'"),
        (dict(CT), "config_groups' weights are"),
        ({**CT, "config_groups": [1]}, "config_groups' weights are"),
        (compressed(block_structure=5), "block_structure is 5, expected two positive integers"),
        (compressed(block_structure=[128, 0]), r"block_structure is \[128, 0\]"),
        ({**FP8, "weight_block_size": "128"}, "weight_block_size is '128'"),
        ("fp8", "'fp8' is not supported: expected an object with quant_method"),
        ("gptq", "'gptq' is not supported: expected an object with quant_method"),
        ({"quant_method": ["fp8"]}, "is not supported: expected gptq, awq, fp8"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path: Path, said: Any, says: str) -> None:
    write_fp8(tmp_path / "q", said, "weight_scale", "row")
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        open_model(str(tmp_path / "q"))
    assert caught.value.param == "quantization_config"


def test_damage_is_named(tmp_path: Path) -> None:
    write_fp8(tmp_path / "q", FP8, "weight_scale", "row")
    file = tmp_path / "q" / "model.safetensors"
    whole, stem = load_file(file), "model.layers.0.mlp.up_proj"
    for change, says in (
        ({f"{stem}.weight_scale": None}, rf"{stem}\.weight is fp8 and has 0 of"),
        ({f"{stem}.weight_scale_inv": torch.ones(1)}, rf"{stem}\.weight is fp8 and has 2 of"),
        (
            {f"{stem}.weight_scale": torch.ones(3)},
            rf"{stem}\.weight_scale is f32 \[3\]; for {stem}\.weight of \[208, 128\] expected",
        ),
    ):
        save_file({k: v for k, v in {**whole, **change}.items() if v is not None}, file, metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=says):
            open_model(str(tmp_path / "q"))


def test_fp8_without_a_word_in_the_config_is_refused(tmp_path: Path) -> None:
    """Bytes without a meaning are never read as one."""
    write_fp8(tmp_path / "q", FP8, "weight_scale", "row")
    (tmp_path / "q" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises((ModelLoadError, UnsupportedModelError), match="F8_E4M3"):
        open_model(str(tmp_path / "q"))
