"""The order M1 in numpy, against definitions too simple to be wrong."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime.errors import GrammarDeadEnd, NumericalError
from phloem.runtime.executor.sampler import ReferenceSampler, ScoreRow, edited, filtered, legal_ids
from phloem.runtime.executor.support import Supports
from phloem.runtime.request import SamplingParams
from phloem.runtime.step import RowFailure, SampleRow, SampleSpec

VOCAB, WIDTH = 40, 48


def spec_row(sampling, *, history=(), num_prompt=0, name="r", row=0, seed=0, sample=0, position=0, mask=None, block=()):
    return SampleRow(row, name, 0, position, seed, sample, sampling, list(history), num_prompt, mask, block)


def draw(logits, rows, masks=None, sampler=None):
    sampler = sampler or ReferenceSampler(vocab_size=VOCAB, width=WIDTH)
    tensor = torch.from_numpy(np.asarray(logits, np.float32).reshape(-1, WIDTH))
    return sampler.prepare(SampleSpec(rows, masks), [row.row for row in rows])(tensor)


def one(logits, sampling, masks=None, **fields):
    return draw(logits, [spec_row(sampling, **fields)], masks)[0]


def random_logits(seed, spread=2.0):
    return np.random.default_rng(seed).normal(0, spread, WIDTH).astype(np.float32)


def bits(*ids, words=-(-WIDTH // 32)):
    row = np.zeros((1, words), np.uint32)
    for t in ids:
        row[0, t // 32] |= np.uint32(1 << (t % 32))
    return row.view(np.int32)


def kept_ids(x, **fields):
    return set(filtered(np.asarray(x, np.float32), np.ones(len(x), bool), SamplingParams(**fields)).order.tolist())


def brute_force_kept(x, legal, temperature, top_k, top_p, min_p):
    """The definitions, one token at a time, in Python floats."""
    order = sorted((t for t in range(len(x)) if legal[t]), key=lambda t: (-x[t], t))
    if top_k > 0:
        order = order[:top_k]
    weight = {t: math.exp((float(x[t]) - float(x[order[0]])) / temperature) for t in order}
    if top_p < 1:
        total, running, kept = sum(weight.values()), 0.0, []
        for t in order:
            kept.append(t)
            running += weight[t]
            if running >= top_p * total:
                break
        order = kept
    return [t for t in order if weight[t] >= min_p]


@settings(max_examples=300)
@given(
    st.integers(0, 2**32), st.sampled_from([0.05, 0.7, 1.0, 3.0]), st.integers(-1, 45),
    st.floats(0.01, 1.0), st.sampled_from([0.0, 0.01, 0.3, 0.9999]), st.booleans(),
)  # fmt: skip
def test_M1_filters_agree_with_their_definitions(seed, temperature, top_k, top_p, min_p, ties):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 2, VOCAB).astype(np.float32)
    if ties:
        x = np.round(x)
    legal = rng.random(VOCAB) < 0.8
    legal[int(rng.integers(VOCAB))] = True
    kept = filtered(x, legal, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert kept.order.tolist() == brute_force_kept(x, legal, temperature, top_k, top_p, min_p)
    top = float(x[kept.order[0]])
    assert np.flatnonzero(kept.weights).tolist() == sorted(t for t in kept.order.tolist() if (x[t] - top) / temperature >= -87)
    assert np.exp(kept.logprobs[kept.order]).sum() == pytest.approx(1.0)


@pytest.mark.case("C-SAMP-04")
@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.60, 2), (0.51, 2), (0.74, 2), (0.49, 1), (0.05, 1), (0.76, 3), (1.0, 4), (1e-300, 1)]
)
def test_top_p_keeps_the_token_that_crosses_the_threshold(top_p, kept):
    probabilities = np.array([0.15, 0.50, 0.10, 0.25])
    found = filtered(np.log(probabilities).astype(np.float32), np.ones(4, bool), SamplingParams(top_p=top_p))
    assert found.order.tolist() == [1, 3, 0, 2][:kept]
    shares = probabilities[found.order] / probabilities[found.order].sum()
    assert np.exp(found.logprobs[found.order]) == pytest.approx(shares, abs=1e-6)


@pytest.mark.parametrize(("top_p", "sizes"), [(0.5, {1, 2}), (0.75, {2, 3})])
def test_an_exact_border_rounds_either_way_but_never_to_nothing(top_p, sizes):
    assert len(kept_ids(np.log([0.15, 0.50, 0.10, 0.25]), top_p=top_p)) in sizes


def test_top_k_keeps_exactly_k_and_the_lower_id_among_equals():
    assert kept_ids([1, 2, 2, 2, 0], top_k=2) == {1, 2}
    assert kept_ids([1, 2, 2, 2, 0], top_k=99) == kept_ids([1, 2, 2, 2, 0], top_k=0) == {0, 1, 2, 3, 4}


def test_min_p_is_relative_to_the_highest_probability():
    logits = np.log([0.4, 0.4, 0.1, 0.04, 0.06])
    assert kept_ids(logits, min_p=0.2) == {0, 1, 2}
    assert kept_ids(logits, min_p=0.2, top_p=0.3) == {0}
    assert kept_ids([3.0, 3.0, 2.9], min_p=1.0) == {0, 1}


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(temperature=1e-300), SamplingParams(top_k=1)]
)
def test_M5_argmax_has_the_lowest_id_on_ties(sampling):
    logits = np.zeros(WIDTH)
    logits[[7, 9, 30]] = 5
    logits[44] = 99  # padded
    tokens = {one(logits, sampling, position=p).token for p in range(40)}
    if sampling.temperature == 1e-300:
        assert tokens == {7, 9, 30}, "exact ties stay ties: T is not 0"
    else:
        assert tokens == {7}


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6, 1e-3])
def test_a_tiny_temperature_neither_overflows_nor_wanders(temperature):
    logits = random_logits(3) * 1e3
    s = SamplingParams(temperature=temperature, logprobs="both", top_logprobs=20, top_p=0.99)
    for position in range(30):
        drawn = one(logits, s, position=position)
        assert drawn.token == int(np.argmax(logits[:VOCAB]))
        assert drawn.logprob.sampled == 0.0
        assert all(math.isfinite(lp) for _, lp in drawn.logprob.top)


def test_frequencies_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = np.full(WIDTH, -50.0)
    logits[[3, 8, 20, 39]] = np.log(probabilities)
    rows = [spec_row(SamplingParams(), position=p) for p in range(4000)]
    found = Counter(s.token for s in draw(logits, rows))
    assert set(found) == {3, 8, 20, 39}
    for token, p in zip([3, 8, 20, 39], probabilities):
        assert abs(found[token] - 4000 * p) < 4.5 * math.sqrt(4000 * p * (1 - p))


# ---------------------------------------------------------------------------------------------------------- hard masks


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_M1_a_masked_token_cannot_be_revived(temperature):
    logits = np.zeros(WIDTH)
    s = SamplingParams(
        temperature=temperature, logit_bias={2: 100.0}, allowed_token_ids=(4, 5, 6, 44, 10**9), repetition_penalty=0.01
    )
    tokens = {
        one(logits, s, masks=bits(2, 3, 5, 6, 44), mask=0, block=(6, 10**9, -5), history=[2] * 9, position=p).token
        for p in range(30)
    }
    assert tokens == {5}


@pytest.mark.case("C-LOAD-08")
@pytest.mark.parametrize("mask", [None, 0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_ids_are_never_drawn_nor_listed(temperature, mask):
    logits = np.zeros(WIDTH)
    logits[VOCAB:] = 30.0
    s = SamplingParams(temperature=temperature, logprobs="both", top_logprobs=20, logit_bias={45: 100.0})
    masks = np.full((1, 2), -1, np.int32)
    for position in range(50):
        drawn = one(logits, s, position=position, mask=mask, masks=masks, history=[45, 46])
        assert drawn.token < VOCAB
        assert all(t < VOCAB for t, _ in drawn.logprob.top)
        assert math.isfinite(drawn.logprob.logprob)


@pytest.mark.case("C-SAMP-05", "C-SAMP-06")
def test_unknown_ids_index_nothing():
    unknown = (-1, -5, VOCAB, WIDTH, 10**6, 2**31 - 1)
    s = SamplingParams(temperature=0, logprobs="model")
    plain = draw([random_logits(1), random_logits(2)], [spec_row(s), spec_row(s, row=1)])
    odd = SamplingParams(
        temperature=0, logprobs="model", logit_bias=dict.fromkeys([u for u in unknown if u >= 0], 9.0), presence_penalty=2.0
    )
    mixed = draw([random_logits(1), random_logits(2)], [spec_row(odd, history=unknown, block=unknown), spec_row(s, row=1)])
    assert mixed == plain


def test_an_empty_mask_fails_its_request_alone():
    s = SamplingParams(temperature=0)
    rows = [spec_row(s, name="a"), spec_row(s, name="b", mask=0), spec_row(s, name="c", row=1)]
    dead = draw([random_logits(1), random_logits(2)], rows, masks=bits(WIDTH - 1))
    assert [d.request_id for d in dead] == ["a", "b", "c"]
    assert isinstance(dead[1], RowFailure)
    assert isinstance(dead[1].error, GrammarDeadEnd)
    assert dead[1].error.status == 500
    assert dead[::2] == draw([random_logits(1), random_logits(2)], rows[::2])


def test_a_dead_end_is_a_fault_of_whoever_left_no_token():
    allowed = SamplingParams(temperature=0, allowed_token_ids=[3])
    for row, masks, says, status in (
        (spec_row(allowed, mask=0), bits(5), "the grammar allows none of allowed_token_ids", 400),
        (spec_row(allowed, block=(3,)), None, "masked before min_tokens leave none of allowed_token_ids", 400),
        (spec_row(SamplingParams(temperature=0), mask=0), bits(WIDTH - 1), "the grammar mask is empty", 500),
    ):
        (dead,) = draw([random_logits(1)], [row], masks=masks)
        assert isinstance(dead, RowFailure) and says in str(dead.error) and dead.error.status == status
        assert dead.error.param == ("allowed_token_ids" if status == 400 else None)


def test_M1_a_grammar_at_its_end_outranks_min_tokens():
    logits = random_logits(1)
    assert one(logits, SamplingParams(), masks=bits(7), mask=0, block=(7,)).token == 7
    assert one(logits, SamplingParams(), masks=bits(7, 8), mask=0, block=(7,)).token == 8
    assert isinstance(one(logits, SamplingParams(allowed_token_ids=(7,)), block=(7,)), RowFailure)


def test_a_mask_narrower_than_the_vocabulary_allows_no_more_than_it_says():
    assert legal_ids(None, None, (), VOCAB).all()
    drawn = one(np.arange(WIDTH), SamplingParams(temperature=0), masks=np.full((1, 1), -1, np.int32), mask=0)
    assert drawn.token == 31


# ----------------------------------------------------------------------------------------------------------- penalties


@given(
    st.lists(st.integers(0, VOCAB - 1), max_size=30), st.integers(0, 30), st.floats(0.1, 10), st.floats(-2, 2), st.floats(-2, 2)
)
@settings(max_examples=60)
def test_penalties_follow_their_formulas(history, num_prompt, repetition, frequency, presence):
    num_prompt = min(num_prompt, len(history))
    logits = random_logits(5)
    bias = {3: 1.5, 8: -100.0, 39: 0.25}
    s = SamplingParams(repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias)
    output = Counter(history[num_prompt:])
    ids = np.array(sorted(set(history)), np.int32)
    x = edited(logits[:VOCAB], s, (ids, np.array([output[t] for t in ids.tolist()], np.int32)))
    for t in range(VOCAB):
        v = float(logits[t])
        if t in history:
            v = v / repetition if v > 0 else v * repetition
        v -= frequency * output[t] + presence * (output[t] > 0)
        assert x[t] == pytest.approx(v + bias.get(t, 0.0), rel=1e-5, abs=1e-5)


def test_repetition_sees_the_prompt_and_frequency_does_not():
    logits = np.zeros(WIDTH)
    logits[[3, 5]] = 4.0, 3.9
    prompt = {"history": [3], "num_prompt": 1}
    assert one(logits, SamplingParams(temperature=0, repetition_penalty=1.3), **prompt).token == 5
    assert one(logits, SamplingParams(temperature=0, frequency_penalty=2.0, presence_penalty=2.0), **prompt).token == 3
    assert one(logits, SamplingParams(temperature=0, presence_penalty=2.0), history=[3], num_prompt=0).token == 5


@pytest.mark.parametrize("value", [1e-300, 1e-30, 10.0])
def test_extreme_penalties_stay_finite(value):
    s = SamplingParams(repetition_penalty=value, logprobs="both", top_logprobs=20)
    drawn = one(random_logits(1) * 1e30, s, history=range(VOCAB), num_prompt=0)
    assert math.isfinite(drawn.logprob.logprob)
    assert math.isfinite(drawn.logprob.sampled)


@pytest.mark.case("C-SAMP-13")
def test_logit_bias_counts_before_temperature():
    logits = random_logits(9)
    t = int(np.argmax(logits[:VOCAB]))
    assert one(logits, SamplingParams(temperature=0, logit_bias={t: -100.0})).token != t
    assert one(logits, SamplingParams(temperature=0, logit_bias={11: 100.0})).token == 11
    assert {one(logits, SamplingParams(temperature=2.0, logit_bias={11: 100.0}), position=p).token for p in range(50)} == {11}


# ----------------------------------------------------------------------------------------------------------- randomness


@pytest.mark.case("C-SAMP-09")
def test_M2_a_draw_does_not_see_the_batch():
    seeded = SamplingParams(temperature=0.8, logprobs="both", top_logprobs=5, top_p=0.95, repetition_penalty=1.2)
    rows = [
        spec_row(seeded, row=i, name=f"r{i}", seed=42 + i, position=i, history=[i, i + 1, 3], num_prompt=2) for i in range(9)
    ]
    logits = np.stack([random_logits(i) for i in range(9)])
    together = draw(logits, rows)
    assert [draw(logits, [row])[0] for row in rows] == together
    assert draw(logits, rows[::-1])[::-1] == together
    neighbours = [spec_row(SamplingParams(temperature=100.0), row=8, seed=i) for i in range(5)]
    assert draw(logits, [*neighbours, *rows])[5:] == together


def test_M2_seed_sample_and_position_each_change_the_draw():
    flat = np.zeros(WIDTH)
    for field in ("seed", "sample", "position"):
        tokens = [one(flat, SamplingParams(), **{field: value}).token for value in range(200)]
        assert len(set(tokens)) > 30, field
        assert tokens == [one(flat, SamplingParams(), **{field: value}).token for value in range(200)]


# ------------------------------------------------------------------------------------------------------------- logprobs


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


EXTRAS = [
    {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 2.0}}, {"temperature": 0.0},
    {"temperature": 0.4}, {"allowed_token_ids": (1, 2, 3)}, {"top_k": 1}, {"top_p": 0.01},
]  # fmt: skip


@pytest.mark.case("C-RL-02", "C-API-13")
@pytest.mark.parametrize("extra", EXTRAS, ids=lambda e: next(iter(e)))
def test_M4_model_is_the_raw_log_softmax_and_sampled_sums_to_one(extra):
    logits = random_logits(4)
    history = {"history": [1, 2, 3], "num_prompt": 1}
    model = one(logits, SamplingParams(logprobs="model", top_logprobs=20, **extra), **history)
    sampled = one(logits, SamplingParams(logprobs="sampled", top_logprobs=20, **extra), **history)
    both = one(logits, SamplingParams(logprobs="both", top_logprobs=20, **extra), **history)
    assert model.token == sampled.token == both.token
    raw = log_softmax(logits)
    assert model.logprob.logprob == np.float32(raw[model.token])
    best = np.argsort(-raw[:VOCAB], kind="stable")[:20]
    assert model.logprob.top == tuple((int(t), float(np.float32(raw[t]))) for t in best)
    b = both.logprob
    assert (b.logprob, b.top, b.sampled) == (model.logprob.logprob, model.logprob.top, sampled.logprob.logprob)
    if extra.get("temperature") != 0.0:  # rl L3
        scaled = log_softmax(logits.astype(np.float64) / extra.get("temperature", 1.0))
        assert b.sampled + b.logmass == pytest.approx(scaled[both.token], abs=1e-5)
    support = Supports(VOCAB, WIDTH).mask(b.support)
    assert support[both.token]
    if len(sampled.logprob.top) < 20:  # rl L4: what could be drawn, and nothing else
        assert np.flatnonzero(support).tolist() == sorted(t for t, _ in sampled.logprob.top)
    assert sampled.logprob.sampled is None
    if extra != {"temperature": 0.4}:  # 20 alternatives hold the whole support
        assert len(sampled.logprob.top) <= 20
    if len(sampled.logprob.top) < 20:
        assert sum(math.exp(lp) for _, lp in sampled.logprob.top) == pytest.approx(1.0, abs=1e-6)
        assert dict(sampled.logprob.top)[sampled.token] == sampled.logprob.logprob
    if extra.get("temperature") == 0.0:
        assert sampled.logprob.top == ((sampled.token, 0.0),)
    assert all(math.isfinite(lp) and lp <= 0 for d in (model, sampled, both) for _, lp in d.logprob.top)


def test_equal_alternatives_are_listed_by_id():
    logits = np.zeros(WIDTH)
    assert [t for t, _ in one(logits, SamplingParams(logprobs="model", top_logprobs=5)).logprob.top] == [0, 1, 2, 3, 4]
    assert [t for t, _ in one(logits, SamplingParams(logprobs="sampled", top_logprobs=5)).logprob.top] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_M4_a_row_that_is_not_finite_fails_alone(bad):
    logits = np.stack([random_logits(1), random_logits(2), random_logits(3)])
    rows = [spec_row(SamplingParams(temperature=t), row=i, name=str(i)) for i, t in enumerate([1.0, 0.0, 1.0])]
    plain = draw(logits, rows)
    for where in (0, 17, VOCAB - 1):
        logits[1] = random_logits(2)
        logits[1, where] = bad
        found = draw(logits, rows)
        assert (found[0], found[2]) == (plain[0], plain[2])
        assert isinstance(found[1], RowFailure)
        assert isinstance(found[1].error, NumericalError)


def test_padding_may_be_minus_infinity_but_not_nan():
    logits = random_logits(1)
    logits[VOCAB:] = -np.inf
    assert math.isfinite(one(logits, SamplingParams(logprobs="both")).logprob.logprob)
    logits[WIDTH - 1] = np.nan
    assert isinstance(one(logits, SamplingParams()), RowFailure)


def test_scores_are_model_logprobs_and_none_where_not_finite():
    sampler = ReferenceSampler(vocab_size=VOCAB, width=WIDTH)
    logits = np.stack([random_logits(1), random_logits(2)])
    logits[1, 5] = np.nan
    found = sampler.score(torch.from_numpy(logits), [ScoreRow(0, 9, 2), ScoreRow(1, 9, 0), ScoreRow(0, 45, 0)])
    raw = log_softmax(logits[0])
    assert found[0] is not None
    assert (found[0].token_id, found[0].logprob) == (9, float(np.float32(raw[9])))
    assert [t for t, _ in found[0].top] == np.argsort(-raw[:VOCAB])[:2].tolist()
    assert found[1] is None
    assert found[2] is not None
    assert found[2].logprob == float(np.float32(raw[45])), "a prompt may hold a padded id; its logprob is what the model says"
