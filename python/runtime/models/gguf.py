"""GGUF files: metadata as plain Python values, tensors as `Stored`. Nothing in the file is believed before it is checked.

    "GGUF" | version u32 | tensors u64 | keys u64 | key: string, type u32, value … | tensor: name, dims, type, offset … | pad | data

Its own reader, because the `gguf` package makes a numpy array of each of the 100,000 strings of a vocabulary (2.3 s for the
embedded model against 0.05 s here) and trusts counts and offsets. Every count is bounded by the bytes that are left before
anything of that size is made. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from phloem.runtime.backends.blocks import BLOCK, BLOCK_BYTES
from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.models.kquants import K_QUANTS
from phloem.runtime.models.stored import PLAIN, Stored, map_file

__all__ = ["GgufFile"]

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_TENSOR_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k", 30: "bf16",
}  # fmt: skip
_LFS = b"version https://git-lfs"


class GgufFile:
    """metadata: key -> int, float, bool, str, or a list of one of them.   tensors: name -> Stored, in file order.

    Raises ModelLoadError with the file's name and one line for anything malformed, UnsupportedModelError for a split file, a
    big-endian one, or a block type that Phloem cannot read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._buffer, self._size = map_file(path)
        self._at = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Stored] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError) as error:
            self._bad(f"damaged at byte {self._at} ({error})")

    def _parse(self) -> None:
        magic = self._buffer[:4]
        if magic != b"GGUF":
            if self._buffer[: len(_LFS)] == _LFS:
                self._bad("a Git LFS pointer, not the model: fetch it with `git lfs pull`")
            self._bad(f"no GGUF file: it starts with {magic!r}")
        self._at = 4
        version = self._u32()
        if version not in (2, 3):
            if version in (2 << 24, 3 << 24):
                raise UnsupportedModelError(f"{self.path}: a big-endian GGUF file; Phloem reads little-endian ones.")
            raise UnsupportedModelError(f"{self.path}: GGUF version {version}; Phloem reads 2 and 3.")
        num_tensors, num_keys = self._u64(), self._u64()
        self._room("keys", num_keys, 13)
        self._room("tensors", num_tensors, 24)
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                self._bad(f"key {key!r} occurs twice")
            self.metadata[key] = self._value(self._u32(), key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
            self._bad(f"general.alignment is {alignment!r}; expected a power of two")
        if self.metadata.get("split.count", 0) not in (0, 1):
            raise UnsupportedModelError(
                f"{self.path}: one of {self.metadata['split.count']} parts. Join them with llama.cpp's gguf-split --merge."
            )
        start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset, nbytes in infos:
            if name in self.tensors:
                self._bad(f"tensor {name!r} occurs twice")
            if offset % alignment or start + offset + nbytes > self._size:
                self._bad(
                    f"tensor {name!r} should end at byte {start + offset + nbytes}, but the file has {self._size}: truncated or damaged"
                    if offset % alignment == 0
                    else f"tensor {name!r} starts at {offset}, which is no multiple of {alignment}"
                )
            self.tensors[name] = Stored(name, kind, shape, self.path, self._buffer, start + offset, nbytes)
        end = 0
        for tensor in sorted(self.tensors.values(), key=lambda t: t.offset):
            if tensor.nbytes and tensor.offset < end:
                self._bad(f"tensor {tensor.name!r} overlaps the one before it")
            end = max(end, tensor.offset + tensor.nbytes)

    def _tensor_info(self) -> tuple[str, str, tuple[int, ...], int, int]:
        name, dims = self._string(), self._u32()
        if not 1 <= dims <= 4:
            self._bad(f"tensor {name!r} has {dims} dimensions")
        shape = tuple(self._u64() for _ in range(dims))[::-1]
        number, offset = self._u32(), self._u64()
        elements = 1
        for extent in shape:
            elements *= extent
        if elements > self._size * 8:
            self._bad(f"tensor {name!r} would have {elements} elements in a file of {self._size} bytes")
        if number not in _TENSOR_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: tensor {name!r} is stored as {_type_name(number)}, which Phloem cannot read."
            )
        kind = _TENSOR_TYPES[number]
        block, size = (
            (1, PLAIN[kind].itemsize) if kind in PLAIN else K_QUANTS[kind] if kind in K_QUANTS else (BLOCK, BLOCK_BYTES[kind])
        )
        if shape[-1] % block:
            self._bad(f"tensor {name!r} has rows of {shape[-1]}, no multiple of {kind}'s {block}")
        return name, kind, shape, offset, elements // block * size

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1)[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 4:
            self._bad(f"key {key!r} has value type {kind}")
        inner, count = self._u32(), self._u64()
        if inner in _SCALARS:
            self._room(f"values of {key!r}", count, np.dtype(_SCALARS[inner]).itemsize)
            return self._numbers(_SCALARS[inner], count)
        self._room(f"values of {key!r}", count, 8)
        if inner == _STRING:
            return self._strings(count)
        return [self._value(inner, key, depth + 1) for _ in range(count)]

    def _numbers(self, dtype: str, count: int) -> list[Any]:
        kind = np.dtype(dtype)
        self._room("values", count, kind.itemsize)
        values = np.frombuffer(self._buffer, kind, count, self._at)
        self._at += count * kind.itemsize
        numbers: list[Any] = values.tolist()
        return numbers

    def _strings(self, count: int) -> list[str]:
        """A vocabulary is 50,000 of them: one loop, no calls."""
        buffer, at, size, unpack = self._buffer, self._at, self._size, _U64.unpack_from
        out = []
        for _ in range(count):
            (length,) = unpack(buffer, at)
            at += 8
            if length > size - at:
                self._at = at
                self._bad(f"a string of {length} bytes at byte {at}, but {size - at} are left")
            out.append(buffer[at : at + length].decode())
            at += length
        self._at = at
        return out

    def _string(self) -> str:
        return self._strings(1)[0]

    def _u32(self) -> int:
        (value,) = _U32.unpack_from(self._buffer, self._at)
        self._at += 4
        return int(value)

    def _u64(self) -> int:
        (value,) = _U64.unpack_from(self._buffer, self._at)
        self._at += 8
        return int(value)

    def _room(self, what: str, count: int, least: int) -> None:
        if count * least > self._size - self._at:
            self._bad(f"{count} {what} at byte {self._at}, but {self._size - self._at} bytes are left: truncated or damaged")

    def _bad(self, reason: str) -> NoReturn:
        raise ModelLoadError(f"{self.path}: {reason}.")


def _type_name(number: int) -> str:
    try:
        from gguf import GGMLQuantizationType

        return str(GGMLQuantizationType(number).name)
    except (ImportError, ValueError):
        return f"type {number}"
