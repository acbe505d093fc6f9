"""`Engine(device="cuda")` from its options to its text, on the fake device: the contracts that tests/device asks of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import phloem as ph
from tests.device_contracts import CONTRACTS, engine_options, small_model
from tests.fake_device import pretend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("device") / "m")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in CONTRACTS])
def test_contract(name: str, folder: Path) -> None:
    with pretend(seed=1, eagerness=0.5) as devices:
        assert CONTRACTS[name](lambda **options: ph.Engine(str(folder), **engine_options(**options)))
        assert devices, "it ran elsewhere"


@pytest.mark.parametrize(
    "options",
    [{"dtype": "fp8"}, {"kv_dtype": "fp8"}, {"dtype": "q4"}, {"dtype": "f16"}, {"load_format": "dummy"}],
)
def test_every_format_runs(options: dict[str, str], folder: Path) -> None:
    with pretend(seed=1, eagerness=1.0), ph.Engine(str(folder), **engine_options(max_running=2, **options)) as engine:  # type: ignore[arg-type]
        output = engine.generate("ab", ph.SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        assert len(output.token_ids) == 3
