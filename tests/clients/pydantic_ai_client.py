"""pydantic-ai: text, a typed output through a required tool, a stream."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]


class Answer(BaseModel):
    mood: Literal["good", "bad"]


async def main() -> None:
    model = OpenAIChatModel("default", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    settings = {"temperature": 0.0, "max_tokens": 60}
    text = await Agent(model, model_settings=settings).run("Say hello.")
    assert text.output
    typed = await Agent(model, output_type=Answer, model_settings=settings, retries=0).run("How are you?")
    assert typed.output.mood in ("good", "bad")
    async with Agent(model, model_settings=settings).run_stream("Say hello.") as stream:
        said = await stream.get_output()
    assert said == text.output


asyncio.run(main())
