"""GRPO from random weights: a 105 000-parameter Llama learns to add two digits, with Phloem's rollouts inside the training loop.

    python examples/grpo_arithmetic.py [--seed 0] [--steps 150] [--mode shared|copy]     about 15 seconds of CPU a seed
    python examples/grpo_arithmetic.py --break update     the negative control: weights are never passed on, and nothing is learnt

Prompt `a+b=` (the 55 pairs with a + b <= 9), answer one digit under a grammar, then EOS. Reward 0.1 digit + 0.1 EOS +
0.3 (1 - |d - a - b| / 9) + 0.5 exact. Every step checks that rollout and training forward agree (mean 1e-5, largest 1e-4), and that versions rise.
Prints one JSON line: rewards and exact answers, mean of the first and of the last ten steps.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers

import phloem as ph
from phloem import rl

PAD, BOS, EOS, PLUS, EQUALS = 10, 11, 12, 13, 14
PAIRS = [(a, b) for a in range(10) for b in range(10 - a)]
# Of two float32 forwards that add in different orders: 7e-7 in most steps, 2.5e-5 in the worst of 150, where either is the farther from float64 (docs/rl.md).
MEAN_TOLERANCE, TOLERANCE = 1e-5, 1e-4


@dataclass(frozen=True)
class Result:
    seed: int
    mode: str
    first_reward: float
    first_exact: float
    reward: float
    exact: float
    largest_difference: float
    versions: int
    seconds: float


def make_tokenizer() -> tokenizers.Tokenizer:
    """Ids 0-9 are the digits; 32 in all."""
    vocabulary = {str(d): d for d in range(10)} | {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "+": PLUS, "=": EQUALS}
    vocabulary |= {chr(ord("a") + i): 15 + i for i in range(17)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    return made


def tokenizer_folder(folder: Path) -> Path:
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_model(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            max_position_embeddings=64, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=False,
        )
    )  # fmt: skip


def prompt_of(a: int, b: int) -> list[int]:
    return [BOS, a, PLUS, b, EQUALS]


def reward_of(sample: rl.Sample) -> float:
    a, b, out = sample.prompt_ids[1], sample.prompt_ids[3], sample.output_ids
    is_digit = bool(out) and out[0] < 10
    reward = 0.1 * is_digit + 0.1 * (len(out) == 2 and out[1] == EOS)
    return reward + (0.3 * (1 - abs(out[0] - a - b) / 9) + 0.5 * (out[0] == a + b) if is_digit else 0.0)


def is_exact(sample: rl.Sample) -> bool:
    return bool(sample.output_ids) and sample.output_ids[0] == sample.prompt_ids[1] + sample.prompt_ids[3]


def train(
    seed: int,
    steps: int = 150,
    mode: Literal["shared", "copy"] = "shared",
    broken: Literal["", "commit", "update"] = "",
    threads: int = 1,
) -> Result:
    """broken: leave out the commit (shared weights: the next rollout raises) or the update (copied weights: nothing is learnt)."""
    torch.set_num_threads(threads)
    started, chooser = time.perf_counter(), random.Random(seed)
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    with tempfile.TemporaryDirectory() as folder:
        engine = ph.RolloutEngine.attach(
            model, tokenizer=tokenizer_folder(Path(folder)), share="require" if mode == "shared" else "copy", kv_tokens=8192, max_running=256,
            max_step_tokens=512, threads=threads,
        )  # fmt: skip
    sampling = ph.SamplingParams(max_tokens=2, temperature=1.0)
    rewards, exacts, largest = list[float](), list[float](), 0.0
    with engine:
        for step in range(steps):
            prompts = [prompt_of(*chooser.choice(PAIRS)) for _ in range(16)]
            batch = engine.rollout(
                prompts, sampling, n=16, regex="[0-9]", seed=seed * 100_003 + step, group_ids=list(range(16))
            )
            assert all(span.version == engine.version for s in batch for span in s.spans)
            values = [reward_of(s) for s in batch]
            advantages = rl.group_advantages(batch, values)
            x = batch.tensors(pad_id=PAD)
            logp = rl.token_logprobs(model(x.ids).logits, x)
            if broken != "update":
                apart = ((logp.detach() - x.logprobs_sampled) * x.loss_mask).abs()
                largest = max(largest, float(apart.max()))
                typical = float(apart.sum() / x.loss_mask.sum())
                assert largest <= TOLERANCE and typical <= MEAN_TOLERANCE, (
                    f"step {step}: rollout and forward differ by {largest}, {typical}"
                )
            loss = -(advantages[:, None] * torch.exp(logp - logp.detach()) * x.loss_mask).sum() / x.loss_mask.sum()
            if broken:
                descend(model, optimizer, loss)
            else:
                before = engine.version
                with engine.training():
                    descend(model, optimizer, loss)
                assert engine.version == before + 1
            rewards.append(sum(values) / len(values))
            exacts.append(sum(map(is_exact, batch)) / len(batch))
        engine.check()
        return Result(
            seed, mode + ("" if not broken else f" without {broken}"), mean(rewards[:10]), mean(exacts[:10]), mean(rewards[-10:]), mean(exacts[-10:]),
            largest, engine.version, time.perf_counter() - started,
        )  # fmt: skip


def descend(model: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--mode", choices=("shared", "copy"), default="shared")
    parser.add_argument("--break", dest="broken", choices=("", "commit", "update"), default="")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    mode: Literal["shared", "copy"] = "copy" if args.broken == "update" else args.mode
    print(json.dumps(asdict(train(args.seed, args.steps, mode, args.broken, args.threads))))


if __name__ == "__main__":
    main()
