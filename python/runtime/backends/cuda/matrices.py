"""Weights as the GPU multiplies them. Each kind has its kernel in a library that we keep; `dequantised` says what it means.

    Plain    bf16 or f16 [out, in]                     cuBLAS, through torch's linear
    Fp8      e4m3 [out, in], a float32 scale a row     torch._scaled_mm; a row of x is scaled to fp8 on the way (W8A8)
    Int4     4 bits, scale and zero a group of a row   torch._weight_int4pack_mm (tinygemm): w = (q - 8) * scale + zero, bf16 only

Int4 takes GGUF's q4_0 and q4_1 as stored, groups of 32: w = d (q - 8), and w = d q + m = d (q - 8) + (m + 8 d). Scale and zero are
rounded to bf16, which is the kernel's format. GPTQ and AWQ come as Weight("int4") (models/quantised.py): (q - z) s is scale s and zero
(8 - z) s. fp8 checkpoints come as Weight("e4m3") (models/fp8.py), bytes and scales as they are stored. q8_0 has no kernel here and becomes plain, at twice its size: 4-bit files keep their tables so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phloem.runtime.backends.base import Packed, Weight
from phloem.runtime.backends.blocks import dequantise
from phloem.runtime.errors import KernelError

__all__ = [
    "FP8_MAX",
    "Fp8Matrix",
    "Int4Matrix",
    "Matrix",
    "PlainMatrix",
    "int4_from_blocks",
    "pack_matrix",
    "scaled_rows",
]

FP8_MAX = 448.0  # the largest e4m3
INNER_K_TILES = 8  # of tinygemm's packing: `in` must be a multiple of 16 times this


@dataclass(slots=True)
class PlainMatrix:
    """widths: rows of each part."""

    data: Tensor
    gated: bool = False
    widths: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return (self.data.shape[0], self.data.shape[1])

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.data, bias)

    def rows(self, ids: Tensor) -> Tensor:
        """As an embedding table."""
        return self.data.index_select(0, ids)

    def dequantised(self) -> Tensor:
        return self.data.float()


@dataclass(slots=True)
class Fp8Matrix:
    """data: float8_e4m3fn [out, in].   scales: float32 [1, out]."""

    data: Tensor
    scales: Tensor
    compute: torch.dtype
    gated: bool = False
    widths: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return (self.data.shape[0], self.data.shape[1])

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        values, scales = scaled_rows(x)
        out = torch._scaled_mm(values, self.data.t(), scale_a=scales, scale_b=self.scales, out_dtype=torch.bfloat16)
        out = out.to(self.compute)
        return out if bias is None else out + bias

    def rows(self, ids: Tensor) -> Tensor:
        raise KernelError("an fp8 matrix is no embedding table; tables stay bf16.")

    def dequantised(self) -> Tensor:
        return self.data.float() * self.scales.t()


@dataclass(slots=True)
class Int4Matrix:
    """packed: tinygemm's own order.   scales_and_zeros: bf16 [in / group, out, 2]."""

    packed: Tensor
    scales_and_zeros: Tensor
    group: int
    shape: tuple[int, int]
    gated: bool = False

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        multiply = torch._weight_int4pack_mm if x.is_cuda else torch._weight_int4pack_mm_for_cpu
        out: Tensor = multiply(x, self.packed, self.group, self.scales_and_zeros)
        return out if bias is None else out + bias

    def rows(self, ids: Tensor) -> Tensor:
        raise KernelError("an int4 matrix is no embedding table; use dtype='bf16' or a file whose table is not 4-bit.")

    def dequantised(self) -> Tensor:
        """By the kernel itself: the identity times it."""
        eye = torch.eye(self.shape[1], dtype=torch.bfloat16, device=self.packed.device)
        return self.times(eye, None).t().float()


Matrix = PlainMatrix | Fp8Matrix | Int4Matrix


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / scale as e4m3, scales float32 [n, 1]): each row's largest magnitude becomes 448. A row of zeros has scale 1."""
    most = x.abs().amax(dim=1, keepdim=True).float()
    scales = torch.where(most > 0, most / FP8_MAX, torch.ones_like(most))
    return (x.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def pack_matrix(parts: Sequence[Weight], *, gated: bool, compute: torch.dtype, device: torch.device) -> Packed:
    """Parts stacked along `out`. Raises KernelError for a kind that no kernel here multiplies, and for shapes that it does not take."""
    columns = {part.shape[1] for part in parts}
    if len(columns) != 1:
        raise KernelError(f"parts of one matrix have {sorted(columns)} columns; expected one width.")
    if gated and (len(parts) != 2 or parts[0].shape != parts[1].shape):
        raise KernelError(f"a gated matrix is made of [gate, up] of one shape, not of {[p.shape for p in parts]}.")
    kinds, widths = {part.kind for part in parts}, tuple(part.shape[0] for part in parts)
    if kinds <= {"f32", "bf16", "f16", "q8_0"}:
        # Part by part: the host never holds a second copy of the whole matrix.
        plain = [dequantise("q8_0", p.data).view(p.shape) if p.kind == "q8_0" else p.data.detach() for p in parts]
        return PlainMatrix(torch.cat([p.to(device).to(compute) for p in plain]), gated, widths)
    if kinds <= {"f8", "e4m3"}:
        scaled = [_scaled(p) if p.kind == "e4m3" else scaled_rows(p.data.detach().to(device)) for p in parts]
        scaled = [(v.to(device), s.to(device)) for v, s in scaled]
        data, scales = torch.cat([v for v, _ in scaled]), torch.cat([s for _, s in scaled]).t().contiguous()
        if data.shape[0] % 16 or data.shape[1] % 16:
            raise KernelError(f"an fp8 matrix of {list(data.shape)}: both sides must be multiples of 16. Use dtype='bf16'.")
        return Fp8Matrix(data, scales, compute, gated, widths)
    if kinds <= {"q4_0", "q4_1"}:
        if compute != torch.bfloat16:
            raise KernelError("the int4 kernel computes in bf16; use dtype='q4' or 'auto' with a bf16 model.")
        found = [int4_from_blocks(p) for p in parts]
        return pack_int4([q for q, _ in found], [s for _, s in found], 32, gated=gated, device=device)
    if kinds == {"int4"}:
        if compute != torch.bfloat16:
            raise KernelError("the int4 kernel computes in bf16; use dtype='auto'.")
        split = [_grouped(p) for p in parts]
        if len({group for *_, group in split}) != 1:
            raise KernelError(
                f"parts of one int4 matrix have groups of {sorted({group for *_, group in split})}; expected one size."
            )
        return pack_int4([q for q, *_ in split], [s for _, s, _ in split], split[0][2], gated=gated, device=device)
    raise KernelError(
        f"no kernel of the cuda backend multiplies {', '.join(sorted(kinds))}. Use dtype='bf16', 'f16', 'fp8' or 'q4', or a file that "
        "stores one of them."
    )


def pack_int4(
    quants: Sequence[Tensor], scales: Sequence[Tensor], group: int, *, gated: bool, device: torch.device
) -> Int4Matrix:
    """quants: uint8 0 .. 15 [out, in].   scales: float32 [out, in / group, 2], (scale, zero) of w = (q - 8) scale + zero."""
    q, sz = torch.cat(list(quants)), torch.cat(list(scales))
    rows, columns = q.shape
    if rows % 8 or columns % (16 * INNER_K_TILES) or columns % group or group not in (32, 64, 128, 256):
        raise KernelError(
            f"an int4 matrix of {[rows, columns]} in groups of {group}: its rows must be a multiple of 8, its columns of "
            f"{16 * INNER_K_TILES} and of the group, the group 32, 64, 128 or 256. Use dtype='bf16'."
        )
    pairs = sz.permute(1, 0, 2).contiguous().to(torch.bfloat16).to(device)
    if device.type == "cpu":
        packed = torch._convert_weight_to_int4pack_for_cpu(q.to(torch.int32), INNER_K_TILES)
    else:
        halves = (q[:, ::2] << 4 | q[:, 1::2]).to(device)
        packed = torch._convert_weight_to_int4pack(halves, INNER_K_TILES)
    return Int4Matrix(packed, pairs, group, (rows, columns), gated)


def _scaled(part: Weight) -> tuple[Tensor, Tensor]:
    """Weight("e4m3") as `scaled_rows` gives it."""
    columns = part.shape[1]
    return part.data[:, :columns].contiguous().view(torch.float8_e4m3fn), part.data[:, columns:].contiguous().view(
        torch.float32
    )


def _grouped(part: Weight) -> tuple[Tensor, Tensor, int]:
    """Weight("int4") as (quants, pairs, elements of a group)."""
    rows, columns = part.shape
    groups = (part.data.shape[1] - columns) // 8
    pairs = part.data[:, columns:].contiguous().view(torch.float32).view(rows, groups, 2)
    return part.data[:, :columns].contiguous(), pairs, columns // groups


def int4_from_blocks(part: Weight) -> tuple[Tensor, Tensor]:
    """GGUF q4_0 or q4_1 as (quants uint8 [out, in], (scale, zero) float32 [out, in / 32, 2])."""
    rows, columns = part.shape
    size = 18 if part.kind == "q4_0" else 20
    raw = part.data.view(rows, columns // 32, size)
    d = raw[..., :2].contiguous().view(torch.float16).float()
    nibbles = raw[..., size - 16 :]
    q = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).reshape(rows, columns)  # element i low, i + 16 high
    zero = torch.zeros_like(d) if part.kind == "q4_0" else raw[..., 2:4].contiguous().view(torch.float16).float() + 8 * d
    return q, torch.cat([d, zero], dim=-1)
