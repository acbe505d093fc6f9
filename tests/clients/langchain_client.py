"""langchain-openai: invoke, stream, a bound tool, with_structured_output, batch."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = sys.argv[1]


class Answer(BaseModel):
    """An answer."""

    mood: Literal["good", "bad"]


@tool
def weather(city: Literal["Oslo", "Lima"]) -> str:
    """The weather of a city."""
    return "3 degrees"


def main() -> None:
    model = ChatOpenAI(
        base_url=f"{URL}/v1", api_key="none", model="default", temperature=0, max_tokens=40, max_retries=0, timeout=300
    )
    whole = model.invoke("Say hello.")
    assert whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(str(chunk.content) for chunk in model.stream("Say hello.")) == whole.content
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(Answer, method=method).invoke("How are you?").mood in ("good", "bad")
    called = model.bind_tools([weather], tool_choice="weather", parallel_tool_calls=False).invoke(
        "What is the weather in Oslo?"
    )
    assert called.tool_calls[0]["args"]["city"] in ("Oslo", "Lima")
    assert len(model.batch(["One.", "Two."])) == 2


main()
