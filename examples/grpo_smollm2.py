"""GRPO on SmolLM2-135M, in float32 on the CPU: short sums, answered as a bare number. Minutes; not part of the test suite.

    python examples/grpo_smollm2.py [--steps 80] [--threads 2]

4 prompts x 8 samples a step, at most 8 new tokens; reward 0.5 for the format (a number and nothing else), 0.5 for the right one. The
last four blocks and the norms are trained. Weights are shared with the engine: a step commits them without a copy. Prints one JSON line a step, with the
largest difference between the rollouts' logprobs and the training forward's.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from typing import Any

import torch

import phloem as ph
from phloem import rl


def make_model(threads: int) -> tuple[Any, Any]:
    """The embedded model in transformers, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with ph.RolloutEngine(None, dtype="f32", kv_tokens=64, threads=threads) as engine:
        state, tokenizer = engine.state_dict(), engine.tokenizer
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return model, tokenizer


def reward_of(text: str, answer: int) -> tuple[float, float]:
    match = re.fullmatch(r"\s*(\d+)\.?\s*", text)
    return 0.5 * (match is not None), 0.5 * (match is not None and int(match[1]) == answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = make_model(args.threads)
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or any(f"layers.{i}." in name for i in range(26, 30)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)
    chooser = random.Random(args.seed)
    sampling = ph.SamplingParams(max_tokens=8, temperature=1.0)
    with ph.RolloutEngine.attach(
        model, tokenizer=tokenizer, share="require", kv_memory="256MiB", threads=args.threads
    ) as engine:
        for step in range(args.steps):
            sums = [(chooser.randint(1, 9), chooser.randint(1, 9)) for _ in range(4)]
            prompts = [engine.tokenizer.encode(f"2 + 2 = 4\n{a} + {b} =") for a, b in sums]
            batch = engine.rollout(prompts, sampling, n=8, seed=args.seed * 100_003 + step, group_ids=list(range(4)))
            scores = [
                reward_of(engine.tokenizer.decode(s.output_ids).split("\n")[0], sum(sums[int(s.group_id)])) for s in batch
            ]
            advantages = rl.group_advantages(batch, [f + c for f, c in scores])
            x = batch.tensors(pad_id=2)
            logp = rl.token_logprobs(model(x.ids).logits, x)
            apart = float(((logp.detach() - x.logprobs_sampled) * x.loss_mask).abs().max())
            loss = -(advantages[:, None] * torch.exp(logp - logp.detach()) * x.loss_mask).sum() / x.loss_mask.sum()
            with engine.training():
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            count = len(scores)
            print(json.dumps({"step": step, "format": 2 * sum(f for f, _ in scores) / count, "correct": 2 * sum(c for _, c in scores) / count, "largest_difference": apart}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
