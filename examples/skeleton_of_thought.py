"""Skeleton of thought: first the points, then all of them expanded at once, then the text put together.

question ── skeleton ─┬─ point 1 ── text
                      ├─ point 2 ── text       one forward a token for all of them, not one each
                      └─ …
"""

from __future__ import annotations

from typing import Any

import phloem as ph

QUESTION = "How do I grow tomatoes on a balcony?"


@ph.function
def skeleton_of_thought(s: ph.State, question: str, points: int = 5, head_tokens: int = 10, text_tokens: int = 40) -> str:
    s += ph.system("You answer in numbered points.") + ph.user(f"{question} Name {points} points, a few words each.")
    with s.assistant():
        for i in range(points):
            s += f"{i + 1}. " + ph.gen(f"head_{i}", stop=["\n", "."], max_tokens=head_tokens) + "\n"
    heads = [s[f"head_{i}"].strip() for i in range(points)]
    text = ph.gen("text", stop="\n", max_tokens=text_tokens)
    with s.fork(points) as branches:
        for i, branch in enumerate(branches):
            branch += ph.user(f"Explain point {i + 1} in one sentence: {heads[i]}") + ph.assistant(text)
    return "\n".join(f"{i + 1}. {head}: {found.strip()}" for i, (head, found) in enumerate(zip(heads, s["text"])))


def main(backend: Any, **sizes: int) -> ph.Run[Any]:
    return skeleton_of_thought.run(question=QUESTION, temperature=0, backend=backend, **sizes)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
