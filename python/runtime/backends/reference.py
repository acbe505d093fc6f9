"""The executable specification: every operation in the plainest arithmetic, float32, one token at a time.

B1 (the same bits for any batch, chunking, page size or thread count) holds by construction: whatever is summed is summed by a
numpy call on *one* token, whose shapes, and with them its order of additions, are the same for any batch around it, and numpy
uses one thread for it. (A BLAS would be faster, but may choose its order by the number of rows or threads.) What is not
summed is elementwise, so exact per element.

    keys of a token     [0 .. 255] [256 .. 511] [512 .. pos | masked]     splits of 256 keys, masked ones zero, merged in order

K and V of a layer lie as [num_pages + 1, page_size, num_kv_heads, head_dim], "NHD". Quantised weights become float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phloem.runtime.backends.base import AttentionSpec, BatchLike, ForwardBatch, KVSpec, Limits, Model, Packed, Weight
from phloem.runtime.backends.blocks import dequantise
from phloem.runtime.backends.check import check_batch
from phloem.runtime.errors import KernelError

__all__ = ["Reference", "ReferenceKV", "ReferenceMatrix", "ReferenceRunner"]

SPLIT = 256  # keys to a partial softmax: a constant of the arithmetic, so changing it changes bits
F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReferenceMatrix:
    """values: float32 [out, in].   gated: the first half of the rows is the gate, the second half up.   rows: of each part."""

    values: F32
    gated: bool = False
    rows: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values.shape[0], self.values.shape[1])


class Reference:
    """The backend. It always computes on one thread; `threads` is an upper bound."""

    name = "reference"
    kv_dtypes = ("f32", "bf16")

    def __init__(self, threads: int = 1) -> None:
        self.threads = 1

    def pack(self, parts: Sequence[Weight], *, gated: bool = False) -> Packed:
        """float32, whatever the parts are stored as. Raises KernelError if their widths differ."""
        columns = {part.shape[1] for part in parts}
        if len(columns) != 1:
            raise KernelError(f"parts of one matrix have {sorted(columns)} columns; expected one width.")
        if gated and (len(parts) != 2 or parts[0].shape != parts[1].shape):
            raise KernelError(f"a gated matrix is made of [gate, up] of one shape, not of {[p.shape for p in parts]}.")
        return ReferenceMatrix(
            np.concatenate([_float32(part) for part in parts]), gated, tuple(part.shape[0] for part in parts)
        )

    def like(self, packed: Packed) -> Packed:
        one = _matrix(packed)
        return ReferenceMatrix(np.zeros_like(one.values), one.gated, one.rows)

    def store(self, packed: Packed, part: int, weight: Weight) -> None:
        _part(packed, part)[:] = _float32(weight)

    def store_from(self, packed: Packed, source: Packed, part: int) -> None:
        _part(packed, part)[:] = _part(source, part)

    def settle(self) -> None:
        pass

    def read(self, packed: Packed, row: int, count: int) -> Tensor:
        return torch.from_numpy(_matrix(packed).values[row : row + count].copy())

    def discard(self, packed: Packed) -> int:
        """numpy's memory cannot be given back and kept."""
        return 0

    def vector(self, values: Tensor) -> Tensor:
        return values.detach().float().clone()

    def bind(self, model: Model, kv: KVSpec, limits: Limits) -> ReferenceRunner:
        if kv.dtype not in self.kv_dtypes:
            raise KernelError(f"kv_dtype is {kv.dtype!r}; the reference backend has {', '.join(self.kv_dtypes)}.")
        return ReferenceRunner(model, ReferenceKV(kv), limits)

    def close(self) -> None:
        """Nothing to give back."""


class ReferenceKV:
    """Pages of K and V. What a page held before its owner's first write is arbitrary, NaN included."""

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        shape = (spec.num_layers, spec.num_pages + 1, spec.page_size, spec.num_kv_heads, spec.head_dim)
        dtype = torch.float32 if spec.dtype == "f32" else torch.bfloat16
        self.k = torch.empty(shape, dtype=dtype)
        self.v = torch.empty(shape, dtype=dtype)

    def discard(self) -> int:
        freed = (self.k.numel() + self.v.numel()) * self.k.element_size()
        self.k = self.v = torch.empty(0, dtype=self.k.dtype)
        return freed

    def restore(self) -> None:
        s, dtype = self.spec, self.k.dtype
        shape = (s.num_layers, s.num_pages + 1, s.page_size, s.num_kv_heads, s.head_dim)
        self.k, self.v = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        index = torch.as_tensor(list(pages), dtype=torch.int64)
        return self.k[layer][index].float(), self.v[layer][index].float()

    def write(self, layer: int, slots: NDArray[np.int64], k: F32, v: F32) -> None:
        index = torch.from_numpy(slots)
        for store, rows in ((self.k, k), (self.v, v)):
            flat = store[layer].view(-1, self.spec.num_kv_heads, self.spec.head_dim)
            flat[index] = torch.from_numpy(rows).to(flat.dtype)

    def copy(self, copies: NDArray[np.int32]) -> None:
        """All layers of each (source, target) page. Reads all sources before it writes."""
        source, target = (torch.from_numpy(copies[:, i].astype(np.int64)) for i in (0, 1))
        self.k[:, target] = self.k[:, source]
        self.v[:, target] = self.v[:, source]


class ReferenceRunner:
    """Also the Ops that the model is called with: there is nothing to record."""

    def __init__(self, model: Model, kv: ReferenceKV, limits: Limits) -> None:
        self.model, self.kv, self.limits = model, kv, limits

    def rebind(self, model: Model) -> None:
        """Serve this model from now on, over the same pages."""
        self.model = model

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Raises KernelError before it writes anything if the batch breaks the page contract."""
        check_batch(batch, self.kv.spec, self.limits, self.model.width)
        if len(batch.copies):
            self.kv.copy(batch.copies)
        if not len(batch.token_ids):
            return torch.empty(0, self.model.width)
        with np.errstate(
            all="ignore"
        ):  # a row that is not finite is for whoever reads its logits to report (M4), not a warning
            return self.model.forward(self, batch)

    # Ops

    def embed(self, batch: BatchLike, table: Packed) -> Tensor:
        return torch.from_numpy(_matrix(table).values[_real(batch).token_ids])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = [_rms_norm(row[None], weight.numpy(), eps)[0] for row in x.numpy()]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty_like(x)  # a chunk that wants no logits has no rows

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        out = _rows_times(x.numpy(), _matrix(weight).values)
        if bias is not None:
            out += bias.numpy()
        if residual is not None:
            out += residual.numpy()
        return torch.from_numpy(out)

    def gated_linear(self, x: Tensor, gate_up: Packed) -> Tensor:
        matrix = _matrix(gate_up)
        if not matrix.gated:
            raise KernelError("gated_linear needs a matrix that was packed with gated=True.")
        both = _rows_times(x.numpy(), matrix.values)
        half = both.shape[1] // 2
        out = np.empty((len(both), half), np.float32)
        with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right limit, -0
            for target, row in zip(out, both, strict=True):
                gate = row[:half]
                target[:] = gate / (1 + np.exp(-gate)) * row[half:]
        return torch.from_numpy(out)

    def attention(
        self,
        batch: BatchLike,
        qkv: Tensor,
        layer: int,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        real, page_size = _real(batch), self.kv.spec.page_size
        tokens, heads, kv_heads, dim = len(qkv), spec.num_heads, spec.num_kv_heads, spec.head_dim
        every = qkv.numpy().reshape(tokens, heads + 2 * kv_heads, dim)
        q, k, v = every[:, :heads], every[:, heads : heads + kv_heads], every[:, heads + kv_heads :]
        if q_norm is not None:
            q = np.stack([_rms_norm(row, q_norm.numpy(), spec.norm_eps) for row in q])
        if k_norm is not None:
            k = np.stack([_rms_norm(row, k_norm.numpy(), spec.norm_eps) for row in k])
        q, k = _rotate(q, real.positions, spec), _rotate(k, real.positions, spec)
        self.kv.write(layer, real.kv_slots, k, np.ascontiguousarray(v))  # of all rows, before any row reads (R5)
        out = np.empty((tokens, heads * dim), np.float32)
        for row in range(len(real.kv_last_page_len)):
            pages = real.kv_indices[real.kv_indptr[row] : real.kv_indptr[row + 1]]
            kv_len = (len(pages) - 1) * page_size + int(real.kv_last_page_len[row])
            keys, values = (_whole_splits(t, kv_len) for t in self.kv.read(layer, pages.tolist()))
            for token in range(real.qo_indptr[row], real.qo_indptr[row + 1]):
                out[token] = _attend(q[token], keys, values, int(real.positions[token]), spec)
        return torch.from_numpy(out)

    def logit_rows(self, batch: BatchLike, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy()[_real(batch).logit_rows])


def _float32(part: Weight) -> F32:
    if part.kind in ("f32", "bf16", "f16"):
        values = part.data.detach().float()
    else:
        values = dequantise(part.kind, part.data)
    if tuple(values.shape) != part.shape:
        raise KernelError(f"a {part.kind} weight says it is {part.shape}, but its data is {tuple(values.shape)}.")
    return np.ascontiguousarray(values.cpu().numpy())


def _part(packed: Packed, part: int) -> F32:
    one = _matrix(packed)
    at = sum(one.rows[:part])
    return one.values[at : at + one.rows[part]]


def _matrix(packed: Packed) -> ReferenceMatrix:
    if not isinstance(packed, ReferenceMatrix):
        raise KernelError(f"a matrix of another backend ({type(packed).__name__}) was given to the reference backend.")
    return packed


def _real(batch: BatchLike) -> ForwardBatch:
    assert isinstance(batch, ForwardBatch)
    return batch


def _rows_times(x: F32, weight: F32) -> F32:
    """x @ weight.T, each row by a call of one constant shape."""
    out = np.empty((len(x), len(weight)), np.float32)
    for target, row in zip(out, x, strict=True):
        np.einsum("nk,k->n", weight, row, out=target)
    return out


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """[n, width]: x / sqrt(mean(x^2) + eps) * weight."""
    mean = np.einsum("nw,nw->n", x, x) / np.float32(x.shape[1])
    scaled: F32 = weight * (x * (1 / np.sqrt(mean + np.float32(eps)))[:, None])
    return scaled


def _rotate(x: F32, positions: NDArray[np.int32], spec: AttentionSpec) -> F32:
    """RoPE over pairs (i, i + half); dimensions beyond the table's stay."""
    cos, sin = (table.numpy()[positions][:, None] for table in (spec.rope.cos, spec.rope.sin))
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], axis=-1)


def _whole_splits(pages: Tensor, kv_len: int) -> F32:
    """[splits * 256, kv heads, dim]: the first kv_len keys, then zeros."""
    keys = pages.numpy().reshape(-1, *pages.shape[2:])
    out = np.zeros((-(-kv_len // SPLIT) * SPLIT, *keys.shape[1:]), np.float32)
    out[:kv_len] = keys[:kv_len]
    return out


def _attend(q: F32, keys: F32, values: F32, position: int, spec: AttentionSpec) -> F32:
    """One token: softmax(q k / scale) v over its visible keys, split by split with a running maximum."""
    kv_heads, dim = spec.num_kv_heads, spec.head_dim
    grouped = np.ascontiguousarray(q).reshape(kv_heads, -1, dim)
    best = np.full((*grouped.shape[:2], 1), -np.inf, np.float32)
    total = np.zeros_like(best)
    out = np.zeros(grouped.shape, np.float32)
    oldest = max(0, position - spec.window + 1) if spec.window else 0
    for start in range(oldest // SPLIT * SPLIT, position + 1, SPLIT):
        where = np.arange(start, start + SPLIT)
        seen = (where >= oldest) & (where <= position)
        scores = np.einsum("hgd,jhd->hgj", grouped, keys[start : start + SPLIT]) * np.float32(spec.scale)
        # What is not seen may be anything, also NaN, and 0 * NaN is not 0: so its value goes here, its score below.
        v = np.where(seen[:, None, None], values[start : start + SPLIT], np.float32(0))
        if spec.softcap:
            scores = np.float32(spec.softcap) * np.tanh(scores / np.float32(spec.softcap))
        scores = np.where(seen, scores, np.float32(-np.inf))
        peak = np.maximum(best, scores.max(-1, keepdims=True))
        shrink, weights = np.exp(best - peak), np.exp(scores - peak)
        total = total * shrink + weights.sum(-1, keepdims=True)
        out = out * shrink + np.einsum("hgj,jhd->hgd", weights, v)
        best = peak
    attended: F32 = (out / total).reshape(-1)
    return attended
