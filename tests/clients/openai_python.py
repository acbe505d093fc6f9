"""openai-python: models, chat, streams, async, completions, logprobs, `.parse` with pydantic, a loop of tools, errors."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel, Field

URL = sys.argv[1]
ASK: list[Any] = [{"role": "user", "content": "Say hello in one short sentence."}]


class City(BaseModel):
    name: str = Field(max_length=20)
    size: Literal["small", "large"]


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model

    whole = client.chat.completions.create(model=model, messages=ASK, max_completion_tokens=12, temperature=0)
    assert whole.choices[0].message.content and whole.usage and whole.usage.completion_tokens == 12

    pieces, last = [], None
    for chunk in client.chat.completions.create(
        model=model, messages=ASK, max_completion_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        last = chunk
    assert "".join(pieces) == whole.choices[0].message.content
    assert last is not None and last.usage is not None and last.usage.completion_tokens == 12

    with client.chat.completions.stream(model=model, messages=ASK, max_completion_tokens=12, temperature=0) as stream:
        for _ in stream:
            pass
        assert (
            stream.current_completion_snapshot.choices[0].message.content == whole.choices[0].message.content
        )  # the final one raises on `length`

    n = client.chat.completions.create(model=model, messages=ASK, max_tokens=4, n=3, seed=7, logprobs=True, top_logprobs=2)
    assert len(n.choices) == 3
    for choice in n.choices:
        assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content[0].top_logprobs) >= 2

    text = client.completions.create(model=model, prompt=["Once", "Twice"], max_tokens=3, temperature=0, logprobs=2, echo=True)
    assert [c.index for c in text.choices] == [0, 1] and text.choices[0].text.startswith("Once")

    parsed = client.chat.completions.parse(
        model=model, messages=ASK, response_format=City, max_completion_tokens=120, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, City)

    tool_loop(client, model)
    try:
        client.chat.completions.create(model="no such model", messages=ASK)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found" and model in str(error)
    else:
        raise AssertionError("an unknown model was served")
    asyncio.run(concurrently(model))


def tool_loop(client: openai.OpenAI, model: str) -> None:
    class Weather(BaseModel):
        """The weather of a city."""

        city: Literal["Oslo", "Lima"]

    tools = [openai.pydantic_function_tool(Weather)]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    first = client.chat.completions.parse(
        model=model,
        messages=messages,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=80,
        temperature=0,
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.tool_calls
    call = message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Weather)
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "3 degrees"}]
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="none", max_completion_tokens=16
    )
    assert answer.choices[0].message.content is not None

    arguments: list[str] = []
    for chunk in client.chat.completions.create(
        model=model, messages=messages[:1], tools=tools, tool_choice={"type": "function", "function": {"name": "Weather"}}, stream=True,
        max_completion_tokens=60, temperature=0,
    ):  # fmt: skip
        for delta in (c.delta for c in chunk.choices):
            arguments += [t.function.arguments or "" for t in delta.tool_calls or [] if t.function]
    assert json.loads("".join(arguments))["city"] in ("Oslo", "Lima")


async def concurrently(model: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=300) as client:

        async def one(number: int) -> str:
            said = []
            async for chunk in await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": f"Count to {number}."}],
                max_tokens=6,
                temperature=0,
                stream=True,
            ):
                said += [c.delta.content or "" for c in chunk.choices]
            return "".join(said)

        both = await asyncio.gather(*(one(k) for k in (1, 2, 3)), *(one(k) for k in (1, 2, 3)))
        assert both[:3] == both[3:]


main()
