"""The recorded forward against the reference backend, and against itself by == (B1): batch, chunks, pages, threads, variants."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phloem.runtime.backends.base import AttentionSpec, BatchLike, KVSpec, Limits, Ops, Packed, Weight
from phloem.runtime.backends.blocks import quantise
from phloem.runtime.backends.cpu import Cpu, CpuMatrix, CpuRunner
from phloem.runtime.backends.cpu_program import Recorder, layout
from phloem.runtime.backends.reference import Reference
from phloem.runtime.errors import ConfigError, EngineClosedError, KernelError
from phloem.runtime.layers.rope import RopeConfig, rope_table
from phloem.runtime.native import supported_variants
from tests.paged_runs import Piece, make_batch

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCABULARY = 3, 96, 4, 2, 32, 160, 131
QKV = (HEADS + 2 * KV_HEADS) * DIM
ROPE = rope_table(RopeConfig(), DIM, 512)
SPEC = KVSpec(LAYERS, KV_HEADS, DIM, 48, 4, "f32")
LIMITS = Limits(max_tokens=96, max_rows=16, max_logits=8, max_pages=256)
KINDS = ("f32", "bf16", "f16", "q8_0", "q4_0", "q4_1")


def weight(kind: str, rows: int, columns: int, seed: int) -> Weight:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * columns**-0.5
    if kind in ("f32", "bf16", "f16"):
        dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[kind]
        return Weight(kind, (rows, columns), values.to(dtype))  # type: ignore[arg-type]
    return Weight(kind, (rows, columns), quantise(kind, values))  # type: ignore[arg-type]


@dataclass
class Tiny:
    """Embedding, attention with biases and per-head norms, gated MLP, residuals, tied head: every op there is."""

    backend: Cpu | Reference
    kind: str = "f32"
    mixed: bool = False  # qkv of three kinds at once
    shared: bool = False
    num_layers: int = LAYERS
    width: int = VOCABULARY

    def __post_init__(self) -> None:
        pack = self.backend.share if self.shared and isinstance(self.backend, Cpu) else self.backend.pack
        kinds = ("q8_0", "f32", "bf16") if self.mixed else (self.kind,) * 3
        self.table = pack([weight(self.kind, VOCABULARY, HIDDEN, 1)])
        self.layers = []
        for i in range(LAYERS):
            sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
            self.layers.append(
                (
                    pack([weight(kind, size, HIDDEN, 10 * i + j) for j, (kind, size) in enumerate(zip(kinds, sizes))]),
                    pack([weight(self.kind, HIDDEN, HEADS * DIM, 10 * i + 4)]),
                    pack(
                        [weight(self.kind, INNER, HIDDEN, 10 * i + 5), weight(self.kind, INNER, HIDDEN, 10 * i + 6)], gated=True
                    ),
                    pack([weight(self.kind, HIDDEN, INNER, 10 * i + 7)]),
                )
            )
        self.norm = self.backend.vector(torch.linspace(0.5, 1.5, HIDDEN))
        self.bias = self.backend.vector(torch.linspace(-0.3, 0.3, QKV))
        self.head_norm = self.backend.vector(torch.linspace(0.8, 1.2, DIM))
        self.spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, ROPE, norm_eps=1e-6)

    def forward(self, ops: Ops, batch: BatchLike) -> Tensor:
        x = ops.embed(batch, self.table)
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            h = ops.linear(ops.rms_norm(x, self.norm, 1e-5), qkv, self.bias)
            x = ops.linear(ops.attention(batch, h, i, self.spec, self.head_norm, self.head_norm), out, residual=x)
            x = ops.linear(ops.gated_linear(ops.rms_norm(x, self.norm, 1e-5), gate_up), down, residual=x)
        return ops.linear(ops.rms_norm(ops.logit_rows(batch, x), self.norm, 1e-5), self.table)


IDS = np.random.default_rng(0).integers(0, VOCABULARY, (6, 80)).tolist()


@pytest.fixture
def cpu() -> Iterator[Cpu]:
    backend = Cpu(2)
    yield backend
    backend.close()


def mixed_steps(runner: Any) -> list[Tensor]:
    """Prefill of three sequences, decodes beside a chunk, a copied page: each step's logits."""
    spec = runner.kv.spec
    a, b, c, d = list(range(12)), list(range(12, 24)), list(range(24, 36)), list(range(36, 48))
    steps = [
        [Piece(IDS[0][:30], 0, a, logits=30), Piece(IDS[1][:7], 0, b), Piece(IDS[2][:1], 0, c)],
        [Piece(IDS[0][30:31], 30, a), Piece(IDS[1][7:27], 7, b, logits=3), Piece(IDS[2][1:3], 1, c, logits=0)],
        [Piece(IDS[0][31:32], 31, a), Piece(IDS[0][30:34], 30, [*a[:7], d[0], d[1]], logits=4)],
    ]
    return [
        runner.forward(make_batch(pieces, spec, copies=[(a[7], d[0])] if i == 2 else ())).clone()
        for i, pieces in enumerate(steps)
    ]


@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_logits_are_the_references(cpu: Cpu, kind: str, kv: str) -> None:
    spec = replace(SPEC, dtype=kv)  # type: ignore[arg-type]
    ours = mixed_steps(cpu.bind(Tiny(cpu, kind), spec, LIMITS))
    reference = Reference()
    theirs = mixed_steps(reference.bind(Tiny(reference, kind), spec, LIMITS))
    for a, b in zip(ours, theirs):
        assert a.shape == b.shape
        # bf16 pages: a rounding of K or V that falls the other way moves a logit by about 1e-3
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 if kv == "f32" else 2e-2)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1"])
def test_quantised_logits_are_near_the_references(cpu: Cpu, kind: str) -> None:
    """Activations are int8 here and exact there: some 1 % a product, averaged, through 12 layers. C++ tests compare exactly."""
    ours = torch.cat(mixed_steps(cpu.bind(Tiny(cpu, kind), SPEC, LIMITS)))
    reference = Reference()
    theirs = torch.cat(mixed_steps(reference.bind(Tiny(reference, kind), SPEC, LIMITS)))
    error = float((ours - theirs).norm() / theirs.norm())
    assert error < 0.04, error


def test_a_matrix_may_have_parts_of_several_kinds(cpu: Cpu) -> None:
    reference = Reference()
    ours = torch.cat(mixed_steps(cpu.bind(Tiny(cpu, mixed=True), SPEC, LIMITS)))
    theirs = torch.cat(mixed_steps(reference.bind(Tiny(reference, mixed=True), SPEC, LIMITS)))
    assert (ours - theirs).norm() < 0.04 * theirs.norm()


def alone(runner: CpuRunner, ids: list[int], chunk: int) -> Tensor:
    """All logits of one sequence, `chunk` tokens a step, on pages in descending order."""
    spec = runner.kv.spec
    pages = list(range(spec.num_pages))[::-1]
    out = []
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        out.append(runner.forward(make_batch([Piece(part, start, pages, logits=len(part))], spec)).clone())
    return torch.cat(out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", supported_variants())
def test_b1_a_tokens_logits_are_its_own(variant: str, kind: str) -> None:
    """By ==: chunks, page sizes, threads, neighbours."""
    expected: Tensor | None = None
    for threads in (1, 2, 3):
        backend = Cpu(threads, variant)
        model = Tiny(backend, kind)
        for page_size, pages in ((4, 48), (1, 80), (16, 6), (64, 3)):
            runner = backend.bind(model, replace(SPEC, page_size=page_size, num_pages=pages), LIMITS)
            if threads > 1 and page_size != 4:
                continue
            for chunk in {1: (48, 7), 2: (48, 1), 3: (48,)}[threads]:
                got = alone(runner, IDS[0][:48], chunk)
                expected = got if expected is None else expected
                assert torch.equal(got, expected), (threads, page_size, chunk)
        runner = backend.bind(model, SPEC, LIMITS)
        tables = [list(range(8 * i, 8 * i + 8)) for i in range(6)]
        beside = make_batch(
            [Piece(IDS[(i + 1) % 6][: 3 + i], 0, tables[i]) for i in range(5)] + [Piece(IDS[0][:20], 0, tables[5])], SPEC
        )
        assert expected is not None
        assert torch.equal(runner.forward(beside)[5], expected[19])
        backend.close()


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_shared_weights_have_the_bits_of_packed_ones_and_follow_their_owner(cpu: Cpu, kind: str) -> None:
    packed, shared = (torch.cat(mixed_steps(cpu.bind(Tiny(cpu, kind, shared=s), SPEC, LIMITS))) for s in (False, True))
    assert torch.equal(packed, shared)
    mine = weight(kind, VOCABULARY, HIDDEN, 1)
    model = Tiny(cpu, kind)
    model.table = cpu.share([mine])
    runner = cpu.bind(model, SPEC, LIMITS)
    batch = make_batch([Piece(IDS[0][:5], 0, [0, 1])], SPEC)
    before = runner.forward(batch).clone()
    mine.data.mul_(2)
    assert not torch.equal(runner.forward(batch), before)
    mine.data.div_(2)
    assert torch.equal(runner.forward(batch), before)


def test_more_logit_rows_than_fit_are_computed_in_parts(cpu: Cpu) -> None:
    model = Tiny(cpu)
    wide = cpu.bind(model, SPEC, replace(LIMITS, max_logits=96))
    narrow = cpu.bind(model, SPEC, replace(LIMITS, max_logits=3))
    batch = make_batch([Piece(IDS[0][:64], 0, list(range(16)), logits=64)], SPEC)
    assert torch.equal(narrow.forward(batch), wide.forward(batch))


def test_no_logit_rows_and_no_tokens_are_fine(cpu: Cpu) -> None:
    runner = cpu.bind(Tiny(cpu), SPEC, LIMITS)
    assert runner.forward(make_batch([Piece(IDS[0][:6], 0, [3, 1], logits=0)], SPEC)).shape == (0, VOCABULARY)
    assert runner.forward(make_batch([], SPEC, copies=[(3, 7), (1, 9)])).shape == (0, VOCABULARY)
    for layer in range(LAYERS):
        for plane in runner.kv.read(layer, [3, 1, 7, 9]):
            assert torch.equal(plane[0], plane[2])
            assert torch.equal(plane[1, :2], plane[3, :2])
            assert plane[0].abs().sum() > 0


def test_keys_and_values_are_the_references(cpu: Cpu) -> None:
    reference = Reference()
    ours, theirs = cpu.bind(Tiny(cpu), SPEC, LIMITS), reference.bind(Tiny(reference), SPEC, LIMITS)
    batch = make_batch([Piece(IDS[0][:8], 0, [5, 2])], SPEC)
    ours.forward(batch)
    theirs.forward(batch)
    for layer in range(LAYERS):
        for a, b in zip(ours.kv.read(layer, [5, 2]), theirs.kv.read(layer, [5, 2])):
            assert a.shape == (2, 4, KV_HEADS, DIM)
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    with pytest.raises(KernelError, match="no such page"):
        ours.kv.read(LAYERS, [0])


def test_scratch_slots_keep_nothing(cpu: Cpu) -> None:
    runner = cpu.bind(Tiny(cpu), SPEC, LIMITS)
    first = runner.forward(make_batch([Piece(IDS[0][:4], 0, [5])], SPEC)).clone()
    again = runner.forward(make_batch([Piece(IDS[0][3:4], 3, [5], to_scratch=True)], SPEC))
    assert torch.equal(first, again)


def test_the_arena_does_not_grow_with_layers() -> None:
    backend = Cpu(1)
    recorded = []
    for layers in (2, 3):
        model = Tiny(backend)
        model.layers = model.layers[:layers]
        recorder = Recorder(SPEC, lambda layer, value: 64)
        result = model.forward(recorder, object())
        recorded.append(layout(recorder.recorded, result, LIMITS)[1])  # type: ignore[arg-type]
    assert recorded[0] == recorded[1]
    backend.close()


def test_live_buffers_never_overlap() -> None:
    """A model that keeps early results for late: each is still what it was."""
    backend = Cpu(2)
    matrices = [backend.pack([weight("f32", HIDDEN, HIDDEN, i)]) for i in range(5)]
    table, head = backend.pack([weight("f32", VOCABULARY, HIDDEN, 9)]), backend.pack([weight("f32", VOCABULARY, HIDDEN, 8)])

    class Skips:
        num_layers, width = LAYERS, VOCABULARY

        def __init__(self, matrices: list[Packed], table: Packed, head: Packed) -> None:
            self.matrices, self.table, self.head = matrices, table, head

        def forward(self, ops: Ops, batch: BatchLike) -> Tensor:
            kept = [ops.embed(batch, self.table)]
            for i, matrix in enumerate(self.matrices):
                kept.append(ops.linear(kept[-1], matrix, residual=kept[i // 2]))
            x = kept[-1]
            for old in kept[:-1]:
                x = ops.linear(x, self.matrices[0], residual=old)
            return ops.linear(ops.logit_rows(batch, x), self.head)

    reference = Reference()
    theirs = Skips([reference.pack([weight("f32", HIDDEN, HIDDEN, i)]) for i in range(5)], reference.pack([weight("f32", VOCABULARY, HIDDEN, 9)]),
                   reference.pack([weight("f32", VOCABULARY, HIDDEN, 8)]))  # fmt: skip
    batch = make_batch([Piece(IDS[0][:9], 0, [0, 1, 2], logits=9)], SPEC)
    ours = backend.bind(Skips(matrices, table, head), SPEC, LIMITS).forward(batch)
    torch.testing.assert_close(ours, reference.bind(theirs, SPEC, LIMITS).forward(batch), rtol=1e-4, atol=1e-4)
    backend.close()


Change = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("field", "change", "says"),
    [
        ("token_ids", lambda x: x + VOCABULARY, r"token_ids\[0\].*table holds 0 to 130"),
        ("token_ids", lambda x: x.astype(np.int64), r"token_ids is int64\(5,\); expected int32\(5,\)"),
        ("positions", lambda x: x[:-1], "positions is"),
        ("positions", lambda x: x + 600, r"rotary table holds 0 to 511"),
        ("kv_slots", lambda x: x + 10_000, r"kv_slots\[0\]"),
        ("kv_slots", lambda x: x - 10_000, r"kv_slots\[0\]"),
        ("qo_indptr", lambda x: x * 0, "qo_indptr"),
        ("kv_indices", lambda x: x + 48, "kv_indices"),
        ("kv_last_page_len", lambda x: x + 4, "kv_last_page_len"),
        ("logit_rows", lambda x: x + 5, r"logit_rows\[0\]"),
        ("logit_rows", lambda x: x.astype(np.int64), "logit_rows is int64"),
        ("copies", lambda x: np.array([[0, 48]], np.int32), "copy 0 names page 48"),
        ("copies", lambda x: np.array([0, 1], np.int32), "copies is"),
    ],
)
def test_a_bad_batch_is_refused_before_anything_is_written(cpu: Cpu, field: str, change: Change, says: str) -> None:
    runner = cpu.bind(Tiny(cpu), SPEC, LIMITS)
    good = make_batch([Piece(IDS[0][:5], 0, [0, 1])], SPEC)
    with pytest.raises(KernelError, match=says):
        runner.forward(replace(good, **{field: change(getattr(good, field))}))
    assert all(not plane.any() for plane in runner.kv.read(0, [0, 1]))
    assert runner.forward(good).shape == (1, VOCABULARY)


def test_a_batch_beyond_the_limits_is_refused(cpu: Cpu) -> None:
    runner = cpu.bind(Tiny(cpu), SPEC, replace(LIMITS, max_tokens=4))
    with pytest.raises(KernelError, match=r"5 tokens.*limits of this runner are 4"):
        runner.forward(make_batch([Piece(IDS[0][:5], 0, [0, 1])], SPEC))


def test_matrices_that_cannot_be_are_refused(cpu: Cpu) -> None:
    square = weight("f32", 64, 64, 0)
    with pytest.raises(KernelError, match=r"columns; expected one width"):
        cpu.pack([square, weight("f32", 64, 32, 0)])
    with pytest.raises(KernelError, match="gate, up"):
        cpu.pack([square], gated=True)
    with pytest.raises(KernelError, match=r"expected torch.float32 \[32, 64\]"):
        cpu.pack([replace(square, shape=(32, 64))])
    with pytest.raises(KernelError, match="blocks of 32"):
        cpu.pack([Weight("q4_0", (2, 40), torch.zeros(2, 18, dtype=torch.uint8))])
    with pytest.raises(KernelError, match="1 to 8 parts"):
        cpu.pack([square] * 9)
    with pytest.raises(KernelError, match="can be shared"):
        cpu.share([weight("q8_0", 2, 32, 0)])


class Wrong:
    """A model that does `what` with its input."""

    num_layers, width = LAYERS, VOCABULARY

    def __init__(self, backend: Cpu, what: Callable[[Ops, BatchLike, Tensor, Packed], Tensor]) -> None:
        self.table, self.what = backend.pack([weight("f32", VOCABULARY, HIDDEN, 1)]), what

    def forward(self, ops: Ops, batch: BatchLike) -> Tensor:
        return self.what(ops, batch, ops.embed(batch, self.table), self.table)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (lambda ops, batch, x, table: ops.linear(x, table), "must end with its logits"),
        (lambda ops, batch, x, table: ops.logit_rows(batch, ops.logit_rows(batch, x)), "gathers its logit rows once"),
        (lambda ops, batch, x, table: ops.linear(ops.linear(x, table), table), "linear: x is 131 wide"),
        (lambda ops, batch, x, table: ops.rms_norm(x, torch.ones(3), 1e-5), r"shape \(3,\); expected \(96,\)"),
        (lambda ops, batch, x, table: ops.linear(torch.ones(2, 96), table), "only what ops returned"),
        (lambda ops, batch, x, table: ops.gated_linear(x, table), "gated=True"),
        (lambda ops, batch, x, table: ops.linear(x, object()), "another backend"),
        (lambda ops, batch, x, table: ops.attention(batch, x, 0, AttentionSpec(8, 2, DIM, 1.0, ROPE)), "qkv is 96 wide"),
        (lambda ops, batch, x, table: ops.attention(batch, x, 9, AttentionSpec(4, 2, DIM, 1.0, ROPE)), "layer 9"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_when_it_is_bound(cpu: Cpu, what: Any, says: str) -> None:
    with pytest.raises(KernelError, match=says):
        cpu.bind(Wrong(cpu, what), SPEC, LIMITS)


def test_after_close_every_call_says_so(cpu: Cpu) -> None:
    runner = cpu.bind(Tiny(cpu), SPEC, LIMITS)
    batch = make_batch([Piece(IDS[0][:5], 0, [0, 1])], SPEC)
    logits = runner.forward(batch)
    cpu.close()
    cpu.close()
    assert torch.isfinite(logits).all()  # the view outlives the backend
    for call in (lambda: runner.forward(batch), lambda: cpu.pack([weight("f32", 4, 4, 0)]), lambda: runner.kv.read(0, [0])):
        with pytest.raises(EngineClosedError, match="closed"):
            call()


def test_a_forked_child_is_told_and_does_not_hang(cpu: Cpu) -> None:
    runner = cpu.bind(Tiny(cpu), SPEC, LIMITS)
    batch = make_batch([Piece(IDS[0][:5], 0, [0, 1])], SPEC)
    expected = runner.forward(batch).clone()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            runner.forward(batch)
        except EngineClosedError:
            cpu.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(runner.forward(batch), expected)


def test_two_backends_live_side_by_side(cpu: Cpu) -> None:
    other = Cpu(2)
    runners = [backend.bind(Tiny(backend), SPEC, LIMITS) for backend in (cpu, other)]
    steps = [mixed_steps(runner) for runner in runners]
    assert all(torch.equal(a, b) for a, b in zip(*steps))
    other.close()
    assert torch.equal(mixed_steps(runners[0])[2], steps[0][2])


def test_memory_goes_with_its_last_reference(cpu: Cpu) -> None:
    matrix = cpu.pack([weight("f32", 1024, 1024, 0)])
    assert isinstance(matrix, CpuMatrix)
    assert matrix.bytes >= 4 << 20
    address = cpu.context.allocate(64)
    del matrix
    gc.collect()
    again = cpu.pack([weight("f32", 1024, 1024, 0)])  # finds the room that the first one left
    assert isinstance(again, CpuMatrix)
    assert abs(cpu.context.allocate(64) - address) < 64 << 20


def test_threads_and_variant_are_checked() -> None:
    with pytest.raises(ConfigError, match="threads is -1"):
        Cpu(-1)
    with pytest.raises(KernelError, match="variant is 'mmx'"):
        Cpu(1, "mmx")
    backend = Cpu(0)
    assert backend.threads == len(os.sched_getaffinity(0))
    backend.close()


def test_profile_adds_up_times_while_it_lasts(cpu: Cpu) -> None:
    runner = cpu.bind(Tiny(cpu), SPEC, LIMITS)
    batch = make_batch([Piece(IDS[0][:5], 0, [0, 1])], SPEC)
    with runner.program.profile() as times:
        runner.forward(batch)
    assert len(times) == len(runner.program.names)
    assert times.min() > 0
    before = times.copy()
    runner.forward(batch)
    assert (times == before).all()
