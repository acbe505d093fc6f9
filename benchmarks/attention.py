"""One layer's paged attention: time, and its share of what this machine can read or compute in the same run.

    python -m benchmarks.attention [--quick]

Shapes of the embedded model (9 query and 3 key heads of 64, pages of 16, shuffled). The layers rotate, so that keys come from
memory as they do between the steps of a model. Ceilings are torch's: a sum over 512 MiB and a 2048 x 2048 matmul; reading runs of
4 KiB (a page's keys for one head) in random order reaches less than the first on most machines.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import interleaved, median, record, time_of
from tests.kernels.paged import Geometry, Kernels, Placed, Row

MODEL = Geometry(heads=9, kv_heads=3, head_dim=64)


@dataclass
class Load:
    """The same batch over the pages of several layers."""

    name: str
    kernels: Kernels
    layers: list[Placed]

    def __post_init__(self) -> None:
        g, arrays = self.layers[0].geometry, self.layers[0].arrays
        tokens = len(arrays["positions"])
        rng = np.random.default_rng(1)
        self.qkv = rng.standard_normal((tokens, (g.heads + 2 * g.kv_heads) * g.head_dim), np.float32)
        self.out = np.zeros((tokens, g.heads * g.head_dim), np.float32)
        self.args = [self.kernels.args(layer, self.qkv, self.out) for layer in self.layers]
        keys = arrays["positions"].astype(np.int64) + 1
        self.flops = 4 * g.heads * g.head_dim * int(keys.sum())
        pages = len(np.unique(arrays["kv_indices"]))
        self.bytes = pages * g.page_size * g.kv_heads * g.head_dim * 2 * (4 if g.kv == "f32" else 2)

    def build(self) -> None:
        self.kernels.call("phloem_attention_plan_build", self.kernels.plan, ctypes.byref(self.args[0]))

    def run(self, repetition: int) -> float:
        """Seconds a layer."""
        self.build()
        time.sleep(0.003)  # the previous load's pool spins for a millisecond more
        self._layers()
        return time_of(self._layers) / len(self.layers)

    def _layers(self) -> None:
        for args in self.args:
            self.kernels.call("phloem_attention", self.kernels.plan, ctypes.byref(args))


def batch(g: Geometry, layers: int, rows: int, length: int, new: int, common: int = 0) -> list[Placed]:
    """`rows` rows of which the first `common` keys lie on shared pages; contents differ between neighbours, not everywhere."""
    rng = np.random.default_rng(0)
    per_row, shared = -(-length // g.page_size), common // g.page_size
    num_pages = shared + rows * (per_row - shared)
    order = rng.permutation(num_pages)
    prefix, own = order[:shared].tolist(), order[shared:].reshape(rows, -1).tolist()
    shape = Row(np.empty((length, 0, 0), np.float32), np.empty((length, 0, 0), np.float32), np.empty((new, 0, 0), np.float32))
    k_shape, v_shape = (
        (num_pages + 1, g.kv_heads, g.head_dim, g.page_size),
        (num_pages + 1, g.kv_heads, g.page_size, g.head_dim),
    )
    return [
        Placed(g, num_pages, written(g, k_shape), written(g, v_shape), [shape] * rows, [prefix + tail for tail in own])
        for _ in range(layers)
    ]


def written(g: Geometry, shape: tuple[int, ...]) -> NDArray[Any]:
    """Finite numbers on huge pages, as the engine's own memory has them. Memory never written would be one page of zeros."""
    dtype = np.dtype(np.uint16 if g.kv == "bf16" else np.float32)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(memory, dtype)
    flat[...] = 0x3F0F if g.kv == "bf16" else 0.5
    flat[::7] = 0xBE80 if g.kv == "bf16" else -0.25
    return flat.reshape(shape)


def ceilings() -> tuple[float, float]:
    """Bytes and floating point operations a second, two threads or as many as torch has."""
    array = torch.ones(128 << 20)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    read = min(time_of(lambda: array.sum()) for _ in range(7))
    multiply = min(time_of(lambda: a @ b) for _ in range(7))
    return array.nbytes / read, 2 * 2048**3 / multiply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--variant", type=int, default=-1, help="code variant, kernels/include/phloem.h; -1: the best")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeat = 5 if options.quick else 25
    loads: list[Load] = []
    for kv in ("f32", "bf16"):
        g = replace(MODEL, kv=kv)  # type: ignore[arg-type]
        layers = 3 if kv == "f32" else 6
        shapes = {
            "decode 32 rows, 1024 keys, all distinct": batch(g, layers, 32, 1024, 1),
            "decode 32 rows, 992 of 1024 keys shared": batch(g, layers, 32, 1024, 1, 992),
            "decode 1 row, 1024 keys": batch(g, 4 * layers, 1, 1024, 1),
            "decode 1 row, 8192 keys": batch(g, layers, 1, 8192, 1),
            "prefill 512 tokens on 1024 keys": batch(g, 2, 1, 1536, 512),
            "prefill 512 tokens": batch(g, 2, 1, 512, 512),
        }
        loads += [Load(f"{kv}: {name}", Kernels(options.threads, options.variant), placed) for name, placed in shapes.items()]
    bandwidth, flops = ceilings()
    runs: dict[str, Callable[[int], float]] = {load.name: load.run for load in loads}
    seconds = {name: median(times) for name, times in interleaved(repeat, **runs).items()}
    bandwidth, flops = (max(pair) for pair in zip((bandwidth, flops), ceilings()))
    for load in loads:
        layer, extra = seconds[load.name], {}
        if "shared" in load.name:
            extra["speedup_over_distinct"] = round(
                seconds[f"{load.name.split(':')[0]}: decode 32 rows, 1024 keys, all distinct"] / layer, 2
            )
        record(
            "attention_layer_ms", layer * 1e3, "ms", load.name, threads=options.threads, variant=options.variant,
            gb_s=round(load.bytes / layer / 1e9, 1), gflop_s=round(load.flops / layer / 1e9, 1),
            ceiling_gb_s=round(bandwidth / 1e9, 1), ceiling_gflop_s=round(flops / 1e9, 1),
            of_ceiling=round(max(load.bytes / layer / bandwidth, load.flops / layer / flops), 2), **extra,
        )  # fmt: skip
    build = median([time_of(loads[0].build) for _ in range(50)])
    record("attention_plan_us", build * 1e6, "us", "32 rows of 64 pages", threads=options.threads)
    for load in loads:
        load.kernels.close()


if __name__ == "__main__":
    main()
