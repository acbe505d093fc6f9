"""k-quants and 5-bit blocks against the `gguf` package, on random bytes with sane scales."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from phloem.runtime.models.kquants import K_QUANTS, dequantise_k

# Where a block keeps its float16 scales.
SCALES = {"q5_0": [0], "q5_1": [0, 2], "q2_k": [80, 82], "q3_k": [108], "q4_k": [0, 2], "q5_k": [0, 2], "q6_k": [208]}


@pytest.mark.parametrize("kind", sorted(K_QUANTS))
def test_equal_to_the_gguf_package(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.runtime.models.kquants._CHUNK_BLOCKS", 7)
    elements, size = K_QUANTS[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (11 * 3, size), dtype=np.uint8)
    for at in SCALES[kind]:
        blocks[:, at : at + 2] = random.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    rows = blocks.reshape(11, 3 * size)
    ours = dequantise_k(kind, torch.from_numpy(rows))
    assert ours.shape == (11, 3 * elements)
    np.testing.assert_array_equal(ours.numpy(), dequantize(rows, gguf.GGMLQuantizationType[kind.upper()]))
