"""How near the linear kernels come to this machine's ceilings: each shape of the embedded model, each format, M rows at once.

    python benchmarks/kernels.py [--kinds f32,bf16,q8_0,q4_0,q4_1] [--shapes qkv,...] [--rows 1,4,...] [--threads 2] [--variant auto]

One JSON line a cell: GFLOP/s (or GOP/s), GB/s of weights, and the fraction of the roofline, which is the larger of bytes /
bandwidth and operations / peak, both measured in the same run. Weights rotate over copies well beyond L3, so they come from DRAM.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import median, record
from phloem.runtime.native import Context

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
KINDS = {
    "f32": (0, 4.0),
    "bf16": (1, 2.0),
    "q8_0": (2, 34 / 32),
    "q4_0": (3, 18 / 32),
    "q4_1": (4, 20 / 32),
}  # C number, bytes a weight
COPIES = 128 << 20  # bytes over which weights rotate


def seconds(call: Callable[[int], None], budget: float = 0.15) -> float:
    """Median time of a call; its argument counts up."""
    for i in range(3):
        call(i)
    times: list[float] = []
    begin = time.perf_counter()
    while (time.perf_counter() - begin < budget or len(times) < 7) and len(times) < 5000:
        start = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - start)
    return median(times)


def ceilings(context: Context) -> dict[str, float]:
    """GB/s of reading, GFLOP/s of multiply-adds, GOP/s of int8 dot products."""
    library, size = context.library, 512 << 20
    memory = context.allocate(size)
    ctypes.memset(memory, 1, size)
    read = size / seconds(lambda _: context.check(library.phloem_ceiling_read(context.handle, memory, size)), 0.5) / 1e9
    context.release(memory)
    done = ctypes.c_double()
    rates = []
    for loop in (library.phloem_ceiling_fma, library.phloem_ceiling_dot):
        taken = seconds(lambda _, loop=loop: context.check(loop(context.handle, 200_000, ctypes.byref(done))), 0.3)  # type: ignore[misc]
        rates.append(done.value / taken / 1e9)
    return {"read": read, "fma": rates[0], "dot": rates[1]}


def source(kind: str, n: int, k: int, seed: int) -> np.ndarray:  # type: ignore[type-arg]
    """Rows of random weights, sane as numbers: halves inside blocks are small and finite."""
    rng = np.random.default_rng(seed)
    if kind == "f32":
        return rng.standard_normal((n, k), np.float32)
    if kind == "bf16":
        return (rng.standard_normal((n, k), np.float32).view(np.uint32) >> 16).astype(np.uint16)
    block = {"q8_0": 34, "q4_0": 18, "q4_1": 20}[kind]
    data = rng.integers(0, 256, (n, k // 32, block), np.uint8)
    scales = (rng.random((n, k // 32, 2), np.float32) * 0.01).astype(np.float16).view(np.uint8).reshape(n, k // 32, 4)
    head = 4 if kind == "q4_1" else 2
    data[:, :, :head] = scales[:, :, :head]
    return data.reshape(n, -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,4,8,32,256")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variant", default="auto")
    options = parser.parse_args()
    context = Context(options.threads, options.variant)
    top = ceilings(context)
    setting = {"threads": options.threads, "variant": context.variant}
    for name, unit in (("read", "GB/s"), ("fma", "GFLOP/s"), ("dot", "GOP/s")):
        record(f"ceiling.{name}", top[name], unit, "kernels", **setting)
    rows = [int(m) for m in options.rows.split(",")]
    for kind in options.kinds.split(","):
        totals = dict.fromkeys(rows, 0.0)
        for shape in options.shapes.split(","):
            (n, k), (number, bytes_each) = SHAPES[shape], KINDS[kind]
            data = source(kind, n, k, 1)
            size = n * k * bytes_each
            copies = max(2, int(COPIES / size))
            made = [
                context.make(context.library.phloem_matrix_pack, number, n, k, data.ctypes.data, data.strides[0])
                for _ in range(copies)
            ]
            handles = [(ctypes.c_void_p * 1)(handle) for handle in made]
            x = np.random.default_rng(2).standard_normal((max(rows), k), np.float32)
            y = np.zeros((max(rows), n), np.float32)
            x_at, y_at = x.ctypes.data, y.ctypes.data
            for m in rows:

                def call(
                    i: int,
                    m: int = m,
                    k: int = k,
                    n: int = n,
                    handles: list[ctypes.Array[ctypes.c_void_p]] = handles,
                    x_at: int = x_at,
                    y_at: int = y_at,
                ) -> None:
                    context.check(
                        context.library.phloem_linear(
                            context.handle, handles[i % len(handles)], 1, 0, x_at, k, m, None, None, 0, y_at, n
                        )
                    )

                taken = seconds(call)
                totals[m] += taken * (1 if shape == "head" else 30)
                least = max(
                    size / top["read"] / 1e9, 2.0 * m * n * k / (top["dot"] if kind.startswith("q") else top["fma"]) / 1e9
                )
                record("linear.roofline", least / taken, "of 1", f"{kind} {shape} {n}x{k} M={m}",
                       us=round(taken * 1e6, 1), gbs=round(size / taken / 1e9, 2), gops=round(2e-9 * m * n * k / taken, 1), **setting)  # fmt: skip
            for handle in made:
                context.library.phloem_matrix_destroy(context.handle, handle)
        for m in rows:
            record(
                "linear.model",
                m / totals[m],
                "tok/s",
                f"{kind}: 30 layers and head, linears alone, M={m}",
                ms=round(totals[m] * 1e3, 3),
                **setting,
            )
    context.close()


if __name__ == "__main__":
    main()
