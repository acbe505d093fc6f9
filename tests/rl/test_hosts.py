"""A RolloutEngine where trainers live: a Ray actor, a Jupyter kernel, a thread other than the main one (rl Z3).

The first two need what this project does not: `pip install ray` and `pip install ipykernel nbclient`, else they are skipped.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from phloem import rl
from phloem.runtime.request import SamplingParams
from tests.rl.tiny import attach, fields_of, nudge, tiny_module

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[1, 5, 6, 7], [1, 20]]


def train_a_little(module: Any = None) -> list[Any]:
    """Rollout, commit, rollout, suspend, resume, rollout from another thread of its own: what a trainer does."""
    module = tiny_module() if module is None else module
    options = SamplingParams(max_tokens=6, ignore_eos=True)
    with attach(module, share="require") as engine:
        found = [fields_of(s) for s in engine.rollout(PROMPTS, options, n=2, seed=0)]
        with engine.training():
            nudge(module, 1)
        found += [fields_of(s) for s in engine.submit(PROMPTS, options, n=2, seed=0).result(60)]
        assert engine.suspend() > 0 and engine.resume() == 0
        again = [fields_of(s) for s in engine.rollout(PROMPTS, options, n=2, seed=0)]
        assert again == found[len(again) :]
        engine.check()
    return found


def plain(found: list[Any]) -> list[Any]:
    """Of what crosses a process: ids and logprobs."""
    return [[list(f[0]), list(f[1]), list(f[2])] for f in found]


def test_Z3_threads_other_than_main_train_too() -> None:
    expected, found = train_a_little(), dict[int, list[Any]]()
    modules = [tiny_module() for _ in range(2)]  # made here: torch's generator is one for all threads
    threads = [threading.Thread(target=lambda i=i: found.update({i: train_a_little(modules[i])})) for i in range(2)]  # type: ignore[misc]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert found == {0: expected, 1: expected}
    assert isinstance(expected[0][0], list) and rl.RolloutEngine


@pytest.mark.slow
def test_Z3_a_ray_actor_trains() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray")
        paths = os.pathsep.join([str(ROOT), *(p for p in sys.path if p)])
        # No uploads and no dashboards: the workers import what this process imports.
        ray.init(
            num_cpus=1, include_dashboard=False, logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": paths}},
            object_store_memory=80 << 20,
        )  # fmt: skip
        try:

            class Trainer:
                def run(self) -> list[Any]:
                    from tests.rl.test_hosts import plain, train_a_little

                    return plain(train_a_little())

            actor = ray.remote(Trainer).remote()
            found = ray.get(actor.run.remote(), timeout=240)
        finally:
            ray.shutdown()
    assert found == plain(train_a_little())


@pytest.mark.slow
def test_Z3_a_jupyter_kernel_trains() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
        pytest.importorskip("ipykernel")
        cells = [
            f"import sys\nsys.path[:0] = {[str(ROOT), *(p for p in sys.path if p)]!r}\nfrom tests.rl.test_hosts import plain, train_a_little",
            "import asyncio\nassert asyncio.get_running_loop()  # a notebook's cells run inside one\nimport json\nprint(json.dumps(plain(train_a_little())))",
        ]
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        # The kernel of this very environment, whatever kernels are installed.
        from jupyter_client.manager import AsyncKernelManager  # type: ignore[import-not-found,unused-ignore]

        manager = AsyncKernelManager()
        manager.kernel_spec_manager.ensure_native_kernel = True
        nbclient.NotebookClient(book, km=manager, timeout=240, kernel_name="python3").execute()
        del manager
        gc.collect()  # its sockets warn that nobody closed them
    out = "".join(o["text"] for o in book.cells[1].outputs if o.get("name") == "stdout")  # stderr has torch's warnings
    found = json.loads(out)
    assert found == plain(train_a_little()) and torch.isfinite(torch.tensor(found[0][1])).all()
