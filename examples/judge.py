"""Branch, solve, merge: six reviews of one essay at once, then one grade that has read them all.

essay ─┬─ clarity ── review ─┐
       ├─ evidence ── review ┼─ essay · all reviews ── select A … E
       └─ …                  ┘
"""

from __future__ import annotations

from typing import Any, Literal

import phloem as ph

ESSAY = (
    "Cities should plant more trees. Trees give shade, and a street with trees is up to five degrees cooler in July. They drink the rain "
    "that would flood the cellars. People who see trees from their window are ill less often, or so a hospital in Pennsylvania found. "
    "Trees cost money, and their leaves must be swept, but so must everything else in a city."
)
CRITERIA = ["clarity", "evidence", "structure", "style", "fairness", "ending"]


@ph.function
def judge(s: ph.State, essay: str, criteria: list[str], max_tokens: int = 40) -> dict[str, Any]:
    s += ph.system("You review essays of pupils. Be short and just.") + ph.user(essay)
    review = ph.gen("review", stop="\n", max_tokens=max_tokens)
    with s.fork(len(criteria)) as branches:
        for branch, criterion in zip(branches, criteria):
            branch += ph.assistant(f"On its {criterion}: " + review)
    reviews = [found.strip() for found in s["review"]]
    s += ph.assistant("".join(f"On its {c}: {r}\n" for c, r in zip(criteria, reviews)))
    s += ph.user("Now the grade.") + ph.assistant("Grade: " + ph.select("grade", Literal["A", "B", "C", "D", "E"]))
    return {"reviews": dict(zip(criteria, reviews)), "grade": s["grade"]}


def main(backend: Any, essay: str = ESSAY, criteria: list[str] = CRITERIA, **sizes: int) -> ph.Run[Any]:
    return judge.run(essay=essay, criteria=criteria, temperature=0, backend=backend, **sizes)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
