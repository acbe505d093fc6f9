"""What type checkers see: `s[gen("n", int)]` is an int. Never run; `make types` checks it, strictly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

from phloem.lang import AsyncState, IntRange, State, fork_each, function, gen, gen_int


@dataclass
class Point:
    x: int


@function
def program(s: State, mail: str) -> Point:
    point = gen("p", Point)
    s += point + "text" + gen("n", int)
    assert_type(s[gen("n", int)], int)
    assert_type(s[point], Point)
    assert_type(s[gen("t", max_tokens=3)], str)
    assert_type(s[gen("t", 64)], str)
    assert_type(s[gen("l", list[int])], list[int])
    assert_type(s[gen("r", IntRange(0, 3))], int)
    assert_type(s[gen_int("i")], str)
    assert_type(s[gen("s", n=3)], list[str])
    assert_type(s["name"], Any)
    assert_type(s.fork(3)[0], State)
    assert_type(fork_each([s], 2).best(gen("n", int)), State)
    return s[point]


@function
async def later(s: AsyncState) -> int:
    assert_type(await s[gen("n", int)], int)
    async with s.fork(2) as b:
        assert_type(b[0], AsyncState)
    return await s[gen("n", int)]


assert_type(program.run(mail="x").value, Point)
assert_type(later.run().value, int)
