"""Does the cost of a prompt in the radix tree stay flat as the tree grows? One JSON line for each size of the tree.

    python -m benchmarks.tree [--quick]

A prompt of 2,048 tokens shares a random part with what is there, then: match, lease, insert the rest, release; the two numbers
are without and with packing a list of ids into bytes (which happens once a request, at the door).
"""

from __future__ import annotations

import random
import sys
import time
from array import array

from benchmarks.common import median, record
from phloem.runtime.cache.prefix import PrefixCache

PAGE, LENGTH = 16, 2048


def make_prompt(rng: random.Random, shared: list[list[int]]) -> list[int]:
    """A third new from its start, the others continue a known prompt from anywhere."""
    prompt = [rng.randrange(50_000) for _ in range(LENGTH)]
    if shared and rng.random() < 0.67:
        stem = rng.choice(shared)
        cut = rng.randrange(1, LENGTH)
        prompt[:cut] = stem[:cut]
    return prompt


def insert(cache: PrefixCache, key: bytearray, step: int) -> None:
    """The life of a prompt in the cache, as the scheduler leads it."""
    pages = len(key) // 4 // PAGE + 1
    got = cache.acquire(("", 0), key, len(key) // 4 - 1, step, pages, cache.take, True)
    assert got is not None
    grant, _ = got
    copy = cache.confirm(grant)
    grant.add(cache.take(pages - grant.num_pages))
    cache.publish(grant, len(key) // 4, step)
    cache.launched()
    cache.release(grant, len(key) // 4, step)
    del copy


def measure(num_prompts: int, samples: int) -> None:
    rng = random.Random(0)
    cache, shared, step = PrefixCache(PAGE, (num_prompts + samples + 8) * (LENGTH // PAGE + 2)), list[list[int]](), 0
    for _ in range(num_prompts):
        prompt = make_prompt(rng, shared)
        step += 1
        insert(cache, bytearray(array("i", prompt).tobytes()), step)
        if len(shared) < 512:
            shared.append(prompt)
    times, packed, matches = list[float](), list[float](), list[float]()
    for _ in range(samples):
        prompt = make_prompt(rng, shared)
        step += 1
        cache.begin_plan()
        start = time.perf_counter()
        key = bytearray(array("i", prompt).tobytes())
        middle = time.perf_counter()
        insert(cache, key, step)
        end = time.perf_counter()
        times.append(end - middle)
        packed.append(end - start)
        start = time.perf_counter()
        cache.tree.match(cache.tree.root(("", 0)), bytes(key))
        matches.append(time.perf_counter() - start)
    workload = f"prompt {LENGTH}, page {PAGE}, tree of {num_prompts} prompts"
    record(
        "tree: match + insert",
        median(times) * 1e6,
        "us",
        workload,
        p99=round(sorted(times)[int(len(times) * 0.99)] * 1e6, 1),
        with_packing=round(median(packed) * 1e6, 1),
        full_match=round(median(matches) * 1e6, 2),
        nodes=cache.tree.num_nodes,
    )
    start, before = time.perf_counter(), cache.tree.num_pages
    for _ in range(min(20_000, before)):
        cache.tree.evict()
    took = time.perf_counter() - start
    record("tree: evict one page", took / min(20_000, before) * 1e6, "us", workload)


def main() -> None:
    quick = "--quick" in sys.argv
    for num_prompts in (1, 64, 512) if quick else (1, 8, 64, 512, 5000):
        measure(num_prompts, 200 if quick else 1000)


if __name__ == "__main__":
    main()
