"""Y6 for any seed: what was computed is unique − fed, and apart the tokens computed for their logits (R4) and what siblings computed at once (R5)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phloem.lang as sgl
from phloem.lang import AsyncState, State, function, gen
from phloem.lang.testing import Scripted

PAGE = 16


def drawn(seed: int, words: list[str]) -> Any:
    """A model of few words: siblings often draw equal text, which ends in the same step or in another."""

    def said(record: Any, prompt: str) -> str:
        rng = random.Random(f"{seed} {record.branch} {record.ordinal} {record.program}")
        return " ".join(rng.choice(words) for _ in range(rng.randint(1, 4)))

    return said


@function
def tree(s: State, prefix: str, width: int, again: bool) -> None:
    idea, mark = gen("idea", max_tokens=40), gen("mark", max_tokens=6)
    s += prefix
    with s.fork(width) as branches:
        for i, b in enumerate(branches):
            b += ("" if i % 2 else f" {i}") + idea + "\nMark:" + mark
            if again:
                b += "." + mark
    s += "End:" + gen("end", max_tokens=8)


@function
async def searched(s: AsyncState, prefix: str, width: int, again: bool) -> None:
    idea, mark = gen("idea", max_tokens=40), gen("mark", max_tokens=6)
    s += prefix
    frontier = [s]
    for _ in range(2):
        async with sgl.fork_each(frontier, width) as branches:
            for b in branches:
                b += "Step: " + idea + "\nMark:" + mark
                if again:
                    b += "." + mark
            frontier = await branches.top(2, key=mark)


def holds(run: Any, backend: Scripted) -> None:
    usage, stats = run.usage, backend.stats()
    assert (usage.cached, usage.computed) == (stats.cached_tokens, stats.prefill_tokens)
    assert usage.computed == usage.unique - usage.fed + usage.again + usage.siblings, usage
    assert usage.siblings < PAGE * usage.requests
    backend.check()


cases = given(
    seed=st.integers(0, 10_000), words=st.lists(st.text("abc", min_size=1, max_size=9), min_size=1, max_size=3), prefix=st.integers(1, 60), width=st.integers(1, 6),
    again=st.booleans(), compile=st.booleans(),
)  # fmt: skip


@pytest.mark.parametrize("program", [tree, searched], ids=["sync", "async"])
@settings(max_examples=12, deadline=None)
@cases
def test_y6_for_any_seed(
    program: Any, seed: int, words: list[str], prefix: int, width: int, again: bool, compile: bool
) -> None:
    with Scripted(drawn(seed, words), page_size=PAGE) as backend:
        run = program.run(prefix="p" * prefix, width=width, again=again, backend=backend, compile=compile)
        holds(run, backend)
