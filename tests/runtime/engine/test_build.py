"""build: what is refused before weights are read, what the bounds of a step are, and that nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phloem.runtime.config import Dtype, Hardware, Resolved, make_config, resolve
from phloem.runtime.engine import build as module
from phloem.runtime.engine.build import build, detect_hardware, limits_of
from phloem.runtime.engine.client import InprocClient
from phloem.runtime.errors import ConfigError, ModelLoadError


def resolved(context: int = 512, **options: int) -> Resolved:
    config = make_config(None, **{"kv_tokens": 4096, **options})
    return resolve(config, Hardware(2, 2**33), model_context=context, kv_bytes_per_token_f32=64, weight_bytes=0)


@pytest.mark.parametrize(
    ("context", "options", "expected"),
    [
        (512, {"max_running": 64, "max_step_tokens": 256}, (256, 64, 64, 64 * 32)),
        (512, {"max_running": 4, "max_step_tokens": 256}, (256, 4, 64, 4 * 32)),
        (512, {"max_running": 64, "max_step_tokens": 8}, (8, 8, 8, 8 * 32)),
        (512, {"max_running": 128, "max_step_tokens": 256}, (256, 128, 128, 128 * 32)),
        (100_000, {"max_running": 64, "kv_tokens": 1024}, (256, 64, 64, 64 * 64)),
        (500, {"max_running": 1, "page_size": 1}, (256, 1, 64, 500)),
    ],
)
def test_limits_bound_one_step(context: int, options: dict[str, int], expected: tuple[int, ...]) -> None:
    """A step has at most max_step_tokens tokens, so no more rows; a row's table is no longer than the context, or the pool."""
    limits = limits_of(resolved(context, **options))
    assert (limits.max_tokens, limits.max_rows, limits.max_logits, limits.max_pages) == expected


def test_hardware_is_what_the_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = detect_hardware()
    assert real.cores >= 1 and real.memory_bytes > 2**28
    told = {"/sys/fs/cgroup/cpu.max": "50000 100000", "/sys/fs/cgroup/memory.max": str(2**27)}
    monkeypatch.setattr(module, "_first_line", lambda path: told.get(path, ""))
    assert detect_hardware() == Hardware(cores=1, memory_bytes=2**27)
    told.update({"/sys/fs/cgroup/cpu.max": "max 100000", "/sys/fs/cgroup/memory.max": "max"})
    free = detect_hardware()
    assert free.cores >= real.cores and free.memory_bytes >= real.memory_bytes


def test_what_cannot_fit_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_model", lambda *a, **o: pytest.fail("read the weights"))
    for options in ({"kv_memory": 1000}, {"kv_tokens": 2**40}, {"max_context": 100_000}, {"device": "cuda"}):
        with pytest.raises(ConfigError):
            build(make_config(None, **options))
    with pytest.raises(ModelLoadError):
        build(make_config("/no/such/model"))


def test_a_build_that_fails_closes_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    create = module.make_backend

    def watched(resolved: Resolved, dtype: Dtype) -> object:
        backend = create(resolved, dtype)
        close = backend.close
        monkeypatch.setattr(backend, "close", lambda: (closed.append(resolved.device), close()))
        return backend

    monkeypatch.setattr(module, "make_backend", watched)
    monkeypatch.setattr(module, "load_model", lambda *a, **o: (_ for _ in ()).throw(ModelLoadError("torn")))
    with pytest.raises(ModelLoadError, match="torn"):
        build(make_config(None, kv_tokens=64, device="reference"))
    assert closed == ["reference"]


def test_building_reports_its_stages_and_gives_torch_its_threads_back() -> None:
    stages: list[str] = []
    torch.set_num_threads(2)
    parts = build(make_config(None, kv_tokens=64, threads=1), stages.append)
    try:
        assert torch.get_num_threads() == 2
        assert [s for s in stages if "%" not in s] == ["reading the headers", "the tokenizer", "the weights", "the KV pool"]
        assert stages[-2] == "weights 100%"
        assert parts.resolved.num_pages == 4 and parts.config.kv_tokens == 64
    finally:
        InprocClient(parts.core, on_close=parts.on_close).close()
