"""Paged attention for tests: the C entries through ctypes, logical rows laid out on pages, and the float64 answer.

A `Row` knows keys, values and queries, not pages. `lay_out` gives it pages: any size, any order, shared or not, all else NaN.

    rows ──lay_out(page_size, share, seed)──► Placed: store + CSR arrays ──Kernels.attend──► out per row
      └──────────────────────────reference (float64)────────────────────────────────────────► out per row
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from phloem.runtime import native

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Geometry:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    kv: Literal["f32", "bf16"] = "f32"
    window: int = 0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))


@dataclass
class Row:
    """k, v: [length, kv_heads, head_dim]; q: [new, heads, head_dim], the queries of its last `new` positions."""

    k: Floats
    v: Floats
    q: Floats

    @property
    def length(self) -> int:
        return len(self.k)

    def piece(self, begin: int, end: int) -> Row:
        """Its new tokens begin .. end - 1 alone, as a chunk of a prefill computes them."""
        length = self.length - len(self.q) + end
        return Row(self.k[:length], self.v[:length], self.q[begin:end])


def to_bf16(x: Floats) -> NDArray[np.uint16]:
    """Nearest even, for finite numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: NDArray[np.uint16]) -> Floats:
    return (x.astype(np.uint32) << 16).view(np.float32)


def random_row(g: Geometry, rng: np.random.Generator, length: int, new: int, prefix: Row | None = None, common: int = 0) -> Row:
    """A row whose first `common` keys are those of `prefix`."""
    k = rng.standard_normal((length, g.kv_heads, g.head_dim), np.float32)
    v = rng.standard_normal((length, g.kv_heads, g.head_dim), np.float32)
    if g.kv == "bf16":
        k, v = from_bf16(to_bf16(k)), from_bf16(to_bf16(v))
    if prefix is not None:
        k[:common], v[:common] = prefix.k[:common], prefix.v[:common]
    return Row(k, v, rng.standard_normal((new, g.heads, g.head_dim), np.float32))


@dataclass
class Placed:
    geometry: Geometry
    num_pages: int
    k: NDArray[Any]  # [num_pages + 1, kv_heads, head_dim, page_size]
    v: NDArray[Any]  # [num_pages + 1, kv_heads, page_size, head_dim]
    rows: Sequence[Row]
    tables: list[list[int]]
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.geometry.page_size
        new = [len(row.q) for row in self.rows]
        last = [row.length - (len(table) - 1) * size for row, table in zip(self.rows, self.tables)]
        positions = [np.arange(row.length - n, row.length) for row, n in zip(self.rows, new)]
        slots = [np.array(table)[p // size] * size + p % size for table, p in zip(self.tables, positions)]
        self.arrays = {
            "positions": np.concatenate(positions).astype(np.int32),
            "qo_indptr": np.cumsum([0, *new]).astype(np.int32),
            "kv_indptr": np.cumsum([0, *map(len, self.tables)]).astype(np.int32),
            "kv_indices": np.array([page for table in self.tables for page in table], np.int32),
            "kv_last_page_len": np.array(last, np.int32),
            "kv_slots": np.concatenate(slots).astype(np.int64),
        }


def empty_store(g: Geometry, num_pages: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Every byte 0xff: NaN in float32 and in bf16."""
    dtype = np.float32 if g.kv == "f32" else np.uint16
    k = np.empty((num_pages + 1, g.kv_heads, g.head_dim, g.page_size), dtype)
    v = np.empty((num_pages + 1, g.kv_heads, g.page_size, g.head_dim), dtype)
    k.view(np.uint8)[...] = 0xFF
    v.view(np.uint8)[...] = 0xFF
    return k, v


def lay_out(rows: Sequence[Row], g: Geometry, *, share: bool = True, seed: int = 0) -> Placed:
    """Pages in random order. With `share`, rows whose keys agree to a page's end use one page for it."""
    size = g.page_size
    num_pages = sum(-(-row.length // size) for row in rows) + 3
    free = list(np.random.default_rng(seed).permutation(num_pages))
    k, v = empty_store(g, num_pages)
    known: dict[bytes, int] = {}
    tables = []
    for row in rows:
        table, spelled = [], b""
        for begin in range(0, row.length, size):
            end = min(begin + size, row.length)
            spelled = hashlib.sha256(spelled + row.k[begin:end].tobytes()).digest()
            page = known.get(spelled) if share and end == begin + size else None
            if page is None:
                page = int(free.pop())
                known[spelled] = page
                keys, values = row.k[begin:end], row.v[begin:end]
                if g.kv == "bf16":
                    keys, values = to_bf16(keys), to_bf16(values)
                k[page, :, :, : end - begin] = keys.transpose(1, 2, 0)
                v[page, :, : end - begin, :] = values.transpose(1, 0, 2)
            table.append(page)
        tables.append(table)
    return Placed(g, num_pages, k, v, rows, tables)


def reference(row: Row, g: Geometry) -> NDArray[np.float64]:
    """[new, heads, head_dim] in float64, one query at a time."""
    group = g.heads // g.kv_heads
    out = np.zeros((len(row.q), g.heads, g.head_dim))
    for i in range(len(row.q)):
        position = row.length - len(row.q) + i
        low = max(0, position + 1 - g.window) if g.window else 0
        for h in range(g.heads):
            k = row.k[low : position + 1, h // group].astype(np.float64)
            v = row.v[low : position + 1, h // group].astype(np.float64)
            scores = k @ row.q[i, h].astype(np.float64) * g.scale
            if g.softcap:
                scores = g.softcap * np.tanh(scores / g.softcap)
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ v / weights.sum()
    return out


class KernelError(Exception):
    pass


class Kernels:
    """One context. Raises KernelError with the library's words."""

    def __init__(self, threads: int = 1, variant: int = -1) -> None:
        self.lib = native.library()
        for name in ("phloem_error", "phloem_create_error", "phloem_variant_name"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        self.context, self.plan = ctypes.c_void_p(), ctypes.c_void_p()
        self.threads, self.variant = threads, variant
        if self.lib.phloem_create(threads, variant, ctypes.byref(self.context)):
            raise KernelError(self.lib.phloem_create_error().decode())
        self.call("phloem_attention_plan_create", ctypes.byref(self.plan))

    def close(self) -> None:
        self.lib.phloem_attention_plan_destroy(self.plan)
        self.lib.phloem_destroy(self.context)

    def call(self, name: str, *args: Any) -> None:
        if getattr(self.lib, name)(self.context, *args):
            raise KernelError(self.lib.phloem_error(self.context).decode())

    def args(self, placed: Placed, qkv: Floats, out: Floats, **more: Any) -> native.AttentionArgs:
        """`more`: fields by name; arrays give their address. Keep them alive during the call."""
        g, arrays = placed.geometry, placed.arrays
        fields = {
            "qkv": qkv, "qkv_ld": qkv.strides[0] // 4, "out": out, "out_ld": out.strides[0] // 4, "k_cache": placed.k, "v_cache": placed.v,
            **arrays, "num_rows": len(arrays["kv_last_page_len"]), "num_tokens": len(arrays["positions"]),
            "kv_type": int(g.kv == "bf16"), "heads": g.heads, "kv_heads": g.kv_heads, "head_dim": g.head_dim,
            "page_size": g.page_size, "num_pages": placed.num_pages, "window": g.window, "scale": g.scale, "softcap": g.softcap,
            **more,
        }  # fmt: skip
        return native.AttentionArgs(**{k: v.ctypes.data if isinstance(v, np.ndarray) else v for k, v in fields.items()})

    def attend(self, placed: Placed) -> list[Floats]:
        """Each row's [new, heads, head_dim]. The rows of qkv hold NaN where attention must not look."""
        g = placed.geometry
        tokens, width = len(placed.arrays["positions"]), g.heads * g.head_dim
        qkv = np.full((tokens, (g.heads + 2 * g.kv_heads) * g.head_dim), np.nan, np.float32)
        qkv[:, :width] = np.concatenate([row.q for row in placed.rows]).reshape(tokens, width)
        out = np.full((tokens, width), np.nan, np.float32)
        args = self.args(placed, qkv, out)
        self.call("phloem_attention_plan_build", self.plan, ctypes.byref(args))
        self.call("phloem_attention", self.plan, ctypes.byref(args))
        again = np.full_like(out, np.nan)  # a plan serves many layers
        args.out = again.ctypes.data
        self.call("phloem_attention", self.plan, ctypes.byref(args))
        assert out.tobytes() == again.tobytes()
        indptr = placed.arrays["qo_indptr"]
        return [out[a:b].reshape(-1, g.heads, g.head_dim) for a, b in itertools.pairwise(indptr)]

    def run(self, rows: Sequence[Row], g: Geometry, **layout: Any) -> list[Floats]:
        return self.attend(lay_out(rows, g, **layout))


def variants() -> list[int]:
    """Those that this machine runs."""
    return [v for v in range(4) if native.library().phloem_supported(v)]


def with_page_size(g: Geometry, page_size: int) -> Geometry:
    return replace(g, page_size=page_size)
