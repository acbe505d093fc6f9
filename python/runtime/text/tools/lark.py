"""The grammars of tool calls as Lark text for llguidance, the one engine that takes free text, tags and any JSON Schema together.

    start:  TEXT                                  free text, as far as its opener
          | TEXT opener call (separator call)*    what stands in a call is enforced; behind the calls nothing follows

Arguments follow the tool's schema after the same lowering and audit as a schema of its own would have (structured A2, A5; T6).
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from phloem.runtime.errors import GrammarError, InvalidRequestError
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.limits import read_schema
from phloem.runtime.grammar.lower import Lowered, lower_schema
from phloem.runtime.grammar.whitespace import llguidance_options
from phloem.runtime.request import GrammarSpec
from phloem.runtime.text.tools.base import Tool

__all__ = ["Arguments", "arguments_of", "content_json", "embed", "literal", "token"]

Whitespace = Literal["flexible", "spaced", "compact"]
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_PLAIN_OBJECT = {"type", "properties", "required", "$defs"}


class Arguments(msgspec.Struct, frozen=True):
    """schema: lowered, of an object.   dropped: (path, keyword) that is not enforced."""

    schema: dict[str, Any]
    dropped: tuple[tuple[str, str], ...] = ()


def arguments_of(tool: Tool, limits: Limits | None = None) -> Arguments:
    """T6. An object that lists its properties and is silent about others gets no others: a function would not know them.

    Raises GrammarError, with the path as its param, for what a strict tool demands and nobody enforces.
    """
    limits = limits or Limits()
    where = f"tools.{tool.number}.function.parameters"
    if tool.parameters is None:
        return Arguments(_NO_ARGUMENTS)
    try:
        lowered = _lowered(tool.parameters, limits, strict=True)
        if lowered.unproved and not tool.strict:
            lowered = _lowered(tool.parameters, limits, strict=False)
    except GrammarError as error:
        if tool.strict:
            raise GrammarError(
                f"the parameters of tool {tool.name!r} cannot be served: {error.message}",
                param=where + (error.param or "").removeprefix("json_schema"),
                code="invalid_json_schema",
            ) from None
        try:
            lowered = _lowered(tool.parameters, limits, strict=False)
        except GrammarError:
            return Arguments({"type": "object"}, ((where, "*"),))
    dropped = tuple((where + pointer, keyword) for pointer, keyword in dict.fromkeys(lowered.dropped))
    return Arguments(_of_an_object(lowered.schema), dropped)


def _lowered(parameters: Any, limits: Limits, *, strict: bool) -> Lowered:
    try:
        source = json.dumps(parameters, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"they are no JSON: {error}", param="json_schema") from None
    return lower_schema(read_schema(source, limits), limits, strict=strict, loose_one_of=not strict)


def _of_an_object(lowered: Any) -> dict[str, Any]:
    if not isinstance(lowered, dict):
        return {"type": "object"} if lowered else {"not": {}}
    schema: dict[str, Any] = lowered
    if "type" not in schema and {"$ref", "anyOf", "allOf", "oneOf", "enum"}.isdisjoint(schema):
        schema = {"type": "object", **schema}
    if schema.get("type") == "object" and "properties" in schema and set(schema) <= _PLAIN_OBJECT:
        schema = {**schema, "additionalProperties": False}
    return schema


def content_json(content: GrammarSpec, whitespace: Whitespace) -> str:
    """What a reply is if it is no call (T7). Raises InvalidRequestError for a constraint that is not JSON."""
    if content.kind == "json_object":
        return embed({"type": "object"}, whitespace)
    if content.kind != "json_schema":
        raise InvalidRequestError(
            f"tools with tool_choice 'auto' and a {content.kind} cannot be had together: which of the two a reply is must be seen "
            "from its start. Use a JSON schema, or leave one out.",
            param="response_format",
        )
    limits = Limits()
    lowered = lower_schema(read_schema(content.source, limits), limits, strict=content.strict).schema
    if lowered is True:
        lowered = {}
    if not isinstance(lowered, dict) or lowered.get("type") != "object":
        raise InvalidRequestError(
            "beside tools the response's schema must be of type object: which of the two a reply is must be seen from its start.",
            param="response_format",
        )
    return embed(lowered, whitespace)


def embed(schema: dict[str, Any], whitespace: Whitespace) -> str:
    options = {**llguidance_options(whitespace), "json_allow_general_unicode_escapes": True}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def literal(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def token(token_id: int) -> str:
    """A Lark token: this id, and no other spelling."""
    return f"<[{token_id}]>"
