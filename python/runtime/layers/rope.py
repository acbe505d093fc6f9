"""Rotary position tables: the base, and every supported scaling, turned into cos and sin once, at load time.

    default   1 / base^(2i/d)
    linear    divided by `factor`
    llama3    low frequencies divided by `factor`, a smooth middle, high ones kept
    yarn      a ramp between kept and divided, cos and sin multiplied by the attention factor
    factors   each frequency divided by its own number (GGUF's rope_freqs tensor)

Each step is in float32 in the order in which transformers takes it, so that long positions agree too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from phloem.runtime.backends.base import RopeTable

__all__ = ["RopeConfig", "rope_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """What a checkpoint says of its rotary positions. original_context: of the training before the scaling (llama3, yarn)."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


def rope_table(rope: RopeConfig, head_dim: int, positions: int) -> RopeTable:
    """cos and sin, float32 [positions, head_dim / 2]."""
    frequencies, attention = _frequencies(rope, head_dim)
    if rope.factors:
        frequencies = frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return RopeTable((angles.cos() * attention).contiguous(), (angles.sin() * attention).contiguous())


def _frequencies(rope: RopeConfig, dim: int) -> tuple[Tensor, float]:
    powers = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(powers, rope, dim), _yarn_attention(rope)
    return plain, 1.0


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1's scaling: by wavelength relative to the original context."""
    context = rope.original_context
    wavelength = 2 * math.pi / plain
    long, short = context / rope.low_freq_factor, context / rope.high_freq_factor
    scaled = torch.where(wavelength > long, plain / rope.factor, plain)
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    middle = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelength >= short) & (wavelength <= long), middle, scaled)


def _yarn(powers: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """YaRN, https://arxiv.org/abs/2309.00071, eq. 17 ff."""

    def dimension(rotations: float) -> float:
        return dim * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_attention(rope: RopeConfig) -> float:
    def mscale(multiplier: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * multiplier * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
