"""What does a step cost the host? Plan, commit, sample spec and deltas against an executor that computes nothing.

    python -m benchmarks.scheduler [--quick]

Running sequences decode at a context of 512 tokens each; `waiting` ones stand in the queue behind a full batch, or, with one
free seat, are looked through and admitted. One JSON line each.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from dataclasses import dataclass

from benchmarks.common import median, record
from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.request import Request, SamplingParams
from phloem.runtime.step import Sampled, SampleSpec, StepPlan, StepResult

VOCAB = 49_152


@dataclass(slots=True)
class NullTicket:
    plan: StepPlan
    result: StepResult


class NullExecutor:
    """Draws the same token for everyone, at no cost."""

    width, num_pages, page_size = VOCAB, 1 << 16, 16

    def launch(self, plan: StepPlan) -> NullTicket:
        return NullTicket(plan, StepResult(plan.step))

    def sample(self, ticket: NullTicket, spec: SampleSpec) -> None:
        ticket.result.sampled = [Sampled(row.request_id, 7) for row in spec.rows]

    def collect(self, ticket: NullTicket) -> StepResult:
        return ticket.result

    def reset(self) -> None: ...
    def close(self) -> None: ...


def make_core(max_running: int, overlap: bool) -> EngineCore:
    settings = CoreSettings(
        page_size=16, num_pages=1 << 16, max_context=8192, vocab_size=VOCAB, width=VOCAB,
        max_running=max_running, max_step_tokens=4096, overlap=overlap, eos_ids=frozenset((2,)), seed=0,
    )  # fmt: skip
    return EngineCore(settings, NullExecutor())


def request(rng: random.Random, name: str, length: int, max_tokens: int, stem: tuple[int, ...] = ()) -> Request:
    prompt = stem + tuple(rng.randrange(VOCAB) for _ in range(length - len(stem)))
    return Request(id=name, token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def decode_steps(running: int, waiting: int, overlap: bool, steps: int) -> list[float]:
    rng, core = random.Random(0), make_core(running, overlap)
    for i in range(running):
        core.add(request(rng, f"r{i}", 512, 4096))
    while core.stats().waiting or core.stats().decode_tokens < running:
        core.step()
    stems = [tuple(rng.randrange(VOCAB) for _ in range(256)) for _ in range(16)]
    for i in range(waiting):
        core.add(request(rng, f"w{i}", 512, 16, rng.choice(stems)))
    for _ in range(20):
        core.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - start)
    return times


def admissions(waiting: int) -> float:
    """Seconds a request for a queue that drains through 8 seats, one token each: what ordering and admitting cost."""
    rng, core = random.Random(1), make_core(8, False)
    stems = [tuple(rng.randrange(VOCAB) for _ in range(256)) for _ in range(16)]
    for i in range(waiting):
        core.add(request(rng, f"w{i}", 512, 1, rng.choice(stems)))
    start = time.perf_counter()
    while core.has_work:
        core.step()
    return (time.perf_counter() - start) / waiting


def main() -> None:
    quick = "--quick" in sys.argv
    steps = 100 if quick else 600
    gc.collect()
    for running in (1, 32) if quick else (1, 8, 32, 64, 256):
        for overlap in (False, True):
            times = decode_steps(running, 0, overlap, steps)
            record(
                "scheduler: host time a step", median(times) * 1e3, "ms", f"{running} decodes, overlap {overlap}",
                p99=round(sorted(times)[int(len(times) * 0.99)] * 1e3, 3),
            )  # fmt: skip
    for waiting in (64,) if quick else (64, 1000, 4096):
        times = decode_steps(32, waiting, False, steps // 4)
        record("scheduler: host time a step", median(times) * 1e3, "ms", f"32 decodes, {waiting} waiting behind a full batch")
    for waiting in (64, 256) if quick else (64, 512, 4096):
        record("scheduler: admit, prefill, finish", admissions(waiting) * 1e6, "us", f"{waiting} waiting, 16 stems, 8 seats")


if __name__ == "__main__":
    main()
