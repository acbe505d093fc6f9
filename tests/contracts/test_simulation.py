"""Schedule equivalence: whatever happens around a request, it gives what it gives alone, and no page is lost on the way.

Thousands of random workloads run through the real EngineCore, against a device that checks every read.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.contracts.workloads import Workload

FAST, SLOW = 800, 8000


def run(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        workload = Workload(seed)
        try:
            workload.run()
        except Exception as error:
            raise AssertionError(f"workload {seed}: {error!r}") from error
        counts += workload.counts
    return counts


def check_coverage(counts: Counter[str]) -> None:
    """Workloads that never get into trouble prove nothing."""
    for name in (
        "preemptions",
        "failed_steps",
        "evicted_pages",
        "copied_pages",
        "adopted_pages",
        "duplicate_pages",
        "surplus_rows",
        "aborts",
        "stops",
        "refused",
        "counted workloads",
        "token-exact workloads",
    ):
        assert counts[name] > 0, f"no workload exercised: {name} ({dict(counts)})"


def test_every_request_gives_what_it_gives_alone() -> None:
    """P2, R1-R8, S1-S6, M2, J3."""
    check_coverage(run(range(FAST)))


@pytest.mark.slow
def test_every_request_gives_what_it_gives_alone_thousands() -> None:
    counts = run(range(FAST, FAST + SLOW))
    check_coverage(counts)
    assert counts["broken holds"] and counts["fallbacks"]
