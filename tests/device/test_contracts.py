"""The engine's contracts on a GPU: tests/device_contracts.py says which; on `cuda` ties within rounding may fall either way."""

from __future__ import annotations

from pathlib import Path

import pytest

import phloem as ph
from phloem.runtime.backends.cuda import missing
from tests.device_contracts import CONTRACTS, engine_options, small_model

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no GPU to test on: {missing()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("device") / "m")


@pytest.mark.parametrize("name", list(CONTRACTS))
def test_contract(name: str, folder: Path) -> None:
    assert CONTRACTS[name](lambda **options: ph.Engine(str(folder), **engine_options(**options)))


def test_the_embedded_model_says_what_it_says_on_the_cpu() -> None:
    prompt, params = "The capital of France is", ph.SamplingParams(max_tokens=8, temperature=0.0)
    with (
        ph.Engine(kv_tokens=1024, dtype="bf16") as cpu,
        ph.Engine(kv_tokens=1024, dtype="bf16", device="cuda", max_running=4) as cuda,
    ):
        assert cuda.generate(prompt, params).text[:12] == cpu.generate(prompt, params).text[:12]
