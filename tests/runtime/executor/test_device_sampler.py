"""DeviceSampler on a fake device against ReferenceSampler: the same draws, row by row and whatever the batch (M1-M5, M2)."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from phloem.runtime.backends.cuda.lanes import Device
from phloem.runtime.backends.cuda.mask import unpack_bits
from phloem.runtime.executor import device_draw as dd
from phloem.runtime.executor.device_sampler import DeviceSampler, uniforms
from phloem.runtime.executor.philox import uniform
from phloem.runtime.executor.sampler import ReferenceSampler, ScoreRow
from phloem.runtime.request import SamplingParams, TokenLogprob
from phloem.runtime.step import NO_SLOT, RowFailure, Sampled, SampleRow, SampleSpec, Under
from tests.fake_device import FakeDevice

VOCAB, WIDTH = 90, 96


def run(
    spec: SampleSpec, logits: torch.Tensor, rows: list[int], seed: int = 0, device: Device | None = None
) -> list[Sampled | RowFailure]:
    device = device or FakeDevice(seed, eagerness=0.4)
    logits = logits.to(device.torch_device)
    sampler, stream, copies = (
        DeviceSampler(device, vocab_size=VOCAB, width=WIDTH),
        device.stream("compute"),
        device.stream("copies"),
    )
    draw = sampler.prepare(spec, rows)
    device.run(stream, draw.bundle.upload)
    device.run(stream, lambda: draw.compute(logits))
    device.wait(copies, device.record(stream))
    device.run(copies, draw.fetch)
    device.record(copies).wait()
    return draw.outcomes()


def random_spec(rng: random.Random, n: int) -> tuple[SampleSpec, torch.Tensor, list[int]]:
    logits = torch.from_numpy(np.random.default_rng(rng.getrandbits(32)).normal(0, 3, (n + 2, WIDTH)).astype(np.float32))
    logits[:, 5] = logits[:, 7]  # ties
    masks = np.random.default_rng(rng.getrandbits(32)).integers(-(2**31), 2**31, (n, 3), dtype=np.int32)
    rows = []
    for i in range(n):
        logprobs = rng.choice([None, "model", "sampled", "both"])
        params: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.0, 0.5, 1.0, 1.7, 1e-30]),
            "top_k": rng.choice([0, 0, 1, 4, 200]),
            "top_p": rng.choice([1.0, 1.0, 0.9, 0.2]),
            "min_p": rng.choice([0.0, 0.0, 0.1]),
            "repetition_penalty": rng.choice([1.0, 1.3]),
            "frequency_penalty": rng.choice([0.0, 0.5]),
            "presence_penalty": rng.choice([0.0, -0.7]),
            "logit_bias": rng.choice([{}, {3: 5.0, 5: -100.0, 7: 2.0}]),
            "allowed_token_ids": rng.choice([None, None, [5, 7, 11, 89]]),
            "logprobs": logprobs,
            "top_logprobs": rng.choice([0, 3]) if logprobs else 0,
        }
        rows.append(
            SampleRow(
                row=0, request_id=f"r{i}", slot=NO_SLOT, position=rng.randrange(2000), seed=rng.getrandbits(63) - 2**62, sample=rng.randrange(4),
                sampling=SamplingParams(**params), history=[5, 9, 5, 7, 7, 95], num_prompt=2,
                mask=rng.choice([None, i]), block=rng.choice([(), (7, 2, 400)]),
            )
        )  # fmt: skip
    at = [rng.randrange(n + 2) for _ in range(n)]
    return SampleSpec(rows, masks), logits, at


def close(a: TokenLogprob | None, b: TokenLogprob | None) -> None:
    if a is None or b is None:
        assert a is b
        return
    assert a.token_id == b.token_id and a.support == b.support and [t for t, _ in a.top] == [t for t, _ in b.top]
    for x, y in (
        (a.logprob, b.logprob),
        (a.sampled, b.sampled),
        (a.logmass, b.logmass),
        *((x, y) for (_, x), (_, y) in zip(a.top, b.top)),
    ):
        assert (x is None and y is None) or math.isclose(x, y, rel_tol=1e-5, abs_tol=2e-6)  # type: ignore[arg-type]


def assert_draws_like_the_reference(seed: int, device: Device | None = None) -> None:
    rng = random.Random(seed)
    spec, logits, at = random_spec(rng, 24)
    logits[at[3], 8] = math.nan
    logits[at[9], 93] = -math.inf  # padding that a model masks itself is fine
    want = ReferenceSampler(vocab_size=VOCAB, width=WIDTH).prepare(spec, at)(logits)
    got = run(spec, logits, at, seed, device)
    for w, g in zip(want, got, strict=True):
        assert type(w) is type(g) and w.request_id == g.request_id
        if isinstance(w, Sampled) and isinstance(g, Sampled):
            assert w.token == g.token
            close(w.logprob, g.logprob)
        elif isinstance(w, RowFailure) and isinstance(g, RowFailure):
            assert str(w.error) == str(g.error)


@pytest.mark.parametrize("seed", range(12))
def test_the_draws_of_the_reference_sampler(seed: int) -> None:
    """M1, M2, M3, M4, M5, and how a row fails alone."""
    assert_draws_like_the_reference(seed)


def test_m2_a_draw_is_the_same_bits_in_any_batch() -> None:
    spec, logits, at = random_spec(random.Random(5), 20)
    together = run(spec, logits, at)
    for i in range(20):
        alone = SampleSpec([spec.rows[i]], spec.masks)
        assert run(alone, logits, [at[i]])[0] == together[i] or isinstance(together[i], RowFailure)
    order = list(range(20))[::-1]
    assert [
        r
        for r in run(SampleSpec([spec.rows[i] for i in order], spec.masks), logits, [at[i] for i in order])
        if isinstance(r, Sampled)
    ] == [r for r in together[::-1] if isinstance(r, Sampled)]


def test_uniforms_are_those_of_philox() -> None:
    triples = [(0, 0, 0), (2**63 - 1, 3, 7), (-5, 1, 2**40), (-(2**63), 65_000, 1)]
    assert uniforms(*zip(*triples)).tolist() == [uniform(*t) for t in triples]
    assert len(uniforms([], [], [])) == 0


def test_a_draw_falls_on_every_kept_token_as_often_as_its_weight_says() -> None:
    """And never on another: 4,000 draws of one row, chi-square against the exact shares."""
    logits = torch.zeros((1, WIDTH))
    logits[0, :4] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    row = SampleRow(0, "r", NO_SLOT, 0, 7, 0, SamplingParams(allowed_token_ids=[0, 1, 2, 3]), [1], 1)
    rows = [SampleRow(0, "r", NO_SLOT, p, 7, 0, row.sampling, [1], 1) for p in range(4000)]
    counts = np.bincount([r.token for r in run(SampleSpec(rows), logits, [0] * 4000) if isinstance(r, Sampled)], minlength=4)
    shares = np.exp([2.0, 1.0, 0.0, -1.0]) / np.exp([2.0, 1.0, 0.0, -1.0]).sum()
    assert len(counts) == 4 and ((counts - 4000 * shares) ** 2 / (4000 * shares)).sum() < 16.3  # p = 0.001 at 3 degrees


@pytest.mark.parametrize("seed", range(4))
def test_scores(seed: int) -> None:
    rng = random.Random(seed)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (6, WIDTH)).astype(np.float32))
    logits[4, 3] = math.inf
    reference, device = ReferenceSampler(vocab_size=VOCAB, width=WIDTH), FakeDevice(seed)
    sampler = DeviceSampler(device, vocab_size=VOCAB, width=WIDTH)
    legal = np.random.default_rng(seed).random(VOCAB) < 0.4
    unders = [
        None,
        Under(1.0),
        Under(0.0),
        Under(0.6, sampler.supports.of(legal)),
        Under(2.0, sampler.supports.of(np.arange(VOCAB) < 2)),
    ]
    rows = [ScoreRow(rng.randrange(6), rng.randrange(VOCAB), rng.choice([0, 4]), rng.choice(unders)) for _ in range(24)]
    stream = device.stream("compute")
    score = sampler.prepare_score(rows)
    device.run(stream, score.bundle.upload)
    device.run(stream, lambda: score.compute(logits))
    device.run(stream, score.fetch)
    device.synchronize()
    for want, got in zip(reference.score(logits, rows), score.outcomes(), strict=True):
        close(want, got)


def test_a_score_under_a_draw_s_support_gives_the_draw_s_sampled_logprob_bit_for_bit() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (1, WIDTH)).astype(np.float32))
    params = SamplingParams(temperature=0.7, top_p=0.8, logprobs="both")
    device = FakeDevice()
    sampler, stream = DeviceSampler(device, vocab_size=VOCAB, width=WIDTH), device.stream("compute")
    for position in range(8):
        (drawn,) = run(SampleSpec([SampleRow(0, "r", NO_SLOT, position, 3, 0, params, [1], 1)]), logits, [0])
        assert isinstance(drawn, Sampled) and drawn.logprob is not None
        score = sampler.prepare_score([ScoreRow(0, drawn.token, 0, Under(0.7, drawn.logprob.support))])
        device.run(stream, score.bundle.upload)
        device.run(stream, lambda score=score: score.compute(logits))  # type: ignore[misc]
        device.run(stream, score.fetch)
        device.synchronize()
        sampler.sent(score, stream)
        assert score.outcomes() == [drawn.logprob]


def test_bits_go_both_ways() -> None:
    bits = torch.from_numpy(np.random.default_rng(0).random((3, VOCAB)) < 0.5)
    assert torch.equal(unpack_bits(dd.pack_bits(bits), VOCAB), bits)


def test_weights_never_overflow() -> None:
    for width in (1, 2, 96, 128_256, 262_144):
        assert width << dd.shift_of(width) <= 2**62 * 2 - 1 and dd.shift_of(width) >= 44
