"""JSON extraction into pydantic: mails in, validated tickets out, half of their tokens never asked of the model.

instructions ─┬─ mail 1 ── {"product": …}     the schema dictates the keys, and what it dictates is written without a forward
              └─ mail 2 ── …
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

import phloem as ph

MAILS = [
    "The lid of my thermos broke on the first day. I want my money back. Ruth",
    "Hi, the lamp flickers since yesterday. No hurry. Best, Tom",
    "My whole order of twelve mugs arrived in pieces! Call me today! Olga",
    "The kettle is fine, but the manual is in Finnish. Can you send another? Jun",
]


class Ticket(BaseModel):
    product: Annotated[str, Field(max_length=24)]
    severity: Literal["low", "medium", "high"]
    refund: bool
    items: Annotated[int, Field(ge=1, le=99)]


@ph.function
def extract(s: ph.State, mails: list[str], max_tokens: int = 80) -> list[Ticket]:
    ticket = ph.gen("ticket", Ticket, max_tokens=max_tokens)
    s += ph.system("You turn mails to a shop into tickets: product, severity, whether a refund is wanted, number of items.")
    with s.fork(len(mails)) as branches:
        for branch, mail in zip(branches, mails):
            branch += ph.user(mail) + ph.assistant(ticket)
    return [branch[ticket] for branch in branches]


def main(backend: Any, mails: list[str] = MAILS, **sizes: int) -> ph.Run[Any]:
    return extract.run(mails=mails, temperature=0, backend=backend, **sizes)


if __name__ == "__main__":
    from present import present

    present(main, __doc__)
