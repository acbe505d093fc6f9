"""outlines: JSON schema, through its OpenAI and its vLLM client; regex and choices through the latter."""

from __future__ import annotations

import json
import re
import sys
from typing import Literal

import openai
import outlines
from pydantic import BaseModel, ConfigDict, Field

URL = sys.argv[1]


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a schema that allows more members is served with more members
    score: int = Field(ge=0, le=9)


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
    by_openai = outlines.from_openai(client, "default")
    assert by_openai("Say hello.", max_tokens=8)
    assert 0 <= json.loads(by_openai("Score?", Answer, max_tokens=40, temperature=0))["score"] <= 9
    by_vllm = outlines.from_vllm(client, "default")
    assert 0 <= json.loads(by_vllm("Score?", Answer, max_tokens=40, temperature=0))["score"] <= 9
    assert by_vllm("Yes or no?", Literal["yes", "no"], max_tokens=10, temperature=0) in ("yes", "no")
    assert re.fullmatch(r"[0-9]{3}", by_vllm("A number:", outlines.types.Regex(r"[0-9]{3}"), max_tokens=10, temperature=0))


main()
