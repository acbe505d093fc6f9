"""The whole engine on the real kernels says what transformers says on the same dequantised weights (scripts/make_fixtures.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phloem as ph
from phloem.runtime.backends import create_backend
from phloem.runtime.models.loader import load_model
from tests.paged_runs import Piece, bind, make_batch

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES: list[dict[str, Any]] = json.loads((FIXTURES / "smollm2_greedy.json").read_text())
LOGITS = np.load(FIXTURES / "smollm2_logits.npz")


def test_greedy_tokens_of_twenty_prompts() -> None:
    """All at once, in f32: 20 prompts x 64 tokens."""
    assert len(CASES) == 20
    with ph.Engine(dtype="f32", kv_tokens=8192) as engine:
        sampling = ph.SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        outputs = engine.generate([case["ids"] for case in CASES], sampling)
    assert [o.token_ids for o in outputs] == [case["greedy"][:64] for case in CASES]


@pytest.mark.parametrize("i", [0, 3, 8, 17])
def test_logits_within_one_in_ten_thousand(i: int) -> None:
    backend = create_backend("cpu")
    try:
        loaded = load_model(None, backend, "f32")
        runner = bind(backend, loaded.model, loaded.config, pages=8)
        logits = runner.forward(make_batch([Piece(CASES[i]["ids"], 0, [5, 1, 3, 0, 2])], runner.kv.spec))[0].numpy()
        expected = LOGITS["last"][i]
        assert logits.argmax() == LOGITS["argmax"][i]
        np.testing.assert_allclose(logits[LOGITS["columns"]], expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    finally:
        backend.close()


@pytest.mark.parametrize("dtype", ["auto", "bf16", "q8", "q4"])
def test_other_formats_stay_close(dtype: str) -> None:
    """Not equal, by design (8-bit activations, rounded weights): the mean logprob of what f32 says moves by less than 0.15."""
    moved = []
    with ph.Engine(dtype=dtype, kv_tokens=4096) as engine:
        for case in CASES[:6]:
            ids, count = case["ids"] + case["greedy"][:48], len(case["ids"])
            moved.append(np.mean([e.logprob for e in engine.score(ids, count)[count:] if e is not None]))
    with ph.Engine(dtype="f32", kv_tokens=4096) as engine:
        for i, case in enumerate(CASES[:6]):
            ids, count = case["ids"] + case["greedy"][:48], len(case["ids"])
            moved[i] -= np.mean([e.logprob for e in engine.score(ids, count)[count:] if e is not None])
    assert np.isfinite(moved).all()
    assert abs(np.mean(moved)) < 0.15, moved
