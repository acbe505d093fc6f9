"""What an engine's options mean for a GPU, without one: which device, which arithmetic, how large a pool, and what is refused how."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import phloem as ph
from phloem.runtime.backends import cuda
from phloem.runtime.backends.cuda import device as device_module
from phloem.runtime.backends.cuda.device import Gpu, find_gpu
from phloem.runtime.config import Hardware, make_config, resolve
from phloem.runtime.engine import gpu as gpu_module
from phloem.runtime.engine.gpu import check_dtype, gpu_dtype, gpu_kv, on_gpu, planned_bytes
from phloem.runtime.errors import ConfigError
from phloem.runtime.models.loader import open_model
from tests.tiny_models import tiny_config, tiny_tensors, write_gguf, write_hf

HOST = Hardware(cores=16, memory_bytes=128 << 30)
H200 = Gpu("NVIDIA H200", 141 << 30, (9, 0))
no_gpu = pytest.mark.skipif(find_gpu() is not None, reason="this machine has a GPU")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(gpu, flashinfer): pretend. flashinfer: a version, or None where its import fails."""

    def pretend(gpu: Gpu | None, flashinfer: str | None) -> None:
        monkeypatch.setattr(device_module, "find_gpu", lambda index=0: gpu)
        monkeypatch.setattr(cuda, "find_gpu", lambda index=0: gpu)
        real = importlib.import_module

        def imported(name: str, *rest: Any) -> Any:
            if name != "flashinfer":
                return real(name, *rest)
            if flashinfer is None:
                raise ModuleNotFoundError("No module named 'flashinfer'")
            return SimpleNamespace(__version__=flashinfer)

        monkeypatch.setattr(cuda.importlib, "import_module", imported)
        monkeypatch.setattr(
            gpu_module.importlib.util, "find_spec", lambda name: None if flashinfer is None else SimpleNamespace()
        )

    return pretend


@pytest.mark.parametrize(
    ("gpu", "flashinfer", "auto"),
    [
        (H200, "0.6.4", True),
        (H200, "0.7.1+cu128", True),
        (H200, None, False),
        (H200, "0.8.0", False),
        (H200, "0.5.3", False),
        (None, "0.6.4", False),
    ],
)
def test_auto_is_cuda_only_where_all_of_it_is_there(machine: Any, gpu: Gpu | None, flashinfer: str | None, auto: bool) -> None:
    machine(gpu, flashinfer)
    assert on_gpu(make_config(), HOST).is_gpu is auto
    assert on_gpu(make_config(device="cpu"), HOST) is HOST
    if auto:
        assert on_gpu(make_config(device="cuda"), HOST) == dataclasses.replace(HOST, memory_bytes=141 << 30, is_gpu=True)
    else:
        with pytest.raises(ConfigError, match="device is 'cuda', but ") as caught:
            on_gpu(make_config(device="cuda"), HOST)
        wanted = (
            "sees no GPU" if gpu is None else "cannot be imported" if flashinfer is None else "was written for >=0.6.4,<0.8"
        )
        assert wanted in str(caught.value) and caught.value.param == "device"


@no_gpu
def test_an_engine_on_cuda_without_a_gpu_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ph.ConfigError, match=r"sees no GPU") as caught:
        ph.Engine(device="cuda")
    assert caught.value.param == "device"


def resolved(weights: int = 16 << 30, **options: Any) -> Any:
    return resolve(
        make_config(device="cuda", **options), Hardware(16, 141 << 30, True), model_context=131_072, kv_bytes_per_token_f32=2 * 32 * 1024 * 4,
        weight_bytes=weights,
    )  # fmt: skip


def test_p3_the_pool_of_a_gpu_is_what_is_left_of_its_share() -> None:
    plain = resolved(max_running=256)
    assert plain.kv_dtype == "bf16" and plain.overlap and plain.device == "cuda"
    assert plain.num_pages * plain.page_bytes == pytest.approx(0.9 * (141 << 30) - (16 << 30), rel=1e-3)
    assert "90% of the GPU less the weights" in plain.arithmetic[1] and "GPU: 141.0 GiB" in plain.arithmetic[2]
    small = resolved(max_running=256, kv_dtype="fp8")
    assert small.page_bytes * 2 == plain.page_bytes and small.num_pages == pytest.approx(2 * plain.num_pages, rel=1e-3)
    assert resolved(max_running=1, max_context=160).num_pages == 10
    with pytest.raises(ConfigError, match="no room for one page"):
        resolved(weights=140 << 30)


def test_what_each_device_computes_in() -> None:
    for device, dtype in (("cuda", "f32"), ("cuda", "q8"), ("cpu", "fp8"), ("reference", "fp8")):
        with pytest.raises(
            ConfigError, match=f"dtype is '{dtype}', and device '{device}' computes none of it; expected one of 'auto'"
        ) as caught:
            check_dtype(device, dtype)  # type: ignore[arg-type]
        assert caught.value.param == "dtype"
    for device, dtype in (("cuda", "fp8"), ("cuda", "f16"), ("cpu", "f16"), ("cpu", "f32")):
        check_dtype(device, dtype)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="computes none of it"):
        ph.Engine(dtype="fp8", device="cpu")


def test_auto_keeps_f16_files_f16_and_blocks_blocks(tmp_path: Path) -> None:
    import torch

    config = tiny_config()
    for name, dtype, want in (("a", torch.float16, "f16"), ("b", torch.bfloat16, "bf16"), ("c", torch.float32, "bf16")):
        opened = open_model(str(write_hf(tmp_path / name, config, tiny_tensors(config, dtype=dtype))))
        assert gpu_dtype("auto", opened) == want and gpu_dtype("fp8", opened) == "fp8"
    assert gpu_dtype("auto", open_model(str(write_gguf(tmp_path / "m.gguf", config, kinds={"ffn_down": "Q8_0"})))) == "auto"


def test_pages_have_the_dtype_of_the_activations_or_fp8() -> None:
    """FlashInfer's FA2 feeds 16-bit keys to the multiplication as they are: bf16 pages under f16 queries would be read as f16."""
    for dtype, own, other in (("f16", "f16", "bf16"), ("bf16", "bf16", "f16"), ("held", "bf16", "f16"), ("fp8", "bf16", "f32")):
        for said, want in (("auto", own), (own, own), ("fp8", "fp8")):
            assert gpu_kv(make_config(device="cuda", kv_dtype=said), dtype).kv_dtype == want  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"kv_dtype is '{other}', and this model computes in {own} on the GPU") as caught:
            gpu_kv(make_config(device="cuda", kv_dtype=other), dtype)  # type: ignore[arg-type]
        assert caught.value.param == "kv_dtype"


def test_what_the_weights_will_take_counts_q8_0_as_bf16(tmp_path: Path) -> None:
    opened = open_model(str(write_hf(tmp_path / "m", tiny_config())))
    assert planned_bytes("cpu", "q4", opened) == opened.weight_bytes("q4")
    tables = 2 * 96 * 64  # the embedding and the head: 34 bytes for 32 values become 64
    assert planned_bytes("cuda", "q4", opened) == opened.weight_bytes("q4") + tables * 2 - tables // 32 * 34


def test_f16_weights_on_the_cpu_are_f16_rounded(tmp_path: Path) -> None:
    """`dtype="f16"` is no GPU option: the CPU computes with the same rounded numbers."""
    import torch

    from phloem.runtime.models.convert import as_weights

    opened = open_model(str(write_hf(tmp_path / "m", tiny_config())))
    stored = opened.assignments[0].tensors
    (weight,) = as_weights(stored, "f16")
    assert weight.kind == "f16" and torch.equal(weight.data, stored[0].float32().to(torch.float16))
    (weight,) = as_weights(stored, "fp8")
    assert weight.kind == "f8" and weight.data.dtype == torch.bfloat16
    assert as_weights(stored, "fp8", is_table=True)[0].kind == "bf16"
