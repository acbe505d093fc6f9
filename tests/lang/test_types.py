"""What type checkers see: `s[gen("n", int)]` is an int. mypy runs once, over a small file, against the package's own stubs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
from dataclasses import dataclass
from typing import Any, Literal
from phloem.lang import AsyncState, IntRange, State, fork_each, function, gen, gen_int, select

@dataclass
class Point:
    x: int

@function
def program(s: State, mail: str) -> Point:
    point = gen("p", Point)
    s += point + "text" + gen("n", int)
    reveal_type(s[gen("n", int)])            # int
    reveal_type(s[point])                    # Point
    reveal_type(s[gen("t", max_tokens=3)])   # str
    reveal_type(s[gen("t", 64)])             # str
    reveal_type(s[gen("l", list[int])])      # list[int]
    reveal_type(s[gen("r", IntRange(0, 3))]) # int
    reveal_type(s[gen_int("i")])             # str
    reveal_type(s[gen("s", n=3)])            # list[str]
    reveal_type(s["name"])                   # Any
    reveal_type(s.fork(3)[0])                # State
    reveal_type(fork_each([s], 2).best(gen("n", int)))  # State
    return s[point]

@function
async def later(s: AsyncState) -> int:
    reveal_type(await s[gen("n", int)])      # int
    async with s.fork(2) as b:
        reveal_type(b[0])                    # AsyncState
    return await s[gen("n", int)]

reveal_type(program.run(mail="x").value)     # Point
reveal_type(later.run().value)               # int
"""


@pytest.mark.slow  # `make types` checks the same, in typed_program.py
def test_reveal_type(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "scripts/link_types.py"], cwd=ROOT, check=True)
    file = tmp_path / "typed.py"
    file.write_text(SOURCE)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(ROOT / ".mypy_cache"), str(file)],
        cwd=tmp_path, capture_output=True, text=True, env={"MYPYPATH": str(ROOT / "build" / "types"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    revealed = {int(m[1]): m[2] for m in re.finditer(r'typed\.py:(\d+): note: Revealed type is "([^"]+)"', done.stdout)}
    wanted = {
        n: m[1].strip() for n, line in enumerate(SOURCE.splitlines(), 1) if (m := re.search(r"reveal_type\(.*# (.+)$", line))
    }
    short = {n: re.sub(r"\b(builtins|typed|phloem\.lang\.state)\.", "", t) for n, t in revealed.items()}
    assert short == wanted, done.stdout + done.stderr
    assert "error:" not in done.stdout, done.stdout
