"""Grammar masks over logits, in place, as one Triton kernel. Imported only where triton is.

Its meaning, and its test, is `masked_logits` of python/runtime/backends/cuda/mask.py, in torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

__all__ = ["masked_logits"]

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

BLOCK = 1024  # ids of one program: 32 words read, at most 4 KB written


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mask_kernel(x, words, rows, vocab_size, x_stride, words_stride, size: tl.constexpr):  # type: ignore[no-untyped-def]
    m = tl.program_id(0)
    row = tl.load(rows + m)
    ids = tl.program_id(1) * size + tl.arange(0, size)
    inside = ids < vocab_size
    word = tl.load(words + m * words_stride + ids // 32, mask=inside, other=0)
    legal = ((word >> (ids % 32)) & 1) != 0
    tl.store(x + row * x_stride + ids, float("-inf"), mask=inside & (legal == 0))


def masked_logits(x: Tensor, words: Tensor, rows: Tensor) -> Tensor:
    """See backends/cuda/mask.py; in place."""
    assert x.stride(1) == 1 and words.stride(1) == 1
    grid = (rows.shape[0], -(-x.shape[1] // BLOCK))
    _mask_kernel[grid](x, words, rows, x.shape[1], x.stride(0), words.stride(0), size=BLOCK)
    return x
