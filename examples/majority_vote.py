"""Majority vote: eight ways of thinking about one question; as soon as one answer cannot be overtaken, the rest is aborted.

question ─┬─ thoughts ── 12 ─┐
          ├─ thoughts ── 12 ─┼─ 12
          ├─ thoughts ── 15  │
          └─ … aborted       ┘
"""

from __future__ import annotations

from typing import Any

import phloem as ph

QUESTION = "A farmer has 3 fields with 4 apple trees each. How many apple trees is that?"


@ph.function
def majority(s: ph.State, question: str, ways: int = 8, max_tokens: int = 48) -> int:
    s += ph.user(question)
    number = ph.gen("number", ph.IntRange(0, 999))
    with s.fork(ways) as branches:
        for branch in branches:
            branch += ph.assistant(
                "Let me think. " + ph.gen("thoughts", stop="\n", max_tokens=max_tokens) + "\nThe answer is " + number
            )
        return branches.vote(number)


def main(backend: Any, **sizes: int) -> ph.Run[Any]:
    return majority.run(question=QUESTION, seed=4, temperature=0.7, backend=backend, **sizes)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
