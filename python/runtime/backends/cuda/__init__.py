"""The NVIDIA backend: FlashInfer's kernels on the page contract. See docs/gpu.md for what has run on a GPU, and what has not.

lanes.py     what a device must offer      device.py   torch.cuda, and nothing else says it
plan.py      which pages are read together attention.py, ops.py   the FlashInfer calls
graphs.py    captured decode steps         runner.py   one step, staged and enqueued
rewrite.py   new weights in old matrices
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from phloem.runtime.backends.base import KVSpec, Limits, Model, Packed, Weight
from phloem.runtime.backends.cuda import rewrite
from phloem.runtime.backends.cuda.device import CudaDevice, find_gpu
from phloem.runtime.backends.cuda.lanes import Device
from phloem.runtime.backends.cuda.mask import best_mask
from phloem.runtime.backends.cuda.matrices import pack_matrix
from phloem.runtime.backends.cuda.runner import CudaRunner, RunnerOptions
from phloem.runtime.errors import ConfigError, KernelError

__all__ = ["Cuda", "missing"]

OLDEST, FIRST_UNTRIED = (0, 6, 4), (0, 8)
KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.float8_e4m3fn}
NEEDS = {"f8": (8, 9), "e4m3": (8, 9), "q4_0": (8, 0), "q4_1": (8, 0), "int4": (8, 0)}  # of torch's kernels for them
COMPUTE = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


def missing() -> str | None:
    """What this machine lacks for device="cuda", and what to do about it; None if nothing."""
    if find_gpu() is None:
        return (
            f"torch {torch.__version__} sees no GPU. Check `nvidia-smi`; if it lists one, install a torch built for CUDA (the CPU wheel "
            "cannot see it)."
        )
    try:
        version = importlib.import_module("flashinfer").__version__
    except (
        Exception
    ) as error:  # its import runs much code: a missing shared library is an OSError, an old torch an AttributeError
        return f'flashinfer cannot be imported ({type(error).__name__}: {error}). Install it with: pip install "phloem[cuda]".'
    numbers = tuple(int(n) for n in str(version).split("+")[0].split(".")[:3] if n.isdigit())
    if not OLDEST <= numbers < FIRST_UNTRIED:
        return (
            f'flashinfer is {version}; this backend was written for >=0.6.4,<0.8. Install it with: pip install "phloem[cuda]".'
        )
    return None


class Cuda:
    """The backend. threads is ignored: the host's part is the caller's thread.

    compute: of activations and plain weights.   device, flashinfer: stand-ins for tests; both or neither.
    Raises ConfigError that says what is missing.
    """

    name = "cuda"
    kv_dtypes: tuple[str, ...] = ("bf16", "f16", "fp8")

    def __init__(
        self,
        threads: int = 1,
        *,
        compute: Literal["bf16", "f16", "f32"] = "bf16",
        options: RunnerOptions | None = None,
        device: Device | None = None,
        flashinfer: Any = None,
    ) -> None:
        if device is None:
            lacks = missing()
            if lacks is not None:
                raise ConfigError(f"device is 'cuda', but {lacks}", param="device")
            device, flashinfer = CudaDevice(), importlib.import_module("flashinfer")
        assert flashinfer is not None, "a device of the caller's needs kernels of the caller's"
        self.device, self._fi = device, flashinfer
        self.compute, self.options = COMPUTE[compute], options or RunnerOptions()
        self.mask = best_mask(device.torch_device)

    def pack(self, parts: Sequence[Weight], *, gated: bool = False) -> Packed:
        """On the device: f32, bf16, f16 and q8_0 in the compute dtype, f8 as e4m3, q4_0 and q4_1 as int4. Raises KernelError."""
        needs = max((NEEDS.get(part.kind, (0, 0)) for part in parts), default=(0, 0))
        if self.device.capability < needs:
            have = ".".join(map(str, self.device.capability))
            raise KernelError(
                f"{self.device.name} has compute capability {have}; a matrix of kind {parts[0].kind!r} needs {needs[0]}.{needs[1]}. "
                "Use dtype='bf16' or 'f16'."
            )
        return pack_matrix(parts, gated=gated, compute=self.compute, device=self.device.torch_device)

    def like(self, packed: Packed) -> Packed:
        """An empty matrix of the same form. 4-bit ones raise UnsupportedModelError here and below."""
        return rewrite.like(packed)

    def store(self, packed: Packed, part: int, weight: Weight) -> None:
        rewrite.store(packed, part, weight)

    def store_from(self, packed: Packed, source: Packed, part: int) -> None:
        rewrite.store_from(packed, source, part)

    def settle(self) -> None:
        self.device.settle()

    def read(self, packed: Packed, row: int, count: int) -> Tensor:
        return rewrite.read(packed, row, count)

    def vector(self, values: Tensor) -> Tensor:
        """In the compute dtype: FlashInfer's norms take weight and input alike."""
        return values.detach().to(self.device.torch_device).to(self.compute).contiguous()

    def bind(self, model: Model, kv: KVSpec, limits: Limits) -> CudaRunner:
        """Takes the memory of the pages, builds the kernels, captures the graphs. Raises KernelError."""
        if self.compute == torch.float32:  # on stand-ins, which convert
            allowed: tuple[str, ...] = (*self.kv_dtypes, "f32")
        else:  # the kernels convert fp8, and take 16 bits of another kind for their own
            allowed = ("bf16" if self.compute == torch.bfloat16 else "f16", "fp8")
        if kv.dtype not in allowed:
            raise KernelError(f"kv_dtype is {kv.dtype!r}; the cuda backend has {', '.join(allowed)} for this model.")
        return CudaRunner(
            self._fi, self.device, model, kv, limits, compute=self.compute, kv_dtype=KV_DTYPES[kv.dtype], options=self.options
        )  # fmt: skip

    def close(self) -> None:
        """Waits for what is enqueued. Memory goes back as its tensors are dropped."""
        self.device.synchronize()
