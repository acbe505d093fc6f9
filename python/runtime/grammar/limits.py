"""The door (C1): what is refused by size alone, before any engine sees it. Data in, data out; knows no engine and no keyword's meaning."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Limits

__all__ = ["check_size", "read_schema", "refuse_schema"]


def refuse_schema(pointer: str, why: str) -> NoReturn:
    """pointer: JSON pointer into the schema. `param` ends in it (A4)."""
    at = f"at {pointer}: " if pointer else ""
    raise GrammarError(
        f"the JSON schema cannot be served: {at}{why}", param=f"json_schema{pointer}", code="invalid_json_schema"
    )


def check_size(source: str, kind: str, limits: Limits) -> None:
    size = len(source) if len(source) > limits.source_bytes else len(source.encode("utf-8", "surrogatepass"))
    if size > limits.source_bytes:
        raise GrammarError(
            f"the {kind.replace('_', ' ')} has {size} bytes; at most {limits.source_bytes} are compiled. Split it, or leave parts out.",
            param=kind,
            code="invalid_json_schema" if kind == "json_schema" else None,
        )


def read_schema(source: str, limits: Limits) -> Any:
    """The schema as Python values. Raises GrammarError for what is no JSON, too large, too deep or too wide."""
    check_size(source, "json_schema", limits)
    try:
        schema = json.loads(source, parse_constant=_no_json)
    except RecursionError:
        refuse_schema("", f"it is nested deeper than {limits.depth} levels. Flatten it, or use $ref.")
    except ValueError as error:
        refuse_schema("", f"it is no JSON ({error}).")
    if not isinstance(schema, (dict, bool)):
        refuse_schema("", f"it is a {type(schema).__name__}; expected an object, true or false.")
    _measure(schema, limits)
    return schema


def _no_json(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _measure(schema: Any, limits: Limits) -> None:
    """Counts every object and list, of instances within `enum` too: what is large is large wherever it stands."""
    level, depth, objects, values = [schema] if isinstance(schema, dict) else [], 0, 0, 0
    while level:
        depth += 1
        if depth > 2 * limits.depth:  # a subschema stands two levels below its own (properties, name)
            refuse_schema("", f"it is nested deeper than {limits.depth} levels. Flatten it, or use $ref.")
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            if isinstance(item, dict):
                objects += 1
                enum, properties = item.get("enum"), item.get("properties")
                values += len(enum) if isinstance(enum, list) else 0
                if isinstance(properties, dict) and len(properties) > limits.properties:
                    refuse_schema("", f"an object has {len(properties)} properties; at most {limits.properties} are compiled.")
            below += [child for child in children if isinstance(child, (dict, list))]
        if objects > 2 * limits.subschemas:  # every second object may be a map of subschemas, not one itself
            refuse_schema("", f"it has more than {limits.subschemas} subschemas. Split it.")
        if values > limits.enum_values:
            refuse_schema("", f"its enums have more than {limits.enum_values} values in all. Split it, or use a pattern.")
        level = below
