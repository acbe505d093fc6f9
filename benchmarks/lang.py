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
from typing import Any

import phloem
import phloem.lang as sgl
from phloem.lang.testing import Scripted


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
    """The same sampling Requests, by run_batch and by the engine's own generate; alternating, on an empty cache each."""
    engine = phloem.Engine(kv_tokens=32_768, max_running=64)
    shots = "".join(f"Q: What is {i} and {i + 1}?\nA: It is {2 * i + 1}.\n" for i in range(12))

    @sgl.function
    def qa(s: sgl.State, n: int) -> None:
        s += shots + f"Q: What is {n} and {n + 7}?\nA:" + sgl.gen("a", max_tokens=tokens, ignore_eos=True)

    items = [{"n": n} for n in range(count)]
    walls: dict[str, list[float]] = {"raw": [], "lang": []}
    cpu: dict[str, list[float]] = {"raw": [], "lang": []}
    qa.run_batch(items[:8], backend=engine, temperature=0)
    for _ in range(tries):
        engine.flush()
        start, used = time.perf_counter(), time.process_time()
        runs = qa.run_batch(items, backend=engine, temperature=0)
        walls["lang"].append(time.perf_counter() - start)
        cpu["lang"].append(time.process_time() - used)
        records = [r for r in runs.records if r.kind == "gen"]
        engine.flush()
        start, used = time.perf_counter(), time.process_time()
        raw = engine.generate([list(r.request.token_ids) for r in records], [r.request.sampling for r in records])
        walls["raw"].append(time.perf_counter() - start)
        cpu["raw"].append(time.process_time() - used)
        assert [o.token_ids for o in raw] == [r.output.token_ids for r in records if r.output is not None]
    wall, work = min(walls["lang"]) / min(walls["raw"]), min(cpu["lang"]) / min(cpu["raw"])
    report("run_batch", programs=count, tokens=tokens, lang_s=round(min(walls["lang"]), 2), raw_s=round(min(walls["raw"]), 2), over=round(wall - 1, 4),
           cpu_over=round(work - 1, 4), hit=round(runs.usage.hit, 4), recomputed=runs.usage.recomputed)  # fmt: skip
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
    parser.add_argument("--tries", type=int, default=3)
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
