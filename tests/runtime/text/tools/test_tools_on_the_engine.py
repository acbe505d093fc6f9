"""T5 and T9 on the embedded model: `required` and a named function give calls whose arguments fit, whatever the model would say."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

import phloem as ph
from phloem.runtime.request import Request
from phloem.runtime.text.tools import FORMATS, detect
from phloem.runtime.text.tools.base import CallPlan, choice_of, tools_of
from tests.runtime.text.tools.test_tool_formats import RAW, SCHEMAS

QUESTION = [{"role": "user", "content": "What is the weather in Paris for the next 3 days?"}]
NAMED = {"type": "function", "function": {"name": "tag"}}


def ask(engine: ph.Engine, plan: CallPlan, prompt: list[int], number: str, **sampling: Any) -> ph.Output:
    params = ph.SamplingParams(max_tokens=120, skip_special_tokens=plan.skip_special_tokens, **sampling)
    request = Request(id=f"tools-{number}", token_ids=tuple(prompt), sampling=params, grammar=plan.grammar)
    collector = engine._verbs._text.collector(request)

    class Sink:
        def push(self, delta: Any) -> int | None:
            collector.push(delta)
            return collector.stopped_at

        def fail(self, error: Exception) -> None:
            raise error

    engine._client.submit([(request, Sink())], atomic=True)
    engine._client.run(lambda: collector.output is not None)
    assert collector.output is not None
    return collector.output


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_t5_required_and_named_calls_fit_their_schemas(name: str, idle_engine: ph.Engine) -> None:
    found, tools = detect(idle_engine.tokenizer, name), tools_of(RAW)
    messages, offered = found.prepare(QUESTION, tools)
    prompt = idle_engine.encode_chat(messages, tools=offered)
    seen = []
    for choice in ("required", NAMED):
        plan = found.plan(choice_of(choice, tools), parallel=False)
        assert plan is not None
        for seed in (1, 2):
            output = ask(idle_engine, plan, prompt, f"{name}-{choice == NAMED}-{seed}", seed=seed, temperature=1.0)
            assert output.error is None and output.finish_reason == "grammar"
            assert output.usage.forced_tokens > 0
            reply = plan.parse(output.text)
            (call,) = reply.calls
            assert call.complete and not reply.content
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            seen.append(call.name)
    assert seen[2:] == ["tag", "tag"]


def test_t5_auto_is_read_whatever_the_model_says(idle_engine: ph.Engine) -> None:
    found, tools = detect(idle_engine.tokenizer), tools_of(RAW)
    messages, offered = found.prepare(QUESTION, tools)
    plan = found.plan(choice_of("auto", tools))
    assert plan is not None and offered is None
    output = ask(idle_engine, plan, idle_engine.encode_chat(messages), "auto", temperature=0.0)
    reply = plan.parse(output.text)
    assert reply.content + "".join(c.arguments for c in reply.calls)
    # The same free text as without a constraint, as far as no call opens.
    free = idle_engine.generate(idle_engine.encode_chat(messages), ph.SamplingParams(max_tokens=120, temperature=0))
    if not reply.calls:
        assert output.token_ids == free.token_ids
