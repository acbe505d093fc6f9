"""Phloem: a structured-generation runtime for language models.

    import phloem as ph

    engine = ph.Engine()                                  # the embedded SmolLM2-135M-Instruct
    out = engine.generate("Once upon a time", ph.SamplingParams(max_tokens=32, temperature=0))
    print(out.text, out.usage.cached_tokens)

Names are loaded when they are first used (PEP 562), so `import phloem` is quick and loads neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phloem.lang import (
        AsyncGroup,
        AsyncState,
        Call,
        Capabilities,
        ChoiceScore,
        Done,
        FloatRange,
        Gen,
        Group,
        IntRange,
        OpenAI,
        Partial,
        Program,
        Replay,
        Reply,
        Run,
        RuntimeEndpoint,
        RunUsage,
        Scripted,
        Select,
        State,
        Token,
        ToolArgs,
        Trace,
        as_tool,
        assistant,
        fork_each,
        function,
        gen,
        gen_int,
        gen_string,
        limits,
        plain,
        react,
        ref,
        role,
        select,
        set_default_backend,
        special,
        system,
        tool,
        usage_of,
        user,
    )
    from phloem.runtime.config import EngineConfig
    from phloem.runtime.engine.aio import AsyncEngine, AsyncStream
    from phloem.runtime.engine.select import ChoiceScores, Selection
    from phloem.runtime.engine.sync import Engine, Stream
    from phloem.runtime.errors import (
        BackendUnavailable,
        BackendUnsupported,
        Cancelled,
        CapacityError,
        CheckFailed,
        ConfigError,
        ContextLengthError,
        EngineBusyError,
        EngineClosedError,
        EngineDeadError,
        EngineSuspendedError,
        GrammarDeadEnd,
        GrammarError,
        IncompleteOutput,
        InvalidRequestError,
        KernelError,
        LimitExceeded,
        MismatchError,
        ModelLoadError,
        NumericalError,
        PhloemError,
        ProgramError,
        ProgramTimeout,
        ReplayMismatch,
        RequestError,
        RequestTimeoutError,
        StaleVersionError,
        ToolFailed,
        UncommittedWeightsError,
        UnsupportedModelError,
        WeightLayoutError,
        WeightsError,
        WeightsInvalidError,
    )
    from phloem.runtime.request import Delta, Output, SamplingParams, TokenLogprob, Usage
    from phloem.runtime.rl.engine import RolloutEngine

    __version__: str

__all__ = [
    "AsyncEngine",
    "AsyncGroup",
    "AsyncState",
    "AsyncStream",
    "BackendUnavailable",
    "BackendUnsupported",
    "Call",
    "Cancelled",
    "Capabilities",
    "CapacityError",
    "CheckFailed",
    "ChoiceScore",
    "ChoiceScores",
    "ConfigError",
    "ContextLengthError",
    "Delta",
    "Done",
    "Engine",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "EngineDeadError",
    "EngineSuspendedError",
    "FloatRange",
    "Gen",
    "GrammarDeadEnd",
    "GrammarError",
    "Group",
    "IncompleteOutput",
    "IntRange",
    "InvalidRequestError",
    "KernelError",
    "LimitExceeded",
    "MismatchError",
    "ModelLoadError",
    "NumericalError",
    "OpenAI",
    "Output",
    "Partial",
    "PhloemError",
    "Program",
    "ProgramError",
    "ProgramTimeout",
    "Replay",
    "ReplayMismatch",
    "Reply",
    "RequestError",
    "RequestTimeoutError",
    "RolloutEngine",
    "Run",
    "RunUsage",
    "RuntimeEndpoint",
    "SamplingParams",
    "Scripted",
    "Select",
    "Selection",
    "StaleVersionError",
    "State",
    "Stream",
    "Token",
    "TokenLogprob",
    "ToolArgs",
    "ToolFailed",
    "Trace",
    "UncommittedWeightsError",
    "UnsupportedModelError",
    "Usage",
    "WeightLayoutError",
    "WeightsError",
    "WeightsInvalidError",
    "as_tool",
    "assistant",
    "fork_each",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "limits",
    "plain",
    "react",
    "ref",
    "role",
    "select",
    "set_default_backend",
    "special",
    "system",
    "tool",
    "usage_of",
    "user",
]

_HOME = {
    "AsyncEngine": "phloem.runtime.engine.aio",
    "AsyncStream": "phloem.runtime.engine.aio",
    "ChoiceScores": "phloem.runtime.engine.select",
    "Engine": "phloem.runtime.engine.sync",
    "EngineConfig": "phloem.runtime.config",
    "RolloutEngine": "phloem.runtime.rl.engine",
    "Selection": "phloem.runtime.engine.select",
    "Stream": "phloem.runtime.engine.sync",
    **dict.fromkeys(("Delta", "Output", "SamplingParams", "TokenLogprob", "Usage"), "phloem.runtime.request"),
    **dict.fromkeys(
        ("AsyncGroup", "AsyncState", "Call", "Capabilities", "ChoiceScore", "Done", "FloatRange", "Gen", "Group", "IntRange", "OpenAI", "Partial", "Program", "Replay", "Reply", "Run", "RunUsage", "RuntimeEndpoint", "Scripted", "Select", "State", "Token", "ToolArgs", "Trace", "as_tool", "assistant", "fork_each", "function", "gen", "gen_int", "gen_string", "limits", "plain", "react", "ref", "role", "select", "set_default_backend", "special", "system", "tool", "usage_of", "user"), "phloem.lang",
    ),
}  # fmt: skip # every other name of __all__ is an error


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("phloem")
    elif name in __all__:
        value = getattr(importlib.import_module(_HOME.get(name, "phloem.runtime.errors")), name)
    else:
        raise AttributeError(f"module 'phloem' has no attribute {name!r}")
    globals()[name] = value  # the next look-up finds it directly
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
