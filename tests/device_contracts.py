"""What holds on a GPU whatever its kernels round: shared by tests/device (real), by a test on the fake device, and by benchmarks/gpu.py.

Each contract takes `make(**options) -> Engine` over one small model and returns a sentence on what it compared, or raises.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import phloem as ph
from tests.tiny_models import tiny_config, write_byte_tokenizer, write_hf

__all__ = ["CONTRACTS", "Make", "small_model"]

Make = Callable[..., ph.Engine]
TIE = 5e-2  # a gap between the best two logits that bf16 may turn around


def small_model(folder: Path) -> Path:
    """A random Llama of two layers with heads of 64, as wide as FlashInfer's kernels want it, over a tokenizer of bytes."""
    config = tiny_config(
        hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=1, vocab_size=272, eos_token_id=256
    )
    return write_byte_tokenizer(write_hf(folder, config))


def prompts(count: int = 10) -> list[list[int]]:
    """Behind shared stretches of several lengths, and strangers."""
    rng = random.Random(1)
    trunk = rng.choices(range(256), k=150)
    return [[*trunk[: rng.choice([0, 30, 64, 150])], *rng.choices(range(256), k=rng.randrange(1, 40))] for _ in range(count)]


def params(i: int, *, greedy: bool) -> ph.SamplingParams:
    return ph.SamplingParams(
        max_tokens=6 + i % 5, temperature=0.0 if greedy else 0.9, top_p=(1.0, 0.8)[i % 2], seed=i, ignore_eos=True, logprobs="model", top_logprobs=2
    )  # fmt: skip


def together(engine: ph.Engine, *, greedy: bool = True) -> list[ph.Output]:
    return engine.generate(prompts(), [params(i, greedy=greedy) for i in range(len(prompts()))])


def agree(one: Sequence[ph.Output], other: Sequence[ph.Output]) -> int:
    """Tokens that are equal. A first difference must be a tie within rounding; what follows it is another text."""
    same = 0
    for a, b in zip(one, other, strict=True):
        for at, (x, y) in enumerate(zip(a.logprobs or (), b.logprobs or ())):
            if x.token_id != y.token_id:
                gap = x.top[0][1] - x.top[1][1]
                assert gap < TIE, f"token {at}: {x.token_id} or {y.token_id}, {gap} apart"
                break
            assert abs(x.logprob - y.logprob) < TIE, (x, y)
            same += 1
    return same


def schedules(make: Make) -> str:
    """Cold or cached, alone or together, in small chunks, preempted, without overlap, without graphs: the same text, but for ties."""
    with make() as engine:
        want = together(engine)
        again = together(engine)
        solo = [engine.generate(p, params(i, greedy=True)) for i, p in enumerate(prompts())]
    count = agree(want, again) + agree(want, solo)
    for options in ({"max_step_tokens": 24}, {"cache_mode": "off"}, {"overlap": False}, {"kv_tokens": 256}, {"page_size": 4}):
        with make(**options) as engine:
            count += agree(want, together(engine))
    return f"{count} tokens equal over 7 schedules"


def deterministic(make: Make) -> str:
    """deterministic=True: alone and together give the same logprobs, bit for bit."""
    with make(deterministic=True, cache_mode="off") as engine:
        want = together(engine)
        solo = [engine.generate(p, params(i, greedy=True)) for i, p in enumerate(prompts())]
    for a, b in zip(want, solo, strict=True):
        assert a.token_ids == b.token_ids and a.logprobs == b.logprobs, "not the same bits alone and together"
    return f"{sum(len(o.token_ids) for o in want)} tokens bitwise equal alone and together"


def repeatable(make: Make) -> str:
    """The same requests in the same order on a fresh engine: the same bits, sampled ones too."""
    runs = []
    for _ in range(2):
        with make() as engine:
            runs.append([(o.token_ids, o.logprobs) for o in together(engine, greedy=False)])
    assert runs[0] == runs[1]
    return f"{len(runs[0])} sampled outputs bitwise equal in two runs"


def constrained(make: Make) -> str:
    """Every output is valid by construction, whatever the model says."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    with make() as engine:
        outputs = engine.generate(["Say: "] * 6, ph.SamplingParams(max_tokens=80, temperature=1.0, seed=1), json_schema=schema)
        done = [o for o in outputs if o.finish_reason not in ("length",)]
        for output in done:
            value = json.loads(output.text)
            assert set(value) == {"a", "b"} and value["b"] in ("x", "y"), output.text
    assert done, "none came to its end"
    return f"{len(done)} of {len(outputs)} JSON texts ended, all valid"


CONTRACTS: dict[str, Callable[[Make], str]] = {
    "schedules": schedules, "deterministic": deterministic, "repeatable": repeatable, "constrained": constrained,
}  # fmt: skip


def engine_options(**options: Any) -> dict[str, Any]:
    return {"device": "cuda", "dtype": "bf16", "kv_tokens": 4096, "max_running": 10, "max_step_tokens": 128, **options}
