"""What FlashInfer's scheduler decides from the arrays, and what is done so that it decides alike for every company of a row."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.runtime.backends.cuda.attention import LEAST_SCRATCH, Kind, same_tile, scratch_bytes


def kind(heads: int, kv_heads: int, dim: int) -> Kind:
    return Kind(heads, kv_heads, dim, dim**-0.5, 0, 0.0)


def tile(kind: Kind, qo_indptr: np.ndarray) -> int:
    """FA2DetermineCtaTileQ of the average length, as PrefillSplitQOKVIndptr calls it."""
    packed = int((np.diff(qo_indptr).astype(np.int64) * (kind.num_heads // kind.num_kv_heads)).sum() // (len(qo_indptr) - 1))
    return 128 if packed > 64 and kind.head_dim < 256 else 64 if packed > 16 else 16


@pytest.mark.parametrize("shape", [(32, 8, 128), (8, 8, 64), (14, 2, 64), (32, 1, 128), (16, 8, 256), (128, 1, 128)])
def test_a_row_has_one_tile_in_any_company(shape: tuple[int, int, int]) -> None:
    this, tiles = kind(*shape), set()
    for lengths in ([1], [1, 1, 1], [3, 500, 1], [8000], [17, 16], [64, 65]):
        qo_indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        wide, taken, kept = same_tile(this, qo_indptr)
        tiles.add(tile(this, wide))
        assert wide.dtype == np.int32 and len(taken) == wide[-1] and len(kept) == sum(lengths)
        assert np.array_equal(taken[kept], np.arange(sum(lengths)))
        for r, n in enumerate(lengths):  # a row's tokens stand at its end, where the causal mask expects them
            assert np.array_equal(kept[qo_indptr[r] : qo_indptr[r + 1]], np.arange(wide[r + 1] - n, wide[r + 1]))
            assert (taken[wide[r] : wide[r + 1] - n] == qo_indptr[r]).all()
    assert len(tiles) == 1


def test_a_row_that_is_long_enough_is_left_as_it_is() -> None:
    wide, taken, kept = same_tile(kind(32, 8, 128), np.array([0, 17, 1000], np.int32))
    assert wide.tolist() == [0, 17, 1000] and np.array_equal(taken, np.arange(1000)) and np.array_equal(kept, np.arange(1000))


def test_the_scratch_holds_what_the_largest_captured_decode_asks_for() -> None:
    """By PrefillPlan's own arithmetic: heads x padded tiles x tile x (dim + 1) x 4 bytes."""
    llama = kind(32, 8, 128)
    for rows in (1, 256, 1024):
        tiles = max(2 * 132 // 8, -(-rows * 4 // 16) + rows - 1)
        assert scratch_bytes([llama], rows) >= 32 * tiles * 16 * 129 * 4
    assert LEAST_SCRATCH <= scratch_bytes([llama], 256) < 1.1 * LEAST_SCRATCH
    assert scratch_bytes([llama], 1024) > 2 * LEAST_SCRATCH
    assert (
        scratch_bytes([kind(32, 2, 128)], 1) >= 32 * (2 * 132 // 2) * 128 * 129 * 4
    )  # long rows of a prefill, cut for every SM
