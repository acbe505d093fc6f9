"""The native sampler against the reference in numpy: the same kept sets, the same draws, logprobs within 1e-5."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from phloem.runtime.errors import GrammarDeadEnd, KernelError, NumericalError
from phloem.runtime.executor.native_sampler import RESULT, ROW, SCORE_ROW, NativeSampler
from phloem.runtime.executor.philox import uniform
from phloem.runtime.executor.sampler import ReferenceSampler, ScoreRow
from phloem.runtime.native import Context, supported_variants
from phloem.runtime.request import MAX_TOP_LOGPROBS, SamplingParams
from phloem.runtime.step import RowFailure, Sampled, SampleRow, SampleSpec

VOCABS = [(1, 1), (40, 48), (64, 64), (777, 800), (5000, 5000)]


@pytest.fixture(scope="module", params=supported_variants())
def context(request: pytest.FixtureRequest) -> Iterator[Context]:
    made = Context(2, request.param)
    yield made
    made.close()


def samplers(context, vocab, width):
    return NativeSampler(context, vocab_size=vocab, width=width), ReferenceSampler(vocab_size=vocab, width=width)


def draw(sampler, logits, rows, masks=None):
    tensor = torch.from_numpy(np.ascontiguousarray(logits, np.float32))
    return sampler.prepare(SampleSpec(rows, masks), [row.row for row in rows])(tensor)


def random_row(rng, i, vocab, masks):
    """Every option, each off half of the time."""

    def maybe(value, off):
        return value if rng.random() < 0.5 else off

    ids = rng.integers(0, vocab, 12)
    sampling = SamplingParams(
        temperature=float(rng.choice([0.0, 0.05, 0.7, 1.0, 2.5])),
        top_k=int(maybe(rng.integers(1, vocab + 2), 0)),
        top_p=float(maybe(rng.uniform(0.01, 0.999), 1.0)),
        min_p=float(maybe(rng.uniform(0.0, 0.3), 0.0)),
        repetition_penalty=float(maybe(rng.uniform(0.5, 2.0), 1.0)),
        frequency_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        presence_penalty=float(maybe(rng.uniform(-2, 2), 0.0)),
        logit_bias=maybe({int(t): float(rng.uniform(-5, 5)) for t in ids[:5]}, {}),
        allowed_token_ids=maybe(tuple({*ids.tolist(), *rng.integers(0, vocab, vocab // 2 + 1).tolist()}), None),
        logprobs=str(rng.choice(["model", "sampled", "both"])),
        top_logprobs=int(rng.integers(0, MAX_TOP_LOGPROBS + 1)),
    )
    history = rng.integers(0, vocab, int(rng.integers(0, 30))).tolist()
    return SampleRow(
        row=int(rng.integers(0, 8)), request_id=f"r{i}", slot=0, position=int(rng.integers(0, 1000)), seed=int(rng.integers(-(2**63), 2**63 - 1)),
        sample=int(rng.integers(0, 4)), sampling=sampling, history=history, num_prompt=len(history) // 2,
        mask=maybe(int(rng.integers(len(masks))), None), block=maybe(tuple(ids[:3].tolist()), ()),
    )  # fmt: skip


def close(a, b):
    if a.token_id != b.token_id or abs(a.logprob - b.logprob) > 1e-5 or (a.sampled is None) != (b.sampled is None):
        return False
    if a.sampled is not None and (
        abs(a.sampled - b.sampled) > 1e-5 or abs(a.logmass - b.logmass) > 2e-5 or a.support != b.support
    ):
        return False
    ids = [t for t, _ in a.top] == [t for t, _ in b.top]
    return ids and all(abs(x - y) <= 1e-5 * max(1.0, abs(y)) for (_, x), (_, y) in zip(a.top, b.top))


def test_the_packed_row_is_the_headers_struct():
    assert ROW.size == 160
    assert RESULT.itemsize == 184
    assert SCORE_ROW.size == 32


def test_M2_the_uniform_number_is_pythons(context):
    from ctypes import c_double, c_uint64

    function = context.library.phloem_uniform
    function.restype, function.argtypes = c_double, [c_uint64] * 3
    rng = np.random.default_rng(0)
    for seed, sample, position in rng.integers(0, 2**63, (200, 3)).tolist():
        assert function(seed, sample, position) == uniform(seed, sample, position)
    assert function(2**64 - 1, 0, 5) == uniform(-1, 0, 5)


@pytest.mark.parametrize(("vocab", "width"), VOCABS)
@pytest.mark.parametrize("shape", ["normal", "peaked", "ties", "flat"])
def test_M1_draws_and_logprobs_are_the_references(context, vocab, width, shape):
    rng = np.random.default_rng([vocab, len(shape)])
    native, reference = samplers(context, vocab, width)
    compared = border = 0
    for _ in range(6):
        logits = rng.normal(0, 2, (8, width)).astype(np.float32)
        if shape == "peaked":
            logits += np.where(rng.random(logits.shape) < 0.01, 12, 0).astype(np.float32)
        elif shape == "ties":
            logits = np.round(logits)
        elif shape == "flat":
            logits *= 1e-3
        masks = rng.integers(-(2**31), 2**31 - 1, (3, -(-width // 32)), dtype=np.int32)
        rows = [random_row(rng, i, vocab, masks) for i in range(24)]
        for row, a, b in zip(rows, draw(native, logits, rows, masks), draw(reference, logits, rows, masks), strict=True):
            assert type(a) is type(b), row
            compared += 1
            if isinstance(a, RowFailure):
                assert type(a.error) is type(b.error)
                continue
            if a.token != b.token or not close(a.logprob, b.logprob):
                border += 1  # a float32 sum fell on the other side of top_p's or the draw's border
                assert row.sampling.temperature > 0, row
    assert border <= compared // 50, f"{border} of {compared} differ"


@pytest.mark.case("C-SAMP-04")
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.60, 2), (0.51, 2), (0.74, 2), (0.49, 1), (0.05, 1), (0.76, 3), (1.0, 4), (1e-300, 1)]
)
def test_top_p_keeps_the_token_that_crosses_the_threshold(context, top_p, kept):
    native, _ = samplers(context, 4, 4)
    logits = np.log(np.array([[0.15, 0.50, 0.10, 0.25]]))
    s = SamplingParams(top_p=top_p, logprobs="sampled", top_logprobs=20)
    found = draw(native, logits, [SampleRow(0, "r", 0, 0, 0, 0, s, (), 0)])[0].logprob.top
    assert [t for t, _ in found] == [1, 3, 0, 2][:kept]
    shares = np.array([0.5, 0.25, 0.15, 0.1])[:kept]
    assert [math.exp(lp) for _, lp in found] == pytest.approx(shares / shares.sum(), abs=1e-6)


@pytest.mark.parametrize("vocab", [300, 49152])
def test_large_rows_keep_the_same_sets(context, vocab):
    """top_k and top_p over many like ids take other paths than small ones: compared by the whole kept set, through its mass."""
    rng = np.random.default_rng(vocab)
    native, reference = samplers(context, vocab, vocab)
    logits = rng.normal(0, 1, (2, vocab)).astype(np.float32)
    logits[1, rng.integers(0, vocab, 30)] += 9
    options = [{"top_p": 0.95}, {"top_p": 0.3}, {"top_p": 0.999999}, {"top_k": 40}, {"top_k": vocab // 10, "top_p": 0.9}, {"top_k": vocab - 1},
               {"min_p": 0.02}, {"top_p": 0.9, "min_p": 0.05, "temperature": 0.7}, {}]  # fmt: skip
    rows = [
        SampleRow(at, f"{at}{i}", 0, p, 3, i, SamplingParams(logprobs="sampled", top_logprobs=20, **o), (), 0)
        for at in range(2) for i, o in enumerate(options) for p in range(3)
    ]  # fmt: skip
    # The logprob of a drawn token is log(weight / mass of the kept set): one id too many, of mass above 1e-6, would show.
    different = [
        row.sampling
        for row, a, b in zip(rows, draw(native, logits, rows), draw(reference, logits, rows))
        if a.token != b.token or not close(a.logprob, b.logprob)
    ]
    assert len(different) <= 1, different


def test_frequencies_follow_the_distribution(context):
    probabilities = np.array([0.4, 0.3, 0.2, 0.1])
    native, _ = samplers(context, 500, 512)
    logits = np.full((1, 512), -50.0)
    logits[0, [3, 100, 101, 499]] = np.log(probabilities)
    rows = [SampleRow(0, f"r{p}", 0, p, 1, 0, SamplingParams(top_p=0.9), (), 0) for p in range(20_000)]
    found = Counter(s.token for s in draw(native, logits, rows))
    assert set(found) == {3, 100, 101}
    for token, p in zip([3, 100, 101], probabilities / 0.9):
        assert abs(found[token] - 20_000 * p) < 4.5 * math.sqrt(20_000 * p * (1 - p))


def test_B1_a_row_is_the_same_bits_in_any_batch_and_with_any_threads(context):
    rng = np.random.default_rng(5)
    vocab, width = 3000, 3008
    masks = rng.integers(-(2**31), 2**31 - 1, (3, width // 32), dtype=np.int32)
    logits = rng.normal(0, 2, (8, width)).astype(np.float32)
    rows = [random_row(rng, i, vocab, masks) for i in range(40)]

    def key(outcome):
        return outcome if isinstance(outcome, Sampled) else str(outcome.error)

    together = [key(o) for o in draw(samplers(context, vocab, width)[0], logits, rows, masks)]
    for threads in (1, 3):
        with_threads = Context(threads, context.variant)
        native, _ = samplers(with_threads, vocab, width)
        assert [key(o) for o in draw(native, logits, rows, masks)] == together
        assert [key(draw(native, logits, [row], masks)[0]) for row in rows] == together
        assert [key(o) for o in draw(native, logits, rows[::-1], masks)][::-1] == together
        with_threads.close()


def test_M5_argmax_has_the_lowest_id_on_ties(context):
    native, _ = samplers(context, 300, 320)
    for ids in ([7, 9, 200], [63, 64], [299], [0, 299]):
        logits = np.zeros((1, 320))
        logits[0, ids] = 5
        logits[0, 310] = 99
        for s in (SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=0, logit_bias={298: 1.0})):
            assert draw(native, logits, [SampleRow(0, "r", 0, 0, 0, 0, s, (), 0)])[0].token == ids[0]


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6])
def test_a_tiny_temperature_does_not_overflow(context, temperature):
    native, _ = samplers(context, 300, 300)
    logits = np.random.default_rng(1).normal(0, 1000, (1, 300))
    for extra in ({}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1}):
        s = SamplingParams(temperature=temperature, logprobs="sampled", top_logprobs=20, **extra)
        found = draw(native, logits, [SampleRow(0, "r", 0, 0, 0, 0, s, (), 0)])[0]
        assert found.token == int(np.argmax(logits))
        assert found.logprob.top == ((found.token, 0.0),)


def test_failures_are_their_rows_alone_and_named(context):
    native, reference = samplers(context, 100, 128)
    logits = np.random.default_rng(2).normal(0, 1, (4, 128)).astype(np.float32)
    logits[1, 70], logits[2, 127], logits[3, 120] = np.nan, np.inf, -np.inf
    masks = np.zeros((1, 4), np.int32)
    for temperature in (0.0, 1.0):
        s = SamplingParams(temperature=temperature, logprobs="both", top_logprobs=3)
        rows = [SampleRow(i, f"r{i}", 0, 0, 1, 0, s, (), 0) for i in range(4)] + [
            SampleRow(0, "dead", 0, 0, 1, 0, s, (), 0, mask=0)
        ]
        found = draw(native, logits, rows, masks)
        assert [type(o.error) if isinstance(o, RowFailure) else o.token for o in found] == [
            found[0].token, NumericalError, NumericalError, found[3].token, GrammarDeadEnd,
        ]  # fmt: skip
        expected = draw(reference, logits, rows, masks)
        assert [o.token for o in (found[0], found[3])] == [o.token for o in (expected[0], expected[3])]
        assert [str(o.error) for o in found if isinstance(o, RowFailure)] == [
            str(o.error) for o in expected if isinstance(o, RowFailure)
        ]


def test_M1_a_grammar_at_its_end_outranks_min_tokens(context):
    native, _ = samplers(context, 40, 40)
    logits = np.random.default_rng(2).normal(0, 1, (1, 40))
    for ids, block, token in (([7], (7,), 7), ([7, 8], (7,), 8)):
        masks = np.zeros((1, 2), np.int32)
        masks[0, 0] = sum(1 << t for t in ids)
        for temperature in (0.0, 1.0):
            s = SamplingParams(temperature=temperature, repetition_penalty=1.5)
            row = SampleRow(0, "r", 0, 0, 0, 0, s, (7, 8), 2, mask=0, block=block)
            assert draw(native, logits, [row], masks)[0].token == token


@pytest.mark.case("C-SAMP-05", "C-SAMP-06")
def test_unknown_ids_index_nothing(context):
    native, _ = samplers(context, 40, 48)
    unknown = (-1, -5, 40, 47, 48, 10**6, 2**31 - 1, 2**40, -(2**40))
    logits = np.random.default_rng(2).normal(0, 1, (1, 48))
    odd = SamplingParams(
        logit_bias=dict.fromkeys([u for u in unknown if u >= 0], 9.0),
        presence_penalty=2.0,
        allowed_token_ids=(*range(40), 10**9),
    )
    for p in range(20):
        plain = draw(native, logits, [SampleRow(0, "r", 0, p, 0, 0, SamplingParams(), (), 0)])
        assert draw(native, logits, [SampleRow(0, "r", 0, p, 0, 0, odd, unknown, 0, block=unknown)]) == plain


def test_scores_are_the_references(context):
    for vocab, width in VOCABS:
        native, reference = samplers(context, vocab, width)
        logits = torch.from_numpy(np.random.default_rng(width).normal(0, 3, (5, width)).astype(np.float32))
        if vocab > 30:
            logits[3, 30] = float("nan")
        rows = [ScoreRow(i % 5, i * 7 % width, i % 21) for i in range(30)]
        for a, b in zip(native.score(logits, rows), reference.score(logits, rows), strict=True):
            assert (a is None) == (b is None)
            assert a is None or close(a, b)
        assert native.score(logits, []) == []


def test_logits_rows_may_have_a_stride(context):
    native, _ = samplers(context, 40, 40)
    wide = torch.from_numpy(np.random.default_rng(2).normal(0, 1, (3, 64)).astype(np.float32))
    rows = [SampleRow(i, f"r{i}", 0, 0, 0, 0, SamplingParams(), (), 0) for i in range(3)]
    prepared = native.prepare(SampleSpec(rows), [0, 1, 2])
    assert prepared(wide[:, :40]) == prepared(wide[:, :40].contiguous())


def test_a_logits_row_that_is_not_there_is_refused(context):
    native, _ = samplers(context, 40, 40)
    with pytest.raises(KernelError, match="logits row 1 of 1"):
        native.prepare(SampleSpec([SampleRow(0, "r", 0, 0, 0, 0, SamplingParams(), (), 0)]), [1])(torch.zeros(1, 40))
