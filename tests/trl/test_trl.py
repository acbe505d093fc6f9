"""Routes A and B of phloem.rl.trl, each trained for five steps by the pinned TRL on the CPU: `make test-trl`. Skipped without TRL."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl", reason="make test-trl runs these in an environment of their own")
pytestmark = pytest.mark.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

import phloem as ph  # noqa: E402
from examples import grpo_arithmetic as task  # noqa: E402
from phloem import rl  # noqa: E402
from phloem.runtime.errors import ConfigError, InvalidRequestError  # noqa: E402

STEPS = 5


def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Low digits first: something that a few steps can move, with a grammar and without."""
    return [float(bool(ids) and ids[0] < 5) for ids in completion_ids]


def trainer_of(folder: Path, model: Any, **given: Any) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(task.tokenizer_folder(folder) / "tokenizer.json"),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
    )
    changes = given.pop("config", {})
    config = trl.GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], max_steps=STEPS, num_generations=4,
        per_device_train_batch_size=8, max_completion_length=4, learning_rate=3e-3, logging_steps=1, save_strategy="no", seed=1, temperature=1.0,
        disable_tqdm=True, **changes,
    )  # fmt: skip
    prompts = [f"{a}+{b}=" for a, b in task.PAIRS]
    return trl.GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        **given,
    )


def history(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "loss" in line]


def run(folder: Path, route: str, **constraint: Any) -> tuple[list[dict[str, float]], rl.RolloutEngine]:
    folder.mkdir()
    model = task.make_model(0)
    engine = rl.RolloutEngine.attach(
        model, tokenizer=str(task.tokenizer_folder(folder)), share="require", kv_tokens=4096, threads=1
    )
    with engine:
        if route == "A":
            trainer = trainer_of(folder, model, rollout_func=rl.trl.make_rollout_func(engine, **constraint))
        else:
            trainer = trainer_of(folder, model)
            rl.trl.install(trainer, engine, **constraint)
        trainer.train()
        assert engine.version >= STEPS - 1
        engine.check()
    return history(trainer), engine


def test_A_and_B_train_and_agree_step_for_step(tmp_path: Path) -> None:
    a, _ = run(tmp_path / "a", "A")
    b, _ = run(tmp_path / "b", "B")
    assert len(a) == len(b) == STEPS
    for left, right in zip(a, b):
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-4)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=2e-2, abs=1e-4)
        assert left["reward"] == right["reward"]
    assert any(line["grad_norm"] > 0 for line in a)
    ratios = [v for line in b for k, v in line.items() if "importance_sampling_ratio/mean" in k]
    assert ratios and all(r == pytest.approx(1.0, abs=1e-4) for r in ratios)  # TRL sees the numbers that it recomputes


def test_under_a_grammar_the_ratio_stays_one_and_it_is_said(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        b, _ = run(tmp_path / "b", "B", regex="[0-9]+")
    assert any("full vocabulary" in str(w.message) for w in told)
    ratios = [v for line in b for k, v in line.items() if "importance_sampling_ratio/mean" in k]
    assert ratios and all(r == pytest.approx(1.0, abs=1e-3) for r in ratios)


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="repetition_penalty"):
        rl.trl.sampling_of(
            trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], repetition_penalty=1.2)
        )
    model = task.make_model(0)
    with (
        rl.RolloutEngine.attach(model, kv_tokens=512, threads=1) as engine,
        pytest.raises(ConfigError, match="make_rollout_func"),
    ):
        rl.trl.install(object(), engine)
    assert torch.is_grad_enabled() and ph.RolloutEngine is rl.RolloutEngine
