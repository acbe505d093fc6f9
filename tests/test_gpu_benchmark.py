"""benchmarks/gpu.py works before it meets a GPU: every part runs on the fake device, within a budget that leaves six minutes whole."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
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


def bare(**known: Any) -> gpu.Run:
    """A Run of the real shape that made no device."""
    run = gpu.Run.__new__(gpu.Run)
    run.fake = False
    for name, value in known.items():
        setattr(run, name, value)
    return run


def test_the_roofline_of_llama_8b() -> None:
    """By hand: 6,979,321,856 numbers in the layers, 525,336,576 in the head; 131,072 bytes of K and V a token."""
    run = bare(bandwidth=1e12, flops=1e15)
    assert run.layer_weights() == 6_979_321_856 and run.weight_bytes() == 2 * (6_979_321_856 + 525_336_576)
    assert run.token_bytes() == 131_072
    found = {"tokens_in": 1000, "cached_tokens": 400, "tokens_out": 10, "steps": 10, "wall_seconds": 1.0}
    by_bytes = (10 * run.weight_bytes() + 5000 * 131_072) / 1e12
    assert run.least(found, 5000) == {"least_seconds": by_bytes, "of_roofline": by_bytes}
    run.bandwidth = 1e18
    by_flops = 2 * (610 * 6_979_321_856 + 10 * 525_336_576) / 1e15
    assert run.least(found, 5000)["least_seconds"] == by_flops
    assert bare(bandwidth=0.0, flops=0.0).least(found, 5000) == {}


class Peer:
    """generate_batch as transformers 5 has it: what failed is logged and left out."""

    def __init__(self, *generated: int) -> None:
        self.generated = generated

    def generate_batch(self, inputs: list[list[int]], generation_config: Any) -> dict[str, Any]:
        now = time.perf_counter()
        results = [
            SimpleNamespace(generated_tokens=[0] * n, error=None, created_time=now + 1, lifespan=(now + 1.5, now + 3))
            for n in self.generated
        ]
        return {str(i): r for i, r in enumerate(results)}


def test_the_peer_is_timed_by_its_own_clock_and_must_have_done_the_work() -> None:
    config = SimpleNamespace(max_new_tokens=4)
    found = gpu.peer_run(Peer(4, 4), [[1, 2], [3]], config)
    assert found["requests"] == 2 and found["wall_seconds"] == pytest.approx(2.0) and found["call_seconds"] < 1
    assert found["total_tokens_per_second"] == pytest.approx(11 / 2)
    with pytest.raises(RuntimeError, match="of 2 requests 1 came back, 0 of them short"):
        gpu.peer_run(Peer(4), [[1, 2], [3]], config)
    with pytest.raises(RuntimeError, match="of 2 requests 2 came back, 1 of them short"):
        gpu.peer_run(Peer(4, 3), [[1, 2], [3]], config)


def test_what_is_found_is_kept_after_each_part_and_ceilings_come_with_what_needs_them() -> None:
    kept: list[list[str]] = []
    gpu.measure(True, ["machine", "attention"], lambda found: kept.append(list(found["parts"])))
    assert kept == [["machine"], ["machine", "ceilings"], ["machine", "ceilings", "attention"]]


def test_no_part_begins_that_the_six_minutes_have_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIMIT", -1000)
    monkeypatch.setattr(gpu, "Run", lambda *_: SimpleNamespace(close=lambda: None))
    found = gpu.measure(False, ["machine"])
    assert found["parts"]["machine"]["skipped"] == "-1000 s of -1000 were left, its budget is 5"


@pytest.mark.slow
def test_every_part_runs_on_the_fake_device() -> None:
    found = gpu.measure(True, [])
    check(found["parts"])
    parts = found["parts"]
    assert parts["kernels"]["wrong"] == [] and parts["kernels"]["skipped"] == []
    assert not any("BROKEN" in str(v) for v in parts["contracts"].values()), parts["contracts"]
    assert parts["throughput"]["requests"] == 3 and parts["throughput"]["graphs"]["graph_steps"] > 0
    for part in (parts["throughput"], parts["shared"]["tree_8_x_16"], parts["json"]):
        assert part["least_seconds"] > 0 and part["of_roofline"] > 0
    assert all(parts["decode"][str(n)]["steps"] == 4 for n in (1, 2, 4)), "decode steps alone: the prompts were computed before"
    assert parts["json"]["valid"] == parts["json"]["ended"] and parts["shared"]["prefix_64_x_2048"]["cached_tokens"] > 0
