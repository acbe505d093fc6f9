"""The specification itself: against float64 arithmetic written another way, and B1 by ==."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from phloem.runtime.backends.base import AttentionSpec, ForwardBatch, KVSpec, Limits, Ops, Packed, Weight
from phloem.runtime.backends.blocks import dequantise, quantise
from phloem.runtime.backends.reference import Reference, ReferenceRunner
from phloem.runtime.errors import KernelError
from phloem.runtime.layers.rope import RopeConfig, rope_table
from tests.paged_runs import Piece, make_batch

HEADS, KV_HEADS, DIM = 4, 2, 16
ROPE = rope_table(RopeConfig(), DIM, 1024)


class AttentionOnly:
    """A model that is one attention over qkv rows looked up by token id: what the page contract is about."""

    num_layers, width = 1, 600  # ids: the attention is returned in place of logits

    def __init__(self, qkv: Tensor, spec: AttentionSpec, norms: tuple[Tensor, Tensor] | None = None) -> None:
        self.qkv, self.spec, self.norms = qkv, spec, norms

    def forward(self, ops: Ops, batch: ForwardBatch) -> Tensor:  # type: ignore[override]
        q_norm, k_norm = self.norms if self.norms else (None, None)
        rows = self.qkv[torch.from_numpy(batch.token_ids).long()]
        return ops.logit_rows(batch, ops.attention(batch, rows, 0, self.spec, q_norm, k_norm))


def spec(window: int = 0, softcap: float = 0.0, norm_eps: float = 0.0) -> AttentionSpec:
    return AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, ROPE, window, softcap, norm_eps)


def runner(model: AttentionOnly, *, pages: int = 40, page_size: int = 16, dtype: str = "f32") -> ReferenceRunner:
    kv = KVSpec(1, KV_HEADS, DIM, pages, page_size, dtype)  # type: ignore[arg-type]
    out = Reference().bind(model, kv, Limits(4096, 64, 4096, 4096))
    out.kv.k.fill_(float("nan"))  # what recycled pages may hold
    out.kv.v.fill_(float("nan"))
    return out


def random_qkv(ids: int = 600) -> Tensor:
    return torch.randn(ids, (HEADS + 2 * KV_HEADS) * DIM, generator=torch.Generator().manual_seed(3))


def dense(model: AttentionOnly, ids: list[int]) -> Tensor:
    """float64, all pairs at once, complex rotation: [len(ids), heads * dim]."""
    x = model.qkv[ids].double().view(len(ids), HEADS + 2 * KV_HEADS, DIM)
    q, k, v = x[:, :HEADS], x[:, HEADS : HEADS + KV_HEADS], x[:, HEADS + KV_HEADS :]
    if model.norms:
        q, k = (
            t / (t.square().mean(-1, keepdim=True) + model.spec.norm_eps).sqrt() * w.double()
            for t, w in zip((q, k), model.norms)
        )
    turn = torch.complex(ROPE.cos.double(), ROPE.sin.double())[: len(ids), None]

    def rotate(t: Tensor) -> Tensor:
        turned = torch.complex(t[..., : DIM // 2], t[..., DIM // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    q, k = rotate(q), rotate(k).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * model.spec.scale
    if model.spec.softcap:
        scores = model.spec.softcap * torch.tanh(scores / model.spec.softcap)
    i, j = torch.arange(len(ids))[:, None], torch.arange(len(ids))[None]
    hidden = (j > i) | (j <= i - model.spec.window if model.spec.window else j < 0)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(HEADS // KV_HEADS, 1)).reshape(len(ids), -1)


@pytest.mark.parametrize("length", [1, 17, 255, 256, 257, 530])
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"window": 40}, {"window": 300}, {"softcap": 2.0}], ids=str)
def test_attention_agrees_with_float64(length: int, options: dict[str, float]) -> None:
    model = AttentionOnly(random_qkv(), spec(**options))  # type: ignore[arg-type]
    ids = np.random.default_rng(length).integers(0, 600, length).tolist()
    pages = np.random.default_rng(0).permutation(40).tolist()
    last = min(length, 20)
    ours = runner(model).forward(make_batch([Piece(ids, 0, pages, logits=last)], runner(model).kv.spec))
    assert torch.allclose(ours.double(), dense(model, ids)[-last:], rtol=1e-5, atol=1e-5)


def test_head_norms_agree_with_float64() -> None:
    norms = (torch.rand(DIM) + 0.5, torch.rand(DIM) + 0.5)
    model = AttentionOnly(random_qkv(), spec(norm_eps=1e-6), norms)
    ids = list(range(50))
    ours = runner(model).forward(make_batch([Piece(ids, 0, [3, 1, 2, 0], logits=50)], runner(model).kv.spec))
    assert torch.allclose(ours.double(), dense(model, ids), rtol=1e-5, atol=1e-5)


def test_linear_norm_and_gate_agree_with_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 96, generator=generator), torch.randn(64, 96, generator=generator)
    bias, residual = torch.randn(64, generator=generator), torch.randn(5, 64, generator=generator)
    backend, ops = Reference(), runner(AttentionOnly(random_qkv(), spec()))
    packed = backend.pack([Weight("f32", (24, 96), w[:24]), Weight("bf16", (40, 96), w[24:].bfloat16())])
    exact = torch.cat([w[:24], w[24:].bfloat16().float()]).double()
    assert packed.shape == (64, 96)
    assert torch.allclose(
        ops.linear(x, packed, bias, residual.clone()).double(), x.double() @ exact.T + bias + residual, atol=1e-4
    )
    up = torch.randn(64, 96, generator=generator)
    gated = backend.pack([Weight("f32", (64, 96), w * 30), Weight("f32", (64, 96), up)], gated=True)
    gate = x.double() @ (w * 30).double().T  # some so negative that exp overflows float32
    assert gate.min() < -90
    expected = gate * torch.sigmoid(gate) * (x.double() @ up.double().T)
    assert torch.allclose(ops.gated_linear(x, gated).double(), expected, rtol=1e-4, atol=1e-4)
    norm = torch.rand(96, generator=generator)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    assert torch.allclose(ops.rms_norm(x, backend.vector(norm), 1e-5).double(), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_packed_blocks_are_their_values(kind: str) -> None:
    blocks = quantise(kind, torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    packed = Reference().pack([Weight(kind, (8, 64), blocks)])  # type: ignore[arg-type]
    ops = runner(AttentionOnly(random_qkv(), spec()))
    assert torch.allclose(ops.linear(torch.eye(64), packed).T, dequantise(kind, blocks), atol=0)
    rows = ops.embed(make_batch([Piece([3, 0, 7], 0, [0])], ops.kv.spec), packed)
    assert torch.equal(rows, dequantise(kind, blocks)[[3, 0, 7]])


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_b1_bits_do_not_depend_on_pages_chunks_neighbours_or_threads(window: int, dtype: str) -> None:
    """B1, B2: one sequence of 300 tokens, alone in one go, against every other way to get there."""
    model, ids = AttentionOnly(random_qkv(), spec(window=window)), list(range(300))

    def alone(page_size: int) -> Tensor:
        r = runner(model, pages=320, page_size=page_size, dtype=dtype)
        return r.forward(make_batch([Piece(ids, 0, list(range(320)), logits=300)], r.kv.spec))

    expected = alone(16)
    assert not expected.isnan().any()
    for page_size in (1, 4, 64):
        assert torch.equal(alone(page_size), expected)
    r = runner(model, pages=64, dtype=dtype)
    mine, other = list(range(63, 40, -1)), list(range(40))
    got, at, neighbour = [], 0, 0
    for chunk in (1, 15, 100, 16, 40, 1, 1, 126):
        pieces = [Piece([599 - neighbour], neighbour, other), Piece(ids[at : at + chunk], at, mine, logits=chunk)]
        got.append(r.forward(make_batch(pieces, r.kv.spec))[1:].clone())
        at, neighbour = at + chunk, neighbour + 1
    assert torch.equal(torch.cat(got), expected)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(alone(16), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_b1_a_row_of_a_matrix_product_does_not_depend_on_the_others(threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(33, 576, generator=generator), torch.randn(300, 576, generator=generator)
    backend, ops = Reference(threads), runner(AttentionOnly(random_qkv(), spec()))
    plain, gated = (
        backend.pack([Weight("f32", (300, 576), w)]),
        backend.pack([Weight("f32", (150, 576), h) for h in w.chunk(2)], gated=True),
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for compute in (
            lambda t: ops.linear(t, plain),
            lambda t: ops.gated_linear(t, gated),
            lambda t: ops.rms_norm(t, w[0], 1e-5),
        ):
            alone = torch.cat([compute(row[None]) for row in x])
            for part in (33, 16, 7, 2):
                assert torch.equal(torch.cat([compute(t) for t in x.split(part)]), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_poisoned_token_reaches_only_those_that_see_it(poison: float) -> None:
    """Of its own row those after it, within the window; a neighbour nowhere."""
    qkv = random_qkv()
    clean = AttentionOnly(qkv, spec(window=5))
    dirty = AttentionOnly(qkv.index_fill(0, torch.tensor([599]), poison), spec(window=5))
    pieces = [Piece([*range(20), 599, *range(20, 40)], 0, [3, 1, 0], logits=41), Piece(list(range(9)), 0, [7], logits=9)]
    right, got = (r.forward(make_batch(pieces, r.kv.spec)) for r in (runner(clean), runner(dirty)))
    reached = (right != got).any(1).nonzero().flatten().tolist()
    assert reached == [20, 21, 22, 23, 24]


def test_rows_of_one_batch_read_what_the_batch_writes() -> None:
    """R5: the second row's prefix is written by the first row, in the same forward."""
    model, ids = AttentionOnly(random_qkv(), spec()), list(range(40))
    r = runner(model)
    whole = r.forward(make_batch([Piece(ids, 0, [0, 1, 2], logits=8)], r.kv.spec)).clone()
    r = runner(model)
    shared = [Piece(ids[:32], 0, [0, 1]), Piece(ids[32:], 32, [0, 1, 7], logits=8)]
    assert torch.equal(r.forward(make_batch(shared, r.kv.spec))[1:], whole)


def test_r4_a_recomputed_token_goes_to_the_scratch_page_and_reads_the_kept_one() -> None:
    model, ids = AttentionOnly(random_qkv(), spec()), list(range(32))
    r = runner(model)
    whole = r.forward(make_batch([Piece(ids, 0, [4, 9])], r.kv.spec)).clone()
    kept = r.kv.k.clone()
    again = r.forward(make_batch([Piece(ids[31:], 31, [4, 9], to_scratch=True)], r.kv.spec))
    assert torch.equal(again, whole)
    assert torch.equal(r.kv.k[:, :40].nan_to_num(7), kept[:, :40].nan_to_num(7))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_copies_come_before_the_forward_and_move_all_of_a_page(dtype: str) -> None:
    """R2: the copy of a partial page, continued, gives the bits of the original."""
    model, ids = AttentionOnly(random_qkv(), spec()), list(range(30))
    r = runner(model, dtype=dtype)
    whole = r.forward(make_batch([Piece(ids, 0, [0, 1], logits=6)], r.kv.spec)).clone()
    r = runner(model, dtype=dtype)
    r.forward(make_batch([Piece(ids[:24], 0, [0, 1])], r.kv.spec))
    got = r.forward(make_batch([Piece(ids[24:], 24, [0, 5], logits=6)], r.kv.spec, copies=[(1, 5), (0, 8)]))
    assert torch.equal(got, whole)
    k, v = r.kv.read(0, [8, 0])
    assert torch.equal(k[0], k[1]) and torch.equal(v[0], v[1]) and k.dtype == torch.float32


def test_misuse_is_a_kernel_error() -> None:
    backend, model = Reference(), AttentionOnly(random_qkv(), spec())
    f32 = Weight("f32", (4, 32), torch.zeros(4, 32))
    with pytest.raises(KernelError, match=r"\[16, 32\] columns"):
        backend.pack([f32, Weight("f32", (4, 16), torch.zeros(4, 16))])
    with pytest.raises(KernelError, match=r"\[gate, up\]"):
        backend.pack([f32], gated=True)
    with pytest.raises(KernelError, match="its data is"):
        backend.pack([Weight("f32", (5, 32), torch.zeros(4, 32))])
    with pytest.raises(KernelError, match="kv_dtype is 'f16'"):
        backend.bind(model, KVSpec(1, 1, 4, 4, 4, "f16"), Limits(1, 1, 1, 1))  # type: ignore[arg-type]
    ops = runner(model)
    with pytest.raises(KernelError, match="gated=True"):
        ops.gated_linear(torch.zeros(1, 32), backend.pack([f32]))
    with pytest.raises(KernelError, match="another backend"):
        ops.linear(torch.zeros(1, 32), StrangePacked())
    with pytest.raises(KernelError, match="kv_indices spans"):
        ops.forward(make_batch([Piece([1], 0, [99])], ops.kv.spec))


class StrangePacked:
    shape = (4, 32)


_: Packed = StrangePacked()
