"""Appending (norms, rope, page writes) and copying pages."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.paged import (
    Floats,
    Geometry,
    KernelError,
    Kernels,
    Placed,
    empty_store,
    from_bf16,
    lay_out,
    random_row,
    to_bf16,
    variants,
)

MAX_POSITIONS = 512


@pytest.fixture(
    scope="module", params=[*((v, 2) for v in variants()), (variants()[-1], 1)], ids=lambda p: f"variant{p[0]}-threads{p[1]}"
)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    variant, threads = request.param
    opened = Kernels(threads, variant)
    yield opened
    opened.close()


def rope_table(rotary: int) -> tuple[Floats, Floats]:
    angles = np.arange(MAX_POSITIONS)[:, None] * 1e4 ** (-np.arange(rotary // 2) / max(1, rotary // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Appended:
    """One call on fresh NaN pages."""

    def __init__(
        self, kernels: Kernels, placed: Placed, qkv: Floats, rotary: int, norms: tuple[Floats, Floats] | None = None
    ) -> None:
        placed.k, placed.v = empty_store(placed.geometry, placed.num_pages)
        self.qkv = qkv.copy()
        cos, sin = rope_table(rotary)
        more: dict[str, Any] = {
            "rope_cos": cos,
            "rope_sin": sin,
            "rotary_dim": rotary,
            "max_positions": MAX_POSITIONS,
            "norm_eps": 1e-5,
        }
        if norms is not None:
            more |= {"q_norm": norms[0], "k_norm": norms[1]}
        args = kernels.args(placed, self.qkv, self.qkv, **more)
        kernels.call("phloem_append_kv", ctypes.byref(args))
        self.k, self.v = placed.k, placed.v


def expected_heads(x: Floats, positions: NDArray[np.int32], rotary: int, norm: Floats | None) -> NDArray[np.float64]:
    """x: [T, heads, dim] after norm and rope, in float64."""
    y = x.astype(np.float64)
    if norm is not None:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * norm
    half = rotary // 2
    cos, sin = (t[positions].astype(np.float64)[:, None] for t in rope_table(rotary))
    a, b = y[..., :half].copy(), y[..., half:rotary].copy()
    y[..., :half], y[..., half:rotary] = a * cos - b * sin, b * cos + a * sin
    return y


def batch(g: Geometry, seed: int = 0) -> tuple[Placed, Floats]:
    rng = np.random.default_rng(seed)
    rows = [random_row(g, rng, n, new) for n, new in ((37, 37), (100, 1), (16, 3), (161, 60), (1, 1))]
    placed = lay_out(rows, g)
    width = (g.heads + 2 * g.kv_heads) * g.head_dim
    return placed, rng.standard_normal((102, width), np.float32)


def split_heads(g: Geometry, qkv: Floats) -> tuple[Floats, Floats, Floats]:
    q, k, v = np.split(qkv.reshape(len(qkv), -1, g.head_dim), [g.heads, g.heads + g.kv_heads], axis=1)
    return q, k, v


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("head_dim", "rotary", "normed"), [(64, 64, False), (32, 12, True), (40, 40, True), (128, 0, False), (24, 16, False)]
)
def test_append_agrees_with_float64(
    kernels: Kernels, page_size: int, kv: str, head_dim: int, rotary: int, normed: bool
) -> None:
    g = Geometry(heads=3, kv_heads=1 if head_dim == 128 else 3, head_dim=head_dim, page_size=page_size, kv=kv)  # type: ignore[arg-type]
    placed, qkv = batch(g)
    rng = np.random.default_rng(1)
    norms = (1 + rng.random(head_dim, np.float32), 1 + rng.random(head_dim, np.float32)) if normed else None
    done = Appended(kernels, placed, qkv, rotary, norms)
    q, k, v = split_heads(g, qkv)
    positions, slots = placed.arrays["positions"], placed.arrays["kv_slots"]
    page, offset = slots // page_size, slots % page_size

    expected_q = expected_heads(q, positions, rotary, norms[0] if norms else None)
    np.testing.assert_allclose(split_heads(g, done.qkv)[0], expected_q, rtol=0, atol=2e-6)
    assert done.qkv[:, g.heads * head_dim :].tobytes() == qkv[:, g.heads * head_dim :].tobytes()

    stored_k, stored_v = done.k[page, :, :, offset], done.v[page, :, offset, :]
    expected_k = expected_heads(k, positions, rotary, norms[1] if norms else None)
    if kv == "f32":
        np.testing.assert_allclose(stored_k, expected_k, rtol=0, atol=2e-6)
        assert stored_v.tobytes() == v.tobytes()
    else:
        np.testing.assert_allclose(from_bf16(stored_k), expected_k, rtol=2**-8, atol=2e-6)
        assert stored_v.tobytes() == to_bf16(v).tobytes()

    # Nothing but the slots was written.
    poison = np.ones((placed.num_pages + 1, page_size), bool)
    poison[page, offset] = False
    assert (np.ascontiguousarray(done.k.transpose(0, 3, 1, 2)[poison]).view(np.uint8) == 0xFF).all()
    assert (np.ascontiguousarray(done.v.transpose(0, 2, 1, 3)[poison]).view(np.uint8) == 0xFF).all()


def test_append_of_a_token_has_the_same_bits_in_any_batch(kernels: Kernels) -> None:
    """B1."""
    g = Geometry(heads=9, kv_heads=3, head_dim=64)
    placed, qkv = batch(g)
    norms = (np.full(64, 1.5, np.float32), np.full(64, 0.5, np.float32))
    whole = Appended(kernels, placed, qkv, 64, norms)
    page, offset = placed.arrays["kv_slots"] // 16, placed.arrays["kv_slots"] % 16
    for t in (0, 36, 50, 101):
        alone = lay_out(placed.rows, g)
        alone.arrays["positions"] = placed.arrays["positions"][t : t + 1].copy()
        alone.arrays["kv_slots"] = placed.arrays["kv_slots"][t : t + 1].copy()
        one = Appended(kernels, alone, qkv[t : t + 1], 64, norms)
        assert one.qkv.tobytes() == whole.qkv[t : t + 1].tobytes()
        assert one.k[page[t], :, :, offset[t]].tobytes() == whole.k[page[t], :, :, offset[t]].tobytes()
        assert one.v[page[t], :, offset[t]].tobytes() == whole.v[page[t], :, offset[t]].tobytes()


def test_variants_with_fma_append_the_same_bits() -> None:
    g = Geometry(heads=3, kv_heads=3, head_dim=40)
    results = []
    for variant in variants()[1:]:
        kernels = Kernels(1, variant)
        placed, qkv = batch(g)
        done = Appended(kernels, placed, qkv, 40, (np.ones(40, np.float32), np.ones(40, np.float32)))
        results.append(done.qkv.tobytes() + done.k.tobytes() + done.v.tobytes())
        kernels.close()
    assert len(set(results)) <= 1


def test_the_scratch_page_takes_what_must_not_be_kept(kernels: Kernels) -> None:
    """R4: many tokens of a batch may point there, the same slot twice; q is rotated all the same."""
    g = Geometry(heads=3, kv_heads=1, head_dim=64)
    placed, qkv = batch(g)
    kept = Appended(kernels, placed, qkv, 64)
    scratch = placed.num_pages * g.page_size
    placed.arrays["kv_slots"][5:90] = scratch + np.arange(85) % 3
    done = Appended(kernels, placed, qkv, 64)
    width = g.heads * g.head_dim
    assert done.qkv[:, :width].tobytes() == kept.qkv[:, :width].tobytes()
    written = placed.arrays["kv_slots"][placed.arrays["kv_slots"] < scratch] // g.page_size
    untouched = np.setdiff1d(
        np.arange(placed.num_pages + 1), written
    )  # the scratch page among them: two threads would race there
    assert (np.ascontiguousarray(done.k[untouched]).view(np.uint8) == 0xFF).all()
    assert (np.ascontiguousarray(done.v[untouched]).view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rotary_dim": 7}, "rotary_dim is 7"),
        ({"rotary_dim": 66}, "rotary_dim is 66"),
        ({"max_positions": 100}, r"positions\[\d+\] is \d+; the rope tables hold 0 to 99"),
    ],
)
def test_append_refuses(change: dict[str, int], words: str) -> None:
    kernels = Kernels()
    placed, qkv = batch(Geometry(heads=3, kv_heads=1, head_dim=64))
    cos, sin = rope_table(64)
    fields: dict[str, Any] = {"rope_cos": cos, "rope_sin": sin, "rotary_dim": 64, "max_positions": MAX_POSITIONS, **change}
    args = kernels.args(placed, qkv, qkv, **fields)
    with pytest.raises(KernelError, match=words):
        kernels.call("phloem_append_kv", ctypes.byref(args))
    kernels.close()


@pytest.mark.parametrize("slot", [-1, 10**9])
def test_append_refuses_a_slot_outside_the_storage(slot: int) -> None:
    kernels = Kernels()
    placed, qkv = batch(Geometry(heads=3, kv_heads=1, head_dim=64))
    placed.arrays["kv_slots"][3] = slot
    args = kernels.args(placed, qkv, qkv)
    with pytest.raises(KernelError, match=r"kv_slots\[3\]"):
        kernels.call("phloem_append_kv", ctypes.byref(args))
    kernels.close()


def copy_pages(kernels: Kernels, planes: list[NDArray[Any]], pairs: list[tuple[int, int]]) -> None:
    pointers = (ctypes.c_void_p * len(planes))(*(plane.ctypes.data for plane in planes))
    flat = np.array(pairs, np.int32).reshape(-1, 2)
    size = ctypes.c_size_t(planes[0][0].nbytes)
    num_pages = len(planes[0]) - 1
    kernels.call("phloem_copy_pages", pointers, len(planes), size, ctypes.c_void_p(flat.ctypes.data), len(flat), num_pages)


def test_pages_are_copied_in_every_layer(kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    planes = [rng.integers(0, 256, (11, 3 * 64 * 16 * 4), np.uint8) for _ in range(14)]
    expected = [plane.copy() for plane in planes]
    pairs = [(3, 7), (3, 1), (9, 0), (2, 2)]
    for plane in expected:
        for source, target in pairs:
            plane[target] = plane[source]
    copy_pages(kernels, planes, pairs)
    assert all(np.array_equal(a, b) for a, b in zip(planes, expected))
    copy_pages(kernels, planes, [])
    assert all(np.array_equal(a, b) for a, b in zip(planes, expected))


@pytest.mark.parametrize("pair", [(10, 0), (0, 10), (-1, 2)])
def test_a_copy_of_or_to_no_page_is_refused(pair: tuple[int, int]) -> None:
    """The scratch page, 10 here, is no page to copy."""
    kernels = Kernels()
    planes = [np.zeros((11, 64), np.uint8)]
    with pytest.raises(KernelError, match="copy 1 names page"):
        copy_pages(kernels, planes, [(1, 2), pair])
    kernels.close()


def test_a_copied_page_continues_the_sequence(kernels: Kernels) -> None:
    """R2: copy-on-write, then attention over the copy: the same bits."""
    g = Geometry(heads=4, kv_heads=2, head_dim=32)
    row = random_row(g, np.random.default_rng(0), 45, 2)
    placed = lay_out([row], g)
    before = kernels.attend(placed)[0]
    unused = next(p for p in range(placed.num_pages) if p not in placed.tables[0])
    copy_pages(kernels, [placed.k, placed.v], [(placed.tables[0][-1], unused)])
    placed.k[placed.tables[0][-1]], placed.v[placed.tables[0][-1]] = np.nan, np.nan
    placed.arrays["kv_indices"][-1] = unused
    assert kernels.attend(placed)[0].tobytes() == before.tobytes()
