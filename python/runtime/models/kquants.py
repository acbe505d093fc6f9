"""GGUF's k-quants and 5-bit blocks to float32. They are unpacked once, at load: no kernel computes with them.

    q4_k  144 bytes, 256 elements   d f16 | dmin f16 | 12 bytes: 8 scales and 8 minima of 6 bits | 128 bytes of 4 bits
    q6_k  210 bytes, 256 elements   128 low nibbles | 64 bytes of 2 high bits | 16 scales int8 | d f16

The two that most files use are done here with torch; the rest by the `gguf` package, which is slower.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["K_QUANTS", "dequantise_k"]

# kind -> (elements, bytes) of a block
K_QUANTS = {
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
}
_CHUNK_BLOCKS = 1 << 13


def dequantise_k(kind: str, data: Tensor) -> Tensor:
    """float32 [rows, columns] of uint8 blocks [rows, bytes]."""
    elements, size = K_QUANTS[kind]
    rows = data.shape[0]
    blocks = data.reshape(-1, size)
    out = torch.empty(blocks.shape[0], elements, dtype=torch.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        part = blocks[start : start + _CHUNK_BLOCKS]
        if kind == "q4_k":
            out[start : start + len(part)] = _q4_k(part)
        elif kind == "q6_k":
            out[start : start + len(part)] = _q6_k(part)
        else:
            out[start : start + len(part)] = _by_gguf(kind, part)
    return out.view(rows, -1)


def _q4_k(blocks: Tensor) -> Tensor:
    d, dmin, packed = _half(blocks[:, 0:2]), _half(blocks[:, 2:4]), blocks[:, 4:16]
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], 1).float() * d
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], 1).float() * dmin
    codes = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = torch.cat([codes & 15, codes >> 4], 2).reshape(-1, 8, 32).float()
    return (codes * scales[:, :, None] - minima[:, :, None]).reshape(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, :128].reshape(-1, 2, 1, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * _half(blocks[:, 208:210])
    low = torch.cat([low & 15, low >> 4], 2).reshape(-1, 8, 32)
    high = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 2).reshape(-1, 8, 32)
    codes = (low | (high << 4)).float() - 32
    return (codes.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


def _by_gguf(kind: str, blocks: Tensor) -> Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind.upper()]))


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).float()
