"""The attention kernel: right against float64, and the same bits however a query is computed (B1)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.paged import (
    Floats,
    Geometry,
    KernelError,
    Kernels,
    Row,
    lay_out,
    random_row,
    reference,
    variants,
    with_page_size,
)

# Outputs are averages of values of order 1. 2e-6 is some 30 units in the last place: float32 dot products and exponentials.
TOLERANCE = 2e-6


@pytest.fixture(
    scope="module", params=[*((v, 2) for v in variants()), (variants()[-1], 1)], ids=lambda p: f"variant{p[0]}-threads{p[1]}"
)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    variant, threads = request.param
    opened = Kernels(threads, variant)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def best() -> Iterator[Kernels]:
    opened = Kernels(2)
    yield opened
    opened.close()


def mixed_rows(g: Geometry, seed: int = 0) -> list[Row]:
    """Decodes, chunks, a tree of shared prefixes, lengths on and off every boundary there is."""
    rng = np.random.default_rng(seed)
    root = random_row(g, rng, 600, 37)
    branch = random_row(g, rng, 530, 1, root, 512)
    return [
        root,
        branch,
        random_row(g, rng, 1, 1),
        random_row(g, rng, 545, 7, branch, 528),
        random_row(g, rng, 70, 70),
        random_row(g, rng, 533, 1, branch, 530),
        random_row(g, rng, 256, 1),
        random_row(g, rng, 257, 2),
        random_row(g, rng, 16, 3),
        random_row(g, rng, 601, 1, root, 600),
        random_row(g, rng, 640, 1, root, 128),
    ]


def same(a: Sequence[Floats], b: Sequence[Floats]) -> bool:
    return [x.tobytes() for x in a] == [x.tobytes() for x in b]


def worst(rows: Sequence[Row], outs: Sequence[Floats], g: Geometry) -> float:
    """NaN counts as infinitely wrong."""
    return max(float(np.nan_to_num(np.abs(out - reference(row, g)), nan=np.inf).max()) for row, out in zip(rows, outs))


GEOMETRIES = {
    "mha": Geometry(heads=4, kv_heads=4, head_dim=64),
    "gqa3": Geometry(heads=9, kv_heads=3, head_dim=64),
    "gqa8, 128": Geometry(heads=16, kv_heads=2, head_dim=128),
    "mqa 16": Geometry(heads=5, kv_heads=1, head_dim=16),
    "one group beyond a tile": Geometry(heads=100, kv_heads=1, head_dim=16),
    "24 columns": Geometry(heads=4, kv_heads=2, head_dim=24),
    "72 columns": Geometry(heads=2, kv_heads=1, head_dim=72),
    "256 columns": Geometry(heads=2, kv_heads=1, head_dim=256),
    "bf16": Geometry(heads=9, kv_heads=3, head_dim=64, kv="bf16"),
    "bf16, 40 columns": Geometry(heads=4, kv_heads=1, head_dim=40, kv="bf16"),
    "window": Geometry(window=100),
    "window of one": Geometry(window=1),
    "window of a split": Geometry(window=256, kv="bf16"),
    "soft cap": Geometry(softcap=2.0),
    "soft cap, window, bf16": Geometry(softcap=30.0, window=300, kv="bf16"),
}


@pytest.mark.parametrize("g", GEOMETRIES.values(), ids=GEOMETRIES.keys())
def test_agrees_with_float64(best: Kernels, g: Geometry) -> None:
    rows = mixed_rows(g)
    assert worst(rows, best.run(rows, g), g) < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("kv", ["f32", "bf16"])
def test_every_variant_agrees_with_float64_at_every_page_size(kernels: Kernels, page_size: int, kv: str) -> None:
    g = Geometry(heads=3, kv_heads=1, head_dim=24, page_size=page_size, kv=kv, window=290 if page_size == 32 else 0)  # type: ignore[arg-type]
    rows = mixed_rows(g)
    assert worst(rows, kernels.run(rows, g), g) < TOLERANCE


def test_scores_are_as_exact_as_float32_allows(best: Kernels) -> None:
    """One key far above the others: the answer is its value, and the maximum keeps the exponentials from overflow."""
    g = Geometry(heads=1, kv_heads=1, head_dim=16)
    row = random_row(g, np.random.default_rng(0), 300, 1)
    row.k[123, 0], row.q[0, 0] = 20.0, 20.0
    assert np.array_equal(best.run([row], g)[0][0, 0], row.v[123, 0])


@pytest.mark.parametrize(
    "g", [GEOMETRIES[n] for n in ("gqa3", "gqa8, 128", "24 columns", "bf16", "window", "soft cap, window, bf16")]
)
class TestB1:
    """A query's bits depend on its own q, keys and values."""

    def test_alone_or_in_a_batch(self, kernels: Kernels, g: Geometry) -> None:
        rows = mixed_rows(g)
        assert same(kernels.run(rows, g), [kernels.run([row], g)[0] for row in rows])

    def test_any_page_size(self, kernels: Kernels, g: Geometry) -> None:
        rows = mixed_rows(g)
        expected = kernels.run(rows, g)
        for page_size in (1, 2, 4, 8, 32, 64):
            assert same(kernels.run(rows, with_page_size(g, page_size), seed=page_size), expected), page_size

    def test_shared_pages_or_copies(self, kernels: Kernels, g: Geometry) -> None:
        rows = mixed_rows(g)
        assert same(kernels.run(rows, g, share=True), kernels.run(rows, g, share=False))

    def test_any_order_and_placement(self, kernels: Kernels, g: Geometry) -> None:
        rows = mixed_rows(g)
        expected = kernels.run(rows, g)
        order = np.random.default_rng(5).permutation(len(rows))
        assert same(kernels.run([rows[i] for i in order], g, seed=7), [expected[i] for i in order])

    @pytest.mark.parametrize("chunk", [1, 5, 16, 33])
    def test_any_chunking(self, best: Kernels, g: Geometry, chunk: int) -> None:
        row = random_row(g, np.random.default_rng(1), 420, 300)
        whole = best.run([row], g)[0]
        parts = [row.piece(i, min(i + chunk, 300)) for i in range(0, 300, chunk)]
        assert same([np.concatenate([best.run([part], g)[0] for part in parts])], [whole])
        # All chunks at once, as rows of one batch: each token's later neighbours on its page are then there, and not its own.
        assert same([np.concatenate(best.run(parts, g))], [whole])

    def test_any_number_of_threads(self, g: Geometry) -> None:
        rows = mixed_rows(g)
        for variant in variants():
            outs = []
            for threads in (1, 2, 3):
                kernels = Kernels(threads, variant)
                outs.append([*kernels.run(rows, g), *kernels.run(rows[:1], g), *kernels.run(rows[1:2], g)])
                kernels.close()
            assert same(outs[0], outs[1])
            assert same(outs[0], outs[2])

    def test_variants_with_fma_agree(self, g: Geometry) -> None:
        """More than B1 asks: a wider machine computes the same numbers."""
        rows = mixed_rows(g)
        outs = []
        for variant in variants()[1:]:
            kernels = Kernels(1, variant)
            outs.append(kernels.run(rows, g))
            kernels.close()
        assert all(same(out, outs[0]) for out in outs)


@pytest.mark.parametrize("kv", ["f32", "bf16"])
def test_decodes_that_share_a_prefix_equal_decodes_alone(kernels: Kernels, kv: str) -> None:
    """The workload that tree attention is for, and a tree below it: 32 rows, 8 branches, own tails."""
    g = Geometry(heads=9, kv_heads=3, head_dim=64, kv=kv)  # type: ignore[arg-type]
    rng = np.random.default_rng(3)
    root = random_row(g, rng, 600, 1)
    branches = [random_row(g, rng, 640, 1, root, 512) for _ in range(8)]
    rows = [random_row(g, rng, 650 + i, 1, branches[i % 8], 608) for i in range(32)]
    shared = kernels.run(rows, g)
    assert same(shared, kernels.run(rows, g, share=False))
    assert worst(rows, shared, g) < TOLERANCE


def test_rows_with_one_table_and_different_ends(best: Kernels) -> None:
    """n samples of a prompt: the same pages, the last one too, up to different positions; what lies beyond is poison to some."""
    g = Geometry(page_size=64)
    row = random_row(g, np.random.default_rng(0), 200, 120)
    placed = lay_out([row], g)
    pieces = [row.piece(i, i + 1) for i in (5, 60, 61, 119, 119)]
    placed_all = replace(placed, rows=pieces, tables=[placed.tables[0][: -(-p.length // 64)] for p in pieces], arrays={})
    whole = best.attend(placed)[0]
    assert same(best.attend(placed_all), [whole[i : i + 1] for i in (5, 60, 61, 119, 119)])


def test_later_tokens_that_are_nan_do_not_reach_earlier_ones(kernels: Kernels) -> None:
    for window in (0, 40):
        g = Geometry(window=window)
        row = random_row(g, np.random.default_rng(0), 300, 200)
        clean = kernels.run([row], g)[0]
        row.k[-11:], row.v[-11:] = np.nan, np.inf
        spoilt = kernels.run([row], g)[0]
        assert same([spoilt[:-11]], [clean[:-11]])
        assert np.isnan(spoilt[-11:]).all()


def test_keys_before_the_window_may_be_anything(kernels: Kernels) -> None:
    g = Geometry(window=33)
    row = random_row(g, np.random.default_rng(0), 300, 2)
    clean = kernels.run([row], g)[0]
    row.k[:266], row.v[:266] = np.nan, np.nan
    assert same(kernels.run([row], g), [clean])


def test_random_batches(best: Kernels) -> None:
    """Whatever the trie, the tiles and the items become."""
    rng = np.random.default_rng(11)
    for trial in range(25):
        kv_heads = int(rng.integers(1, 4))
        g = Geometry(
            heads=kv_heads * int(rng.integers(1, 6)),
            kv_heads=kv_heads,
            head_dim=int(rng.choice([16, 32, 40, 64])),
            page_size=int(rng.choice([1, 2, 4, 16, 16, 64])),
            kv="bf16" if rng.random() < 0.3 else "f32",
            window=int(rng.choice([0, 0, 17, 260])),
            softcap=float(rng.choice([0.0, 0.0, 5.0])),
        )
        rows: list[Row] = []
        for _ in range(int(rng.integers(1, 12))):
            length = int(rng.integers(1, 700))
            prefix = rows[int(rng.integers(len(rows)))] if rows and rng.random() < 0.6 else None
            common = int(rng.integers(0, min(length, prefix.length) + 1)) if prefix else 0
            new = int(rng.integers(1, min(length, 60) + 1)) if rng.random() < 0.5 else 1
            rows.append(random_row(g, rng, length, new, prefix, common))
        outs = best.run(rows, g, seed=trial)
        assert worst(rows, outs, g) < TOLERANCE, (trial, g)
        assert same(outs, [best.run([row], g)[0] for row in rows]), (trial, g)


@pytest.mark.parametrize(
    ("array", "index", "value", "words"),
    [
        ("kv_indices", 1, 40, "kv_indices are between 0 and num_pages - 1"),
        ("kv_indices", 0, -1, "kv_indices are between 0 and num_pages - 1"),
        ("kv_last_page_len", 0, 17, "kv_last_page_len is between 1 and page_size"),
        ("kv_last_page_len", 0, 0, "kv_last_page_len is between 1 and page_size"),
        ("qo_indptr", 1, 0, "qo_indptr must rise"),
        ("qo_indptr", 2, 9, "qo_indptr ends with the number of tokens"),
        ("kv_indptr", 1, 0, "kv_indptr must rise"),
        ("qo_indptr", 0, 1, "begin with 0"),
    ],
)
def test_arrays_that_break_the_contract_are_refused(best: Kernels, array: str, index: int, value: int, words: str) -> None:
    g = Geometry()
    rng = np.random.default_rng(0)
    placed = lay_out([random_row(g, rng, 40, 2), random_row(g, rng, 20, 1)], g)
    placed.arrays[array][index] = value
    with pytest.raises(KernelError, match=words):
        best.attend(placed)


def test_a_row_with_more_tokens_than_keys_is_refused(best: Kernels) -> None:
    g = Geometry()
    placed = lay_out([random_row(g, np.random.default_rng(0), 3, 3)], g)
    placed.arrays["kv_last_page_len"][0] = 2
    with pytest.raises(KernelError, match="no more tokens than keys"):
        best.attend(placed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 5}, "heads is a multiple of kv_heads"),
        ({"head_dim": 20}, "head_dim is a multiple of 8 from 16 to 256"),
        ({"head_dim": 264}, "head_dim is a multiple of 8 from 16 to 256"),
        ({"page_size": 12}, "page_size is a power of two from 1 to 64"),
        ({"num_pages": 0}, "at least one page"),
        ({"kv_type": 2}, "kv_type is 2"),
        ({"window": -1}, "window is -1"),
        ({"softcap": float("nan")}, "softcap nan"),
    ],
)
def test_shapes_that_no_kernel_takes_are_refused(best: Kernels, change: dict[str, float], words: str) -> None:
    g = Geometry()
    placed = lay_out([random_row(g, np.random.default_rng(0), 3, 3)], g)
    buffer = np.zeros((3, 512), np.float32)
    args = best.args(placed, buffer, buffer, **change)
    with pytest.raises(KernelError, match=words):
        best.call("phloem_attention_plan_build", best.plan, ctypes.byref(args))
