"""Multi-turn chat: each turn computes what is new, the turns before it stay where they are.

system · user ── reply ── user ── reply ── user ── reply
"""

from __future__ import annotations

from typing import Any

import phloem as ph

TURNS = [
    "Hello! My name is Ada.",
    "I keep bees in the garden.",
    "What do they need in winter?",
    "And in spring?",
    "Which flowers do they like?",
    "Thank you. What was my name?",
]


@ph.function
def chat(s: ph.State, turns: list[str], max_tokens: int = 40) -> list[str]:
    s += ph.system("You are a friendly neighbour. Answer in one short sentence.")
    replies: list[str] = []
    for number, turn in enumerate(turns):
        reply = ph.gen(f"reply_{number}", max_tokens=max_tokens)
        s += ph.user(turn) + ph.assistant(reply)
        replies.append(s[reply])  # read here, as somebody who types would
    return replies


def main(backend: Any, turns: list[str] = TURNS, max_tokens: int = 40) -> ph.Run[Any]:
    return chat.run(turns=turns, max_tokens=max_tokens, temperature=0, backend=backend)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
