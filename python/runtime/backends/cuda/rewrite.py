"""New numbers in the matrices that a step reads, where they lie: updates of weights (rl W). bf16, f16 and fp8; 4-bit ones refuse.

A part is some rows of its matrix. Writes go through torch's current stream, and the end of an update waits for that. While a matrix is served
nothing is written into it: an update fills a second buffer, or it is one in place and the engine stands still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phloem.runtime.backends.base import Packed, Weight
from phloem.runtime.backends.cuda.matrices import Fp8Matrix, Matrix, PlainMatrix, scaled_rows
from phloem.runtime.errors import KernelError, UnsupportedModelError

__all__ = ["like", "read", "store", "store_from"]

FLOATS = ("f32", "bf16", "f16", "f8")


def _own(packed: Packed) -> PlainMatrix | Fp8Matrix:
    if isinstance(packed, PlainMatrix | Fp8Matrix):
        return packed
    if isinstance(packed, Matrix):
        raise UnsupportedModelError(
            "4-bit weights on a GPU take no new numbers; load the model with dtype='bf16' or 'fp8'.", param="dtype"
        )
    raise KernelError(f"a matrix of another backend ({type(packed).__name__}) was given to the cuda backend.")


def like(packed: Packed) -> Matrix:
    """An empty matrix of the same form."""
    one = _own(packed)
    if isinstance(one, PlainMatrix):
        return PlainMatrix(torch.empty_like(one.data), one.gated, one.widths)
    return Fp8Matrix(torch.empty_like(one.data), torch.empty_like(one.scales), one.compute, one.gated, one.widths)


def store(packed: Packed, part: int, weight: Weight) -> None:
    """Plain floats of any width and place. Under fp8 each row is scaled anew, as at load."""
    one = _own(packed)
    rows = _rows(one, part)
    if weight.shape != (rows.stop - rows.start, one.shape[1]) or weight.kind not in FLOATS:
        raise KernelError(
            f"part {part} is floats of {(rows.stop - rows.start, one.shape[1])}; the weight is {weight.kind} {weight.shape}."
        )
    data = weight.data.detach().to(one.data.device)
    if isinstance(one, PlainMatrix):
        one.data[rows].copy_(data)
        return
    values, scales = scaled_rows(data.to(torch.bfloat16))  # bf16 first: what a load makes of a wider file
    one.data.view(torch.uint8)[rows].copy_(values.view(torch.uint8))
    one.scales[:, rows].copy_(scales.t())


def store_from(packed: Packed, source: Packed, part: int) -> None:
    """The same part of another matrix of the same form."""
    one, other = _own(packed), _own(source)
    rows = _rows(one, part)
    one.data.view(torch.uint8)[rows].copy_(other.data.view(torch.uint8)[rows])
    if isinstance(one, Fp8Matrix) and isinstance(other, Fp8Matrix):
        one.scales[:, rows].copy_(other.scales[:, rows])


def read(packed: Packed, row: int, count: int) -> Tensor:
    """Rows as the arithmetic takes them, float32 [count, in] on the host."""
    one = _own(packed)
    values = one.data[row : row + count].float()
    if isinstance(one, Fp8Matrix):
        values = values * one.scales[:, row : row + count].t()
    return values.cpu()


def _rows(one: PlainMatrix | Fp8Matrix, part: int) -> slice:
    start = sum(one.widths[:part])
    return slice(start, start + one.widths[part])
