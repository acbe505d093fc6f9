"""It learns, or the test fails (rl §10, G9): the tiny GRPO task on three seeds, and its negative controls."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest
import torch

import phloem as ph
from examples import grpo_arithmetic as task
from phloem import rl
from phloem.runtime.errors import UncommittedWeightsError
from tests.rl.tiny import VOCABULARY, attach, tiny_module

GATE_REWARD, GATE_EXACT, GATE_EACH = 0.65, 0.35, 0.55


@pytest.mark.parametrize("mode", ["shared", "copy"])
def test_a_few_steps_learn_to_draw_digits(mode):
    """The short twin: reward is the fraction of ids below 10 among 8 drawn."""
    module = tiny_module()
    with torch.no_grad():
        module.lm_head.weight.mul_(0.1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.0)
    rewards = []
    with attach(module, share="require" if mode == "shared" else "copy") as engine:
        for step in range(25):
            batch = engine.rollout([[1, 5], [1, 6]], ph.SamplingParams(max_tokens=8, ignore_eos=True), n=16, seed=step)
            values = [sum(t < 10 for t in s.output_ids) / 8 for s in batch]
            x = batch.tensors()
            logp = rl.token_logprobs(module(x.ids).logits, x)
            assert ((logp.detach() - x.logprobs_sampled) * x.loss_mask).abs().max() <= 1e-5
            loss = -(rl.group_advantages(batch, values)[:, None] * logp * x.loss_mask).sum() / x.loss_mask.sum()
            with engine.training():
                task.descend(module, optimizer, loss)
            rewards.append(sum(values) / len(values))
    assert sum(rewards[:3]) / 3 < 0.25 < 0.6 < sum(rewards[-3:]) / 3, rewards
    assert VOCABULARY == 96


def test_G9_without_commit_it_raises_in_shared_mode():
    with pytest.raises(UncommittedWeightsError):
        task.train(0, steps=2, mode="shared", broken="commit")


def pool() -> ProcessPoolExecutor:
    """A process a core: the runs know nothing of one another."""
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))


def ensure_gated(results: list[Any], steps: int) -> None:
    assert sum(r.reward for r in results) / 3 >= GATE_REWARD and sum(r.exact for r in results) / 3 >= GATE_EXACT, results
    assert all(r.reward >= GATE_EACH for r in results), results
    assert all(r.versions == steps for r in results)


def ensure_stuck(result: Any) -> None:
    assert result.reward <= 0.50 and result.exact <= 0.20, result


def test_G9_the_tiny_task_passes_its_gates_on_three_seeds_and_without_update_it_does_not():
    """In 90 steps of the 150, where these seeds are past the gates already (0.75, 0.69 and 0.72 on an AMD Zen 4)."""
    with pool() as workers:
        learning: list[Future[Any]] = [workers.submit(task.train, seed, steps=90) for seed in range(3)]
        stuck = workers.submit(task.train, 0, steps=60, mode="copy", broken="update")
        ensure_gated([run.result() for run in learning], 90)
        ensure_stuck(stuck.result())


@pytest.mark.slow
def test_G9_the_whole_task_passes_its_gates_on_three_seeds():
    ensure_gated([task.train(seed, steps=150) for seed in range(3)], 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_G9_no_seed_learns_without_update(seed):
    ensure_stuck(task.train(seed, steps=150, mode="copy", broken="update"))
