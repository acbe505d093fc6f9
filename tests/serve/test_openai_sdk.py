"""openai's own Python SDK against the embedded model, over a real loopback socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

import openai
import pydantic
import pytest

from tests.serve.serving import Loopback, Server

HELLO = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def sdk(loopback: Loopback) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{loopback.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_models(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list().data
    assert (model.id, model.owned_by) == ("smollm2", "phloem")
    assert sdk.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_chat_whole_and_streamed_are_one_text(sdk: openai.OpenAI) -> None:
    asked = {"model": "smollm2", "messages": HELLO, "temperature": 0, "max_completion_tokens": 12, "seed": 1}
    whole = sdk.chat.completions.create(**asked)  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {c.id for c in chunks} == {chunks[0].id}
    assert whole.system_fingerprint == chunks[0].system_fingerprint


def test_the_streaming_helper_assembles_the_same(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(model="smollm2", messages=HELLO, temperature=0, max_completion_tokens=8) as stream:  # type: ignore[arg-type]
        for _ in stream:
            pass
        final = stream.current_completion_snapshot
    whole = sdk.chat.completions.create(model="smollm2", messages=HELLO, temperature=0, max_completion_tokens=8)  # type: ignore[call-overload]
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_completions_with_logprobs(sdk: openai.OpenAI) -> None:
    reply = sdk.completions.create(model="smollm2", prompt="The capital of France is", max_tokens=5, temperature=0, logprobs=2)
    (choice,) = reply.choices
    assert choice.logprobs is not None and choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert reply.usage is not None and len(choice.logprobs.tokens) == reply.usage.completion_tokens == 5


def test_parse_gives_the_users_own_type(sdk: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        yes: bool
        size: Literal[1, 2]

    reply = sdk.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Answer in JSON."}],
        response_format=Answer,
        temperature=0,
        max_completion_tokens=60,
    )
    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, Answer)


def test_a_named_tool_is_called(sdk: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False,
            },
        },
    }  # fmt: skip
    asked = {
        "model": "smollm2", "messages": HELLO, "tools": [tool], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "temperature": 0,
    }  # fmt: skip
    whole = sdk.chat.completions.create(**asked)  # type: ignore[call-overload]
    (call,) = whole.choices[0].message.tool_calls
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather" and call.function.arguments in ('{"city": "Paris"}', '{"city": "Rome"}')


def test_errors_are_the_sdks_own_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(model="smollm2", messages=HELLO, temperature=1000)  # type: ignore[call-overload]
    assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
    assert caught.value.request_id is not None and caught.value.request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="smollm2", messages=HELLO, functions=[{"name": "f"}])  # type: ignore[call-overload]
    assert refused.value.code == "unsupported_parameter"


def test_the_async_client(loopback: Loopback, embedded: Server) -> None:
    async def several() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{loopback.url}/v1", api_key="unused", max_retries=0) as client:
            asked = [
                client.chat.completions.create(model="default", messages=HELLO, temperature=0, max_tokens=6)  # type: ignore[call-overload]
                for _ in range(4)
            ]
            return [r.choices[0].message.content for r in await asyncio.gather(*asked)]

    texts = asyncio.run(several())
    assert len(set(texts)) == 1
    embedded.assert_idle()
