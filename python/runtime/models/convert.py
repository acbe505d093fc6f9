"""What a stored matrix becomes, for each `dtype` option. The one table of that decision:

    stored            auto    f32    bf16    q8       q4         f16: every kind as f16
    f32               f32     f32    bf16    q8_0     q4_0       the embedding and the head, under q4: q8_0
    bf16              bf16    f32    bf16    q8_0     q4_0
    f16               f32     f32    bf16    q8_0     q4_0       no kernel computes in f16, and bf16 would lose 3 bits
    q8_0              q8_0    f32    bf16    q8_0     q4_0       kept as it is in the embedding and the head
    q4_0, q4_1        same    f32    bf16    q8_0     same
    other blocks      f32     f32    bf16    q8_0     q4_0       fp8: f8, whose values are bf16 until the backend scales them;
    int4, e4m3        f32     f32    bf16    q8_0     q4_0       the embedding and the head: bf16. held: int4 and e4m3 as they are

Parts of one fused matrix end up of one kind: q4_0 beside q4_1 becomes q4_1, which is exact; any other mixture becomes float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from phloem.runtime.backends.base import Weight, WeightKind
from phloem.runtime.backends.blocks import BLOCK, BLOCK_BYTES, q4_0_to_q4_1, quantise
from phloem.runtime.errors import UnsupportedModelError
from phloem.runtime.models.stored import PLAIN, Stored

__all__ = ["Dtype", "as_weights", "common_kind", "num_bytes", "target_kind"]

Dtype = Literal["auto", "f32", "bf16", "f16", "fp8", "q8", "q4", "held"]
_AUTO: dict[str, WeightKind] = {"f32": "f32", "bf16": "bf16", "q8_0": "q8_0", "q4_0": "q4_0", "q4_1": "q4_1"}


def target_kind(stored: str, dtype: Dtype, *, is_table: bool) -> WeightKind:
    """is_table: the embedding or the head."""
    if dtype == "auto":
        return _AUTO.get(stored, "f32")
    if dtype == "f32" or dtype == "bf16" or dtype == "f16":
        return dtype
    if dtype == "fp8":
        return "bf16" if is_table else "e4m3" if stored == "e4m3" else "f8"
    if dtype == "held":  # what "auto" is on cuda for a file with int4 or e4m3; no option of its own
        return "int4" if stored == "int4" else "e4m3" if stored == "e4m3" and not is_table else "bf16"
    if dtype == "q8":
        return "q8_0"
    if stored in ("q4_0", "q4_1") or (stored == "q8_0" and is_table):
        return _AUTO[stored]
    return "q8_0" if is_table else "q4_0"


def as_weights(tensors: Sequence[Stored], dtype: Dtype, *, is_table: bool = False) -> list[Weight]:
    """The parts of one matrix, of one kind. Raises UnsupportedModelError if rows cannot be cut into blocks of 32."""
    kind = common_kind(tensors, dtype, is_table=is_table)
    return [_convert(t, kind) for t in tensors]


def common_kind(tensors: Sequence[Stored], dtype: Dtype, *, is_table: bool) -> WeightKind:
    """What the parts of one matrix become. Reads headers only; raises as `as_weights` does."""
    kinds = {target_kind(t.kind, dtype, is_table=is_table) for t in tensors}
    if len(kinds) == 1:
        (common,) = kinds
    else:
        common = "q4_1" if kinds == {"q4_0", "q4_1"} else "f32"
    for tensor in tensors:
        if common in BLOCK_BYTES and tensor.shape[1] % BLOCK:
            raise UnsupportedModelError(
                f"{tensor.file}: {tensor.name} has rows of {tensor.shape[1]} elements; {common} needs a multiple of {BLOCK}. "
                "Use dtype='f32' or 'bf16'.",
                param="dtype",
            )
    return common


def num_bytes(tensors: Sequence[Stored], dtype: Dtype, *, is_table: bool) -> int:
    """Bytes of what `as_weights` will make."""
    kind = common_kind(tensors, dtype, is_table=is_table)
    elements = sum(t.shape[0] * t.shape[1] for t in tensors)
    if kind == "int4":
        return sum(t.nbytes for t in tensors)
    if kind == "f8" or kind == "e4m3":
        return elements + 4 * sum(t.shape[0] for t in tensors)  # as the backend keeps it: a scale a row
    return elements // BLOCK * BLOCK_BYTES[kind] if kind in BLOCK_BYTES else elements * PLAIN[kind].itemsize


def _convert(tensor: Stored, kind: WeightKind) -> Weight:
    shape = (tensor.shape[0], tensor.shape[1])
    if tensor.kind == kind:
        return Weight(kind, shape, tensor.read())
    if tensor.kind == "q4_0" and kind == "q4_1":
        return Weight(kind, shape, q4_0_to_q4_1(tensor.read()))
    if kind == "f32":
        return Weight(kind, shape, tensor.float32())
    if kind == "bf16" or kind == "f8":
        return Weight(kind, shape, tensor.read() if tensor.kind == "bf16" else tensor.float32().to(torch.bfloat16))
    if kind == "f16":
        return Weight(kind, shape, _half(tensor))
    return Weight(kind, shape, quantise(kind, tensor.float32()))


def _half(tensor: Stored) -> Tensor:
    values = tensor.float32()
    if values.numel() and float(values.abs().amax()) > torch.finfo(torch.float16).max:
        raise UnsupportedModelError(
            f"{tensor.file}: {tensor.name} has values beyond what f16 holds (65504). Use dtype='bf16' or 'f32'.", param="dtype"
        )
    return values.to(torch.float16)
