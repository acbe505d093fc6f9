"""fp8 checkpoints: a matrix of e4m3 bytes and its scales, two tensors, is presented as one. Knows the layouts' names and checks.

    q_proj.weight F8_E4M3 [out, in] + q_proj.weight_scale      one number, or one a row     ──►  kind "e4m3": stays fp8 where a kernel has it
                                    + q_proj.weight_scale_inv  one a block of rows × columns ──►  kind "e4m3_blocks": becomes bf16 or float32

    value = e4m3 * scale             config.json says quant_method fp8, fbgemm_fp8, or compressed-tensors of 8-bit floats

Scales that a checkpoint gives for activations (input_scale) and for keys and values (k_scale, v_scale) are not used: activations are
scaled row by row as they come, which clips nothing, and pages hold plain e4m3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.stored import PLAIN, Stored

__all__ = ["FP8_METHODS", "Fp8Format", "Fp8Stored", "fp8_format", "present_fp8"]

FP8_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
UNUSED = ("input_scale", "k_scale", "v_scale", "q_scale", "prob_scale", "input_scale_ub", "activation_scale")
SCALES = ("weight_scale", "weight_scale_inv")


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """block: (rows, columns) that share a scale; None: a whole matrix or a row does."""

    block: tuple[int, int] | None = None


def fp8_format(said: Mapping[str, Any]) -> tuple[Fp8Format, str]:
    """What config.json's quantization_config of one of FP8_METHODS says, and what of it is not supported ("" for nothing)."""
    block: Any = said.get("weight_block_size")
    wrong = ""
    if said.get("quant_method") == "compressed-tensors":
        groups = said.get("config_groups")
        weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
        wanted = {"num_bits": 8, "type": "float"}
        if not weights or any(not isinstance(w, dict) or any(w.get(k) != v for k, v in wanted.items()) for w in weights):
            wrong = f"config_groups' weights are {weights!r}, expected num_bits 8 and type 'float' in each"
        elif said.get("sparsity_config") not in (None, {}):
            wrong = "it has a sparsity_config"
        else:
            blocks = [w.get("block_structure") for w in weights if isinstance(w, dict)]
            block = blocks[0]
            if any(other != block for other in blocks):
                wrong = f"config_groups have blocks of {blocks}, expected one size"
    if not wrong and said.get("fmt", "e4m3") != "e4m3":
        wrong = f"fmt is {said.get('fmt')!r}, expected 'e4m3'"
    if not wrong and block is not None and not _is_block(block):
        name = "block_structure" if said.get("quant_method") == "compressed-tensors" else "weight_block_size"
        wrong = f"{name} is {block!r}, expected two positive integers"
    return Fp8Format(None if wrong or block is None else (block[0], block[1])), wrong


def _is_block(block: Any) -> bool:
    return isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Stored(Stored):
    """One matrix over its bytes and its scales."""

    scale: Stored | None = None
    format: Fp8Format = field(default=Fp8Format())

    def read(self) -> Tensor:
        """Kind e4m3: uint8 [out, in + 4], a row's e4m3 bytes and then its scale, float32."""
        scales = self._scales().expand(self.shape[0], 1).contiguous()
        return torch.cat([self._bytes(), scales.view(torch.uint8)], dim=1)

    def float32(self) -> Tensor:
        values = self._bytes().view(torch.float8_e4m3fn).float()
        if self.format.block is None:
            return values * self._scales()
        (rows, columns), scales = self.format.block, self._scales()
        wide = scales.repeat_interleave(rows, 0)[: self.shape[0]].repeat_interleave(columns, 1)[:, : self.shape[1]]
        return values * wide

    def _bytes(self) -> Tensor:
        return torch.frombuffer(self.buffer, dtype=torch.uint8, count=self.nbytes, offset=self.offset).view(self.shape)

    def _scales(self) -> Tensor:
        """float32, [1, 1], [out, 1], or a scale a block."""
        assert self.scale is not None
        found = self.scale.read().float()
        return found if self.format.block is not None else found.reshape(-1, 1)


def present_fp8(tensors: Mapping[str, Stored], form: Fp8Format, source: str) -> dict[str, Stored]:
    """The checkpoint's tensors with each matrix and its scales as one. Raises ModelLoadError if a scale is missing or of a wrong shape."""
    spent, found = set[str](), dict[str, Stored]()
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if tensor.kind != "F8_E4M3" or last != "weight" or len(tensor.shape) != 2:
            continue
        scales = [tensors[f"{stem}.{s}"] for s in SCALES if f"{stem}.{s}" in tensors]
        if len(scales) != 1:
            raise ModelLoadError(
                f"{source}: {name} is fp8 and has {len(scales)} of {', '.join(f'{stem}.{s}' for s in SCALES)}; expected one."
            )
        found[name] = _matrix(tensor, scales[0], form, source)
        spent |= {name, scales[0].name}
    rest = {n: t for n, t in tensors.items() if n not in spent and n.rpartition(".")[2] not in UNUSED}
    return found | rest


def _matrix(tensor: Stored, scale: Stored, form: Fp8Format, source: str) -> Fp8Stored:
    rows, columns = tensor.shape
    shapes: list[tuple[int, ...]]
    if form.block is not None:
        shapes = [(-(-rows // form.block[0]), -(-columns // form.block[1]))]
    else:
        shapes = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if scale.kind not in PLAIN or scale.shape not in shapes:
        raise ModelLoadError(
            f"{source}: {scale.name} is {scale.kind} {list(scale.shape)}; for {tensor.name} of {[rows, columns]} expected f32, bf16 or f16 of "
            f"{' or '.join(str(list(s)) for s in shapes)}."
        )
    kind = "e4m3" if form.block is None else "e4m3_blocks"
    return Fp8Stored(tensor.name, kind, tensor.shape, tensor.file, tensor.buffer, tensor.offset, tensor.nbytes, scale, form)
