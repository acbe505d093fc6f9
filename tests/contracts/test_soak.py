"""No page, pin, slot or record leaks, whatever ends the requests: aborts, deadlines, preemptions, failures, stop strings."""

from __future__ import annotations

import random

import pytest

from tests.drive import Driver


def soak(num_requests: int, seed: int, check_every: int) -> None:
    rng = random.Random(seed)
    d = Driver(
        page_size=4,
        num_pages=96,
        max_running=8,
        max_step_tokens=48,
        overlap=bool(seed % 2),
        check=False,
        vocab_size=8,
        max_wait=300,
    )
    stems = [tuple(rng.randrange(1, 8) for _ in range(rng.randrange(4, 90))) for _ in range(6)]
    live, deadlines, sent = set[str](), dict[str, int](), 0
    while sent < num_requests or d.core.has_work:
        while sent < num_requests and len(live) < 24:
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(1, len(stem) + 1)] + tuple(rng.randrange(1, 8) for _ in range(rng.randrange(6)))
            group = {"group": f"g{sent // 3}", "sample": sent % 3} if rng.random() < 0.3 else {}
            name = d.submit(
                prompt, max_tokens=rng.randrange(0, 40), temperature=1.0, ignore_eos=False,
                request={"hold": rng.random() < 0.02, "namespace": rng.choice(("", "", "x")), **group},
            )  # fmt: skip
            live.add(name)
            sent += 1
            if rng.random() < 0.1:
                deadlines[name] = d.steps + rng.randrange(1, 30)
        if rng.random() < 0.05 and live:
            d.core.abort(rng.choice(sorted(live)))
        if rng.random() < 0.05 and live:
            d.core.stop(rng.choice(sorted(live)), rng.randrange(1, 5))
        if rng.random() < 0.002:
            d.device.fail_next = RuntimeError(f"failure {d.steps}")
        for name in [name for name, at in deadlines.items() if at <= d.steps]:
            d.core.abort(name)
            del deadlines[name]
        for delta in d.step():
            if delta.finish_reason is not None:
                live.discard(delta.request_id)
                deadlines.pop(delta.request_id, None)
                del d.said[delta.request_id], d.namespaces[delta.request_id]
        if d.steps % check_every == 0:
            d.core.check()
    stats, core = d.core.stats(), d.core
    assert stats.preemptions > 0 and stats.evicted_pages > 0 and stats.aborted > 0 and stats.failed_steps > 0
    assert sum(stats.finished.values()) + stats.refused == num_requests
    assert not core._live and not core._seeds.groups and not core._compiling and not core._pipeline
    assert not core.scheduler.leaders and not core.scheduler.waiting and not core.scheduler.queue.fresh
    core.scheduler.cache.holds.drop()
    d.assert_no_leak()
    tree = core.scheduler.cache.tree
    assert len(tree._lru) < 200 and not tree.stale and not tree.num_nodes
    assert len(core.scheduler.queue._ages) + len(core.scheduler.queue._order) < 200


@pytest.mark.case("C-CACHE-13")
@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_leaks(seed: int) -> None:
    soak(2000, seed, check_every=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_nothing_leaks_in_ten_thousand_requests(seed: int) -> None:
    soak(10_000, seed, check_every=50)
