"""The constraint of a call: the keyword arguments of the verbs in, one GrammarSpec out. Compiles nothing, knows no engine.

json_schema= · json_object= · regex= · choices= · grammar= · structural_tag=   at most one of them
strict= · json_whitespace= · jump_forward= · open_end= · trusted=              how it is served
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import GrammarSpec, SamplingParams

__all__ = ["GrammarOptions", "JsonSchema", "grammar_spec", "without_ignored_stops"]

JsonSchema = str | bool | Mapping[str, Any] | type
"""Schema text, a mapping, or a pydantic model class (anything with model_json_schema). Key order is the order of generation."""

Whitespace = Literal["flexible", "spaced", "compact"]
JumpForward = Literal["canonical", "permissive", "off"]


class GrammarOptions(TypedDict, total=False):
    """Constrain the output; at most one of the first six. GrammarError says what cannot be enforced, and where.

    json_schema: JSON that the schema accepts.   json_object: any JSON object.   regex: text that matches it as a whole.
    choices: one of these texts.   grammar: text of an EBNF grammar, whose first rule is `root`; of a Lark grammar, if it opens with
    %llguidance; or a GrammarSpec, which is served as it says.   structural_tag: free text with constrained tags.
    strict: False may leave out assertions that nobody enforces; Output.dropped_keywords lists them.
    json_whitespace: "flexible" (at most 8 blanks where JSON allows some), "spaced" (", " and ": ") or "compact".
    jump_forward: "canonical" takes what is forced without asking the model; "off" gives the same tokens one by one;
        "permissive" forces only where one token alone is legal, which is plain constrained sampling.
    open_end: a complete value also ends with any text that cannot continue it, as a number in running text does; what ended it is
        in no output, and Usage.dropped_tokens counts it.
    trusted: the constraint is the program's own, and compiles in this process rather than in a worker that can be killed.
    """

    json_schema: JsonSchema | None
    json_object: bool
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | GrammarSpec | None
    structural_tag: str | Mapping[str, Any] | None
    strict: bool
    json_whitespace: Whitespace
    jump_forward: JumpForward
    open_end: bool
    trusted: bool


_KINDS = ("json_schema", "json_object", "regex", "choices", "grammar", "structural_tag")
_HOW = {"strict": True, "json_whitespace": "flexible", "jump_forward": "canonical", "open_end": False, "trusted": False}
_WORDS = {"json_whitespace": ("flexible", "spaced", "compact"), "jump_forward": ("canonical", "permissive", "off")}


def grammar_spec(**options: Any) -> GrammarSpec | None:
    """What GrammarOptions asks for; None if it asks for nothing. Raises InvalidRequestError that names the argument."""
    unknown = [name for name in options if name not in _KINDS and name not in _HOW]
    if unknown:
        raise TypeError(f"there is no argument {unknown[0]!r} here; a constraint takes {', '.join([*_KINDS, *_HOW])}.")
    _check_flag("json_object", options.get("json_object", False))
    given = [name for name in _KINDS if options.get(name) is not None and not (name == "json_object" and not options[name])]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} were given; expected one kind of constraint at most.", param=given[1])
    how = {name: options.get(name, default) for name, default in _HOW.items()}
    for name in ("strict", "open_end", "trusted"):
        _check_flag(name, how[name])
    for name, words in _WORDS.items():
        if how[name] not in words:
            raise InvalidRequestError(f"{name} is {how[name]!r}; expected one of {', '.join(map(repr, words))}.", param=name)
    if not given:
        asked = [name for name in _HOW if name in options and options[name] != _HOW[name]]
        if asked:
            raise InvalidRequestError(
                f"{asked[0]} was given without a constraint; name one of {', '.join(_KINDS)}.", param=asked[0]
            )
        return None
    if isinstance(options[given[0]], GrammarSpec):
        return _whole(given[0], options)
    kind: Any = given[0]
    if kind == "grammar":
        kind = "lark" if isinstance(options[kind], str) and options[kind].lstrip().startswith("%llguidance") else "ebnf"
    return GrammarSpec(kind=kind, source=_SOURCES[given[0]](options[given[0]]), **how)


def _whole(name: str, options: dict[str, Any]) -> GrammarSpec:
    """A GrammarSpec says everything itself."""
    if name != "grammar":
        raise InvalidRequestError(f"{name} is a GrammarSpec; pass it as grammar=.", param=name)
    beside = [key for key in _HOW if key in options]
    if beside:
        raise InvalidRequestError(f"{beside[0]} was given beside a GrammarSpec, which has a field for it.", param=beside[0])
    spec: GrammarSpec = options[name]
    return spec


def without_ignored_stops(sampling: SamplingParams, grammar: GrammarSpec | None) -> SamplingParams:
    """Stop strings act on free text, and under regex, EBNF and choices; never inside JSON, where a value may well hold one."""
    if sampling.stop and grammar is not None and grammar.kind in ("json_schema", "json_object"):
        return msgspec.structs.replace(sampling, stop=())
    return sampling


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {value!r}; expected True or False.", param=name)


def _schema(value: Any) -> str:
    if isinstance(value, str):
        return value
    make = getattr(value, "model_json_schema", None)
    if make is not None:
        value = make()
    if not isinstance(value, (Mapping, bool)):
        raise InvalidRequestError(
            f"json_schema is a {type(value).__name__}; expected a mapping, JSON text, or a pydantic model class.",
            param="json_schema",
        )
    return _json("json_schema", value)


def _text(name: str) -> Any:
    def source(value: Any) -> str:
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} is a {type(value).__name__}; expected a string.", param=name)
        return value

    return source


def _choices(value: Any) -> str:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not all(isinstance(v, str) for v in value):
        raise InvalidRequestError("choices is not a list of strings.", param="choices")
    return _json("choices", list(value))


def _tag(value: Any) -> str:
    if isinstance(value, str):
        return value
    make = getattr(value, "model_dump", None)
    if make is not None:
        value = make(by_alias=True)
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"structural_tag is a {type(value).__name__}; expected a mapping or JSON text.", param="structural_tag"
        )
    return _json("structural_tag", value)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} is not JSON: {error}", param=name) from None


_SOURCES = {
    "json_schema": _schema,
    "json_object": lambda value: "",
    "regex": _text("regex"),
    "choices": _choices,
    "grammar": _text("grammar"),
    "structural_tag": _tag,
}
