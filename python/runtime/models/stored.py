"""One tensor in a checkpoint file: where its bytes lie. None are read before `read`. Knows no model.

kind       f32 f16 bf16             plain, row-major
           q8_0 q4_0 q4_1           GGUF blocks of 32, which may stay packed
           q5_0 q5_1 q2_k … q6_k    GGUF blocks that become float32 at load
           int4                     GPTQ's and AWQ's groups (quantised.py), float32 unless a backend multiplies them as they are
           e4m3, e4m3_blocks        fp8 with its scales (fp8.py): the first may stay as it is, the second becomes float32 or bf16
           other                    named in errors
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phloem.runtime.backends.blocks import BLOCK_BYTES, dequantise
from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.kquants import K_QUANTS, dequantise_k

__all__ = ["PLAIN", "READABLE", "Stored", "map_file"]

PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
READABLE = frozenset([*PLAIN, *BLOCK_BYTES, *K_QUANTS, "int4", "e4m3", "e4m3_blocks"])


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """shape is row-major, [out, in] for a matrix.   nbytes is what the file holds, checked against its size by the reader."""

    name: str
    kind: str
    shape: tuple[int, ...]
    file: Path
    buffer: mmap.mmap
    offset: int
    nbytes: int

    def read(self) -> Tensor:
        """The file's own bytes, mapped: the plain kinds with their dtype and shape, blocks as uint8 [rows, bytes]."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=PLAIN.get(self.kind, torch.uint8))
        if self.kind in PLAIN:
            dtype = PLAIN[self.kind]
            if self.offset % dtype.itemsize:  # allowed in safetensors, but a torch view needs alignment
                raw = torch.frombuffer(bytearray(self.buffer[self.offset : self.offset + self.nbytes]), dtype=dtype)
            else:
                raw = torch.frombuffer(self.buffer, dtype=dtype, count=self.nbytes // dtype.itemsize, offset=self.offset)
            return raw.view(self.shape)
        raw = torch.frombuffer(self.buffer, dtype=torch.uint8, count=self.nbytes, offset=self.offset)
        return raw.view(self.shape[0] if len(self.shape) > 1 else 1, -1)

    def float32(self) -> Tensor:
        """The values, exactly, in `shape`."""
        raw = self.read()
        if self.kind in PLAIN:
            return raw.float()
        values = dequantise(self.kind, raw) if self.kind in BLOCK_BYTES else dequantise_k(self.kind, raw)
        return values.view(self.shape)


def map_file(path: Path) -> tuple[mmap.mmap, int]:
    """The file mapped and its size. Private: nothing written through it reaches the file. Raises ModelLoadError."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                raise ModelLoadError(f"{path}: the file is empty. Download it again.")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), size
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error}).") from error
