"""What does a draw cost beside the model's step, and beside torch? One JSON line a case.

    python -m benchmarks.sampling [--quick]

32 rows of 49,152 logits, like a language model's (a broad bulk, some dozens of candidates well above it) and flat (all alike:
the worst case of top-p). The native sampler with one thread, the numpy reference, and torch doing softmax, sort, cumulative sum
and multinomial, one thread too, are timed in turn. Then the executor's own work for 32 decode rows on a runner that does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.common import interleaved, median, record, time_of
from phloem.runtime.backends.base import ForwardBatch, KVCache
from phloem.runtime.executor.local import LocalExecutor
from phloem.runtime.executor.native_sampler import NativeSampler
from phloem.runtime.executor.sampler import ReferenceSampler, Sampler
from phloem.runtime.native import Context
from phloem.runtime.request import SamplingParams
from phloem.runtime.step import FUTURE, Row, SampleRow, SampleSpec, StepPlan

ROWS, VOCAB = 32, 49_152
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
    "top_p+penalty": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1),
    "top_p+logprobs": SamplingParams(temperature=0.8, top_p=0.95, logprobs="both", top_logprobs=20),
}


def logits_like(shape: str) -> torch.Tensor:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2.2 if shape == "language" else 1.0, (ROWS, VOCAB))
    if shape == "language":
        for row in logits:
            row[rng.integers(0, VOCAB, 50)] += rng.exponential(3, 50) + 6
    return torch.from_numpy(logits.astype(np.float32))


def spec_of(sampling: SamplingParams, position: int) -> SampleSpec:
    history = np.random.default_rng(1).integers(0, VOCAB, 1000).tolist()
    return SampleSpec([SampleRow(i, f"r{i}", i, position, i, 0, sampling, history, 500) for i in range(ROWS)])


def torch_draw(logits: torch.Tensor, s: SamplingParams) -> torch.Tensor:
    """What a straightforward torch sampler does; penalties and logprobs are left out, in its favour."""
    if s.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / s.temperature
    if s.top_k:
        values, ids = logits.topk(s.top_k, dim=-1)
        return ids.gather(1, torch.multinomial(values.softmax(dim=-1), 1))
    probabilities = logits.softmax(dim=-1)
    if s.top_p < 1:
        ordered, ids = probabilities.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(dim=-1) - ordered > s.top_p] = 0.0
        return ids.gather(1, torch.multinomial(ordered, 1))
    return torch.multinomial(probabilities, 1)


def draws(sampler: Sampler, logits: torch.Tensor, sampling: SamplingParams) -> Callable[[int], float]:
    def run(rep: int) -> float:
        spec = spec_of(sampling, rep)
        return time_of(lambda: sampler.prepare(spec, range(ROWS))(logits))

    return run


class Idle:
    """A runner whose forward costs nothing."""

    kv: KVCache

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self._logits


def executor_step(sampler: Sampler, logits: torch.Tensor, overlap: bool) -> Callable[[int], float]:
    executor = LocalExecutor(
        Idle(logits), sampler, page_size=16, num_pages=4096, width=VOCAB, max_running=ROWS, max_logits=ROWS, overlap=overlap
    )
    pages = [np.arange(i * 64, i * 64 + 64, dtype=np.int32) for i in range(ROWS)]
    spec = spec_of(CASES["greedy"], 0)

    def run(rep: int) -> float:
        plan = StepPlan(
            rep, [Row(f"r{i}", i, 500 + rep % 500, [FUTURE], pages[i], logits_from=500 + rep % 500) for i in range(ROWS)]
        )
        return time_of(lambda: step(plan))

    def step(plan: StepPlan) -> None:
        ticket = executor.launch(plan)
        executor.sample(ticket, spec)
        assert executor.collect(ticket).failed is None

    return run


def main() -> None:
    repeat = 5 if "--quick" in sys.argv else 30
    torch.set_num_threads(1)
    context = Context(1)
    native = NativeSampler(context, vocab_size=VOCAB, width=VOCAB)
    reference = ReferenceSampler(vocab_size=VOCAB, width=VOCAB)
    for shape in ("language", "flat"):
        logits = logits_like(shape)
        for name, sampling in CASES.items():

            def peer(rep: int, logits: torch.Tensor = logits, sampling: SamplingParams = sampling) -> float:
                return time_of(lambda: torch_draw(logits, sampling))

            times = interleaved(repeat, native=draws(native, logits, sampling), torch=peer)
            slow = interleaved(2, numpy=draws(reference, logits, sampling))
            figures = {who: round(median(t) / ROWS * 1e6, 1) for who, t in (times | slow).items()}
            record(
                "sample_row", figures["native"], "us/row", f"{shape}: {name}", torch=figures["torch"], numpy=figures["numpy"]
            )
    steps = interleaved(
        10 * repeat,
        inline=executor_step(native, logits, False),
        overlap=executor_step(native, logits, True),
        draw=draws(native, logits, CASES["greedy"]),
    )
    for lane in ("inline", "overlap"):
        own = median(steps[lane]) - median(steps["draw"])
        record("executor_step", own * 1e6, "us", f"{ROWS} decode rows, {lane}: pack and hand over, without the draws")
    context.close()


if __name__ == "__main__":
    main()
