"""Few-shot QA: many questions behind one prefix of examples, which is computed once.

examples ─┬─ "Q: … A:" ── answer
          ├─ "Q: … A:" ── answer        64 questions × 20 tokens behind 600: 1 880 of 40 280 tokens are computed
          └─ …
"""

from __future__ import annotations

from typing import Any

import phloem as ph

FACTS = [
    ("What is the capital of France?", "Paris"),
    ("How many legs does a spider have?", "Eight"),
    ("Which planet is closest to the sun?", "Mercury"),
    ("Who wrote Romeo and Juliet?", "William Shakespeare"),
    ("What do bees make?", "Honey"),
    ("What colour is an emerald?", "Green"),
]
QUESTIONS = [
    "What is the capital of Norway?",
    "How many legs does an ant have?",
    "Which planet is the largest?",
    "Who painted the Mona Lisa?",
    "What do cows eat?",
    "What colour is a ruby?",
]


@ph.function
def ask(s: ph.State, question: str, max_tokens: int = 8) -> str:
    s += "Answer each question in a word or two.\n\n"
    for known, answer in FACTS:
        s += f"Q: {known}\nA: {answer}\n\n"
    answer_here = ph.gen("answer", stop="\n", max_tokens=max_tokens, temperature=0)
    s += f"Q: {question}\nA:" + answer_here
    return s[answer_here].strip()


@ph.function
def few_shot(s: ph.State, questions: list[str], max_tokens: int = 8) -> dict[str, str]:
    """The same in one program: a branch a question."""
    s += "Answer each question in a word or two.\n\n" + "".join(f"Q: {q}\nA: {a}\n\n" for q, a in FACTS)
    answer = ph.gen("answer", stop="\n", max_tokens=max_tokens, temperature=0)
    with s.fork(len(questions)) as branches:
        for branch, question in zip(branches, questions):
            branch += f"Q: {question}\nA:" + answer
    return {question: found.strip() for question, found in zip(questions, s["answer"])}


def main(backend: Any, questions: list[str] = QUESTIONS, max_tokens: int = 8) -> ph.Run[Any]:
    return few_shot.run(questions=questions, max_tokens=max_tokens, backend=backend)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
