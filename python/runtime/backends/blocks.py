"""GGUF's 32-element blocks: q8_0, q4_0 and q4_1 to float32 and back. Knows nothing of files or models.

    q8_0  34 bytes   d f16 | 32 x int8                      x = d * q
    q4_0  18 bytes   d f16 | 16 bytes, two 4-bit each       x = d * (q - 8)
    q4_1  20 bytes   d f16 | m f16 | 16 bytes               x = d * q + m
                             byte i holds element i in its low half and element i + 16 in its high half

The rounding is that of ggml's reference quantiser, so blocks made here equal those of its tools bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BLOCK", "BLOCK_BYTES", "dequantise", "q4_0_to_q4_1", "quantise"]

BLOCK = 32
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
_CHUNK = 1 << 21  # elements at a time: temporaries stay in the cache, and a large head needs no second copy of itself


def dequantise(kind: str, data: Tensor) -> Tensor:
    """float32 [rows, columns] of uint8 blocks [rows, columns / 32 * block bytes]. Exact: each value is its block's formula."""
    size = BLOCK_BYTES[kind]
    rows, width = data.shape
    out = torch.empty(rows, width // size * BLOCK, dtype=torch.float32)
    step = max(1, _CHUNK // max(1, out.shape[1]))
    for start in range(0, rows, step):
        blocks = data[start : start + step].reshape(-1, size)
        target = out[start : start + step].view(-1, BLOCK)
        scale = _halves(blocks[:, 0:2])
        if kind == "q8_0":
            torch.mul(blocks[:, 2:].contiguous().view(torch.int8).float(), scale, out=target)
            continue
        first = size - BLOCK // 2
        codes = blocks[:, first:]
        low, high = (codes & 15).float(), (codes >> 4).float()
        if kind == "q4_0":
            low, high = (low - 8) * scale, (high - 8) * scale
        else:
            minimum = _halves(blocks[:, 2:4])
            low, high = low * scale + minimum, high * scale + minimum
        target[:, : BLOCK // 2] = low
        target[:, BLOCK // 2 :] = high
    return out


def quantise(kind: str, values: Tensor) -> Tensor:
    """uint8 blocks [rows, columns / 32 * block bytes] of float32 [rows, columns]; columns is a multiple of 32."""
    size = BLOCK_BYTES[kind]
    rows, columns = values.shape
    if columns % BLOCK:
        raise ValueError(f"{kind} packs rows of a multiple of {BLOCK} elements, not {columns}")
    out = torch.empty(rows, columns // BLOCK * size, dtype=torch.uint8)
    step = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, step):
        x = values[start : start + step].float().reshape(-1, BLOCK)
        target = out[start : start + step].view(-1, size)
        if kind == "q8_0":
            scale = x.abs().amax(1, keepdim=True) / 127
            scaled = x * _inverse(scale)
            # Half away from zero, without the error of floor(a + 0.5) just below a half.
            whole = scaled.abs().floor()
            whole += (scaled.abs() - whole >= 0.5).float()
            target[:, 2:] = (whole * scaled.sign()).to(torch.int8).view(torch.uint8)
        elif kind == "q4_0":
            largest = x.gather(1, x.abs().argmax(1, keepdim=True))
            scale = largest / -8
            target[:, 2:] = _nibbles(x * _inverse(scale) + 8.5)
        else:
            low = x.amin(1, keepdim=True)
            scale = (x.amax(1, keepdim=True) - low) / 15
            target[:, 2:4] = low.half().view(torch.uint8)
            target[:, 4:] = _nibbles((x - low) * _inverse(scale) + 0.5)
        target[:, 0:2] = scale.half().view(torch.uint8)
    return out


def q4_0_to_q4_1(data: Tensor) -> Tensor:
    """The same values as q4_1 blocks, exactly: d * (q - 8) == d * q + m with m = -8 d, which float16 holds."""
    blocks = data.reshape(-1, BLOCK_BYTES["q4_0"])
    out = torch.empty(blocks.shape[0], BLOCK_BYTES["q4_1"], dtype=torch.uint8)
    out[:, 0:2] = blocks[:, 0:2]
    out[:, 2:4] = (_halves(blocks[:, 0:2]) * -8).half().view(torch.uint8)
    out[:, 4:] = blocks[:, 2:]
    return out.view(data.shape[0], -1)


def _halves(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def _nibbles(codes: Tensor) -> Tensor:
    codes = codes.trunc().clamp(0, 15).to(torch.uint8)
    return codes[:, : BLOCK // 2] | (codes[:, BLOCK // 2 :] << 4)
