"""U9: a trace answers the program it was made of, and notices another. U8: what `show` says."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import phloem as ph
from phloem.lang.ir import assistant, gen, select, system, user
from phloem.lang.run import function
from phloem.lang.state import AsyncState, State
from phloem.lang.testing import Scripted
from phloem.lang.trace import Replay
from phloem.runtime.errors import InvalidRequestError, ReplayMismatch


@function
def judge(s: State, essay: str, temperature: float = 1.0) -> Any:
    s += system("You judge essays.") + user(essay)
    with s.fork(3) as branches:
        for b, what in zip(branches, ("clarity", "style", "proof")):
            b += assistant(f"On {what}: " + gen("view", max_tokens=12, temperature=temperature, stop="."))
    s += assistant("Grade: " + select("grade", ["A", "B", "C"]))
    return s["view"], s["grade"]


def test_u9_a_replay_gives_the_same_without_a_model(idle_engine: ph.Engine, tmp_path: Path) -> None:
    run = judge.run(essay="The sea is wide.", backend=idle_engine)
    run.trace.save(tmp_path / "t.jsonl")
    before = idle_engine.stats().steps
    again = judge.run(essay="The sea is wide.", backend=Replay(tmp_path / "t.jsonl"))
    assert again.value == run.value and again.text() == run.text() and again.seed == run.seed
    assert replace(again.usage, dropped=0) == replace(run.usage, dropped=0), "what was drawn behind a stop is chance"
    assert idle_engine.stats().steps == before
    interpreted = judge.run(essay="The sea is wide.", backend=Replay(tmp_path / "t.jsonl"), compile=False)
    assert interpreted.value == run.value, "hints are not compared"


def test_u9_the_file_is_json_lines_with_everything(tmp_path: Path) -> None:
    with Scripted({"view": "Good.", "grade": "B"}) as backend:
        run = judge.run(essay="e", backend=backend, seed=7)
    run.trace.save(tmp_path / "t.jsonl")
    header, *lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert header["phloem_trace"] == 1 and header["seed"] == 7 and header["program"] == "judge"
    gens = [line for line in lines if line["kind"] == "gen"]
    assert len(gens) == 3 and sorted(g["branch"] for g in gens) == [[0], [1], [2]]
    for g in gens:
        assert g["request"]["sampling"]["seed"] and g["output"]["token_ids"] and "weights_version" in g["output"]
        assert "test_trace.py:" in g["at"]


@pytest.mark.parametrize("change, match", [
    ({"essay": "The sea is deep."}, r"'view'.*from token \d+ on: \d+ instead of \d+"), ({"temperature": 0.5}, "sampling differs: temperature 0.5 instead of 1.0"), ({"seed": 8}, "sampling differs: seed"),
])  # fmt: skip
def test_u9_another_program_is_noticed_with_its_line(change: dict[str, Any], match: str, tmp_path: Path) -> None:
    with Scripted({"view": "Good.", "grade": "B"}) as backend:
        judge.run(essay="The sea is wide.", backend=backend, seed=7).trace.save(tmp_path / "t.jsonl")
    with pytest.raises(ExceptionGroup) as caught:  # each branch asks for something else
        judge.run(**{"essay": "The sea is wide.", "backend": Replay(tmp_path / "t.jsonl"), **change})
    for error in caught.value.exceptions:
        assert isinstance(error, ReplayMismatch) and re.search(match, str(error)), error
        assert error.at is not None and "test_trace.py:" in error.at


def test_u9_a_program_that_asks_for_more_is_noticed(tmp_path: Path) -> None:
    @function
    def count(s: State, n: int) -> None:
        for i in range(n):
            s += f"{i}" + gen(f"g{i}")
            s.sync()

    with Scripted(lambda record, prompt: "x") as backend:
        count.run(n=2, backend=backend).trace.save(tmp_path / "t.jsonl")
    with pytest.raises(ReplayMismatch, match="no request at this place"):
        count.run(n=3, backend=Replay(tmp_path / "t.jsonl"))


def test_u9_failures_are_replayed(tmp_path: Path) -> None:
    @function
    def fails(s: State) -> Any:
        s += "a" + gen("n", int)
        return s["n"]

    with Scripted({"n": "x"}) as backend:
        run = fails.run(backend=backend, stream=True)
        run.sync()
        assert "breaks its constraint" in str(run.error())
        run.trace.save(tmp_path / "t.jsonl")
    with pytest.raises(ph.PhloemError, match="breaks its constraint"):
        fails.run(backend=Replay(tmp_path / "t.jsonl"))


def test_u9_of_an_async_program(tmp_path: Path) -> None:
    @function
    async def explore(s: AsyncState) -> list[str]:
        s += user("Go.")
        async with s.fork(2) as branches:
            for b in branches:
                b += assistant(gen("idea"))
        return list(await s["idea"])

    with Scripted({"idea": ["left", "right"]}) as backend:
        explore.run(backend=backend).trace.save(tmp_path / "t.jsonl")
    assert explore.run(backend=Replay(tmp_path / "t.jsonl")).value == ["left", "right"]


def test_u9_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    for text in ("", "{}\n", "hello\n", '{"phloem_trace": 99}\n'):
        (tmp_path / "t.jsonl").write_text(text)
        with pytest.raises(InvalidRequestError, match="no trace"):
            Replay(tmp_path / "t.jsonl")


# --------------------------------------------------------------------------------------------------------------------------- U8


def test_u8_show_names_lines_counts_and_probabilities() -> None:
    with Scripted({"view": ["Good.", "Fair.", "Weak."], "grade": "B"}) as backend:
        run = judge.run(essay="The sea is wide.", backend=backend)
        stats = backend.stats()
    shown, u = run.show(), run.usage
    head, table, more = shown.splitlines()[:3]
    assert head.startswith("judge on scripted, seed ")
    assert (
        f"prompt {u.prompt} = cached {stats.cached_tokens} + computed {u.computed}   hit {u.hit:.1%}".replace(",", " ")
        in table.replace("\u202f", " ")
        or u.prompt > 999
    )
    assert f"completion {u.completion}" in more
    for branch, text in enumerate(("Good", "Fair", "Weak")):
        line = next(line for line in shown.splitlines() if f'"{text}' in line)
        assert "gen view" in line and "test_trace.py:" in line and f"of branch {branch}" in line
    assert '"B" 100.0%' in shown and "select grade" in shown


def test_u8_html_escapes_what_a_model_says() -> None:
    evil = "<script>alert(1)</script>"

    class Reader(HTMLParser):
        tags: set[str] = set()

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.tags.add(tag)

    with Scripted({"view": evil, "grade": "A"}) as backend:
        page = judge.run(essay="<img src=x onerror=1>", backend=backend)._repr_html_()
    reader = Reader()
    reader.feed(page)
    assert reader.tags <= {"style", "div", "b", "span", "ul", "li"} and "&lt;script&gt;" in page
