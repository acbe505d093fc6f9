"""Packed bit rows of grammars onto logits: the torch that says what it means, and kernels/triton/mask.py where Triton is.

FlashInfer has nothing that reads a bitmask. In torch the bits of a row become 32 times as many integers on the way; the kernel reads
each word once and writes only what is masked.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

__all__ = ["Mask", "best_mask", "masked_logits", "unpack_bits"]

Mask = Callable[[Tensor, Tensor, Tensor], Tensor]


def unpack_bits(words: Tensor, vocab_size: int) -> Tensor:
    """int32 [n, w], bit t of a row is token t -> bool [n, vocab_size]."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> places) & 1).bool().flatten(1)[:, :vocab_size]


def masked_logits(x: Tensor, words: Tensor, rows: Tensor) -> Tensor:
    """x float32 [n, V] with -inf where a row of `rows` (int64 [m], distinct) lacks its bit in words int32 [m, ceil(V / 32)].

    May overwrite x. Bits beyond V mean nothing."""
    legal = unpack_bits(words, x.shape[1])
    return x.index_copy_(0, rows, torch.where(legal, x.index_select(0, rows), -torch.inf))


def best_mask(device: torch.device) -> Mask:
    """The Triton kernel for a GPU where triton is installed (torch brings it there), else `masked_logits`."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return cast("Mask", importlib.import_module("phloem.triton.mask").masked_logits)
    return masked_logits
