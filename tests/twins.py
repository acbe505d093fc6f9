"""One kernel call, twice: on whatever device and kernels one gives, and by FlashInfer's definition on the CPU. Shared by tests/device,
benchmarks/gpu.py, and by a test that runs every case against itself, so that the first GPU meets cases that work.

    for case in cases(): compare(case, flashinfer, CudaDevice())     -> largest error, in units of what the dtype rounds
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phloem.runtime.backends.base import ForwardBatch, KVSpec, Weight
from phloem.runtime.backends.blocks import quantise
from phloem.runtime.backends.cuda import KV_DTYPES
from phloem.runtime.backends.cuda.attention import Attention, Dtypes, Kind, upload_indices
from phloem.runtime.backends.cuda.lanes import Device
from phloem.runtime.backends.cuda.mask import best_mask
from phloem.runtime.backends.cuda.matrices import FP8_MAX, pack_matrix
from phloem.runtime.backends.cuda.ops import CudaKV
from phloem.runtime.backends.cuda.plan import Costs, plan_layout
from tests.fake_device import FakeDevice, FakeFlashInfer
from tests.paged_runs import Piece, make_batch

__all__ = ["Case", "cases", "compare"]

Run = Callable[[Any, Device], Tensor]
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SHARE = Costs(token_bytes=1, query_bytes=0, group=1, launch_bytes=0, margin=1.0)


@dataclass(frozen=True)
class Case:
    """first: an 8B Llama in bf16 needs it, so it is looked at before the rest."""

    name: str
    run: Run
    dtype: torch.dtype
    first: bool = False


def noise(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def cases() -> Iterator[Case]:
    bf16, f16 = torch.bfloat16, torch.float16
    for role in ("decode", "prefill", "cascade"):
        yield attention(role, heads=32, kv_heads=8, dim=128, first=True)
    for dtype in (bf16, f16):
        yield Case(f"rmsnorm {dtype}", lambda fi, d, t=dtype: norm(fi, d, t), dtype, dtype == bf16)  # type: ignore[misc]
        yield Case(f"head rmsnorm {dtype}", lambda fi, d, t=dtype: head_norm(fi, d, t), dtype)  # type: ignore[misc]
        yield Case(f"fused add, rmsnorm {dtype}", lambda fi, d, t=dtype: fused_norm(fi, d, t), dtype, dtype == bf16)  # type: ignore[misc]
        yield Case(f"silu and mul {dtype}", lambda fi, d, t=dtype: silu(fi, d, t), dtype, dtype == bf16)  # type: ignore[misc]
        yield Case(f"rope {dtype}", lambda fi, d, t=dtype: rope(fi, d, t), dtype, dtype == bf16)  # type: ignore[misc]
    for kv in ("bf16", "f16", "fp8"):
        yield Case(f"append by slot {kv}", lambda fi, d, k=kv: append(fi, d, k), bf16, kv == "bf16")  # type: ignore[misc]
    for role in ("decode", "prefill"):
        yield attention(role, window=9)
        yield attention(role, softcap=5.0)
        yield attention(role, kv="fp8")
        yield attention(role, dim=256)
        yield attention(role, page_size=1)
        yield attention(role, heads=9, kv_heads=3)
        yield attention(role, query=f16, kv="f16")
        yield attention(role, page_size=64)
    yield attention("cascade", kv="fp8")
    yield attention("cascade", softcap=5.0)
    yield attention("prefill", deterministic=True)
    yield attention("decode", deterministic=True)
    for kind in ("bf16", "f8", "q4_0"):
        for rows in (1, 7, 200):
            yield Case(f"matmul {kind} x {rows}", lambda fi, d, k=kind, n=rows: product(d, k, n), bf16, kind == "bf16")  # type: ignore[misc]
    yield Case("mask", lambda fi, d: mask(d), torch.float32, True)
    for kv in ("bf16", "fp8"):
        yield Case(f"copy pages {kv}", lambda fi, d, k=kv: copy_pages(d, k), bf16, kv == "bf16")  # type: ignore[misc]


def compare(case: Case, fi: Any, device: Device) -> float:
    """The largest difference, in roundings of the dtype at the size of the largest value. Raises what the kernel raises."""
    want = case.run(FakeFlashInfer(), FakeDevice()).float()
    got = case.run(fi, device).float().cpu()
    assert got.shape == want.shape and bool(torch.isfinite(got).all()), "not finite, or another shape"
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-6) / ROUNDING[case.dtype])


def attention(
    role: str, *, heads: int = 8, kv_heads: int = 2, dim: int = 64, page_size: int = 16, window: int = 0, softcap: float = 0.0, kv: str = "bf16",
    query: torch.dtype = torch.bfloat16, deterministic: bool = False, first: bool = False,
) -> Case:  # fmt: skip
    kind = Kind(heads, kv_heads, dim, dim**-0.5, window, softcap)
    pages = 2048 // page_size
    spec = KVSpec(1, kv_heads, dim, pages, page_size, kv)  # type: ignore[arg-type]
    batch = _batch(role, spec)

    def run(fi: Any, device: Device) -> Tensor:
        where, stream = device.torch_device, device.stream("compute")
        store = CudaKV(spec, KV_DTYPES[kv], where)
        data = noise(1, *store.data.shape).clamp(-FP8_MAX, FP8_MAX).to(KV_DTYPES[kv])
        store.data.view(torch.uint8).copy_(data.view(torch.uint8))
        q = noise(2, len(batch.token_ids), heads, dim).to(query).to(where)
        shared = Attention(
            fi, device, spec, [kind], Dtypes(query, KV_DTYPES[kv]), deterministic=deterministic, workspace_bytes=64 << 20 if where.type == "cuda" else 1024
        )  # fmt: skip
        layout = plan_layout(batch, page_size, SHARE if role == "cascade" else None)
        assert (role == "cascade") == (len(layout.parts[0].levels) > 1) and layout.decode == (role == "decode")
        step, out = shared.settle(layout), list[Tensor]()
        device.synchronize()  # what stands above ran on another stream
        device.run(stream, lambda: step.plan(upload_indices(step.levels, where)))
        order = torch.arange(len(q)) if layout.tokens is None else torch.from_numpy(layout.tokens)
        device.run(stream, lambda: out.append(step.run(kind, q[order.to(where)], *store.pages(0))))
        device.synchronize()
        result: Tensor = torch.empty_like(out[0]).index_copy_(0, order.to(where), out[0])  # back in the batch's order
        return result

    named = {"heads": f"{heads}/{kv_heads}", "dim": dim, "page": page_size, "window": window, "softcap": softcap, "kv": kv}
    name = " ".join(
        [f"attention {role}", *(f"{k}={v}" for k, v in named.items() if v), *(["deterministic"] if deterministic else [])]
    )
    return Case(f"{name} {query}", run, query, first)


def _batch(role: str, spec: KVSpec) -> ForwardBatch:
    """Ragged rows on shuffled pages, about 1,500 tokens; for cascade, behind three shared stretches and beside strangers."""
    rng, free = random.Random(3), list(range(spec.num_pages))
    rng.shuffle(free)

    def take(tokens: int) -> list[int]:
        return [free.pop() for _ in range(-(-tokens // spec.page_size))]

    def row(prefix: list[int], own: int, q_len: int) -> Piece:
        length = len(prefix) * spec.page_size + own
        return Piece([0] * min(q_len, length), length - min(q_len, length), [*prefix, *take(own)])

    if role == "decode":
        return make_batch([row([], n, 1) for n in (1, 700, 33, 64, 17, 250)], spec)
    if role == "prefill":
        return make_batch([row([], n, q) for n, q in ((300, 300), (129, 1), (77, 20), (513, 64), (1, 1))], spec)
    trunk, branch = take(256), take(128)
    rows = [row([*trunk, *branch], 5 + i, 1 + i % 3) for i in range(4)] + [row(trunk, 40, 2), row([], 70, 9), row(trunk, 3, 1)]
    return make_batch(rows, spec)


def norm(fi: Any, device: Device, dtype: torch.dtype) -> Tensor:
    x, w = (noise(s, *shape).to(dtype).to(device.torch_device) for s, shape in ((1, (7, 4096)), (2, (4096,))))
    out: Tensor = fi.rmsnorm(x, w, 1e-5)
    return out


def head_norm(fi: Any, device: Device, dtype: torch.dtype) -> Tensor:
    qkv, w = (noise(s, *shape).to(dtype).to(device.torch_device) for s, shape in ((1, (7, 12 * 128)), (2, (128,))))
    out: Tensor = fi.rmsnorm(qkv[:, : 8 * 128].view(7, 8, 128), w, 1e-6)
    return out


def fused_norm(fi: Any, device: Device, dtype: torch.dtype) -> Tensor:
    x, y, w = (
        noise(s, *shape).to(dtype).to(device.torch_device) for s, shape in ((1, (7, 4096)), (2, (7, 4096)), (3, (4096,)))
    )
    fi.fused_add_rmsnorm(x, y, w, 1e-5)
    return torch.cat([x, y])


def silu(fi: Any, device: Device, dtype: torch.dtype) -> Tensor:
    out: Tensor = fi.silu_and_mul(noise(1, 7, 2 * 14_336).to(dtype).to(device.torch_device))
    return out


def rope(fi: Any, device: Device, dtype: torch.dtype) -> Tensor:
    """On columns of a fused qkv, as the model has them."""
    where = device.torch_device
    qkv = noise(1, 7, 12 * 64).to(dtype).to(where)
    angles = torch.arange(9000, dtype=torch.float32)[:, None] * 10_000.0 ** (-torch.arange(32, dtype=torch.float32) / 32)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(where)
    positions = torch.tensor([0, 1, 2, 77, 4095, 8191, 5], dtype=torch.int32, device=where)
    q, k, _ = torch.split(qkv, [8 * 64, 2 * 64, 2 * 64], dim=1)
    fi.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 64, table)
    return qkv


def append(fi: Any, device: Device, kv: str) -> Tensor:
    """By the table of every page, the scratch page included."""
    where = device.torch_device
    store = CudaKV(KVSpec(1, 2, 64, 9, 16, kv), KV_DTYPES[kv], where)  # type: ignore[arg-type]
    new = noise(1, 5, 2 * 2 * 64).to(KV_DTYPES[kv]).to(where)
    k, v = new[:, :128].view(5, 2, 64), new[:, 128:].view(5, 2, 64)
    slots = torch.from_numpy(np.array([0, 17, 16 * 9 + 3, 100, 143], np.int32)).to(where)
    zeros = torch.zeros(5, dtype=torch.int32, device=where)
    fi.append_paged_kv_cache(k, v, zeros, slots, store.pages(0), store.every_page, store.one_row, store.full)
    return store.data.float()


def product(device: Device, kind: Any, rows: int) -> Tensor:
    """Through the kernel that the kind has on that device, packed there: int4 is packed otherwise on a GPU than on a CPU."""
    values = noise(1, 512, 1024, scale=0.05)
    data = quantise(kind, values) if kind == "q4_0" else values
    matrix = pack_matrix([Weight(kind, (512, 1024), data)], gated=False, compute=torch.bfloat16, device=device.torch_device)
    x, bias = noise(2, rows, 1024).to(torch.bfloat16), noise(3, 512).to(torch.bfloat16)
    out: Tensor = matrix.times(x.to(device.torch_device), bias.to(device.torch_device))  # type: ignore[attr-defined]
    return out


def mask(device: Device) -> Tensor:
    """What is masked becomes 0, which no logit is."""
    where, generator = device.torch_device, torch.Generator().manual_seed(4)
    words = torch.randint(-(2**31), 2**31, (5, 1003), dtype=torch.int32, generator=generator)
    masked = best_mask(where)(noise(5, 9, 32_077).to(where), words.to(where), torch.tensor([8, 0, 3, 4, 7]).to(where))
    return torch.where(masked == -torch.inf, 0.0, masked)


def copy_pages(device: Device, kv: str) -> Tensor:
    where = device.torch_device
    store = CudaKV(KVSpec(3, 2, 64, 9, 16, kv), KV_DTYPES[kv], where)  # type: ignore[arg-type]
    store.data.view(torch.uint8).copy_(noise(6, *store.data.shape).clamp(-FP8_MAX, FP8_MAX).to(KV_DTYPES[kv]).view(torch.uint8))
    store.copy(torch.tensor([1, 1, 5], device=where), torch.tensor([2, 9, 0], device=where))
    return store.data.float().to(torch.bfloat16)
