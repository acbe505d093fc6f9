"""The race: whole-engine figures, each beside its peer in the same run, interleaved, medians and ratios.

    python -m benchmarks.race [--dtype f32] [--repeat 3] [--only prefill,decode,b,c,e,g,h,start]

prefill  one prompt of 512 and of 2,048 tokens                      against llama-bench pp512, pp2048
decode   one stream, 128 tokens after a prompt of 128               against llama-bench tg128
b        32 streams, 64 in / 128 out                                against vLLM and llama-batched-bench
c        64 questions of 32 tokens behind 1,024 shared, 16 out      against vLLM; 16 run at a time, in both
e        8 roots of 512, 4 branches of 8, 4 children of 8, 32 out   against vLLM; 16 at a time, levels in lock step, in both
g        a prompt of 2,048 tokens again: tokens computed, TTFT      one token must be recomputed
h        8 streams of 64 in / 256 out meet a prompt of 1,500        longest stall, beside a step of one chunk; tokens each got
start    engine from nothing to the first token
Every repetition draws new ids, so no cache survives from one to the next. Each begins with one that is not counted: a pool is written
for the first time once in its life, and in a virtual machine that may take as long as all the computing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import phloem as ph
from benchmarks.common import interleaved, median, note, random_ids, record
from benchmarks.peers import LlamaCpp, Vllm
from phloem.runtime.errors import PhloemError

GREEDY = {"temperature": 0.0, "ignore_eos": True}
KV_TOKENS = 12_288  # workload e and its cache; few enough that the first repetition has written most of them


def sampling(n: int) -> ph.SamplingParams:
    return ph.SamplingParams(max_tokens=n, **GREEDY)  # type: ignore[arg-type]


class Ours:
    def __init__(self, dtype: str, threads: int, running: int) -> None:
        self.engine = ph.Engine(dtype=dtype, threads=threads, kv_tokens=KV_TOKENS, max_running=running)
        self.engine.generate(random_ids(5, 64), sampling(4))

    def prefill(self, seed: int, length: int) -> float:
        ids = random_ids(seed, length)
        start = time.perf_counter()
        self.engine.generate(ids, sampling(1))
        return length / (time.perf_counter() - start)

    def decode(self, seed: int, prompt: int, new: int) -> float:
        times: list[float] = []
        for delta in self.engine.stream(random_ids(seed, prompt), sampling(new)):
            times.append(time.perf_counter())
            last = len(delta.token_ids)
        assert last
        return (new - 1) / (times[-1] - times[0])

    def generate(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        outputs = self.engine.generate(prompts, sampling(new))
        return time.perf_counter() - start, [o.token_ids for o in outputs]


Generate = Callable[[list[list[int]], int], tuple[float, list[list[int]]]]


def shared_prefix(run: Generate, seed: int) -> float:
    """Seconds of workload c."""
    prefix = random_ids(seed, 1024)
    return run([prefix + random_ids(seed * 1000 + i, 32) for i in range(64)], 16)[0]


def tree(run: Generate, seed: int) -> float:
    """Seconds of workload e, level by level."""
    roots = [random_ids(seed * 1000 + r, 512) for r in range(8)]
    level1 = [root + random_ids(seed * 1000 + 100 + r * 10 + b, 8) for r, root in enumerate(roots) for b in range(4)]
    first, outputs = run(level1, 32)
    level2 = [
        p + o + random_ids(seed * 100_000 + i * 10 + k, 8) for i, (p, o) in enumerate(zip(level1, outputs)) for k in range(4)
    ]
    return first + run(level2, 32)[0]


@contextmanager
def peer(running: int) -> Iterator[Vllm | None]:
    """A vLLM that runs so many sequences at once, warmed up; None where there is none."""
    vllm = Vllm(running)
    if not vllm.found():
        yield None
        return
    note("starting vLLM ...")
    vllm.start()
    try:
        vllm.generate([random_ids(1, 64)], 4)
        yield vllm
    finally:
        vllm.stop()


def measured(repeat: int, **runs: Callable[[int], float]) -> dict[str, list[float]]:
    for name in runs.keys() & {"phloem", "vllm"}:  # llama.cpp starts anew each time, and warms itself up
        runs[name](-1)
    return interleaved(repeat, **runs)


def report(
    name: str, workload: str, results: dict[str, list[float]], unit: str, higher_is_better: bool, **extra: object
) -> None:
    ours = median(results["phloem"])
    peers = {k: median(v) for k, v in results.items() if k != "phloem"}
    ratios = {k: round(ours / v if higher_is_better else v / ours, 3) for k, v in peers.items()}
    record(
        name,
        ours,
        unit,
        workload,
        peers={k: round(v, 3) for k, v in peers.items()},
        ratio=ratios,
        runs=len(results["phloem"]),
        **extra,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="f32", choices=["f32", "bf16", "q8", "q4"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="prefill,decode,b,c,e,g,h,start")
    args = parser.parse_args()
    parts = args.only.split(",")
    llama = LlamaCpp({"f32": "f32", "bf16": "bf16", "q8": "q8_0", "q4": "q4_0"}[args.dtype], args.threads)
    if not llama.found():
        note("llama.cpp is not there (benchmarks/peers/setup.sh llama): its columns are left out.")
    if not Vllm(1).found():
        note("vLLM is not there (benchmarks/peers/setup.sh vllm): its columns are left out.")
    ours = Ours(args.dtype, args.threads, running=32)
    extra = {"dtype": args.dtype, "threads": args.threads}
    seeds = iter(range(10, 10_000))
    if "prefill" in parts:
        for length in (512, 2048):
            runs = {"phloem": lambda _, n=length: ours.prefill(next(seeds), n)}
            if llama.found():
                runs["llama.cpp"] = lambda _, n=length: llama.bench(n, 0)
            report(f"prefill_{length}", f"one prompt of {length} tokens", measured(args.repeat, **runs), "tok/s", True, **extra)
    if "decode" in parts:
        runs = {"phloem": lambda _: ours.decode(next(seeds), 128, 128)}
        if llama.found():
            runs["llama.cpp"] = lambda _: llama.bench(0, 128)
        report("decode_1", "one stream, 128 in / 128 out", measured(args.repeat, **runs), "tok/s", True, **extra)
    if "b" in parts:
        with peer(32) as vllm:
            runs = {"phloem": lambda _: 32 * 128 / ours.generate([random_ids(next(seeds), 64) for _ in range(32)], 128)[0]}
            if vllm:
                runs["vllm"] = lambda _: 32 * 128 / vllm.generate([random_ids(next(seeds), 64) for _ in range(32)], 128)[0]
            if llama.found():
                runs["llama.cpp"] = lambda _: llama.batched(64, 128, 32)
            report("b_32_streams", "32 streams, 64 in / 128 out", measured(args.repeat, **runs), "out tok/s", True, **extra)
    if "c" in parts or "e" in parts:
        sixteen = Ours(args.dtype, args.threads, running=16)
        with peer(16) as vllm:
            for part, name, workload, run in (
                ("c", "c_shared_prefix", "64 x (1,024 shared + 32) in / 16 out, 16 at a time", shared_prefix),
                ("e", "e_tree", "8 x 512, 4 x 8, 4 x 8 in / 32 out a node, 16 at a time", tree),
            ):
                if part in parts:
                    runs = {"phloem": lambda _, run=run: run(sixteen.generate, next(seeds))}
                    if vllm:
                        runs["vllm"] = lambda _, run=run: run(vllm.generate, next(seeds))
                    report(name, workload, measured(args.repeat, **runs), "s", False, **extra)
        sixteen.engine.close()
    if "g" in parts:
        ids = random_ids(next(seeds), 2048)
        cold = ours.engine.generate(ids, sampling(1))
        before = ours.engine.stats().prefill_tokens
        start = time.perf_counter()
        warm = ours.engine.generate(ids, sampling(1))
        seconds = time.perf_counter() - start
        assert warm.token_ids == cold.token_ids
        computed = ours.engine.stats().prefill_tokens - before
        record(
            "g_warm_ttft",
            seconds * 1e3,
            "ms",
            "2,048 tokens again",
            computed_tokens=computed,
            cached=warm.usage.cached_tokens,
            **extra,
        )
    if "h" in parts:
        stall(args.dtype, args.threads)
    if "start" in parts:
        del ours
        gc.collect()
        code = "import time,phloem as ph\ne=ph.Engine()\ne.generate('a',ph.SamplingParams(max_tokens=1))\ne.close()"
        times = []
        for _ in range(args.repeat):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - start)
        record("start", median(times), "s", "process start to first token, embedded model, exit included", runs=args.repeat)


def stall(dtype: str, threads: int) -> None:
    """h: the longest gap between two tokens of any of 8 streams while a prompt of 1,500 tokens is computed, beside the time of a step with
    a full chunk at position 0 and at the prompt's end. Each stream that gets a token in each step waits for one step at a time."""
    import asyncio

    async def run() -> dict[str, float]:
        async with ph.AsyncEngine(dtype=dtype, threads=threads, kv_tokens=65_536) as engine:
            await engine.generate(random_ids(3, 64), sampling(4))
            start = time.perf_counter()
            await engine.generate(random_ids(4, 1500), sampling(1))
            alone = time.perf_counter() - start
            start = time.perf_counter()
            await engine.generate(random_ids(6, engine.config.max_step_tokens), sampling(1))
            chunk = time.perf_counter() - start
            last = engine.config.max_step_tokens
            ids = random_ids(8, 1500)
            await engine.generate(ids[:-last], sampling(1))
            start = time.perf_counter()
            await engine.generate(ids, sampling(1))
            last_chunk = time.perf_counter() - start
            stamps: list[list[float]] = [[] for _ in range(8)]

            async def stream(i: int) -> None:
                async for _ in engine.stream(random_ids(50 + i, 64), sampling(256)):
                    stamps[i].append(time.perf_counter())

            tasks = [asyncio.create_task(stream(i)) for i in range(8)]
            while min(map(len, stamps)) < 32:
                await asyncio.sleep(0.01)
            steps, begin = (await engine.stats()).steps, time.perf_counter()
            await engine.generate(random_ids(7, 1500), sampling(1))
            steps, end = (await engine.stats()).steps - steps, time.perf_counter()
            await asyncio.gather(*tasks)
            gaps = [b - a for s in stamps for a, b in itertools.pairwise(s) if b > begin and a < end + 0.05]
            got = min(sum(begin < stamp <= end for stamp in s) for s in stamps)
            return {
                "gap": max(gaps), "chunk": chunk, "last_chunk": last_chunk, "ttft": end - begin, "alone": alone, "steps": steps, "got": got,
            }  # fmt: skip

    found = asyncio.run(run())
    gap = found["gap"]
    record(
        "h_longest_stall", gap * 1e3, "ms", "8 streams, then 1,500 tokens", one_chunk_ms=round(found["chunk"] * 1e3, 1),
        last_chunk_ms=round(found["last_chunk"] * 1e3, 1), in_chunks=round(gap / found["chunk"], 2),
        in_last_chunks=round(gap / found["last_chunk"], 2), long_ttft_ms=round(found["ttft"] * 1e3, 1), alone_ms=round(found["alone"] * 1e3, 1),
        steps=int(found["steps"]), tokens_of_each_stream_meanwhile=int(found["got"]), dtype=dtype, threads=threads,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except PhloemError as error:
        sys.exit(f"{type(error).__name__}: {error}")
