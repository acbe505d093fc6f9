"""What the language costs: `+=`, `fork(1000)`, 10,000 live branches, a plan of 1,000 programs, and run_batch over raw engine calls.

python -m benchmarks.lang            one JSON line each
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import phloem
import phloem.lang as sgl
from phloem.lang.testing import Scripted


@dataclass(frozen=True)
class Spent:
    """By one side of a pair. wall, cpu: seconds.   tokens: computed by the model, of prompts and of outputs."""

    wall: float
    cpu: float
    steps: int
    requests: int
    tokens: int


def report(name: str, **values: Any) -> None:
    print(json.dumps({"benchmark": f"lang.{name}", **values}), flush=True)


def best(repeat: int, make: Callable[[], float]) -> float:
    """CPU seconds of the quickest of some tries: the machine is shared."""
    found = []
    for _ in range(repeat):
        gc.collect()
        found.append(make())
    return min(found)


def append_and_fork() -> None:
    literal = "a literal of some thirty chars."
    gens = [sgl.gen(f"g{i}", max_tokens=8) for i in range(2000)]
    found: dict[str, float] = {}

    @sgl.function
    def program(s: sgl.State) -> None:
        def literals() -> float:
            state = s.fork(1)[0]
            start = time.process_time()
            for _ in range(10_000):
                state += literal
            return (time.process_time() - start) / 10_000

        def handles() -> float:
            state = s.fork(1)[0]
            start = time.process_time()
            for handle in gens:
                state += handle
            return (time.process_time() - start) / len(gens)

        def fork() -> float:
            start = time.process_time()
            s.fork(1000)
            return time.process_time() - start

        s += "prefix"
        found.update(literal=best(5, literals), gen=best(5, handles), fork=best(5, fork))
        raise KeyboardInterrupt  # nothing of it is to run

    with Scripted({}) as backend, contextlib.suppress(KeyboardInterrupt):
        program.run(backend=backend)
    start = time.process_time()
    for i in range(2000):
        sgl.gen(f"h{i}", max_tokens=8, temperature=0.5)
    made = (time.process_time() - start) / 2000
    report(
        "append",
        literal_us=round(found["literal"] * 1e6, 2),
        gen_us=round(found["gen"] * 1e6, 2),
        making_a_gen_us=round(made * 1e6, 2),
    )
    report("fork_1000", ms=round(found["fork"] * 1e3, 2))


def live_branches(count: int) -> None:
    @sgl.function
    def program(s: sgl.State) -> int:
        s += "root " * 20
        tracemalloc.start()
        branches = s.fork(count)
        for i, branch in enumerate(branches):
            branch += f"{i}"
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        handle = sgl.gen("v", max_tokens=2)
        for branch in branches[:1000]:
            branch += handle
        assert [branch["v"] for branch in branches[:1000]] == ["ab"] * 1000
        return size

    with Scripted({"v": "ab"}, kv_tokens=2_000_000) as backend:
        start = time.process_time()
        run = program.run(backend=backend)
        report(
            "branches", live=count, drawing=1000, mb=round(run.value / 1e6, 1), seconds=round(time.process_time() - start, 2)
        )


def plan(count: int) -> None:
    @sgl.function
    def program(s: sgl.State) -> None:
        s += "A prefix that all of them share, of a few words. " * 10
        with s.fork(count) as branches:
            for i, branch in enumerate(branches):
                branch += f"Question {i}: why?\nAnswer:" + sgl.gen("a", stop="\n", max_tokens=16)

    engine = phloem.Engine(kv_tokens=2048)
    start = time.process_time()
    made = program.plan(backend=engine)
    report("plan", programs=count, seconds=round(time.process_time() - start, 3), prompt=made.prompt, unique=made.unique)
    engine.close()


def batch(count: int, tokens: int, tries: int) -> None:
    """The same sampling Requests, by run_batch and by the engine's own generate; in pairs, first one then the other first, on an empty cache each."""
    engine = phloem.Engine(kv_tokens=32_768, max_running=64)
    shots = "".join(f"Q: What is {i} and {i + 1}?\nA: It is {2 * i + 1}.\n" for i in range(12))

    @sgl.function
    def qa(s: sgl.State, n: int) -> None:
        s += shots + f"Q: What is {n} and {n + 7}?\nA:" + sgl.gen("a", max_tokens=tokens, ignore_eos=True)

    items = [{"n": n} for n in range(count)]
    runs = qa.run_batch(items, backend=engine, temperature=0)  # untimed: it touches the whole pool's memory for the first time
    records = [r for r in runs.records if r.kind == "gen"]
    requests = [list(r.request.token_ids) for r in records], [r.request.sampling for r in records]
    wanted = [r.output.token_ids for r in records]

    def language() -> list[Any]:
        return [r.output.token_ids for r in qa.run_batch(items, backend=engine, temperature=0).records if r.kind == "gen"]

    def raw() -> list[Any]:
        return [output.token_ids for output in engine.generate(*requests)]

    sides = {"lang": language, "raw": raw}
    spent: dict[str, list[Spent]] = {"lang": [], "raw": []}
    for number in range(tries):
        for name in sorted(sides, reverse=bool(number % 2)):
            engine.flush()
            gc.collect()
            before = engine.stats()
            start, used = time.perf_counter(), time.process_time()
            found = sides[name]()
            took, worked = time.perf_counter() - start, time.process_time() - used
            after = engine.stats()
            assert sorted(found) == sorted(wanted)
            spent[name].append(
                Spent(
                    wall=took,
                    cpu=worked,
                    steps=after.steps - before.steps,
                    requests=after.requests - before.requests,
                    tokens=after.prefill_tokens + after.decode_tokens - before.prefill_tokens - before.decode_tokens,
                )
            )
    for name, each in spent.items():
        last = each[-1]
        report(
            f"run_batch.{name}", programs=count, tokens=tokens, wall_s=round(min(s.wall for s in each), 2), cpu_s=round(min(s.cpu for s in each), 2),
            steps=last.steps, requests=last.requests, tokens_computed=last.tokens, tokens_a_step=round(last.tokens / last.steps, 1),
        )  # fmt: skip
    pairs = list(zip(spent["lang"], spent["raw"]))
    report(
        "run_batch.over", programs=count, tokens=tokens, pairs=len(pairs), wall=round(median(x.wall / y.wall for x, y in pairs) - 1, 4),
        cpu=round(median(x.cpu / y.cpu for x, y in pairs) - 1, 4), wall_pairs=[round(x.wall / y.wall - 1, 4) for x, y in pairs],
        of_the_quickest=round(min(x.wall for x, _ in pairs) / min(y.wall for _, y in pairs) - 1, 4), hit=round(runs.usage.hit, 4), recomputed=runs.usage.recomputed, again=runs.usage.again,
    )  # fmt: skip
    engine.close()


def importing() -> None:
    code = "import time; t = time.process_time(); import phloem.lang as s; s.gen, s.function, s.State; print((time.process_time() - t) * 1e3)"
    found = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(5)
    )
    report("import", ms=round(found, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=["append", "branches", "plan", "import", "batch"])
    options = parser.parse_args()
    if "append" in options.only:
        append_and_fork()
    if "branches" in options.only:
        live_branches(10_000)
    if "plan" in options.only:
        plan(1000)
    if "import" in options.only:
        importing()
    if "batch" in options.only:
        batch(options.programs, options.tokens, options.tries)


if __name__ == "__main__":
    main()
