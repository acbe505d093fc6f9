"""Programs as environments: a branch is a Sample, and drawn ids stay on its path (rl T4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import phloem as ph
from phloem import rl
from phloem.runtime.errors import EngineBusyError, InvalidRequestError
from tests.rl.tiny import fields_of


@ph.function
def sums(s: ph.State, a: int) -> str:
    """Two draws with text between them, which nobody drew."""
    s += f"{a}+"
    s += ph.gen("first", allowed_token_ids=tuple(range(10)), max_tokens=2, ignore_eos=True)
    s += "="
    s += ph.gen("second", max_tokens=3, ignore_eos=True)
    return str(s["first"])


@ph.function
def branches(s: ph.State) -> list[str]:
    s += "12"
    s += ph.gen("stem", max_tokens=4, ignore_eos=True)
    forks = s.fork(3)
    for i, f in enumerate(forks):
        f += f"{i}="
        f += ph.gen("leaf", max_tokens=2, ignore_eos=True)
    return [str(f["leaf"]) for f in forks]


def test_T4_a_run_is_a_sample_whose_mask_covers_what_was_drawn(grammar_engine):
    module, engine = grammar_engine
    batch = engine.rollout(sums, [{"a": 1}, {"a": 2}], 3, seed=5)
    assert len(batch) == 6 and [s.group_id for s in batch] == [0, 0, 0, 1, 1, 1]
    assert [s.sample_index for s in batch] == [0, 1, 2] * 2 and len(batch.values) == 6
    tokenizer = engine.tokenizer
    for s, value, a in zip(batch, batch.values, (1, 1, 1, 2, 2, 2)):
        s.check()
        assert tokenizer.decode(s.prompt_ids).endswith(f"{a}+")
        assert s.loss_mask == [1, 1, 0, 1, 1, 1] and s.output_ids[2] == 14
        assert tokenizer.decode(s.output_ids[:2]) == value and value.isdigit()
        assert [(span.start, span.end, span.version) for span in s.spans] == [(0, 2, 0), (3, 6, 0)]
        # score, given the supports, gives the same numbers bit for bit: what the program drew is what a trainer replays.
        (found,) = engine.score([s.token_ids], from_position=len(s.prompt_ids), support=[s.support])
        assert [t.sampled for t, m in zip(found, s.loss_mask) if m] == [v for v, m in zip(s.logprobs_sampled, s.loss_mask) if m]
        assert [t.logprob for t, m in zip(found, s.loss_mask) if m] == [v for v, m in zip(s.logprobs_model, s.loss_mask) if m]
    x = batch.tensors(pad_id=10)
    logp = rl.token_logprobs(module(x.ids).logits, x)
    assert ((logp - x.logprobs_sampled) * x.loss_mask).abs().max() <= 1e-5
    logp.mul(x.loss_mask).sum().backward()
    assert torch.isfinite(module.lm_head.weight.grad).all()
    assert rl.group_advantages(batch, [float(v[0]) for v in batch.values]).shape == (6,)


def test_T4_draws_depend_on_the_seed_and_the_samples_index_alone(grammar_engine):
    _, engine = grammar_engine
    whole = engine.rollout(sums, [{"a": 1}, {"a": 2}], 3, seed=5)
    again = engine.rollout(sums, [{"a": 2}], 2, seed=5)
    assert [fields_of(s) for s in again] == [fields_of(s) for s in whole[3:5]]
    other = engine.rollout(sums, [{"a": 2}], 2, seed=6)
    assert [s.output_ids for s in other] != [s.output_ids for s in again]
    assert len({tuple(s.output_ids) for s in whole[:3]}) > 1


def test_T4_a_fork_is_a_sample_a_branch_over_one_prefix(grammar_engine):
    _, engine = grammar_engine
    engine.flush()
    before = engine.stats().engine
    batch = engine.rollout(branches, [{}], 2, seed=1)
    computed = engine.stats().engine.prefill_tokens - before.prefill_tokens
    assert len(batch) == 6 and len(batch.groups()) == 1
    for run in (batch[:3], batch[3:]):
        stem = run[0].output_ids[:4]
        assert all(s.output_ids[:4] == stem and s.loss_mask == [1] * 4 + [0, 0] + [1, 1] for s in run)
        assert len({s.logprobs_model[0] for s in run}) == 1 and [s.output_ids[4] for s in run] == [0, 1, 2]
    assert batch[0].output_ids[:4] != batch[3].output_ids[:4]
    alone = sum(len(s.prompt_ids) + 6 for s in batch)
    assert computed < alone / 2


@ph.function
def ended(s: ph.State) -> None:
    s += "1+1="
    s += ph.gen("x", regex="[0-9]", max_tokens=4)


def test_T4_the_token_that_ends_the_last_gen_counts(grammar_engine):
    _, engine = grammar_engine
    (s,) = engine.rollout(ended, [{}], seed=3)
    assert len(s.output_ids) == 2 and s.output_ids[1] == 12 and s.loss_mask == [1, 1] and s.finish in ("eos", "grammar")


@ph.function
def lost(s: ph.State, how: str) -> None:
    s += "1+"
    if how == "eos":
        s += ph.gen("x", regex="[0-9]", max_tokens=4)
        s += "2"
    elif how == "retry":
        s += ph.gen("x", max_tokens=2, ignore_eos=True, check=_Twice(), retries=2)
    elif how == "n":
        s += ph.gen("x", max_tokens=2, ignore_eos=True, n=2)
    elif how == "penalty":
        s += ph.gen("x", max_tokens=2, repetition_penalty=1.5)
    elif how == "temperature":
        s += ph.gen("x", max_tokens=2, ignore_eos=True) + ph.gen("y", max_tokens=2, ignore_eos=True, temperature=0.5)
    elif how == "select":
        s += ph.select("x", ["1", "2"])


class _Twice:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: Any) -> bool:
        self.calls += 1
        return self.calls > 1


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("eos", r"gen 'x' drew are not on its path: what stands there"), ("retry", "gen 'x'.*tried again"), ("n", "gen 'x'.*n=2"),
        ("penalty", "off_policy"), ("temperature", "gen 'y' was drawn at temperature 0.5"), ("select", "drew no token"),
    ],
)  # fmt: skip
def test_T4_what_cannot_be_trained_on_raises_and_names_the_gen(grammar_engine, how, message):
    _, engine = grammar_engine
    with pytest.raises(InvalidRequestError, match=message):
        engine.rollout(lost, [{"how": how}], seed=0)
    batch = engine.rollout(lost, [{"how": how}, {"how": ""}], seed=0, on_error="return")
    assert all(isinstance(s.error, InvalidRequestError) for s in batch) and len(batch) == 2


def test_T4_bad_calls_say_so(grammar_engine):
    _, engine = grammar_engine
    for args in (None, {"a": 1}, "a", []):
        with pytest.raises(InvalidRequestError, match="list of its arguments"):
            engine.rollout(sums, args, 2)
    with pytest.raises(InvalidRequestError, match="deadline says nothing to a program"):
        engine.rollout(sums, [{"a": 1}], 2, deadline=1.0)
    with pytest.raises(InvalidRequestError, match="n is 0"):
        engine.rollout(sums, [{"a": 1}], 0)
    with engine.training(), pytest.raises(EngineBusyError):
        engine.rollout(sums, [{"a": 1}], 2)
    assert isinstance(sums, rl.Environment) and not isinstance([[1, 2]], rl.Environment)
