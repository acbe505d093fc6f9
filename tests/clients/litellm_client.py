"""litellm through `hosted_vllm/`: chat, stream with usage, JSON schema, tools, async."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download at import
import litellm

URL = sys.argv[1]
KNOWN: dict[str, Any] = {
    "model": "hosted_vllm/default",
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "num_retries": 0,
    "timeout": 300,
}
ASK = [{"role": "user", "content": "Say hello in one short sentence."}]


def main() -> None:
    whole = litellm.completion(**KNOWN, messages=ASK, max_tokens=10, temperature=0)
    assert whole.choices[0].message.content and whole.usage.completion_tokens == 10
    said, usage = "", None
    for chunk in litellm.completion(
        **KNOWN, messages=ASK, max_tokens=10, temperature=0, stream=True, stream_options={"include_usage": True}
    ):
        said += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = getattr(chunk, "usage", None) or usage
    assert said == whole.choices[0].message.content and usage is not None and usage.completion_tokens == 10
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    kind = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    found = litellm.completion(**KNOWN, messages=ASK, response_format=kind, max_tokens=30, temperature=0)
    assert 0 <= json.loads(found.choices[0].message.content)["n"] <= 9
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    called = litellm.completion(**KNOWN, messages=ASK, tools=[tool], tool_choice="required", max_tokens=60, temperature=0)
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["n"] in range(10)
    again = asyncio.run(litellm.acompletion(**KNOWN, messages=ASK, max_tokens=10, temperature=0))
    assert again.choices[0].message.content == said
    try:
        litellm.completion(**{**KNOWN, "model": "hosted_vllm/no-such"}, messages=ASK)
    except litellm.NotFoundError:
        return
    raise AssertionError("an unknown model was served")


main()
