"""M1 in torch, for logits that stay on their device: the same draws at any batch size, on any device. Pure functions of tensors.

What is summed is summed in integers: a weight exp(z) becomes a whole number of 2^-shift, and sums of those are exact, so neither the
batch, nor the width of a kernel, nor the order in which a GPU adds can change a token (M2). What is not summed is elementwise.

    x ──legal──► z = (x - max) / T ──► w = round(exp(z) 2^shift)  [n, V] int64
       rows that cut: sort once, by x falling, lower id first ──top-k──► ──top-p──► ──min-p──► w = 0 elsewhere
       first id whose running sum exceeds floor(u * total)

sampler.py says what is computed; against it a weight below half of 2^-shift (about 1e-14 of the highest) counts as 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cut", "Weighed", "best", "draw", "edit", "finite", "log_total", "logsumexp", "pack_bits", "shift_of", "weigh"]

MIN_Z = -87.0
MIN_TEMPERATURE = 1.1754943508222875e-38
MAX_EDITED = 1e30


def shift_of(width: int) -> int:
    """Bits of a weight: `width` of them never overflow int64."""
    return 62 - max(width - 1, 1).bit_length()


def finite(raw: Tensor, vocab_size: int) -> Tensor:
    """bool [n]: no NaN or infinity among the vocabulary, no NaN or +inf among padded ids."""
    padded: Tensor = (raw[:, vocab_size:] < math.inf).all(1)
    return torch.isfinite(raw[:, :vocab_size]).all(1) & padded


def pack_bits(bits: Tensor) -> Tensor:
    """bool [n, vocab_size] -> int32 [n, ceil(vocab_size / 32)]."""
    rows, size = bits.shape
    padded = torch.nn.functional.pad(bits, (0, -size % 32)).view(rows, -1, 32).long()
    words = (padded << torch.arange(32, device=bits.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def edit(x: Tensor, penalties: tuple[Tensor, ...] | None, bias: tuple[Tensor, ...] | None) -> None:
    """In place. penalties: (row, id int64; times in the output float64; repetition float32; frequency, presence float64), one entry an
    id that occurred.   bias: (row, id int64; value float64)."""
    if penalties is not None:
        row, ids, times, repetition, frequency, presence = penalties
        v = x[row, ids]
        v = torch.where(v > 0, v / repetition, v * repetition).double()
        v = v - (frequency * times + presence * (times > 0))
        x.index_put_((row, ids), v.clamp(-MAX_EDITED, MAX_EDITED).float())
    if bias is not None:
        row, ids, value = bias
        x.index_put_((row, ids), (x[row, ids].double() + value).clamp(-MAX_EDITED, MAX_EDITED).float())


def first_best(masked: Tensor) -> tuple[Tensor, Tensor]:
    """(value, lowest id that has it) of each row; argmax promises no order among equals."""
    top = masked.amax(1)
    ids = torch.arange(masked.shape[1], device=masked.device)
    return top, torch.where(masked == top[:, None], ids, masked.shape[1]).amin(1)


@dataclass(slots=True)
class Cut:
    """The filters of some rows: index int64 [c] into the weighed rows; top_k int64 (0: off), top_p, log_min_p float64 (-inf: off) [c]."""

    index: Tensor
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor


@dataclass(slots=True)
class Weighed:
    """z: float64 [n, V], 0 at the best.   weights: int64 [n, V], 0 for what is not kept.   total: int64 [n]."""

    z: Tensor
    weights: Tensor
    total: Tensor


def weigh(masked: Tensor, top: Tensor, temperature: Tensor, shift: int, cut: Cut | None) -> Weighed:
    """masked: float32 [n, V], -inf where illegal, one finite at least.   temperature: float64 [n], above 0."""
    z = (masked.double() - top.double()[:, None]) / temperature.clamp(min=MIN_TEMPERATURE)[:, None]
    weights = torch.where(z >= MIN_Z, (z.clamp(min=MIN_Z).exp() * 2.0**shift).round(), 0.0).long()
    if cut is not None and cut.index.shape[0]:
        weights.index_copy_(0, cut.index, _kept(masked[cut.index], z[cut.index], weights[cut.index], cut))
    return Weighed(z, weights, weights.sum(1))


def _kept(masked: Tensor, z: Tensor, weights: Tensor, cut: Cut) -> Tensor:
    width = masked.shape[1]
    order = torch.sort(masked, dim=1, descending=True, stable=True).indices
    place = torch.arange(width, device=masked.device)
    keep = place < torch.where(cut.top_k > 0, cut.top_k, width)[:, None]
    ordered = torch.where(keep, weights.gather(1, order), 0)
    sums = ordered.cumsum(1)
    before = (sums - ordered).double()
    # A token stays if what stands before it does not reach p yet: the one that crosses p stays, and one always does.
    keep &= (cut.top_p >= 1)[:, None] | (before < (cut.top_p * sums[:, -1].double())[:, None]) | (place == 0)
    keep &= z.gather(1, order) >= cut.log_min_p[:, None]
    return torch.zeros_like(weights).scatter(1, order, torch.where(keep, ordered, 0))


def draw(weighed: Weighed, u: Tensor) -> Tensor:
    """Ids int64 [n]. u: float64 [n] in [0, 1)."""
    target = torch.minimum((u * weighed.total.double()).long(), weighed.total - 1)
    found: Tensor = torch.searchsorted(weighed.weights.cumsum(1), target[:, None], right=True)[:, 0]
    return found


def log_total(total: Tensor, shift: int) -> Tensor:
    """Log of a sum of weights, float64."""
    return total.double().log() - shift * math.log(2)


def logsumexp(raw: Tensor, temperature: Tensor | None, shift: int) -> tuple[Tensor, Tensor]:
    """(max of x, log of the sum of exp(x - max)), float64 [n], of x = raw or raw / temperature, over the whole width."""
    x = raw.double()
    if temperature is not None:
        x = x / temperature.clamp(min=MIN_TEMPERATURE)[:, None]
    top = x.amax(1)
    return top, log_total(((x - top[:, None]).exp() * 2.0**shift).round().long().sum(1), shift)


def best(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the `count` highest of each row, highest first, lower id first among equals."""
    if not count:  # most rows ask for none, and a sort of the vocabulary is the dearest thing here
        return x[:, :0], torch.empty((len(x), 0), dtype=torch.int64, device=x.device)
    found = torch.sort(x, dim=1, descending=True, stable=True)
    return found.values[:, :count], found.indices[:, :count]
