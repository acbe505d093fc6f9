"""Memory and life: suspend, resume, close, fork, exit (rl Z1-Z4, I17; G7, G8, G10)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest
import torch

from phloem import rl
from phloem.runtime.errors import EngineClosedError, EngineSuspendedError, InvalidRequestError, WeightsInvalidError
from phloem.runtime.request import SamplingParams
from tests.rl.tiny import fields_of, nudge

PROMPTS = [[1, 5, 6, 7, 8], [1, 20, *range(30, 60)]]
SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def rolled(engine: rl.RolloutEngine) -> list[tuple[Any, ...]]:
    return [fields_of(s) for s in engine.rollout(PROMPTS, SHORT, n=2, seed=0)]


def resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_Z1_suspend_gives_the_pools_bytes_back_and_resume_takes_them_again(attached):
    _, engine = attached(kv_tokens=16_384)
    pool = engine.resolved.num_pages * engine.resolved.page_bytes
    expected = rolled(engine)
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    engine.rollout([[1, i] for i in range(3, 35)], long)  # touch most of it
    before = resident()
    freed = engine.suspend()
    assert freed >= 0.95 * pool
    assert before - resident() >= 0.6 * pool
    assert engine.suspend() == 0  # idempotent
    for call in (lambda: rolled(engine), lambda: engine.score([[1, 2]]), lambda: engine.commit()):
        with pytest.raises(EngineSuspendedError, match=r"resume\(\)"):
            call()
    with pytest.raises(EngineSuspendedError):
        engine.submit(PROMPTS, SHORT).result(60)
    assert engine.resume() == 0 and engine.resume() == 0
    assert rolled(engine) == expected


def test_Z1_resume_warms_the_hottest_prefixes(attached):
    _, engine = attached()
    prompt = PROMPTS[1]
    engine.rollout([prompt], SHORT)
    engine.suspend()
    assert engine.resume(warm=2) >= 1
    assert engine.explain(prompt).num_cached == len(prompt) - 1
    engine.suspend()
    assert engine.resume() == 0 and engine.explain(prompt).num_cached == 0


@pytest.mark.case("C-RL-06")
@pytest.mark.parametrize("policy", ["finish", "abort", "recompute"])
def test_Z1_what_was_under_way_when_it_was_suspended_is_not_lost(attached, policy):
    _, engine = attached(max_running=2)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    expected = [s.output_ids for s in engine.rollout([[1, 5 + i] for i in range(5)], long, seed=0)]
    handles = [engine.submit([[1, 5 + i]], long, seed=0) for i in range(5)]
    engine.suspend(in_flight=policy)
    engine.resume()
    samples = [h.result(60)[0] for h in handles]
    if policy == "abort":
        assert {s.finish for s in samples} <= {"abort", "length"}
    else:
        assert [s.output_ids for s in samples] == expected


@pytest.mark.case("C-RL-05", "C-RL-06")
def test_Z2_weights_given_back_are_loaded_again_or_nothing_is_served(attached):
    module, engine = attached(share="copy")
    state, reference = {k: v.clone() for k, v in module.state_dict().items()}, rolled(engine)
    for order in ("load, wake", "wake, load"):
        assert engine.suspend({"kv", "weights"}) > 0
        if order == "load, wake":
            with pytest.raises(EngineSuspendedError):
                rolled(engine)
            engine.resume()
        else:
            engine.resume()
            with pytest.raises(WeightsInvalidError, match=r"update\(\)"):
                rolled(engine)
        with pytest.raises(WeightsInvalidError):
            rolled(engine)
        with engine.update() as u:
            u.load(state)
        again = engine.rollout(PROMPTS, SHORT, n=2, seed=0)
        assert [fields_of(s) for s in again] == reference
        assert all(s.cached_tokens <= 4 for s in again[:1])
    with pytest.raises(InvalidRequestError, match="'kv'"):
        engine.suspend({"weights"})


def test_Z2_shared_weights_are_the_trainers_to_keep(attached):
    _, engine = attached()
    with pytest.raises(InvalidRequestError, match="trainer's own"):
        engine.suspend({"kv", "weights"})


def test_G8_200_cycles_take_no_memory(attached):
    module, engine = attached(kv_tokens=8192)
    expected = None
    sizes = []
    for i in range(200):
        engine.rollout(PROMPTS, SHORT, n=2, seed=0)
        engine.suspend()
        engine.resume()
        if i % 10 == 0:
            with engine.training():
                nudge(module, i, 1e-4)
        if i in (49, 199):
            sizes.append(resident())
    assert sizes[1] <= sizes[0] * 1.01
    assert expected is None


def test_I17_aborting_half_of_the_rollouts_leaves_no_page_behind(attached):
    _, engine = attached()
    handles = [engine.submit([[1, 5 + i]], SamplingParams(max_tokens=200, ignore_eos=True), n=4) for i in range(8)]
    for h in handles[::2]:
        h.cancel()
    started = time.monotonic()
    assert {s.finish for h in handles[::2] for s in h.result(60)} == {"abort"}
    assert time.monotonic() - started < 60
    assert {s.finish for h in handles[1::2] for s in h.result(120)} == {"length"}
    engine.flush()
    stats = engine.stats().engine
    engine.check()
    assert stats.pages_live == 0


def test_Z4_close_is_idempotent_and_nothing_runs_after(attached):
    module, engine = attached()
    engine.submit(PROMPTS, SamplingParams(max_tokens=300, ignore_eos=True), n=4)
    engine.close()
    engine.close()
    for call in (lambda: rolled(engine), lambda: engine.commit(), lambda: engine.submit(PROMPTS), lambda: engine.suspend()):
        with pytest.raises(EngineClosedError):
            call()
    assert torch.isfinite(module(torch.tensor([[1, 2]])).logits).all()  # the module lives on


EXITS = {
    "an exception in a reward": "engine.rollout(P, S, n=2); raise ValueError('in the reward function')",
    "exit without close": "engine.rollout(P, S, n=2)",
    "exit with a rollout under way": "engine.submit(P, L, n=8)",
    "exit inside training": "context = engine.training(); context.__enter__()",
    "a forked child": (
        "engine.submit(P, S).result(30)\nimport os\npid = os.fork()\nif pid == 0:\n    try:\n        engine.rollout(P, S)\n"
        "    except ph.EngineClosedError:\n        os._exit(7)\n    os._exit(1)\nassert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7"
    ),
    "a thread other than main": (
        "import threading\nfound = []\nt = threading.Thread(target=lambda: found.append(engine.rollout(P, S)))\nt.start(); t.join(30)\nassert found"
    ),
}  # fmt: skip


QUICK = ("an exception in a reward", "exit with a rollout under way", "a forked child")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EXITS])
def test_Z4_G10_the_process_ends_whatever_happened(tmp_path, name):
    """In a process of its own, whose last line tells the time; benchmarks/rl.py measures how long the exit takes from there."""
    from tests.rl.tiny import text_tokenizer
    from tests.tiny_models import tiny_config, write_hf

    folder = text_tokenizer(write_hf(tmp_path, tiny_config()))
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    body, make = EXITS[name], f"ph.RolloutEngine({str(folder)!r}, kv_tokens=4096, threads=1)"
    if "training" in name:
        make = "__import__('tests.rl.tiny', fromlist=['x']).attach(__import__('tests.rl.tiny', fromlist=['x']).tiny_module())"
    code = f"import time, warnings\nwarnings.simplefilter('ignore')\nimport phloem as ph\nengine = {make}\n"
    code += "P, S, L = [[1, 5]], ph.SamplingParams(max_tokens=4), ph.SamplingParams(max_tokens=400, ignore_eos=True)\n"
    code += f"try:\n{textwrap.indent(body, '    ')}\nfinally:\n    print(time.time(), flush=True)\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == (1 if "exception" in name else 0), done.stderr
    assert float(done.stdout.split()[-1]) <= time.time()
