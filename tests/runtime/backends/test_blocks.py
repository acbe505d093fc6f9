"""Blocks against the `gguf` package, which follows ggml's reference quantiser, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from phloem.runtime.backends.blocks import BLOCK_BYTES, dequantise, q4_0_to_q4_1, quantise

KINDS = sorted(BLOCK_BYTES)


def number(kind: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[kind.upper()]


def values() -> torch.Tensor:
    """Random rows, and blocks where rounding is delicate: zeros, one value, exact halves, denormals, huge and tiny scales."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    x[0] = 0
    x[1] = 1
    x[2] = -3.5
    x[3] = torch.arange(256) / 2 - 64
    x[4] *= 1e-8
    x[5] *= 1e4
    x[6, ::32] = 127
    x[6, 1::32] = 0.5
    x[7] = torch.linspace(-1, 1, 256).nextafter(torch.tensor(2.0))
    x[8] = x[8].abs()
    x[9] = -x[9].abs()
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_quantise_rounds_as_ggml_does(kind: str) -> None:
    x = values()
    np.testing.assert_array_equal(quantise(kind, x).numpy(), quantize(x.numpy(), number(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_dequantise_is_exact(kind: str) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (33, 5 * BLOCK_BYTES[kind]), dtype=np.uint8)
    scales = blocks.reshape(-1, BLOCK_BYTES[kind])
    scales[:, 0:2] = np.random.default_rng(1).normal(size=len(scales)).astype(np.float16)[:, None].view(np.uint8)
    if kind == "q4_1":
        scales[:, 2:4] = np.random.default_rng(2).normal(size=len(scales)).astype(np.float16)[:, None].view(np.uint8)
    np.testing.assert_array_equal(dequantise(kind, torch.from_numpy(blocks)).numpy(), dequantize(blocks, number(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_than_one_chunk_and_none(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values()
    whole = quantise(kind, x)
    monkeypatch.setattr("phloem.runtime.backends.blocks._CHUNK", 700)
    assert torch.equal(quantise(kind, x), whole)
    assert torch.equal(dequantise(kind, whole), torch.from_numpy(dequantize(whole.numpy(), number(kind))))
    assert dequantise(kind, whole[:0]).shape == (0, 256)


def test_q4_0_becomes_q4_1_without_a_rounding() -> None:
    blocks = quantise("q4_0", values())
    assert torch.equal(dequantise("q4_1", q4_0_to_q4_1(blocks)), dequantise("q4_0", blocks))


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 elements, not 40"):
        quantise("q8_0", torch.zeros(2, 40))
