"""Rollouts: ids in, ids out, both logprobs, supports (rl L1-L10, I1-I6, I12, I14, I15; G3, G4, G11)."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from typing import Any

import pytest
import torch

import phloem as ph
from phloem import rl
from phloem.runtime.errors import InvalidRequestError, NumericalError, StaleVersionError
from phloem.runtime.request import GrammarSpec, SamplingParams
from tests.rl.tiny import EOS, VOCABULARY, fields_of, nudge, tiny_module

PROMPTS = [[1, 5, 6, 7, 8, 9, 10, 11], [1, 20], [1, 33, 4, 90, 17, 17, 17, 17, 17, 17, 17, 17, 17, 17, 17, 17, 17, 17, 3]]
TRUNCATIONS: list[dict[str, Any]] = [
    {}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.6}, {"temperature": 0.0},
    {"allowed_token_ids": (3, 9, 27, 81)}, {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
]  # fmt: skip


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, **fields})


# ---- the Sample (L1, L2, L6, I1) ---------------------------------------------------------------------------------------------


def test_I1_every_token_has_every_field_and_the_ending_one_counts(attached):
    _, engine = attached()
    batch = engine.rollout(PROMPTS, sampling(max_tokens=40, stop_token_ids=(5, 6, 7)), n=8, seed=1)
    assert len(batch) == 24 and {s.finish for s in batch} >= {"stop_token", "eos"}
    for s in batch:
        s.check()
        assert s.output_ids and s.loss_mask == [1] * len(s.output_ids)
        assert s.truncated == (s.finish == "length")
        if s.finish == "eos":
            assert s.output_ids[-1] == EOS
        if s.finish == "stop_token":
            assert s.output_ids[-1] in (5, 6, 7)
        assert s.spans[0].start == 0 and s.spans[-1].end == len(s.output_ids)
        assert s.version_at_submit == engine.version == 0 and not s.kv_mixed and not s.partial
    assert [s.prompt_ids for s in batch[::8]] == PROMPTS
    assert [s.sample_index for s in batch] == list(range(8)) * 3
    assert [len(g) for g in batch.groups()] == [8, 8, 8] and batch.missing() == [[], [], []]


@pytest.mark.case("C-RL-02")
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=lambda t: "+".join(t) or "plain")
def test_I2_I3_logprobs_are_of_what_was_drawn_from_and_of_the_raw_logits(attached, truncation):
    module, engine = attached()
    batch = engine.rollout(PROMPTS, sampling(ignore_eos=True, **truncation), n=4, seed=3)
    temperature = truncation.get("temperature", 1.0)
    x = batch.tensors()
    with torch.no_grad():
        logits = module(x.ids, attention_mask=x.attention_mask).logits.double()
    for b, s in enumerate(batch):
        for k, token in enumerate(s.output_ids):
            row = logits[b, len(s.prompt_ids) - 1 + k]
            assert s.logprobs_model[k] == pytest.approx(torch.log_softmax(row, -1)[token].item(), abs=1e-5)
            mask = rl.support_mask(s.support[k], VOCABULARY)
            assert mask[token]
            if temperature == 0.0:
                assert s.logprobs_sampled[k] == 0.0 == s.support_logmass[k] and s.forced[k]
                continue
            kept = torch.log_softmax((row / temperature).masked_fill(~mask, -math.inf), -1)
            assert kept[mask].exp().sum().item() == pytest.approx(1.0)
            assert s.logprobs_sampled[k] == pytest.approx(kept[token].item(), abs=1e-5)
            full = torch.log_softmax(row / temperature, -1)[token].item()
            assert s.logprobs_sampled[k] + s.support_logmass[k] == pytest.approx(full, abs=1e-5)
    if not truncation or truncation == {"temperature": 0.6}:  # nothing was cut: exactly
        assert all(m == 0.0 and u is None for s in batch for m, u in zip(s.support_logmass, s.support))


def test_I2_a_grammar_row_is_shared_by_the_batch_and_normalised_over(grammar_engine):
    module, engine = grammar_engine
    batch = engine.rollout([[11, 3, 13, 4, 14]] * 2, sampling(max_tokens=6, top_k=6), n=8, regex="[0-7]{2}a*", seed=0)
    for s in batch:
        first = rl.support_mask(s.support[0], 32)
        assert set(first.nonzero()[:, 0].tolist()) <= set(range(8)) and first.sum() <= 6
    plain = engine.rollout([[11, 3, 13, 4, 14]], sampling(max_tokens=6), n=8, regex="[0-7]{2}a*", seed=0)
    assert len({id(s.support[0]) for s in plain}) == 1  # L4: one row for a state of the grammar
    x = plain.tensors(pad_id=10)
    logp = rl.token_logprobs(module(x.ids).logits, x)
    assert ((logp - x.logprobs_sampled) * x.loss_mask).abs().max() <= 1e-5


def test_L2_forced_runs_have_both_logprobs_and_a_support_of_one(grammar_engine):
    module, engine = grammar_engine
    batch = engine.rollout([[11, 3, 13]], sampling(max_tokens=9, temperature=0.7), n=3, regex="[0-9]abcde", seed=5)
    x = batch.tensors(pad_id=10)
    full = rl.token_logprobs(module(x.ids).logits, x, support=False)
    for b, s in enumerate(batch):
        assert s.output_ids[1:6] == [15, 16, 17, 18, 19] and s.finish == "grammar"
        assert s.forced == [False, True, True, True, True, True, True]  # EOS too
        assert s.logprobs_sampled[1:] == [0.0] * 6
        at = len(s.prompt_ids) - 1
        for k in range(7):
            assert s.support_logmass[k] + s.logprobs_sampled[k] == pytest.approx(full[b, at + k].item(), abs=1e-5)
    logp = rl.token_logprobs(module(x.ids).logits, x)
    assert logp[0, 3:9].abs().max() == 0.0  # T3: nothing to learn where nothing could be chosen
    (grad,) = torch.autograd.grad(logp[:, 3:9].sum(), [module.lm_head.weight])
    assert grad.abs().max() <= 1e-7


def test_G11_without_the_support_the_ratio_is_its_mass(grammar_engine):
    module, engine = grammar_engine
    batch = engine.rollout([[11, 3, 13, 4, 14]], sampling(max_tokens=2), n=32, regex="[0-9]", seed=0)
    x = batch.tensors(pad_id=10)
    logits = module(x.ids).logits
    with_support = torch.exp(rl.token_logprobs(logits, x) - x.logprobs_sampled)[x.loss_mask.bool()]
    without = torch.exp(rl.token_logprobs(logits, x, support=False) - x.logprobs_sampled)[x.loss_mask.bool()]
    assert (with_support - 1).abs().max() <= 1e-5
    assert (without.mean() - 1).abs() > 1e-2


def test_I2_token_logprobs_of_mixed_supports_have_gradients(attached):
    module, engine = attached()
    mixed = [
        engine.rollout([[1, 7]], sampling(**t), n=2, seed=i)[j]
        for i, t in enumerate(TRUNCATIONS)
        if t.get("temperature") != 0.0
        for j in (0, 1)
    ]
    x = rl.RolloutBatch(mixed).tensors()
    logp = rl.token_logprobs(module(x.ids).logits, x)
    assert ((logp - x.logprobs_sampled) * x.loss_mask).abs().max() <= 1e-5
    logp.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())


# ---- bitwise (I4, I5, I12, L7, L8, G4) ------------------------------------------------------------------------------------------


def test_I4_score_is_the_rollout_bit_for_bit(attached):
    _, engine = attached()
    for truncation in TRUNCATIONS:
        batch = engine.rollout(PROMPTS, sampling(**truncation), n=3, seed=7)
        scored = engine.score(
            [s.token_ids for s in batch], from_position=[len(s.prompt_ids) for s in batch], temperature=truncation.get("temperature", 1.0),
            support=[s.support for s in batch],
        )  # fmt: skip
        for s, found in zip(batch, scored):
            assert [t.sampled for t in found] == s.logprobs_sampled
            assert [t.logprob for t in found] == s.logprobs_model
            assert [t.logmass for t in found] == s.support_logmass


def test_score_of_the_whole_vocabulary_and_of_a_token_outside_the_support(attached):
    _, engine = attached()
    (found,) = engine.score([[1, 5, 9, 3]], temperature=0.5)
    assert len(found) == 3 and all(t.logmass == 0.0 for t in found)
    only = rl.Support("ids", (7).to_bytes(4, "little"))
    (outside,) = engine.score([[1, 5, 9]], from_position=2, support=[[only]])
    assert outside[0].sampled is not None and outside[0].sampled < -1e38
    with pytest.raises(InvalidRequestError, match="expected 1 to 2"):
        engine.score([[1, 5, 9]], from_position=3)


def test_I5_G4_nothing_that_runs_beside_it_changes_a_bit(attached):
    module, engine = attached(max_running=64)
    groups = [*PROMPTS, [1, 5, 6, 7, 8, 9, 10, 12], [4]]
    options: dict[str, Any] = {"sampling": sampling(max_tokens=24, top_p=0.95), "seed": 11}
    cold = [fields_of(s) for s in engine.rollout(groups, options["sampling"], n=16, seed=11)]
    hit = [fields_of(s) for s in engine.rollout(groups, options["sampling"], n=16, seed=11)]
    assert hit == cold
    reordered = engine.rollout(groups[::-1], options["sampling"], n=16, seed=11)
    assert [fields_of(s) for g in reordered.groups()[::-1] for s in g] == cold
    for n in (1, 2, 3, 7):  # of a group, its first n
        some = engine.rollout(groups, options["sampling"], n=n, seed=11)
        assert [fields_of(s) for s in some] == [f for i in range(len(groups)) for f in cold[16 * i : 16 * i + n]]
    submitted = engine.submit(groups, options["sampling"], n=16, seed=11).result(60)
    assert [fields_of(s) for s in submitted] == cold
    for changes in (
        {"max_step_tokens": 5},
        {"cache_mode": "off"},
        {"kv_tokens": 256, "page_size": 4},
        {"page_size": 1},
        {"threads": 2},
    ):
        _, other = attached(module, **changes)
        rolled = other.rollout(groups, options["sampling"], n=16, seed=11)
        assert [fields_of(s) for s in rolled] == cold, changes
        if "kv_tokens" in changes:
            assert other.stats().engine.preemptions > 0


def test_I12_a_groups_prompt_is_computed_once_whatever_the_order(attached):
    _, engine = attached(max_running=64, max_step_tokens=16)
    long = [[1, *range(i, i + 40)] for i in (3, 40)]
    unique = len({tuple(p[: k + 1]) for p in long for k in range(41)})
    for order in (long, long[::-1]):
        engine.flush()
        before = engine.stats().engine
        engine.rollout(order, sampling(max_tokens=2, ignore_eos=True), n=8, seed=0)
        after = engine.stats().engine
        assert after.prefill_tokens - before.prefill_tokens == unique and after.recomputed_tokens == before.recomputed_tokens


def test_I6_one_seed_many_streams_and_the_same_again(attached):
    _, engine = attached()
    a = engine.rollout([[1, 9]], sampling(max_tokens=16, ignore_eos=True), n=64, seed=5)
    assert len({tuple(s.output_ids) for s in a}) == 64
    b = engine.rollout([[1, 9]], sampling(max_tokens=16, ignore_eos=True), n=64, seed=5)
    assert [s.output_ids for s in a] == [s.output_ids for s in b]
    c = engine.rollout([[1, 9]], sampling(max_tokens=16, ignore_eos=True), n=64, seed=6)
    assert [s.output_ids for s in a] != [s.output_ids for s in c]
    free = engine.rollout([[1, 9]], sampling(max_tokens=16, ignore_eos=True), n=2)
    again = engine.rollout([[1, 9]], sampling(max_tokens=16, ignore_eos=True), n=2, seed=free[0].seed)
    assert [s.output_ids for s in free] == [s.output_ids for s in again]  # L1: the seed is reported


def test_L7_adjacent_equal_prompts_are_a_group(attached):
    _, engine = attached()
    p, q = [1, 5, 6], [1, 7]
    repeated = engine.rollout([p, p, p, q, q, q], sampling(), seed=4)
    together = engine.rollout([p, q], sampling(), n=3, seed=4)
    assert [fields_of(s) for s in repeated] == [fields_of(s) for s in together]
    assert [len(g) for g in repeated.groups()] == [3, 3]


# ---- limits (L5, L9, L10, I14, I15) ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.1}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}]
)
def test_L5_what_no_trainer_recomputes_is_refused(attached, penalty):
    _, engine = attached()
    with pytest.raises(InvalidRequestError, match="off_policy"):
        engine.rollout([[1]], sampling(**penalty))
    assert len(engine.rollout([[1]], sampling(**penalty), off_policy=True)) == 1


def test_L9_I15_cut_at_every_position_and_resumed_is_uninterrupted(attached):
    _, engine = attached()
    whole = engine.rollout([PROMPTS[2]], sampling(max_tokens=14, ignore_eos=True, top_p=0.9), n=2, seed=8)
    for cut in range(14):
        parts = []
        for s in whole:
            p = rl.Sample(
                prompt_ids=s.prompt_ids, finish="abort", partial=True, sample_index=s.sample_index, seed=s.seed, group_id=0
            )
            for name in (
                "output_ids",
                "logprobs_sampled",
                "logprobs_model",
                "support",
                "support_logmass",
                "forced",
                "loss_mask",
            ):
                setattr(p, name, getattr(s, name)[:cut])
            p.spans = (rl.Span(0, cut, 0),) if cut else ()
            parts.append(p)
        resumed = engine.rollout(parts, sampling(max_tokens=14, ignore_eos=True, top_p=0.9))
        assert [fields_of(s) for s in resumed] == [fields_of(s) for s in whole], cut
        assert [s.spans for s in resumed] == [s.spans for s in whole] and not any(s.partial for s in resumed)


def test_I15_a_grammar_goes_on_where_it_was_cut(grammar_engine):
    _, engine = grammar_engine
    options: dict[str, Any] = {"regex": "[0-9]abc[0-9]{3}", "sampling": sampling(max_tokens=10)}
    (whole,) = engine.rollout([[11, 3]], seed=2, **options)
    for cut in range(1, len(whole.output_ids) - 1):
        part = rl.Sample(prompt_ids=[11, 3], finish="abort", partial=True, seed=whole.seed, output_ids=whole.output_ids[:cut])
        for name in ("logprobs_sampled", "logprobs_model", "support", "support_logmass", "forced", "loss_mask"):
            setattr(part, name, getattr(whole, name)[:cut])
        (resumed,) = engine.rollout([part], **options)
        assert fields_of(resumed) == fields_of(whole), cut


def test_L9_a_deadline_returns_partial_samples_that_go_on(attached):
    _, engine = attached()
    options = sampling(max_tokens=200, ignore_eos=True)
    whole = engine.rollout(PROMPTS, options, n=4, seed=1)
    cut = engine.rollout(PROMPTS, options, n=4, seed=1, deadline=0.02)
    assert len(cut) == 12
    for s in cut:
        s.check()
        assert s.partial == (s.finish == "abort") and s.truncated
    resumed = engine.rollout(list(cut), options)
    assert [fields_of(s) for s in resumed] == [fields_of(s) for s in whole]
    few = engine.rollout(PROMPTS, sampling(max_tokens=64), n=4, seed=1, min_groups=1)
    assert len(few) == 12 and any(not any(s.partial for s in g) for g in few.groups())


def test_L9_what_began_too_long_ago_is_refused(attached):
    module, engine = attached()
    cut = engine.rollout([[1, 5]], sampling(max_tokens=300, ignore_eos=True), deadline=0.001, seed=0)
    assert cut[0].partial
    for i in range(3):
        with engine.training():
            nudge(module, i)
    with pytest.raises(StaleVersionError, match="max_staleness"):
        engine.rollout(list(cut), sampling(max_tokens=300, ignore_eos=True), max_staleness=2)
    (resumed,) = engine.rollout(list(cut), sampling(max_tokens=300, ignore_eos=True), max_staleness=3)
    assert [span.version for span in resumed.spans] == ([0, 3] if cut[0].output_ids else [3])


def test_L10_an_error_concerns_one_sample(attached):
    module, engine = attached()
    with torch.no_grad():
        module.model.embed_tokens.weight[90] = torch.nan
    engine.commit()
    batch = engine.rollout([[1, 5], [1, 90], [1, 6]], sampling(allowed_token_ids=(3, 4, 5)), on_error="return", seed=0)
    assert [type(s.error) for s in batch] == [type(None), NumericalError, type(None)] and batch[1].finish == "error"
    assert batch.missing() == [[], [0], []]
    with pytest.raises(NumericalError):
        engine.rollout([[1, 90]], sampling())


def test_bad_arguments_say_what_was_expected(attached):
    _, engine = attached()
    for bad, word in (("text", "list of prompts"), ([], "list of prompts"), ([1, 2], "list of prompts")):
        with pytest.raises(InvalidRequestError, match=word):
            engine.rollout(bad)
    with pytest.raises(InvalidRequestError, match="group_ids"):
        engine.rollout([[1]], group_ids=[1, 2])
    with pytest.raises(InvalidRequestError, match="n is 0"):
        engine.rollout([[1]], n=0)
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        engine.rollout([[1]], sampling(stop=("x",)))
    with pytest.raises(InvalidRequestError, match="open_end"):
        engine.rollout([[1]], grammar=GrammarSpec(kind="regex", source="a", open_end=True))
    with pytest.raises(ph.GrammarError, match="without grammars"):
        engine.rollout([[1]], regex="a")
    with pytest.raises(ph.ContextLengthError):
        engine.rollout([[1] * 500], sampling(max_tokens=100))


def test_stop_strings_end_a_sample_and_trim_no_id(grammar_engine):
    _, engine = grammar_engine
    batch = engine.rollout([[11, 3]], sampling(max_tokens=30, stop=("7",), ignore_eos=True), n=16, seed=0)
    stopped = [s for s in batch if s.finish == "stop_string"]
    assert stopped
    for s in stopped:
        s.check()
        assert s.output_ids[-1] == 7 and 7 not in s.output_ids[:-1]


# ---- threads (I14, Z3) --------------------------------------------------------------------------------------------------------


def test_submit_gives_the_same_from_a_thread_and_can_be_cancelled(attached):
    _, engine = attached()
    expected = [fields_of(s) for s in engine.rollout(PROMPTS, sampling(), n=2, seed=3)]
    handles = [engine.submit(PROMPTS, sampling(), n=2, seed=3) for _ in range(3)]
    assert all([fields_of(s) for s in h.result(60)] == expected for h in handles)
    long = engine.submit(PROMPTS, sampling(max_tokens=400, ignore_eos=True), n=4, seed=3)
    long.cancel()
    assert {s.finish for s in long.result(60)} == {"abort"}
    found = asyncio.run(engine.arollout(PROMPTS, sampling(), n=2, seed=3))
    assert [fields_of(s) for s in found] == expected


def test_Z3_works_in_a_thread_other_than_main(attached):
    _, engine = attached()
    expected = [fields_of(s) for s in engine.rollout(PROMPTS, sampling(), n=2, seed=3)]
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(engine.rollout(PROMPTS, sampling(), n=2, seed=3))) for _ in range(3)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert [[fields_of(s) for s in b] for b in found] == [expected] * 3


@pytest.mark.parametrize("rounds", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_I14_every_request_ends_in_one_sample_under_any_interleaving(attached, rounds):
    module, engine = attached(kv_tokens=512, max_running=8)
    rng = random.Random(rounds)
    handles: list[tuple[rl.Handle, int]] = []
    for i in range(rounds):
        what = rng.choice(["submit", "submit", "submit", "abort", "train", "commit", "suspend", "rollout", "cancel"])
        if what == "submit":
            n = rng.randint(1, 4)
            handles.append(
                (engine.submit([[1, rng.randint(3, 80)]], sampling(max_tokens=rng.randint(1, 60)), n=n, on_error="return"), n)
            )
        elif what == "abort":
            engine.abort()
        elif what == "cancel" and handles:
            rng.choice(handles)[0].cancel()
        elif what == "train":
            with engine.training(in_flight=rng.choice(["finish", "abort", "recompute", "continue"])):
                nudge(module, i, 1e-3)
        elif what == "commit":
            nothing = rng.choice(["finish", "abort", "recompute", "continue"])
            engine.commit(in_flight=nothing)
        elif what == "suspend":
            engine.suspend(in_flight=rng.choice(["finish", "abort", "recompute"]))
            engine.resume()
        elif what == "rollout":
            assert len(engine.rollout([[1, 4]], sampling(max_tokens=3), n=2)) == 2
        if rng.random() < 0.2:
            time.sleep(0.002)
    for handle, n in handles:
        batch = handle.result(120)
        assert len(batch) == n
        for s in batch:
            s.check()
            assert s.finish in ("eos", "length", "abort") and s.error is None
            assert all(a.end == b.start for a, b in zip(s.spans, s.spans[1:]))


def test_I18_two_engines_do_not_touch_each_other(attached):
    policy, a = attached()
    _reference, b = attached(tiny_module(seed=9))
    before = [fields_of(s) for s in b.rollout(PROMPTS, sampling(), n=2, seed=1)]
    assert before != [fields_of(s) for s in a.rollout(PROMPTS, sampling(), n=2, seed=1)]
    with a.training():
        nudge(policy)
    assert (a.version, b.version) == (1, 0)
    assert [fields_of(s) for s in b.rollout(PROMPTS, sampling(), n=2, seed=1)] == before
