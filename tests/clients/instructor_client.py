"""instructor: TOOLS and JSON_SCHEMA modes, partial objects of a stream."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a schema that allows more members is served with more members
    mood: Literal["good", "bad"]
    score: int = Field(ge=0, le=9)


def main() -> None:
    base = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(base, mode=mode)
        ask = {
            "model": "default",
            "messages": [{"role": "user", "content": "How are you?"}],
            "max_tokens": 80,
            "temperature": 0,
        }
        found = client.chat.completions.create(response_model=Answer, max_retries=0, **ask)
        assert found.mood in ("good", "bad") and 0 <= found.score <= 9
        pieces = list(client.chat.completions.create_partial(response_model=Answer, **ask))
        assert pieces and pieces[-1].mood in ("good", "bad")


main()
