"""benchmarks/gpu.py works before it meets a GPU: every part runs on the fake device, within a budget that leaves six minutes whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import gpu
from phloem.runtime.backends.cuda import missing


def test_the_budgets_leave_six_minutes_whole() -> None:
    assert set(gpu.PARTS) == set(gpu.BUDGETS) and sum(gpu.BUDGETS.values()) <= 345


@pytest.mark.skipif(missing() is None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert gpu.main() == 2
    out = capsys.readouterr()
    assert "nothing to measure: torch" in out.err and not out.out


def check(parts: dict[str, Any]) -> None:
    for name, part in parts.items():
        assert "failed" not in part, (name, part["failed"])
        assert part["seconds"] >= 0


def test_the_first_parts_run_on_the_fake_device() -> None:
    found = gpu.measure(True, ["machine", "ceilings", "attention"])
    check(found["parts"])
    assert found["parts"]["machine"]["fake"] is True and found["parts"]["ceilings"]["copy_gb_per_second"] > 0
    assert len(found["parts"]["attention"]) == 6 and json.loads(json.dumps(found)) == found


@pytest.mark.slow
def test_every_part_runs_on_the_fake_device() -> None:
    found = gpu.measure(True, [])
    check(found["parts"])
    parts = found["parts"]
    assert parts["kernels"]["wrong"] == [] and parts["kernels"]["skipped"] == []
    assert not any("BROKEN" in str(v) for v in parts["contracts"].values()), parts["contracts"]
    assert parts["throughput"]["requests"] == 3 and parts["throughput"]["graphs"]["graph_steps"] > 0
    assert parts["json"]["valid"] == parts["json"]["ended"] and parts["shared"]["prefix_64_x_2048"]["cached_tokens"] > 0
