"""GPTQ and AWQ checkpoints: the same model as the plain checkpoint of their dequantised values, bit for bit, on the CPU; kept 4-bit on cuda."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from phloem.runtime.backends.base import KVSpec, Limits
from phloem.runtime.backends.cuda import Cuda
from phloem.runtime.backends.cuda.matrices import Int4Matrix
from phloem.runtime.backends.reference import Reference
from phloem.runtime.engine.gpu import gpu_dtype
from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.models.loader import load_model, open_model
from phloem.runtime.models.quantised import AWQ_ORDER
from tests.fake_device import FakeDevice, FakeFlashInfer
from tests.paged_runs import Piece, make_batch
from tests.tiny_models import tiny_config, tiny_tensors, write_hf

CONFIG = tiny_config(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
GROUP = 64


def packed(values: np.ndarray, order: tuple[int, ...]) -> Tensor:
    """int 0 .. 15 [r, 8 c] -> int32 [r, c], value j at 4-bit place order[j]."""
    grouped = values.reshape(values.shape[0], -1, 8).astype(np.uint32)
    words = sum(grouped[..., j] << np.uint32(4 * order[j]) for j in range(8))
    return torch.from_numpy(np.asarray(words, np.uint32).view(np.int32).copy())


def write_int4(folder: Path, method: str, *, offset: int = 1, **said: Any) -> dict[str, Tensor]:
    """A checkpoint whose projections are quantised; returns the plain tensors that it means."""
    rng, stored, plain = np.random.default_rng(3), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in tiny_tensors(CONFIG).items():
        if "_proj.weight" not in name:
            stored[name] = plain[name] = tensor.half() if method == "awq" else tensor
            continue
        rows, columns = tensor.shape
        q, z = rng.integers(0, 16, (rows, columns)), rng.integers(1, 16, (columns // GROUP, rows))
        s = torch.from_numpy((rng.random((columns // GROUP, rows)) * 0.02 + 0.001).astype(np.float16))
        zeros, scales = (torch.from_numpy(np.repeat(a, GROUP, axis=0).T.copy()) for a in (z, s.float().numpy()))
        # As the kernel's form has it: (q - 8) s + (8 - z) s, in float32.
        plain[name] = (torch.from_numpy(q).float() - 8) * scales + (8 - zeros.float()) * scales
        stem = name.removesuffix(".weight")
        if method == "awq":
            parts = {"qweight": packed(q.T.copy(), AWQ_ORDER), "qzeros": packed(z, AWQ_ORDER), "scales": s}
        else:
            order = tuple(range(8))
            parts = {"qweight": packed(q, order).t().contiguous(), "qzeros": packed(z - offset, order), "scales": s}
            parts["g_idx"] = (torch.arange(columns) // GROUP).int()
        stored |= {f"{stem}.{part}": value for part, value in parts.items()}
    folder.mkdir(parents=True)
    quantisation = {"quant_method": method, "bits": 4, "group_size": GROUP, **said}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantisation}))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return plain


LAYOUTS = [("gptq", 1, {}), ("gptq", 0, {"checkpoint_format": "gptq_v2"}), ("awq", 0, {"version": "gemm", "zero_point": True})]


@pytest.mark.parametrize(("method", "offset", "said"), LAYOUTS)
def test_it_is_the_model_of_its_values(tmp_path: Path, method: str, offset: int, said: dict[str, Any]) -> None:
    plain = write_int4(tmp_path / "q", method, offset=offset, **said)
    write_hf(tmp_path / "p", CONFIG, plain)
    logits = []
    for folder in ("q", "p"):
        loaded = load_model(str(tmp_path / folder), Reference(), "f32")
        spec = KVSpec(2, 2, 32, 8, 4, "f32")
        runner = Reference().bind(loaded.model, spec, Limits(max_tokens=16, max_rows=2, max_logits=16, max_pages=16))
        logits.append(runner.forward(make_batch([Piece([5, 9, 11], 0, [3], logits=3)], spec)).clone())
    assert torch.equal(*logits)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_on_cuda_it_stays_4_bit(tmp_path: Path, method: str) -> None:
    plain = write_int4(tmp_path / "q", method)
    opened = open_model(str(tmp_path / "q"))
    dtype = gpu_dtype("auto", opened)
    assert dtype == "held" and gpu_dtype("bf16", opened) == "bf16"
    backend = Cuda(device=FakeDevice(), flashinfer=FakeFlashInfer())
    loaded = load_model(opened, backend, dtype)
    layer: Any = loaded.model.layers[1]  # type: ignore[attr-defined]
    assert isinstance(layer.qkv, Int4Matrix) and layer.gate_up.gated and layer.qkv.group == GROUP
    want = torch.cat([plain[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])
    torch.testing.assert_close(layer.qkv.dequantised(), want, rtol=0.02, atol=0.01 * float(want.abs().max()))
    assert opened.weight_bytes(dtype) < 0.5 * opened.weight_bytes("bf16")


@pytest.mark.parametrize(
    ("method", "said", "says"),
    [
        ("gptq", {"bits": 8}, "bits is 8, expected 4"),
        ("gptq", {"desc_act": True}, "desc_act is true"),
        ("gptq", {"group_size": 48}, "group_size is 48"),
        ("awq", {"version": "gemv"}, "version is 'gemv'"),
        ("bitsandbytes", {}, "'bitsandbytes' is not supported: expected gptq, awq, fp8"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(tmp_path: Path, method: str, said: dict[str, Any], says: str) -> None:
    write_int4(tmp_path / "q", method, **said)
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        open_model(str(tmp_path / "q"))
    assert caught.value.param == "quantization_config"


def test_damage_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_int4(tmp_path / "q", "gptq")
    file = tmp_path / "q" / "model.safetensors"
    whole, stem = load_file(file), "model.layers.0.mlp.up_proj"
    for change, error, says in (
        ({f"{stem}.scales": None}, ModelLoadError, rf"{stem} has qweight but no scales"),
        ({f"{stem}.qzeros": torch.zeros(3, 32, dtype=torch.int32)}, ModelLoadError, rf"{stem}\.qzeros is \[3, 32\]; a matrix of \[256, 128\]"),
        ({f"{stem}.g_idx": torch.arange(127, -1, -1, dtype=torch.int32) // GROUP}, UnsupportedModelError, "g_idx orders columns"),
    ):  # fmt: skip
        save_file({k: v for k, v in {**whole, **change}.items() if v is not None}, file, metadata={"format": "pt"})
        with pytest.raises(error, match=says):
            open_model(str(tmp_path / "q"))
