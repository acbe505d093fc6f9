"""Rollouts inside training (rl G1, G2, G3, G8, G10): commit, update, throughput against transformers' generate, memory, exit.

    python -m benchmarks.rl [--only commit,update,rollout,cycles,exit] [--threads 2]         one JSON line a figure

Same weights (the embedded model, float32), same dtype and threads, same process, best of `--repeat` on both sides.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import phloem as ph
from benchmarks.common import record

TEXTS = [
    "2 + 2 = 4\n3 + 5 =", "The capital of France is", "Once upon a time, in a small village,", "def fibonacci(n):\n    ", "Water boils at",
    "In 1969, the first",
]  # fmt: skip


def smollm(threads: int) -> Any:
    """The embedded model's weights in transformers' LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with ph.RolloutEngine(None, dtype="f32", kv_tokens=64, threads=threads) as engine:
        state = engine.state_dict()
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return model


def emit(line: dict[str, Any]) -> None:
    """The first number of the line is its value."""
    name = line.pop("name")
    key = next(k for k in ("ratio", "p99_ms", "max", "growth", "seconds") if k in line)
    record(key, line.pop(key), "", name, **line)


def best(work: Callable[[], Any], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def commit(model: Any, engine: ph.RolloutEngine) -> dict[str, Any]:
    seconds = []
    for _ in range(200):
        started = time.perf_counter()
        engine.commit()
        seconds.append(time.perf_counter() - started)
    return {
        "name": "commit of shared weights, 135M",
        "median_ms": 1e3 * float(np.median(seconds)),
        "p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "target_ms": 1.0,
    }


def update(model: Any, threads: int, repeat: int) -> dict[str, Any]:
    state = {k: v.detach() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    size = sum(v.numel() * 4 for v in state.values())
    source, target = torch.randn(size // 4), torch.zeros(size // 4)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    copy = best(lambda: target.copy_(source), repeat + 1)
    torch.set_num_threads(threads_before)
    with ph.RolloutEngine(None, dtype="f32", kv_tokens=64, threads=threads) as engine:
        names = list(engine.state_dict())

        def once() -> None:
            with engine.update() as u:
                u.load({name: state[name] for name in names})

        once()  # the second buffer is taken once
        seconds = best(once, repeat)
    return {
        "name": "f32 update, 135M",
        "seconds": seconds,
        "memcpy_seconds": copy,
        "ratio": seconds / copy,
        "target_ratio": 1.5,
        "bytes": size,
    }


def throughput(
    model: Any, engine: ph.RolloutEngine, n: int, prompt: int, new: int, target: float, repeat: int
) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(10, 40_000, prompt).tolist()
    sampling = ph.SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True)

    def ours() -> None:
        engine.flush()
        batch = engine.rollout([ids], sampling, n=n, seed=0)
        assert sum(len(s.output_ids) for s in batch) == n * new

    tensor = torch.tensor([ids] * n)

    def theirs() -> None:
        with torch.no_grad():
            model.generate(
                tensor,
                attention_mask=torch.ones_like(tensor),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                top_k=0,
                pad_token_id=2,
            )

    a, b = best(ours, repeat), best(theirs, max(1, repeat - 1))
    return {
        "name": f"rollout n={n} at {prompt}/{new}",
        "seconds": a,
        "transformers_seconds": b,
        "ratio": b / a,
        "target_ratio": target,
        "tokens_per_second": n * new / a,
    }


def agreement(engine: ph.RolloutEngine) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(10, 40_000, 24).tolist() for _ in range(4)]
    batch = engine.rollout(prompts, ph.SamplingParams(max_tokens=32, ignore_eos=True), n=2, seed=0)
    scored = engine.score([s.token_ids for s in batch], from_position=24)
    same = all(
        [t.sampled for t in row] == s.logprobs_sampled and [t.logprob for t in row] == s.logprobs_model
        for row, s in zip(scored, batch)
    )
    found = engine.verify(batch)
    return {
        "name": "logprob, rollout against training forward, 135M f32",
        "max": found.max,
        "mean": found.mean,
        "target": 1e-5,
        "score_equals_rollout": same,
        "tokens": found.tokens,
    }


def truth(model: Any, engine: ph.RolloutEngine) -> dict[str, Any]:
    """Text prompts: how far the rollouts are from a float64 forward, how far torch's float32 forward is, and the two from each other."""
    import copy

    with ph.RolloutEngine(None, dtype="f32", kv_tokens=64) as own:
        prompts = [own.tokenizer.encode(text) for text in TEXTS]
    batch = engine.rollout(prompts, ph.SamplingParams(max_tokens=32, ignore_eos=True), n=2, seed=0)
    exact, apart = copy.deepcopy(model).double(), list[torch.Tensor]()
    for sample in batch:
        ids, at = torch.tensor([sample.token_ids]), len(sample.prompt_ids)
        with torch.no_grad():
            true, torchs = (
                torch.log_softmax(m(ids).logits[0, at - 1 : -1].double(), -1).gather(-1, ids[0, at:, None])[:, 0]
                for m in (exact, model)
            )
        ours = torch.tensor(sample.logprobs_model, dtype=torch.float64)
        apart.append(torch.stack([ours - torchs, ours - true, torchs - true]).abs())
    all_of = torch.cat(apart, 1)
    most, rms = all_of.amax(1).tolist(), all_of.square().mean(1).sqrt().tolist()
    return {
        "name": "logprob on text, 135M f32: rollout to torch; each to float64",
        "max": most[0],
        "rms": rms[0],
        "target": 1e-5,
        "rollout_to_float64": {"max": most[1], "rms": rms[1]},
        "torch_to_float64": {"max": most[2], "rms": rms[2]},
        "tokens": all_of.shape[1],
    }


def cycles(model: Any, engine: ph.RolloutEngine) -> dict[str, Any]:
    def resident() -> int:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sizes, freed = [], 0
    for i in range(200):
        engine.rollout([[1, 100 + i]], ph.SamplingParams(max_tokens=2, ignore_eos=True), n=2)
        freed = engine.suspend()
        engine.resume()
        engine.commit()
        if i in (20, 199):
            sizes.append(resident())
    pool = engine.resolved.num_pages * engine.resolved.page_bytes
    return {
        "name": "200 suspend, resume, commit cycles",
        "growth": sizes[1] / sizes[0] - 1,
        "target": 0.01,
        "given_back": freed / pool,
    }


def exits() -> list[dict[str, Any]]:
    out = []
    bodies = {
        "exception": "engine.rollout([[1, 5]], ph.SamplingParams(max_tokens=4), n=2); raise ValueError",
        "under way": "engine.submit([[1, 5]], ph.SamplingParams(max_tokens=400, ignore_eos=True), n=8)",
    }
    for name, body in bodies.items():
        code = "import time, phloem as ph\nfrom tests.rl.tiny import attach, tiny_module\nengine = attach(tiny_module())\n"
        code += f"try:\n    {body}\nfinally:\n    print(time.time(), flush=True)\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        out.append({"name": f"process exit, {name}", "seconds": time.time() - float(done.stdout.split()[-1]), "target": 2.0})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="commit,agreement,update,rollout,copied,cycles,exit")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=2)
    args = parser.parse_args()
    wanted = set(args.only.split(","))
    torch.set_num_threads(args.threads)
    model = smollm(args.threads)
    if "update" in wanted:
        emit(update(model, args.threads, args.repeat + 1))
    with ph.RolloutEngine.attach(
        model, share="require", kv_tokens=16 * 640, max_running=16, max_step_tokens=512, threads=args.threads
    ) as engine:
        if "commit" in wanted:
            emit(commit(model, engine))
        if "agreement" in wanted:
            emit(agreement(engine))
            emit(truth(model, engine))
        if "rollout" in wanted:
            emit(throughput(model, engine, 16, 512, 32, 4.0, args.repeat))
            emit(throughput(model, engine, 8, 128, 128, 2.5, args.repeat))
        if "cycles" in wanted:
            emit(cycles(model, engine))
    if "copied" in wanted:  # packed weights of the engine's own, made at each commit, against the same peer
        with ph.RolloutEngine.attach(
            model, share="copy", kv_tokens=16 * 640, max_running=16, max_step_tokens=512, threads=args.threads
        ) as engine:
            emit({**throughput(model, engine, 8, 128, 128, 2.5, args.repeat), "name": "rollout n=8 at 128/128, copied weights"})
    if "exit" in wanted:
        for line in exits():
            emit(line)


if __name__ == "__main__":
    main()
