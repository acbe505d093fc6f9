"""guidance: a grammar (as Lark, in `structured_outputs`-like extensions of its OpenAI client), a select, a JSON schema."""

from __future__ import annotations

import sys

import guidance
from guidance import assistant, gen, select, system, user

URL = sys.argv[1]


def main() -> None:
    model = guidance.models.experimental.VLLMModel("default", base_url=f"{URL}/v1", api_key="none", echo=False)
    with system():
        model += "You are terse."
    with user():
        model += "Yes or no?"
    with assistant():
        model += select(["yes", "no"], name="answer")
    assert model["answer"] in ("yes", "no")
    with user():
        model += "A number of three digits."
    with assistant():
        model += gen("number", regex=r"[0-9]{3}", max_tokens=10)
    assert len(model["number"]) == 3 and model["number"].isdigit()


main()
