"""Which engine enforces a grammar exactly (A3). "It compiled" does not mean "it is enforced": facts are data, by engine and version.

    source --limits--> schema --lower--> schema' --exact for xgrammar?--> engines, in the order in which they are asked

A version that was not audited gets nothing. What llguidance compiles after lowering counts as exact, as long as the tests agree.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.limits import check_size, read_schema
from phloem.runtime.grammar.lower import lower_schema
from phloem.runtime.request import GrammarSpec

__all__ = [
    "AUDITED",
    "AUDIT_VERSION",
    "ENGINES_OF",
    "Route",
    "XGRAMMAR_FACTS",
    "has_sized_string",
    "is_audited",
    "route",
    "xgrammar_objection",
]

AUDIT_VERSION = "audit 4"
"""Part of every cache key (C5): raise it whenever a fact or a lowering changes."""

AUDITED = {"xgrammar": ("0.2.9",), "llguidance": ("1.9.1",)}
"""The versions that the facts below were checked with."""

ENGINES_OF: dict[str, tuple[str, ...]] = {
    "choices": ("token_fsm", "llguidance"),
    "regex": ("token_fsm", "llguidance"),
    "json_object": ("llguidance",),
    "json_schema": ("token_fsm", "xgrammar", "llguidance"),
    "ebnf": ("xgrammar",),
    "structural_tag": ("xgrammar",),
    "lark": ("llguidance",),
}
"""kind -> engines in the order in which they are asked. Of JSON Schema, xgrammar gets what passes its audit alone."""


@dataclass(frozen=True, slots=True)
class Route:
    """spec: with the lowered schema as its source.   fallback: the same with `oneOf` loosened, where strict=False allows that.
    unproved: `oneOf`s of which only an engine can say whether their options are disjoint."""

    spec: GrammarSpec
    engines: tuple[str, ...]
    lowered: tuple[tuple[str, str], ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    unproved: tuple[tuple[str, str], ...] = ()
    fallback: Route | None = None


def route(spec: GrammarSpec, limits: Limits) -> Route:
    """Raises GrammarError for what is refused by size, is invalid, or is enforced by nobody."""
    check_size(spec.source, spec.kind, limits)
    engines = tuple(name for name in ENGINES_OF[spec.kind] if is_audited(name))
    if spec.kind == "structural_tag":
        return Route(check_tags(spec, limits), engines)
    if spec.kind != "json_schema":
        return Route(spec, engines)
    return _route_schema(spec, limits, engines, loose=False)


def _route_schema(spec: GrammarSpec, limits: Limits, engines: tuple[str, ...], loose: bool) -> Route:
    found = lower_schema(read_schema(spec.source, limits), limits, strict=spec.strict, loose_one_of=loose)
    schema = found.schema
    chosen = [
        name
        for name in engines
        if (name != "xgrammar" or (xgrammar_objection(schema) is None and not has_sized_string(schema)))
        and (name != "token_fsm" or _may_be_scalar(schema))
    ]
    if found.unproved and "xgrammar" in chosen:
        chosen.remove("xgrammar")
    fallback = None
    if found.unproved and not spec.strict and not loose:
        fallback = _route_schema(spec, limits, engines, loose=True)
    return Route(
        msgspec.structs.replace(spec, source=json.dumps(schema, ensure_ascii=False)),
        tuple(chosen),
        tuple(dict.fromkeys(found.lowered)),
        tuple(dict.fromkeys(found.dropped)),
        tuple(dict.fromkeys(found.unproved)),
        fallback,
    )


def check_tags(spec: GrammarSpec, limits: Limits) -> GrammarSpec:
    """Every JSON schema inside a structural tag is lowered, and must pass xgrammar's audit: no other engine has tags."""
    try:
        tag = json.loads(spec.source)
    except (ValueError, RecursionError):
        raise GrammarError("the structural tag is no JSON.", param="structural_tag") from None

    def walk(node: Any, pointer: str) -> Any:
        if isinstance(node, list):
            return [walk(item, f"{pointer}/{i}") for i, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        made = {key: walk(value, f"{pointer}/{key}") for key, value in node.items() if key != "json_schema"}
        if "json_schema" in node:
            source = json.dumps(node["json_schema"], ensure_ascii=False)
            schema = lower_schema(read_schema(source, limits), limits, strict=True).schema
            objection = xgrammar_objection(schema)
            if objection is not None:
                raise GrammarError(
                    f"the structural tag cannot be served: at {pointer}/json_schema{objection[0]}: {objection[1]!r} is not enforced "
                    "exactly inside tags. Say additionalProperties: false, and leave the keyword out.",
                    param=f"structural_tag{pointer}/json_schema{objection[0]}",
                )
            made["json_schema"] = schema
        return made

    return msgspec.structs.replace(spec, source=json.dumps(walk(tag, ""), ensure_ascii=False))


@functools.cache
def is_audited(engine: str) -> bool:
    versions = AUDITED.get(engine)
    if versions is None:
        return True  # our own
    try:
        return importlib.metadata.version(engine) in versions
    except importlib.metadata.PackageNotFoundError:
        return False


def _may_be_scalar(schema: Any) -> bool:
    if not isinstance(schema, dict) or "$defs" in schema:
        return False
    return "enum" in schema or schema.get("type") in ("integer", "number", "boolean", "null", "string")


# ---------------------------------------------------------------------------------------------------------- xgrammar's facts

Fact = Callable[[Mapping[str, Any]], bool]


def _only(*names: str) -> Fact:
    allowed = frozenset(names)
    return lambda node: set(node) <= allowed


def _closed(node: Mapping[str, Any]) -> bool:
    return node.get("additionalProperties") is False and set(node.get("required", ())) <= set(node.get("properties", ()))


def _int64(node: Mapping[str, Any]) -> bool:
    bounds = [node[k] for k in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if k in node]
    return all(isinstance(b, int) and -(2**63) <= b < 2**63 for b in bounds)


XGRAMMAR_FACTS: dict[str, tuple[str, Fact]] = {
    "object": ("closed: additionalProperties false, required within properties", lambda n: _only("type", "properties", "required", "additionalProperties")(n) and _closed(n)),
    "array": ("items, minItems, maxItems", _only("type", "items", "minItems", "maxItems")),
    "string": ("plain; inside tags min/maxLength alone, without escapes", _only("type", "minLength", "maxLength")),
    "integer": ("ranges within int64", lambda n: _only("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")(n) and _int64(n)),
    "number": ("without bounds", _only("type")),
    "boolean": ("", _only("type")),
    "null": ("", _only("type")),
    "$ref": ("alone", _only("$ref", "$defs")),
    "anyOf": ("alone", _only("anyOf", "$defs")),
    "enum": ("alone", _only("enum")),
}  # fmt: skip
"""What xgrammar 0.2.9 enforces exactly, by the kind of a lowered node: when, and the same as a predicate.

No pattern and no format: its regexes skip what stands before a bounded repeat in an optional group (`a(\\.[0-9]{1,3})?b` takes
"a1b"), and its formats are written with the same engine.
"""


def has_sized_string(schema: Any) -> bool:
    """Whether a lowered schema has a string with a length. xgrammar takes no escape there: no quote, no backslash, no newline, which is
    sound, and not what the schema says. Inside tags, which no other engine has, that is what is served."""
    if not isinstance(schema, dict):
        return False
    if schema.get("type") == "string" and ("minLength" in schema or "maxLength" in schema):
        return True
    parts = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", ())]
    return any(map(has_sized_string, [*parts, schema.get("items")]))


def xgrammar_objection(schema: Any, pointer: str = "") -> tuple[str, str] | None:
    """(pointer into the lowered schema, keyword) of the first place that xgrammar does not enforce exactly; None: it does."""
    if not isinstance(schema, dict):
        return (pointer, "false")
    node = {key: value for key, value in schema.items() if key != "$defs"}
    kind = next((key for key in ("$ref", "anyOf", "enum") if key in node), node.get("type"))
    if not isinstance(kind, str) or kind not in XGRAMMAR_FACTS:
        return (pointer, "type")
    if not XGRAMMAR_FACTS[kind][1](node):
        return (pointer, next((key for key in node if key != "type"), kind))
    for keyword in ("properties", "$defs"):
        for name, part in schema.get(keyword, {}).items():
            found = xgrammar_objection(part, f"{pointer}/{keyword}/{name}")
            if found is not None:
                return found
    if "items" in node:
        return xgrammar_objection(node["items"], f"{pointer}/items")
    for i, part in enumerate(node.get("anyOf", ())):
        found = xgrammar_objection(part, f"{pointer}/anyOf/{i}")
        if found is not None:
            return found
    return None
