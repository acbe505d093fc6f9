"""One JSON line a run: commit, machine, workload, metric. What every benchmark here shares.

Compare only figures of one run on one machine: these machines are small and noisy, so peers are interleaved with us and
medians and ratios are what counts.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """The commit that is measured, with a + when the tree differs from it."""
    try:
        run = ["git", "-C", str(ROOT)]
        head = subprocess.check_output([*run, "rev-parse", "--short=10", "HEAD"], text=True).strip()
        dirty = subprocess.check_output([*run, "status", "--porcelain", "--", "python", "kernels"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if dirty else "")


def machine() -> str:
    name, flags = platform.machine(), ""
    try:
        text = Path("/proc/cpuinfo").read_text()
        fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
        fields = {k.strip(): v.strip() for k, v in fields.items()}
        name = f"{fields.get('model name', name)} family {fields.get('cpu family')} model {fields.get('model')}"
        flags = " ".join(f for f in ("avx2", "avx512f", "avx512_vnni") if f" {f}" in " " + fields.get("flags", ""))
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} cores, {flags}".rstrip(", ")


def record(metric: str, value: float, unit: str, workload: str, **extra: Any) -> dict[str, Any]:
    """Print the line of one run, and keep it under benchmarks/results/ (not in the repository)."""
    line = {"metric": metric, "value": round(value, 5), "unit": unit, "workload": workload, **extra}
    line |= {"commit": commit(), "machine": machine(), "time": time.strftime("%Y-%m-%dT%H:%M:%S")}
    print(json.dumps(line), flush=True)
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    with (folder / f"{time.strftime('%Y-%m-%d')}.jsonl").open("a") as f:
        f.write(json.dumps(line) + "\n")
    return line


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def interleaved(repeat: int, **runs: Callable[[int], float]) -> dict[str, list[float]]:
    """Each run once a repetition, in turn, so that a drift of the machine meets all of them alike. Results by name."""
    results: dict[str, list[float]] = {name: [] for name in runs}
    for rep in range(repeat):
        for name, run in runs.items():
            results[name].append(run(rep))
    return results


def time_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def random_ids(seed: int, length: int) -> list[int]:
    """Ordinary token ids: never special, never twice the same text for two seeds."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 48000) for _ in range(length)]


def note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
