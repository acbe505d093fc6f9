"""Weights of every kind, on the CPU twins of torch's kernels: what is multiplied is what the format says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phloem.runtime.backends.base import Weight, WeightKind
from phloem.runtime.backends.blocks import dequantise, quantise
from phloem.runtime.backends.cuda import Cuda
from phloem.runtime.backends.cuda.matrices import (
    Fp8Matrix,
    Int4Matrix,
    PlainMatrix,
    pack_int4,
    pack_matrix,
    scaled_rows,
)
from phloem.runtime.errors import KernelError
from phloem.runtime.models.quantised import AWQ_ORDER, unpack_awq, unpack_gptq
from tests.fake_device import FakeDevice, FakeFlashInfer

CPU = torch.device("cpu")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["q4_0", "q4_1"])
def test_gguf_blocks_go_through_the_int4_kernel_with_their_own_numbers(kind: WeightKind) -> None:
    values = [randn(16, 256, seed=s) for s in (1, 2)]
    parts = [Weight(kind, (16, 256), quantise("q4_0", v)) for v in values] if kind == "q4_0" else [_q4_1(v) for v in values]
    matrix = pack_matrix(parts, gated=True, compute=torch.bfloat16, device=CPU)
    assert isinstance(matrix, Int4Matrix) and matrix.gated and matrix.shape == (32, 256)
    want = torch.cat([dequantise(kind, p.data).view(16, 256) for p in parts])
    # Scale and zero are kept in bf16: 8 bits of mantissa on numbers as large as 8 scales.
    torch.testing.assert_close(matrix.dequantised(), want, rtol=0.02, atol=0.02 * float(want.abs().max()))
    x = randn(3, 256, seed=9).to(torch.bfloat16)
    torch.testing.assert_close(matrix.times(x, None).float(), x.float() @ want.t(), rtol=0.05, atol=0.6)


def _q4_1(values: torch.Tensor) -> Weight:
    """GGUF q4_1 by hand: float16 scale and minimum, then 16 bytes, element i low and i + 16 high."""
    rows, columns = values.shape
    blocks = values.view(rows, -1, 32)
    low = blocks.amin(-1, keepdim=True).half().float()
    d = ((blocks.amax(-1, keepdim=True) - low) / 15).half().float()
    q = ((blocks - low) / d).round().clamp(0, 15).to(torch.uint8)
    raw = torch.cat([d.half().view(torch.uint8), low.half().view(torch.uint8), q[..., :16] | q[..., 16:] << 4], dim=-1)
    return Weight("q4_1", (rows, columns), raw.reshape(rows, -1))


def _packed(values: np.ndarray, order: tuple[int, ...]) -> torch.Tensor:
    """int 0 .. 15 [r, 8 c] -> int32 [r, c], value j at 4-bit place order[j]."""
    grouped = values.reshape(values.shape[0], -1, 8).astype(np.uint32)
    words = sum(grouped[..., j] << np.uint32(4 * order[j]) for j in range(8))
    return torch.from_numpy(np.asarray(words, np.uint32).view(np.int32).copy())


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
def test_gptq_and_awq_layouts_are_unpacked_as_their_formats_say(layout: str) -> None:
    """(q - z) s, by the definition of the format, equals what our kernel's (q - 8) scale + zero gives."""
    rng, rows, columns, group = np.random.default_rng(1), 16, 256, 128
    q = rng.integers(0, 16, (rows, columns))
    z = rng.integers(1, 16, (columns // group, rows))
    s = torch.from_numpy(rng.random((columns // group, rows)).astype(np.float16))
    plain = tuple(range(8))
    if layout == "awq":
        got = unpack_awq(_packed(q.T.copy(), AWQ_ORDER), _packed(z, AWQ_ORDER), s)
    else:
        offset = 1 if layout == "gptq" else 0
        got = unpack_gptq(_packed(q, plain).t().contiguous(), _packed(z - offset, plain), s, zero_offset=offset)
    quants, pairs = got
    assert np.array_equal(quants.numpy(), q)
    want = (q - np.repeat(z.T, group, axis=1)) * np.repeat(s.float().numpy().T, group, axis=1)
    ours = (quants.float() - 8).view(rows, -1, group) * pairs[..., :1] + pairs[..., 1:]
    np.testing.assert_allclose(ours.view(rows, columns).numpy(), want, rtol=1e-5, atol=1e-5)
    matrix = pack_int4([quants], [pairs], group, gated=False, device=CPU)
    torch.testing.assert_close(matrix.dequantised(), torch.from_numpy(want).float(), rtol=0.02, atol=0.06)


def test_fp8_rows_are_scaled_one_by_one() -> None:
    weight = randn(32, 64, seed=1) * torch.logspace(-3, 3, 32)[:, None]
    matrix = pack_matrix([Weight("f8", (32, 64), weight)], gated=False, compute=torch.bfloat16, device=CPU)
    assert isinstance(matrix, Fp8Matrix)
    torch.testing.assert_close(matrix.dequantised(), weight, rtol=0.07, atol=1e-5)
    x = randn(5, 64, seed=2) * torch.tensor([1e-3, 1.0, 1e3, 1.0, 0.0])[:, None]
    want = x @ weight.t()
    got = matrix.times(x.to(torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)).float() - 1
    error = (got - want).abs() / (x.norm(dim=1)[:, None] * weight.norm(dim=1)[None] + 1)
    assert float(error.max()) < 0.03  # three bits of mantissa on both sides, averaged over 64 products
    values, scales = scaled_rows(torch.zeros(2, 16))
    assert (scales == 1).all() and (values.float() == 0).all()


def test_q8_0_becomes_plain() -> None:
    part = Weight("q8_0", (4, 64), quantise("q8_0", randn(4, 64)))
    matrix = pack_matrix([part], gated=False, compute=torch.bfloat16, device=CPU)
    want = dequantise("q8_0", part.data).view(4, 64).to(torch.bfloat16)
    assert isinstance(matrix, PlainMatrix) and torch.equal(matrix.data, want)
    assert torch.equal(matrix.rows(torch.tensor([2, 0])), want[[2, 0]])


def test_plain_weights_become_the_compute_dtype() -> None:
    parts = [Weight("f32", (4, 8), randn(4, 8)), Weight("bf16", (2, 8), randn(2, 8).to(torch.bfloat16))]
    matrix = pack_matrix(parts, gated=False, compute=torch.float16, device=CPU)
    assert matrix.shape == (6, 8) and matrix.times(torch.ones(1, 8, dtype=torch.float16), None).dtype == torch.float16  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("parts", "options", "says"),
    [
        (
            [Weight("q8_0", (8, 128), torch.zeros(8, 136, dtype=torch.uint8)), Weight("f8", (8, 128), torch.zeros(8, 128))],
            {},
            "no kernel of the cuda backend multiplies f8, q8_0",
        ),
        ([Weight("q4_0", (8, 64), torch.zeros(8, 36, dtype=torch.uint8))], {}, "its columns of 128"),
        ([Weight("q4_0", (8, 128), torch.zeros(8, 72, dtype=torch.uint8))], {"compute": torch.float16}, "computes in bf16"),
        ([Weight("f8", (8, 64), torch.zeros(8, 64))], {}, "multiples of 16"),
        ([Weight("f32", (8, 64), torch.zeros(8, 64)), Weight("f32", (8, 32), torch.zeros(8, 32))], {}, r"\[32, 64\] columns"),
        ([Weight("f32", (8, 64), torch.zeros(8, 64))], {"gated": True}, r"\[gate, up\]"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(parts: list[Weight], options: dict[str, object], says: str) -> None:
    defaults: dict[str, object] = {"gated": False, "compute": torch.bfloat16, "device": CPU}
    with pytest.raises(KernelError, match=says):
        pack_matrix(parts, **{**defaults, **options})  # type: ignore[arg-type]


def test_a_gpu_that_is_too_old_for_a_kernel_says_so_at_load() -> None:
    device = FakeDevice()
    device.capability = (8, 6)
    old, values = Cuda(device=device, flashinfer=FakeFlashInfer()), randn(16, 128)
    with pytest.raises(
        KernelError, match=r"fake has compute capability 8\.6; a matrix of kind 'f8' needs 8\.9. Use dtype='bf16'"
    ):
        old.pack([Weight("f8", (16, 128), values)])
    assert isinstance(old.pack([Weight("q4_0", (16, 128), quantise("q4_0", values))]), Int4Matrix)
    device.capability = (8, 9)
    assert isinstance(old.pack([Weight("f8", (16, 128), values)]), Fp8Matrix)
