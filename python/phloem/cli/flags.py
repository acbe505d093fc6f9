"""Flags made from records: a field `max_tokens` is the flag `--max-tokens`. So no field can be forgotten, and none has two names.

EngineConfig ──┐                      ┌── typer sees one parameter a field, None when the flag is not given
SamplingParams ┼── @command(…) ───────┤
own parameters ┘                      └── the body gets them gathered: engine={…}, sampling={…}
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from phloem.runtime.config import EngineConfig
from phloem.runtime.errors import ConfigError, InvalidRequestError
from phloem.runtime.request import SamplingParams

__all__ = ["ENGINE_HELP", "SAMPLING_HELP", "with_flags"]

ENGINE_HELP = {
    "model": "A directory, a .gguf file or org/name. Default: the embedded model.",
    "dtype": "auto, f32, bf16, f16, q8, q4, or fp8 (cuda): of the weights; auto keeps the file's.",
    "load_format": "auto, or dummy: random weights of the shape that config.json says.",
    "device": "auto, cpu, cuda or reference.",
    "page_size": "Tokens a page: 1, 2, 4, ... 64.",
    "kv_memory": 'The KV pool: bytes, a size ("2GiB") or a fraction of the RAM ("25%", "0.25").',
    "kv_tokens": "The KV pool, in tokens.",
    "kv_dtype": "auto, f32 or bf16; on cuda bf16, f16 or fp8.",
    "max_context": "Prompt and output, in tokens.",
    "max_running": "Sequences that run at once.",
    "max_step_tokens": "Token budget of one step.",
    "policy": "prefix, fcfs or priority.",
    "max_wait": "Served tokens after which a waiting request is overtaken no more.",
    "threads": "0: one a core.",
    "cache_mode": "on or off.",
    "deterministic": "Outputs do not depend on the batch. Always so on the CPU.",
    "overlap": "Plan while the device works.",
    "seed": "Of every draw: the same seed, the same output.",
}
SAMPLING_HELP = {
    "max_tokens": "At most so many; 0 computes the prompt only. Default: 128, or what room is left.",
    "min_tokens": "No end before so many.",
    "temperature": "0 is greedy. Default: 1.0.",
    "top_p": "(0, 1].",
    "top_k": "0 is off.",
    "min_p": "[0, 1].",
    "frequency_penalty": "[-2, 2].",
    "presence_penalty": "[-2, 2].",
    "repetition_penalty": "(0, 10].",
    "stop": "A string that ends the output. May be repeated.",
    "stop_token_ids": "A token id that ends the output. May be repeated.",
    "keep_stop": "Leave the stop string in the text.",
    "ignore_eos": "The model's own end token does not end the output.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "logit_bias": "ID=VALUE, -100 ... 100. May be repeated.",
    "allowed_token_ids": "Only these ids are drawn. May be repeated.",
    "logprobs": "Report the model's logprob of each token (see --format).",
    "top_logprobs": "So many alternatives a token, 0 ... 20.",
    "prompt_logprobs": "Logprobs of the prompt, from this position on.",
}
_OWN_SHAPE = {
    "kv_memory": str,  # a number or a size
    "logit_bias": list[str],  # ID=VALUE
    "logprobs": bool,  # on or off; the kind has its own flag
}


def with_flags(*, engine: bool = True, sampling: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of EngineConfig and SamplingParams. It is called with `engine=` and `sampling=`: the fields given.

    `--seed` is in both records: where both are used it seeds both.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        engine_fields = [f.name for f in dataclasses.fields(EngineConfig)] if engine else []
        sampling_fields = list(SamplingParams.__struct_fields__) if sampling else []
        own = [
            p.replace(annotation=get_type_hints(body, include_extras=True)[p.name])
            for p in inspect.signature(body).parameters.values()
            if p.name not in ("engine", "sampling")
        ]
        made = [_parameter(EngineConfig, name, ENGINE_HELP[name], "Engine") for name in engine_fields]
        for name in sampling_fields:
            if name not in engine_fields:
                made.append(_parameter(SamplingParams, name, SAMPLING_HELP.get(name, ""), "Sampling"))
        if sampling:
            made.append(_option("logprobs_mode", str, "model, sampled or both: the kind that --logprobs reports.", "Sampling"))

        def command(**values: Any) -> None:
            if sampling:
                mode = values.pop("logprobs_mode")
                if mode is not None:
                    values["logprobs"] = mode
            given = {name: value for name, value in values.items() if value is not None and value != []}
            arguments = {p.name: values[p.name] for p in own}
            if engine:
                arguments["engine"] = {name: _converted(name, given[name]) for name in engine_fields if name in given}
            if sampling:
                arguments["sampling"] = {name: _converted(name, given[name]) for name in sampling_fields if name in given}
            body(**arguments)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *made)]
        command.__name__, command.__doc__, command.__module__ = body.__name__, body.__doc__, body.__module__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameter(record: type, name: str, text: str, panel: str) -> inspect.Parameter:
    return _option(name, _OWN_SHAPE.get(name) or _flag_type(get_type_hints(record)[name]), text, panel)


def _option(name: str, kind: Any, text: str, panel: str) -> inspect.Parameter:
    dashed = name.replace("_", "-")
    flag = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    # Without show_default: every default is "not given", and the record's own then holds.
    option = typer.Option(flag, help=text, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


def _flag_type(hint: Any) -> Any:
    """The type that typer parses for a field: int | None -> int, Literal -> str, tuple[int, ...] -> list[int]."""
    origin, arguments = get_origin(hint), [a for a in get_args(hint) if a is not type(None)]
    if origin is Literal:
        return str
    if origin is tuple:
        return list[arguments[0]]  # type: ignore[valid-type]
    if len(arguments) == 1 and (origin is Union or type(None) in get_args(hint)):
        return _flag_type(arguments[0])
    if hint in (int, float, str, bool):
        return hint
    raise AssertionError(f"no flag can be made of {hint}: give it a shape in _OWN_SHAPE")


def _converted(name: str, value: Any) -> Any:
    """What the records expect of the two fields whose flags are text."""
    if name == "kv_memory":
        for number in (int, float):
            try:
                return number(value)
            except ValueError:
                continue
        return value
    if name == "logit_bias":
        return dict(_bias(entry) for entry in value)
    return value


def _bias(entry: str) -> tuple[int, float]:
    token, _, amount = entry.partition("=")
    try:
        return int(token), float(amount)
    except ValueError:
        raise InvalidRequestError(
            f"--logit-bias is {entry!r}; expected ID=VALUE, such as 42=-100.", param="logit_bias"
        ) from None


def usage_error(error: Exception) -> bool:
    """Whether an error comes from how the command was called: exit status 2."""
    return isinstance(error, (ConfigError, InvalidRequestError))
