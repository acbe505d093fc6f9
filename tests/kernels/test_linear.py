"""Linears, embeddings and norms through the C entries, against the reference backend's numbers in float64; outputs poisoned first.

kernels/tests/test_linear.cpp holds the exhaustive bitwise checks; here shapes, strides and formats are drawn at random.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phloem.runtime.backends.base import Weight
from phloem.runtime.backends.blocks import dequantise, quantise
from phloem.runtime.backends.cpu import Cpu, CpuMatrix
from phloem.runtime.native import supported_variants

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
KINDS = ("f32", "bf16", "f16", "q8_0", "q4_0", "q4_1")


@pytest.fixture(scope="module", params=supported_variants())
def cpu(request: pytest.FixtureRequest) -> Iterator[Cpu]:
    backend = Cpu(2, request.param)
    yield backend
    backend.close()


def weight(kind: str, rows: int, columns: int, seed: int) -> tuple[Weight, F64]:
    """A random weight and the numbers it stands for."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if kind in ("f32", "bf16", "f16"):
        values = values.to({"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[kind])
        return Weight(kind, (rows, columns), values), values.double().numpy()  # type: ignore[arg-type]
    data = quantise(kind, values)
    return Weight(kind, (rows, columns), data), np.asarray(dequantise(kind, data), np.float64)  # type: ignore[arg-type]


def as_int8(x: F32) -> F64:
    """x as quantised kernels take it: per 32, scale max|x| / 127, to the nearest."""
    blocks = x.reshape(len(x), -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    quants = np.rint(blocks * np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0))
    exact: F64 = (quants.astype(np.float64) * (most / np.float32(127))).reshape(x.shape)
    return exact


def poisoned(rows: int, stride: int) -> F32:
    return np.full((rows, stride), np.nan, np.float32)


def linear(
    cpu: Cpu,
    parts: Sequence[CpuMatrix],
    x: F32,
    k: int,
    width: int,
    *,
    gated: bool = False,
    bias: F32 | None = None,
    residual: F32 | None = None,
    pad: int = 0,
) -> F32:
    """y of the C entry; checks that nothing beyond `width` of its rows was touched."""
    handles = [handle for part in parts for handle in part.handles]
    y, context = poisoned(len(x), width + pad), cpu.context
    context.check(
        context.library.phloem_linear(
            context.handle,
            (ctypes.c_void_p * len(handles))(*handles),
            len(handles),
            gated,
            x.ctypes.data,
            x.shape[1],
            len(x),
            None if bias is None else bias.ctypes.data,
            None if residual is None else residual.ctypes.data,
            0 if residual is None else residual.shape[1],
            y.ctypes.data,
            width + pad,
        )
    )
    assert np.isnan(y[:, width:]).all()
    assert x.shape[1] >= k
    return y[:, :width].copy()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_linear_equals_float64(cpu: Cpu, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    k = data.draw(st.integers(1, 6)) * 32 if kind.startswith("q") else data.draw(st.integers(1, 200))
    n, rows, seed = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 70)), data.draw(st.integers(0, 99))
    rng = np.random.default_rng(seed)
    stored, values = weight(kind, n, k, seed)
    x = np.ascontiguousarray(
        rng.standard_normal((rows, k + 5), np.float32)
    )  # a stride of its own; what lies beyond k is not read
    x[:, k:] = np.nan
    bias, residual = rng.standard_normal(n, np.float32), rng.standard_normal((rows, n + 2), np.float32)
    matrix = cpu.pack([stored])
    assert isinstance(matrix, CpuMatrix)
    got = linear(cpu, [matrix], x, k, n, bias=bias, residual=residual, pad=3)
    taken = as_int8(x[:, :k].copy()) if kind.startswith("q") else x[:, :k].astype(np.float64)
    size = np.abs(taken) @ np.abs(values).T + 10
    assert np.all(np.abs(got - (taken @ values.T + bias + residual[:, :n])) <= 1e-6 * size)
    one = linear(
        cpu, [matrix], x[rows // 2 : rows // 2 + 1].copy(), k, n, bias=bias, residual=residual[rows // 2 : rows // 2 + 1].copy()
    )
    assert one.tobytes() == got[rows // 2].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_gated_is_silu_of_gate_times_up(cpu: Cpu, kind: str) -> None:
    (gate, _), (up, _) = weight(kind, 75, 96, 1), weight(kind, 75, 96, 2)
    both, apart = cpu.pack([gate, up], gated=True), [cpu.pack([part]) for part in (gate, up)]
    x = np.random.default_rng(0).standard_normal((9, 96), np.float32) * 5
    g, u = (linear(cpu, [part], x, 96, 75).astype(np.float64) for part in apart)  # type: ignore[list-item]
    got = linear(cpu, [both], x, 96, 75, gated=True)  # type: ignore[list-item]
    np.testing.assert_allclose(got, g / (1 + np.exp(-g)) * u, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_embed_is_the_tables_rows(cpu: Cpu, kind: str) -> None:
    stored, values = weight(kind, 110, 64, 3)
    table = cpu.pack([stored])
    assert isinstance(table, CpuMatrix)
    ids = np.array([0, 109, 47, 48, 24, 23, 0], np.int32)
    y, context = poisoned(len(ids), 64), cpu.context
    context.check(context.library.phloem_embed(context.handle, table.handles[0], ids.ctypes.data, len(ids), y.ctypes.data, 64))
    if kind == "q4_1":  # scale * q + minimum: two roundings here and there
        np.testing.assert_allclose(y, values[ids], rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(y, values[ids].astype(np.float32))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 700), rows=st.integers(1, 9), scale=st.sampled_from([1e-6, 1.0, 1e6]), seed=st.integers(0, 99))
def test_rms_norm_equals_float64(cpu: Cpu, n: int, rows: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal((rows, n)) * scale).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    y, context = poisoned(rows, n), cpu.context
    call: Any = context.library.phloem_rms_norm
    context.check(call(context.handle, x.ctypes.data, n, w.ctypes.data, 1e-5, rows, n, y.ctypes.data, n))
    exact = x.astype(np.float64)
    want = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-12)
