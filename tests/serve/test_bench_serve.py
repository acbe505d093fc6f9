"""`phloem bench serve` against a scripted server on loopback: what it sends, and that its figures are those of what came."""

from __future__ import annotations

import asyncio
import json
import math
import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from phloem.cli import app
from phloem.cli.bench_data import DATASETS, Shape, plan
from phloem.cli.bench_load import Goals, Measured, percentile, send_all, summary
from phloem.runtime.errors import ConfigError
from tests.serve.serving import Loopback, Server


@pytest.fixture(scope="module")
def web(scripted: Server) -> Iterator[Loopback]:
    made = Loopback(scripted.app)
    yield made
    made.close()


def shape(**fields: Any) -> Shape:
    return Shape(
        **{"requests": 12, "input_tokens": 8, "output_tokens": 5, "seed": 1, "vocabulary": 200, "prefix_tokens": 32, **fields}
    )


def run(web: Loopback, dataset: str, **fields: Any) -> list[Measured]:
    done, seconds = asyncio.run(send_all(web.url, plan(dataset, shape(**fields)), concurrency=4))
    assert seconds > 0
    return done


@pytest.mark.parametrize("dataset", [name for name in DATASETS if name != "replay"])
def test_each_dataset_is_answered(web: Loopback, server: Server, dataset: str) -> None:
    done = run(web, dataset)
    assert len(done) == 12
    assert all(m.good for m in done), [m.error for m in done if not m.good]
    server.assert_idle()  # a record comes when a request has ended, a moment after its last byte
    told = server.watcher.records
    assert sorted(m.output_tokens for m in done) == sorted(r.completion_tokens for r in told)
    assert sorted(m.prompt_tokens for m in done) == sorted(r.prompt_tokens for r in told)
    assert sorted(m.cached_tokens for m in done) == sorted(r.cached_tokens for r in told)
    for m in done:
        assert m.ttft is not None and 0 < m.ttft <= m.e2el
    if dataset == "json-schema":
        assert all(m.valid for m in done)
    else:
        assert all(m.output_tokens == 5 for m in done)
    if dataset != "json-schema" and dataset != "random":
        assert sum(m.cached_tokens for m in done) > 0  # what these datasets are for


def test_a_plan_is_the_seed_s_alone() -> None:
    for dataset in ("random", "shared-prefix"):
        bodies = [[p.body("") for p in plan(dataset, shape(seed=s))] for s in (1, 1, 2)]
        assert bodies[0] == bodies[1] != bodies[2]


def test_a_branch_continues_what_its_parent_was_answered() -> None:
    planned = plan("fork", shape(branches=2))
    first = planned[0].body("")["prompt"]
    assert [p.after for p in planned[:7]] == [None, 0, 0, 1, 1, 2, 2]
    assert planned[1].body("ANSWER")["prompt"].startswith(first + "ANSWER\n")


def test_a_turn_sends_its_whole_conversation() -> None:
    planned = plan("multi-turn", shape(turns=3, requests=4))
    assert [p.after for p in planned] == [None, 0, 1, None]
    planned[0].body("")
    planned[1].body("one")
    roles = [m["role"] for m in planned[2].body("two")["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]


def test_replay_sends_lines_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"messages": [], "at": 0.5}\n')
    one, two = plan("replay", shape(file=file))
    assert (one.path, one.body("")) == ("/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert (two.path, two.at, two.body("")) == ("/v1/chat/completions", 0.5, {"messages": []})
    for text, why in (("{", "line 1"), ('{"x": 1}', "neither")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            plan("replay", shape(file=file))
    with pytest.raises(ConfigError, match="--file"):
        plan("replay", shape())
    with pytest.raises(ConfigError, match="--dataset"):
        plan("no such", shape())


def test_errors_are_counted_not_hidden(web: Loopback, server: Server) -> None:
    planned = plan("random", shape(requests=3, vocabulary=10**6))
    done, seconds = asyncio.run(send_all(web.url, planned, concurrency=2))
    said = summary(done, seconds, Goals())
    assert said["completed"] == 0 and said["failed"] == {"400": 3} and said["p50_ttft_ms"] is None
    assert all("invalid_value" in m.error for m in done), done[0].error
    nobody, _ = asyncio.run(send_all("http://127.0.0.1:9", planned, timeout=5))
    assert all(m.status == 0 and m.error for m in nobody)


def test_percentiles_are_numpy_s() -> None:
    import numpy as np

    draw = random.Random(2)
    for size in (1, 2, 3, 10, 101):
        values = [draw.random() for _ in range(size)]
        for q in (0, 50, 95, 99, 100):
            assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-12)
    assert math.isnan(percentile([], 50))


def test_goodput_is_what_meets_every_goal() -> None:
    def measured(ttft: float, e2el: float, tokens: int, status: int = 200) -> Measured:
        return Measured(status=status, ttft=ttft, e2el=e2el, output_tokens=tokens, itl=array("d", [0.1]))

    done = [measured(0.1, 1.1, 11), measured(0.9, 1.9, 11), measured(0.1, 3.1, 11), measured(0.1, 1.1, 11, status=500)]
    said = summary(done, 2.0, Goals(ttft=0.5, tpot=0.2))
    assert said["goodput_ratio"] == 0.25 and said["goodput_requests_per_s"] == 0.5
    assert said["completed"] == 3 and said["p50_tpot_ms"] == 100.0


def test_the_command_prints_a_table_and_json(web: Loopback, server: Server) -> None:
    words = ["bench", "serve", "--url", web.url, "--requests", "4", "--input-tokens", "8", "--output-tokens", "4"]
    found = CliRunner().invoke(app, [*words, "--format", "json", "--goodput", "ttft:60000", "--request-rate", "1000"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert said["completed"] == 4 and said["output_tokens"] == 16 and said["goodput_ratio"] == 1.0
    text = CliRunner().invoke(app, words).stdout
    for word in ("TTFT", "TPOT", "ITL", "E2EL", "p50", "p95", "p99", "goodput", "cached prompt tokens"):
        assert word in text


@pytest.mark.parametrize(
    "words, why",
    [
        (["--goodput", "speed:3"], "ttft, tpot or e2el"),
        (["--format", "xml"], "text or json"),
        (["--request-rate", "0"], "above 0"),
        (["--extra-body", "[1]"], "object"),
    ],
)
def test_wrong_usage(words: list[str], why: str) -> None:
    found = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9", *words])
    assert found.exit_code == 2 and why in found.output


def test_a_server_that_is_not_there() -> None:
    found = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9"])
    assert found.exit_code == 1 and "phloem serve" in found.output
