"""What config.json's quantization_config says, and GPTQ and AWQ: a matrix kept as three tensors is presented as one, of kind "int4".

    q_proj.qweight  q_proj.qzeros  q_proj.scales  (q_proj.g_idx)   ──►   q_proj.weight [out, in], int4 in groups along `in`

    value = (q - zero) * scale, q and zero 4 bits                  GPTQ: eight values of a column to an int32, zeros less 1 (format v2: as is)
                                                                   AWQ:  eight values of a row to an int32, in the order 0 4 1 5 2 6 3 7
`read` gives what Weight("int4") says; `float32` the values. Whatever would change the arithmetic and is not known here is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.models.fp8 import FP8_METHODS, Fp8Format, fp8_format, present_fp8
from phloem.runtime.models.stored import Stored

__all__ = ["AWQ_ORDER", "Int4Format", "Int4Stored", "present", "stored_format", "unpack_awq", "unpack_gptq"]

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True, slots=True)
class Int4Format:
    """group: elements along `in` that share scale and zero; 0 is the whole row.   zero_offset: added to stored zeros (GPTQ)."""

    method: Literal["gptq", "awq"]
    group: int
    zero_offset: int = 0


def stored_format(raw: Mapping[str, Any], source: str) -> Int4Format | Fp8Format | None:
    """What config.json's quantization_config says, None without one. Raises UnsupportedModelError for what is not known here."""
    said = raw.get("quantization_config")
    if not said:
        return None
    method = said.get("quant_method", said) if isinstance(said, dict) else said
    wrong = ""
    if not isinstance(said, dict):
        wrong = "expected an object with quant_method"
    elif method in FP8_METHODS:
        fp8, wrong = fp8_format(said)
        if not wrong:
            return fp8
    elif method not in ("gptq", "awq"):
        wrong = f"expected gptq, awq, {', '.join(FP8_METHODS)}"
    elif said.get("bits", said.get("w_bit")) != 4:
        wrong = f"bits is {said.get('bits', said.get('w_bit'))!r}, expected 4"
    elif said.get("desc_act"):
        wrong = "desc_act is true: columns in another order than stored"
    elif method == "awq" and str(said.get("version", "gemm")).lower() != "gemm":
        wrong = f"version is {said.get('version')!r}, expected 'gemm'"
    group = said.get("group_size", said.get("q_group_size")) if isinstance(said, dict) else None
    if not wrong and (not isinstance(group, int) or group not in (-1, 32, 64, 128, 256)):
        wrong = f"group_size is {group!r}, expected -1, 32, 64, 128 or 256"
    if wrong:
        raise UnsupportedModelError(
            f"{source}: quantization_config {method!r} is not supported: {wrong}. Use the unquantised checkpoint, with dtype='q8' or 'q4' to "
            "quantise at load, or a GGUF file.",
            param="quantization_config",
        )
    assert isinstance(group, int)
    offset = 1 if method == "gptq" and said.get("checkpoint_format", "gptq") != "gptq_v2" else 0
    return Int4Format(method, max(group, 0), offset)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Stored(Stored):
    """One matrix over its stored parts."""

    format: Int4Format = field(default=Int4Format("gptq", 128))
    parts: Mapping[str, Stored] = field(default_factory=dict)

    def read(self) -> Tensor:
        """uint8 [out, in + 8 * groups]: a value 0 .. 15 a byte, then (scale, zero) float32 a group, of (q - 8) * scale + zero."""
        quants, pairs = self._unpacked()
        return torch.cat([quants, pairs.flatten(1).contiguous().view(torch.uint8)], dim=1)

    def float32(self) -> Tensor:
        quants, pairs = self._unpacked()
        rows, groups = pairs.shape[:2]
        grouped = (quants.float() - 8).view(rows, groups, -1)
        return (grouped * pairs[..., :1] + pairs[..., 1:]).view(self.shape)

    def _unpacked(self) -> tuple[Tensor, Tensor]:
        qweight, qzeros = (self.parts[n].read().contiguous().view(torch.int32) for n in ("qweight", "qzeros"))
        scales = self.parts["scales"].read()
        if self.format.method == "awq":
            return unpack_awq(qweight, qzeros, scales)
        return unpack_gptq(qweight, qzeros, scales, zero_offset=self.format.zero_offset)


def present(tensors: Mapping[str, Stored], form: Int4Format | Fp8Format, source: str) -> dict[str, Stored]:
    """The checkpoint's tensors with each quantised matrix as one. Raises ModelLoadError if a part is missing or of a wrong shape."""
    if isinstance(form, Fp8Format):
        return present_fp8(tensors, form, source)
    found = {name: t for name, t in tensors.items() if name.rpartition(".")[2] not in SUFFIXES}
    for stem in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".qweight")}):
        parts = {suffix: tensors[f"{stem}.{suffix}"] for suffix in SUFFIXES if f"{stem}.{suffix}" in tensors}
        missing = [suffix for suffix in SUFFIXES[:3] if suffix not in parts]
        if missing:
            raise ModelLoadError(f"{source}: {stem} has qweight but no {', '.join(missing)}.")
        found[f"{stem}.weight"] = _matrix(stem, parts, form, source)
    return found


def _matrix(stem: str, parts: Mapping[str, Stored], form: Int4Format, source: str) -> Int4Stored:
    packed = parts["qweight"].shape
    columns, rows = (packed[0], packed[1] * 8) if form.method == "awq" else (packed[0] * 8, packed[1])
    group = form.group or columns
    groups = -(-columns // group)
    wanted = {"qzeros": (groups, rows // 8), "scales": (groups, rows)}
    for name, shape in wanted.items():
        if parts[name].shape != shape or columns % group or rows % 8:
            raise ModelLoadError(
                f"{source}: {stem}.{name} is {list(parts[name].shape)}; a matrix of {[rows, columns]} in groups of {group} has {list(shape)}."
            )
    order = parts.get("g_idx")
    if order is not None:
        index = order.read().contiguous().view(torch.int32).flatten()
        if not torch.equal(index, (torch.arange(columns) // group).int()):
            raise UnsupportedModelError(
                f"{source}: {stem}.g_idx orders columns by activation, which has no kernel here. Use a checkpoint made with desc_act=False.",
                param="quantization_config",
            )
    whole = parts["qweight"]
    nbytes = sum(p.nbytes for p in parts.values())
    return Int4Stored(f"{stem}.weight", "int4", (rows, columns), whole.file, whole.buffer, whole.offset, nbytes, form, parts)


def _nibbles(packed: Tensor, order: Sequence[int]) -> Tensor:
    """int32 [r, c] -> uint8 [r, 8 c]: value j of an int32 stands at 4-bit place order[j]."""
    shifts = torch.tensor(order, dtype=torch.int32, device=packed.device) * 4
    return ((packed[..., None] >> shifts) & 15).to(torch.uint8).reshape(packed.shape[0], -1)


def _pairs(zeros: Tensor, scales: Tensor) -> Tensor:
    """zeros, scales [groups, out] -> float32 [out, groups, 2]: (scale, zero) of (q - 8) * scale + zero."""
    s = scales.float()
    return torch.stack([s, (8 - zeros.float()) * s], dim=-1).permute(1, 0, 2).contiguous()


def unpack_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor, *, zero_offset: int) -> tuple[Tensor, Tensor]:
    """qweight int32 [in / 8, out], qzeros int32 [groups, out / 8], scales [groups, out] -> (uint8 [out, in], float32 [out, groups, 2])."""
    q = _nibbles(qweight.t().contiguous(), range(8))
    return q, _pairs(_nibbles(qzeros, range(8)).to(torch.int32) + zero_offset, scales)


def unpack_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out] -> as `unpack_gptq`."""
    return _nibbles(qweight, AWQ_ORDER).t().contiguous(), _pairs(_nibbles(qzeros, AWQ_ORDER), scales)
