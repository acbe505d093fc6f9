"""Tree of thought: three ideas for each state, a mark for each idea, the best two go on. The losers' pages are free at once.

goal ─┬─ idea ── 7 ─┬─ idea ── 8 ── plan
      ├─ idea ── 2  └─ idea ── 3
      └─ idea ── 6 ─── …
"""

from __future__ import annotations

from typing import Any

import phloem as ph

GOAL = "We must cross a river with a cart. There is a rope, an axe, and a forest. Give one step at a time."


@ph.function
async def explore(
    s: ph.AsyncState, goal: str, width: int = 3, depth: int = 2, keep: int = 2, idea_tokens: int = 24, plan_tokens: int = 60
) -> str:
    idea = ph.gen("idea", stop="\n", max_tokens=idea_tokens)
    mark = ph.gen("mark", ph.IntRange(0, 10))
    s += ph.user(goal)
    frontier = [s]
    for _ in range(depth):
        async with ph.fork_each(frontier, width) as branches:
            for branch in branches:
                branch += ph.assistant("Next step: " + idea) + ph.user("Rate that step, 0 to 10.") + ph.assistant(mark)
            frontier = await branches.top(keep, key=mark)
    plan = ph.gen("plan", max_tokens=plan_tokens)
    frontier[0] += ph.user("Good. Now say the whole plan.") + ph.assistant(plan)
    return await frontier[0][plan]


def main(backend: Any, **sizes: int) -> ph.Run[Any]:
    return explore.run(goal=GOAL, seed=5, temperature=1.0, backend=backend, **sizes)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
