"""The operations of a model on the GPU: FlashInfer's kernels, torch's matmuls. Eager, or under a graph's capture; no branch on data.

    x ── linear(residual=x) ──► Stream(x, delta)      nothing is added yet
         rms_norm(Stream)   ──► fused add and norm: x += delta, delta = norm(x)      one pass over both

Activations are bf16 or f16; logits leave as float32. K and V of all rows are written before attention reads (R5): one call a layer,
by slot. FlashInfer's append knows slots only as positions of a row's table, so it is given one row whose table is every page in
order: then the position *is* the slot, the scratch page's included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from phloem.runtime.backends.base import AttentionSpec, BatchLike, Packed, RopeTable
from phloem.runtime.backends.cuda.attention import Kind, kind_of
from phloem.runtime.backends.cuda.matrices import FP8_MAX, Fp8Matrix, Int4Matrix, Matrix, PlainMatrix
from phloem.runtime.errors import KernelError

__all__ = ["Attend", "CudaKV", "GpuBatch", "GpuOps", "NoLogits", "specs_of"]

TILE = 64  # rows of one matmul under `deterministic`


class Attend(Protocol):
    def run(self, kind: Kind, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor: ...


class NoLogits(Exception):
    """The forward has done all that later rows can read: no row's logits are wanted."""


@dataclass(slots=True)
class GpuBatch:
    """One forward on the device. token_ids, positions, slots: int32 [T].   rows: int32 [L], or None for every token in order."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor | None
    attend: Attend


@dataclass(slots=True)
class _Sum:
    """The residual stream: x + delta, added by whoever reads it next."""

    x: Tensor
    delta: Tensor | None = None

    def settled(self) -> Tensor:
        if self.delta is not None:
            self.x += self.delta
            self.delta = None
        return self.x


class CudaKV:
    """[layers, 2, num_pages + 1, page_size, kv heads, dim]: K and V of a layer have the same strides, as FlashInfer wants."""

    def __init__(self, spec: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.spec, self.dtype = spec, dtype
        shape = (spec.num_layers, 2, spec.num_pages + 1, spec.page_size, spec.num_kv_heads, spec.head_dim)
        # Zeros, not whatever was there: a masked key that is NaN would still spoil a tile on tensor cores.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.every_page = torch.arange(spec.num_pages + 1, dtype=torch.int32, device=device)
        self.one_row = torch.tensor([0, spec.num_pages + 1], dtype=torch.int32, device=device)
        self.full = torch.tensor([spec.page_size], dtype=torch.int32, device=device)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.data[layer, 0], self.data[layer, 1]

    def read(self, layer: int, pages: Any) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(list(pages), dtype=torch.int64, device=self.data.device)
        k, v = self.pages(layer)
        # index_select has no fp8, a view of bytes has.
        return tuple(t.view(torch.uint8).index_select(0, index).view(self.dtype).float().cpu() for t in (k, v))  # type: ignore[return-value]

    def discard(self) -> int:
        """The bytes given up. Views of the pages stay, of nothing."""
        nbytes = self.data.untyped_storage().nbytes()
        self.data.untyped_storage().resize_(0)
        return nbytes

    def restore(self) -> None:
        self.data.untyped_storage().resize_(self.data.numel() * self.data.itemsize)
        self.data.view(torch.uint8).zero_()  # as at the start

    def copy(self, source: Tensor, target: Tensor) -> None:
        """All layers of each page, whatever is in it. Copies of a plan commute."""
        raw = self.data.view(torch.uint8)
        raw.index_copy_(2, target, raw.index_select(2, source))


class GpuOps:
    """Ops of one runner. `deterministic`: every matmul has TILE rows, so a row's sums do not depend on how many stand beside it."""

    def __init__(self, fi: Any, kv: CudaKV, *, deterministic: bool) -> None:
        self._fi, self._kv, self._deterministic = fi, kv, deterministic
        self._ropes: dict[int, tuple[RopeTable, Tensor]] = {}
        self._zeros: dict[int, Tensor] = {}

    def embed(self, batch: BatchLike, table: Packed) -> Tensor:
        return _handle(_Sum(_matrix(table).rows(_gpu(batch).token_ids)))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        stream = _sum(x)
        if stream.delta is None:
            normed: Tensor = self._fi.rmsnorm(stream.x, weight, eps)
            return normed
        normed, stream.delta = stream.delta, None
        self._fi.fused_add_rmsnorm(normed, stream.x, weight, eps)
        return normed

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        out = self._times(x, _matrix(weight), bias)
        return out if residual is None else _handle(_Sum(_sum(residual).settled(), out))

    def gated_linear(self, x: Tensor, gate_up: Packed) -> Tensor:
        matrix = _matrix(gate_up)
        if not matrix.gated:
            raise KernelError("gated_linear needs a matrix that was packed with gated=True.")
        out: Tensor = self._fi.silu_and_mul(self._times(x, matrix, None))
        return out

    def attention(
        self,
        batch: BatchLike,
        qkv: Tensor,
        layer: int,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        real, tokens = _gpu(batch), qkv.shape[0]
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q, k, v = torch.split(qkv, [heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        if q_norm is not None:
            q = self._fi.rmsnorm(q.view(tokens, heads, dim), q_norm, spec.norm_eps).view(tokens, heads * dim)
        if k_norm is not None:
            k = self._fi.rmsnorm(k.view(tokens, kv_heads, dim), k_norm, spec.norm_eps).view(tokens, kv_heads * dim)
        self._fi.apply_rope_with_cos_sin_cache_inplace(real.positions, q, k, dim, self._rope(spec.rope, qkv.device))
        self._append(real.slots, k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, dim), layer)
        k_pages, v_pages = self._kv.pages(layer)
        return real.attend.run(kind_of(spec), q.view(tokens, heads, dim), k_pages, v_pages).view(tokens, heads * dim)

    def logit_rows(self, batch: BatchLike, x: Tensor) -> Tensor:
        rows, stream = _gpu(batch).rows, _sum(x)
        if rows is None:
            return x
        if not rows.shape[0]:
            raise NoLogits
        delta = None if stream.delta is None else stream.delta.index_select(0, rows)
        return _handle(_Sum(stream.x.index_select(0, rows), delta))

    # ---------------------------------------------------------------------------------------------------------- inside

    def _times(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        if not self._deterministic:
            return matrix.times(x, bias)
        rows = x.shape[0]
        padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % TILE))
        return torch.cat([matrix.times(tile, bias) for tile in torch.split(padded, TILE)])[:rows]

    def _append(self, slots: Tensor, k: Tensor, v: Tensor, layer: int) -> None:
        if self._kv.dtype == torch.float8_e4m3fn:  # a cast makes NaN of what is out of range
            k, v = (t.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn) for t in (k, v))
        elif k.dtype != self._kv.dtype:
            k, v = k.to(self._kv.dtype), v.to(self._kv.dtype)
        self._fi.append_paged_kv_cache(
            k, v, self._row_zero(len(slots), slots.device), slots, self._kv.pages(layer), self._kv.every_page, self._kv.one_row, self._kv.full
        )  # fmt: skip

    def _row_zero(self, tokens: int, device: torch.device) -> Tensor:
        """Zeros for `tokens` tokens, kept: a graph may hold on to them."""
        size = 1 << max(tokens - 1, 0).bit_length()
        if size not in self._zeros:
            self._zeros[size] = torch.zeros(size, dtype=torch.int32, device=device)
        return self._zeros[size][:tokens]

    def _rope(self, rope: RopeTable, device: torch.device) -> Tensor:
        """float32 [positions, rotary dim]: cos, then sin. One a table, which layers share."""
        known = self._ropes.get(id(rope))
        if known is None:
            table = torch.cat([rope.cos, rope.sin], dim=1).to(device, torch.float32).contiguous()
            known = self._ropes[id(rope)] = (rope, table)  # the table too, so that its id stays its own
        return known[1]


class _SpecOps:
    """Runs a model's forward on nothing, to learn what each layer's attention is."""

    def __init__(self) -> None:
        self.specs: dict[int, AttentionSpec] = {}

    def embed(self, *_: Any, **__: Any) -> Tensor:
        return cast("Tensor", self)

    rms_norm = linear = gated_linear = logit_rows = embed

    def attention(
        self, batch: Any, qkv: Any, layer: int, spec: AttentionSpec, q_norm: Any = None, k_norm: Any = None
    ) -> Tensor:
        self.specs[layer] = spec
        return cast("Tensor", self)


def specs_of(model: Any) -> list[AttentionSpec]:
    """Each layer's attention, in order."""
    ops = _SpecOps()
    model.forward(ops, None)
    return [ops.specs[layer] for layer in sorted(ops.specs)]


def _handle(stream: _Sum) -> Tensor:
    """Models hand it from op to op and look at nothing."""
    return cast("Tensor", stream)


def _sum(x: Tensor) -> _Sum:
    return x if isinstance(x, _Sum) else _Sum(x)


def _matrix(packed: Packed) -> Matrix:
    if not isinstance(packed, (PlainMatrix, Fp8Matrix, Int4Matrix)):
        raise KernelError(f"a matrix of another backend ({type(packed).__name__}) was given to the cuda backend.")
    return packed


def _gpu(batch: BatchLike) -> GpuBatch:
    assert isinstance(batch, GpuBatch)
    return batch
