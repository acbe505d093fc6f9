"""The language: programs of `gen`, `select` and `fork` that become requests with shared prefixes.

    import phloem.lang as sgl            # SGLang's names; phloem re-exports those of its own

    @sgl.function
    def qa(s, question):
        s += sgl.user(question) + sgl.assistant(sgl.gen("answer", max_tokens=64))

    sgl.set_default_backend(phloem.Engine())
    print(qa.run(question="What is the capital of France?")["answer"])

Names are loaded when they are first used (PEP 562): importing this loads neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phloem.lang import ir
    from phloem.lang.backend import Backend, Capabilities
    from phloem.lang.budget import limits
    from phloem.lang.choices import (
        ChoiceScore,
        greedy_token_selection,
        sum_of_logprobs,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from phloem.lang.defaults import flush_cache, get_server_info, global_config, set_default_backend
    from phloem.lang.group import AsyncGroup, Group, fork_each
    from phloem.lang.ir import (
        Gen,
        Select,
        assistant,
        assistant_begin,
        assistant_end,
        gen,
        gen_int,
        gen_string,
        plain,
        ref,
        role,
        select,
        special,
        system,
        system_begin,
        system_end,
        tool,
        user,
        user_begin,
        user_end,
    )
    from phloem.lang.openai import OpenAI
    from phloem.lang.remote import RuntimeEndpoint
    from phloem.lang.run import Program, Run, function
    from phloem.lang.state import AsyncState, State
    from phloem.lang.stream import Done, Partial, Token, ToolArgs
    from phloem.lang.testing import Scripted, byte_tokenizer
    from phloem.lang.tools import Call, Reply, as_tool, react
    from phloem.lang.trace import Replay, Trace
    from phloem.lang.types import FloatRange, IntRange
    from phloem.lang.usage import RunUsage, usage_of

_HOME = {
    **dict.fromkeys(("Backend", "Capabilities"), "backend"),
    **dict.fromkeys(
        ("ChoiceScore", "greedy_token_selection", "sum_of_logprobs", "token_length_normalized", "unconditional_likelihood_normalized"), "choices"
    ),
    **dict.fromkeys(("flush_cache", "get_server_info", "global_config", "set_default_backend"), "defaults"),
    **dict.fromkeys(("AsyncGroup", "Group", "fork_each"), "group"),
    **dict.fromkeys(
        ("Gen", "Select", "assistant", "assistant_begin", "assistant_end", "gen", "gen_int", "gen_string", "plain", "ref", "role", "select", "special",
         "system", "system_begin", "system_end", "tool", "user", "user_begin", "user_end"), "ir",
    ),
    "limits": "budget",
    **dict.fromkeys(("Program", "Run", "function"), "run"),
    **dict.fromkeys(("AsyncState", "State"), "state"),
    **dict.fromkeys(("Done", "Partial", "Token", "ToolArgs"), "stream"),
    "OpenAI": "openai",
    "RuntimeEndpoint": "remote",
    **dict.fromkeys(("Scripted", "byte_tokenizer"), "testing"),
    **dict.fromkeys(("Call", "Reply", "as_tool", "react"), "tools"),
    **dict.fromkeys(("Replay", "Trace"), "trace"),
    **dict.fromkeys(("FloatRange", "IntRange"), "types"),
    **dict.fromkeys(("RunUsage", "usage_of"), "usage"),
}  # fmt: skip

_ELSEWHERE = {
    "image": "the models here read text only.",
    "video": "the models here read text only.",
    "Anthropic": "that API has neither tokens nor logprobs for a program. Use Engine, RuntimeEndpoint or OpenAI(base_url, model).",
    "LiteLLM": "point OpenAI(base_url, model) at the LiteLLM proxy.",
    "VertexAI": "point OpenAI(base_url, model) at its OpenAI-compatible endpoint.",
}

__all__ = [
    "ir",
    "AsyncGroup",
    "AsyncState",
    "Backend",
    "Call",
    "Capabilities",
    "ChoiceScore",
    "Done",
    "FloatRange",
    "Gen",
    "Group",
    "IntRange",
    "OpenAI",
    "Partial",
    "Program",
    "Replay",
    "Reply",
    "Run",
    "RunUsage",
    "RuntimeEndpoint",
    "Scripted",
    "Select",
    "State",
    "Token",
    "ToolArgs",
    "Trace",
    "as_tool",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "byte_tokenizer",
    "flush_cache",
    "fork_each",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "limits",
    "plain",
    "react",
    "ref",
    "role",
    "select",
    "set_default_backend",
    "special",
    "sum_of_logprobs",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "tool",
    "unconditional_likelihood_normalized",
    "usage_of",
    "user",
    "user_begin",
    "user_end",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"phloem.lang.{_HOME[name]}"), name)
    elif name in _ELSEWHERE:
        raise AttributeError(f"phloem.lang has no {name}: {_ELSEWHERE[name]}")
    else:
        try:
            return importlib.import_module(f"phloem.lang.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"module 'phloem.lang' has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
