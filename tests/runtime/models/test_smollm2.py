"""The embedded model in float32 against transformers' numbers (scripts/make_fixtures.py): all of them on `cpu`, a few on `reference`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phloem.runtime.backends import create_backend
from phloem.runtime.backends.base import Backend
from phloem.runtime.models.loader import LoadedModel, load_model
from tests.paged_runs import Piece, bind, make_batch

FIXTURES = Path(__file__).parents[2] / "fixtures"
CASES: list[dict[str, Any]] = json.loads((FIXTURES / "smollm2_greedy.json").read_text())
LOGITS = np.load(FIXTURES / "smollm2_logits.npz")


@pytest.fixture(scope="module")
def reference() -> tuple[Backend, LoadedModel]:
    backend = create_backend("reference")
    return backend, load_model(None, backend, "f32")


@pytest.fixture(scope="module")
def cpu() -> Iterator[tuple[Backend, LoadedModel]]:
    backend = create_backend("cpu", threads=2)
    yield backend, load_model(None, backend, "f32")
    backend.close()


def greedy(backend: Backend, loaded: LoadedModel, cases: list[dict[str, Any]], count: int) -> list[list[int]]:
    """`count` tokens of each case, all of them in one batch."""
    runner = bind(backend, loaded.model, loaded.config, pages=8 * len(cases))
    tables = [list(range(8 * i, 8 * i + 8))[::-1] for i in range(len(cases))]
    out: list[list[int]] = [[] for _ in cases]
    for _ in range(count):
        pieces = [
            Piece([got[-1]], len(case["ids"]) + len(got) - 1, table) if got else Piece(case["ids"], 0, table)
            for case, got, table in zip(cases, out, tables)
        ]
        logits = runner.forward(make_batch(pieces, runner.kv.spec))
        for got, token in zip(out, logits.argmax(-1).tolist()):
            got.append(token)
    return out


def check_logits(backend: Backend, loaded: LoadedModel, numbers: Sequence[int]) -> None:
    runner = bind(backend, loaded.model, loaded.config, pages=8 * len(numbers))
    pieces = [Piece(CASES[i]["ids"], 0, range(8 * at, 8 * at + 8)[::-1]) for at, i in enumerate(numbers)]
    for i, logits in zip(numbers, runner.forward(make_batch(pieces, runner.kv.spec)).numpy()):
        assert logits.argmax() == LOGITS["argmax"][i] == CASES[i]["greedy"][0]
        expected = LOGITS["last"][i]
        np.testing.assert_allclose(logits[LOGITS["columns"]], expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def check_long_positions(backend: Backend, loaded: LoadedModel) -> None:
    runner = bind(backend, loaded.model, loaded.config, pages=100)
    ids, at = LOGITS["long_ids"].tolist(), 0
    for position, expected, best in zip(LOGITS["long_positions"], LOGITS["long"], LOGITS["long_argmax"]):
        piece = Piece(ids[at : position + 1], at, list(range(100))[::-1])
        logits = runner.forward(make_batch([piece], runner.kv.spec))[0].numpy()
        at = int(position) + 1
        assert logits.argmax() == best
        np.testing.assert_allclose(logits[LOGITS["columns"]], expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_logits_agree_with_transformers(cpu: tuple[Backend, LoadedModel]) -> None:
    check_logits(*cpu, range(20))


def test_long_positions_agree_with_transformers(cpu: tuple[Backend, LoadedModel]) -> None:
    check_long_positions(*cpu)


def test_all_greedy_tokens_equal_transformers(cpu: tuple[Backend, LoadedModel]) -> None:
    assert len(CASES) == 20
    assert greedy(*cpu, CASES, 64) == [case["greedy"] for case in CASES]


def test_logits_of_the_reference_agree(reference: tuple[Backend, LoadedModel]) -> None:
    check_logits(*reference, (3, 8))


def test_greedy_tokens_of_the_reference_equal(reference: tuple[Backend, LoadedModel]) -> None:
    chosen = [CASES[i] for i in (1, 11)]
    assert greedy(*reference, chosen, 8) == [case["greedy"][:8] for case in chosen]


@pytest.mark.slow
def test_all_greedy_tokens_of_the_reference_equal(reference: tuple[Backend, LoadedModel]) -> None:
    assert greedy(*reference, CASES, 64) == [case["greedy"] for case in CASES]


@pytest.mark.slow
def test_long_positions_of_the_reference_agree(reference: tuple[Backend, LoadedModel]) -> None:
    check_long_positions(*reference)
