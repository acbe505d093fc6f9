"""`phloem run`: a program of a file, its value on stdout, tree and trace on request. Real answers come from the suite's engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import phloem
from phloem.cli import app

PROGRAM = """
import dataclasses
import phloem as ph
from helper import SUFFIX

@dataclasses.dataclass
class Answer:
    text: str
    words: list

@ph.function
def answer(s: ph.State, question: str, words: int = 4):
    s += ph.user(question + SUFFIX) + ph.assistant(ph.gen("a", max_tokens=words, temperature=0))
    return Answer(s["a"], s["a"].split())

@ph.function
def plain(s, question: str):
    s += "Q: " + question + " A:" + ph.gen("a", max_tokens=3, temperature=0)

@ph.function
async def later(s, question: str) -> str:
    s += ph.user(question) + ph.assistant(ph.gen("a", max_tokens=3, temperature=0))
    return await s["a"]

not_one = 5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("SUFFIX = '?'\n")
    (tmp_path / "programs.py").write_text(PROGRAM)
    return tmp_path / "programs.py"


@pytest.fixture(autouse=True)
def shared_engine(engine: phloem.Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from phloem.cli import run

    @contextlib.contextmanager
    def open_engine(options: dict[str, Any], quiet: bool) -> Iterator[phloem.Engine]:
        yield engine

    monkeypatch.setattr(run, "open_engine", open_engine)
    yield
    engine.check()
    assert engine.stats().running == 0


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def test_the_value_is_stdout(file: Path) -> None:
    done = call(f"{file}:answer", "--arg", "question=Where is Oslo", "-a", "words=6")
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert value["words"] == value["text"].split()
    assert done.stderr == ""


def test_a_program_without_a_value_gives_its_text(file: Path) -> None:
    assert call(f"{file}:plain", "--arg", "question=Why").stdout.startswith("Q: Why A:")


def test_an_async_program_runs(file: Path) -> None:
    assert call(f"{file}:later", "--arg", "question=Why").exit_code == 0


def test_show_is_the_engines_own_count(file: Path, engine: phloem.Engine) -> None:
    engine.flush()
    before = engine.stats()
    done = call(f"{file}:answer", "--arg", "question=Where is Oslo", "--show")
    after = engine.stats()
    cached, computed = after.cached_tokens - before.cached_tokens, after.prefill_tokens - before.prefill_tokens
    assert (
        f"prompt {cached + computed} = cached {cached} + computed {computed}   hit {cached / (cached + computed):.1%}"
        in done.stderr
    )
    assert "gen a  programs.py:" in done.stderr


def test_a_trace_is_written_and_answers(file: Path, tmp_path: Path, engine: phloem.Engine) -> None:
    trace = tmp_path / "out.jsonl"
    first = call(f"{file}:answer", "--arg", "question=Where is Oslo", "--trace", trace, "--run-seed", "3")
    assert json.loads(trace.read_text().splitlines()[0])["seed"] == 3
    steps = engine.stats().steps
    again = call(f"{file}:answer", "--arg", "question=Where is Oslo", "--replay", trace)
    assert again.stdout == first.stdout and engine.stats().steps == steps
    other = call(f"{file}:answer", "--arg", "question=Where is Bonn", "--replay", trace)
    assert other.exit_code == 1 and "programs.py:" in other.stderr and "differs from token" in other.stderr


def test_plan_computes_nothing(file: Path, engine: phloem.Engine) -> None:
    steps = engine.stats().steps
    done = call(f"{file}:answer", "--arg", "question=Where is Oslo", "--plan")
    assert "gen a" in done.stdout and engine.stats().steps == steps


def test_text_of_a_file_is_an_argument(file: Path, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("from a file")
    assert call(f"{file}:plain", "--arg", f"question=@{tmp_path / 'q.txt'}").stdout.startswith("Q: from a file A:")


@pytest.mark.parametrize("arguments, words", [
    (["{dir}/programs.py:nothing"], ["has no program 'nothing'", "answer, plain, later"]), (["{dir}/programs.py:not_one"], ["no program"]), (["{dir}/none.py:answer"], ["no file"]),
    (["answer"], ["file.py:program"]), (["{dir}/programs.py:answer", "--arg", "x=1"], ["no such parameter", "question"]),
    (["{dir}/programs.py:answer", "--arg", "question"], ["name=value"]), (["{dir}/programs.py:answer", "--arg", "question=1", "--arg", "question=2"], ["twice"]),
    (["{dir}/programs.py:answer", "--url", "http://a", "--replay", "b"], ["--url and --replay"]), (["{dir}/programs.py:plain", "--arg", "question=@/nope"], ["cannot be read"]),
])  # fmt: skip
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], words: list[str], file: Path) -> None:
    done = call(*(a.replace("{dir}", str(file.parent)) for a in arguments))
    assert done.exit_code == 2 and all(word in done.stderr for word in words), done.stderr
    assert done.stdout == ""
