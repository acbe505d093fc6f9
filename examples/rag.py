"""RAG over several documents: they are read once, held, and every question finds them in the cache.

    system · documents ─┬─ question 1 ── answer
                        ├─ question 2 ── answer       from the second question on, nine tenths are there already
                        └─ …

`digest` reads the documents on branches of their own, at once, and puts what they say behind each other with
`join(mode="concate_and_append")`: the same tokens as the flat prompt has, each at its own place.
"""

from __future__ import annotations

from typing import Any

import phloem as ph

DOCUMENTS = {
    "piers": "The north pier of Skarn is 120 metres long and was built in 1931. The south pier is 85 metres long; a storm took it in 1997, and it was rebuilt a year later.",
    "ferry": "The ferry Merganser sails to the mainland at 07:40 and at 16:15, except on Sundays. A ticket costs 14 crowns. Children under six travel free.",
    "market": "The fish market opens at six in the morning. Cod and herring are sold there all year. The harbour master, Ida Vestergaard, has her office beside it.",
    "library": "The library of Skarn has 4 200 books and one cat, whose name is Comma. It is open on Tuesdays and Fridays, and on rainy Sundays.",
}
QUESTIONS = [
    "How long is the north pier?",
    "When was the south pier rebuilt?",
    "What does a ticket for the ferry cost?",
    "Who is the harbour master?",
    "What is the name of the cat?",
    "When does the fish market open?",
    "How long is the south pier?",
    "On which day does the ferry not sail?",
    "Which fish are sold all year?",
    "How many books does the library have?",
]


@ph.function
def answer_all(s: ph.State, documents: dict[str, str], questions: list[str], max_tokens: int = 24) -> dict[str, str]:
    s += ph.system("Answer from these documents.\n\n" + "\n\n".join(f"[{name}] {text}" for name, text in documents.items()))
    answers: dict[str, str] = {}
    for question in questions:  # one after another, as they come in
        with s.copy() as branch:
            found = ph.gen("answer", stop="\n", max_tokens=max_tokens)
            branch += ph.user(question) + ph.assistant(found)
            answers[question] = branch[found].strip()
    return answers


@ph.function
def digest(s: ph.State, documents: dict[str, str], question: str, max_tokens: int = 24) -> str:
    s += "Notes from the archive.\n"
    notes = s.fork(len(documents))
    notes += [f"\n[{name}] {text}\n" for name, text in documents.items()]
    notes.join(mode="concate_and_append")
    s += f"\nQuestion: {question}\nAnswer:" + ph.gen("answer", stop="\n", max_tokens=max_tokens)
    return str(s["answer"]).strip()


def main(backend: Any, questions: list[str] = QUESTIONS, **sizes: int) -> ph.Run[Any]:
    return answer_all.run(documents=DOCUMENTS, questions=questions, temperature=0, backend=backend, **sizes)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
