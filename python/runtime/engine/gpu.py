"""What building an engine means when its device is a GPU: which one, in which arithmetic, with whose executor. Asked by build.py.

    device "auto"  cuda where torch sees a GPU and flashinfer is there, else cpu       "cuda"  cuda, or the error that says what lacks

Weights on a GPU are bf16 or f16; `dtype="auto"` keeps f16 files f16 and rounds f32 files to bf16.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Literal

from phloem.runtime.backends import create_backend
from phloem.runtime.backends.base import Backend, KVSpec, Limits
from phloem.runtime.config import Dtype, EngineConfig, Hardware, Resolved
from phloem.runtime.errors import ConfigError
from phloem.runtime.executor.device import DeviceExecutor
from phloem.runtime.models.convert import Dtype as LoadDtype
from phloem.runtime.models.convert import common_kind, num_bytes
from phloem.runtime.models.loader import LoadedModel, OpenModel

__all__ = ["check_dtype", "device_executor", "gpu_dtype", "gpu_kv", "make_backend", "on_gpu", "planned_bytes"]

ON_CUDA = ("auto", "bf16", "f16", "fp8", "q4")
ELSEWHERE = ("auto", "f32", "bf16", "f16", "q8", "q4")


def on_gpu(config: EngineConfig, hardware: Hardware) -> Hardware:
    """`hardware` with the GPU's memory where this config means the GPU. Raises ConfigError if it must have one and there is none."""
    if config.device not in ("auto", "cuda"):
        return hardware
    if (
        config.device == "auto" and importlib.util.find_spec("flashinfer") is None
    ):  # a fraction of a millisecond, not its import
        return hardware
    from phloem.runtime.backends.cuda import missing
    from phloem.runtime.backends.cuda.device import find_gpu

    gpu = find_gpu()
    if config.device == "auto" and (gpu is None or missing() is not None):
        return hardware
    lacks = missing()
    if gpu is None or lacks is not None:
        raise ConfigError(f"device is 'cuda', but {lacks}", param="device")
    return dataclasses.replace(hardware, memory_bytes=gpu.memory_bytes, is_gpu=True)


def check_dtype(device: str, dtype: Dtype) -> None:
    """Raises ConfigError for a dtype that the device has no arithmetic for."""
    known = ON_CUDA if device == "cuda" else ELSEWHERE
    if dtype not in known:
        listed = ", ".join(repr(d) for d in known)
        raise ConfigError(
            f"dtype is {dtype!r}, and device {device!r} computes none of it; expected one of {listed}.", param="dtype"
        )


def gpu_dtype(dtype: Dtype, opened: OpenModel) -> LoadDtype:
    """What "auto" means for this file: plain weights as bf16, or as f16 if they are all f16; blocks stay, and so do GPTQ's and AWQ's groups and fp8."""
    kinds = {t.kind for a in opened.assignments if a.rule.form != "vector" for t in a.tensors}
    if dtype == "auto" and kinds & {"int4", "e4m3"}:
        return "held"
    if dtype == "auto" and "e4m3_blocks" in kinds:  # no kernel here scales by blocks
        return "bf16"
    if dtype != "auto" or not kinds <= {"f32", "bf16", "f16"}:
        return dtype
    return "f16" if kinds == {"f16"} else "bf16"


def gpu_kv(config: EngineConfig, dtype: LoadDtype) -> EngineConfig:
    """With the pages' dtype said: that of the activations, or fp8. FlashInfer converts fp8 keys; 16 bits of another kind it would read as
    its own. dtype: as `gpu_dtype` says. Raises ConfigError."""
    own = _compute(dtype)
    if config.kv_dtype == "auto":
        return dataclasses.replace(config, kv_dtype=own)
    if config.kv_dtype not in (own, "fp8"):
        raise ConfigError(
            f"kv_dtype is {config.kv_dtype!r}, and this model computes in {own} on the GPU; expected 'auto', {own!r} or 'fp8'.",
            param="kv_dtype",
        )
    return config


def _compute(dtype: LoadDtype) -> Literal["f16", "bf16"]:
    return "f16" if dtype == "f16" else "bf16"


def planned_bytes(device: str, dtype: LoadDtype, opened: OpenModel) -> int:
    """What the weights will take on the device."""
    whole = opened.weight_bytes(dtype)
    if device != "cuda":
        return whole
    for each in opened.assignments:
        is_table = each.rule.form == "table"
        if each.rule.form != "vector" and common_kind(each.tensors, dtype, is_table=is_table) == "q8_0":  # kept as bf16
            whole += sum(2 * t.shape[0] * t.shape[1] for t in each.tensors) - num_bytes(each.tensors, dtype, is_table=is_table)
    return whole


def make_backend(resolved: Resolved, dtype: LoadDtype) -> Backend:
    """dtype: as `gpu_dtype` says."""
    if resolved.device != "cuda":
        return create_backend(resolved.device, threads=resolved.threads)
    from phloem.runtime.backends.cuda.runner import RunnerOptions

    options = RunnerOptions(deterministic=resolved.config.deterministic is True)
    return create_backend("cuda", compute=_compute(dtype), options=options)


def device_executor(
    backend: Backend,
    loaded: LoadedModel,
    kv: KVSpec,
    limits: Limits,
    *,
    vocab_size: int,
    width: int,
    max_running: int,
    overlap: bool,
) -> DeviceExecutor:
    from phloem.runtime.backends.cuda import Cuda
    from phloem.runtime.executor.device_sampler import DeviceSampler

    assert isinstance(backend, Cuda)
    sampler = DeviceSampler(backend.device, vocab_size=vocab_size, width=width, max_requests=2 * max_running, mask=backend.mask)
    return DeviceExecutor(
        backend.bind(loaded.model, kv, limits), sampler, page_size=kv.page_size, num_pages=kv.num_pages, width=width, max_running=max_running,
        max_logits=limits.max_logits, overlap=overlap, weights=loaded.weights,
    )  # fmt: skip
