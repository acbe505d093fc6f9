"""Whether two schemas can share no instance: what turns `oneOf` into `anyOf` (A2). Says yes only where it is proved.

    by type          {"type": "string"}                       {"type": "integer"}
    by value         {"enum": [1, 2]}                         {"const": 3}
    by a property    required in one of them, and its schemas disjoint; or impossible in the other
    by options       each one of an anyOf or oneOf is disjoint from the other schema

Works on lowered schemas: no draft forms, `$ref` only to `#/$defs/…`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["TYPES", "Facts", "Known", "are_disjoint", "canonical", "facts_of", "type_of"]

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
MAX_DEPTH = 6
MAX_QUESTIONS = 20_000  # of one schema; beyond, nothing more is proved


def type_of(value: Any) -> str:
    """JSON type of an instance; whole numbers are integers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


@dataclass
class Known:
    """defs: name -> lowered schema of `#/$defs/name`.   excluding: pattern -> canonical JSON of strings that it does not match."""

    defs: Mapping[str, Any] = field(default_factory=dict)
    excluding: dict[str, frozenset[str]] = field(default_factory=dict)
    questions: int = 0  # that were asked

    def exclude(self, pattern: str, words: list[str]) -> None:
        """`pattern` matches every string but these."""
        self.excluding[pattern] = frozenset(map(canonical, words))

    def target(self, ref: str) -> Any:
        return self.defs.get(ref.removeprefix("#/$defs/"))


@dataclass
class Facts:
    """What must hold of every instance. kinds: types, with integer apart from other numbers."""

    source: Any = None
    kinds: frozenset[str] = TYPES
    listed: list[Any] | None = None  # the values of an enum
    values: frozenset[str] | None = None  # canonical JSON of each
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    closed: list[frozenset[str]] = field(default_factory=list)  # the only names that are possible
    others: list[tuple[frozenset[str], Any]] = field(default_factory=list)  # what holds of every name but these

    def forbids(self, name: str) -> bool:
        if any(schema is False for schema in self.properties.get(name, ())):
            return True
        return any(name not in names for names in self.closed)

    def schemas_of(self, name: str) -> list[Any]:
        """What must hold of this property where it is there."""
        return self.properties.get(name, []) + [schema for names, schema in self.others if name not in names]


def are_disjoint(a: Any, b: Any, known: Known, depth: int = 0) -> bool:
    """True: no instance satisfies both. False: not proved."""
    known.questions += 1
    if depth > MAX_DEPTH or known.questions > MAX_QUESTIONS:
        return False
    if a is False or b is False:
        return True
    for one, other in ((a, b), (b, a)):
        for options in _options(one, known):
            if all(are_disjoint(option, other, known, depth + 1) for option in options):
                return True
    fa, fb = facts_of(a, known), facts_of(b, known)
    kinds = fa.kinds & fb.kinds
    if not kinds or (fa.values is not None and fb.values is not None and not fa.values & fb.values):
        return True
    if any(x.values is not None and x.values <= y.excluded for x, y in ((fa, fb), (fb, fa))):
        return True
    if kinds != {"object"}:
        return False
    if any(fb.forbids(name) for name in fa.required) or any(fa.forbids(name) for name in fb.required):
        return True
    return any(
        are_disjoint(x, y, known, depth + 1)
        for name in sorted(fa.required | fb.required)
        for x in fa.schemas_of(name)
        for y in fb.schemas_of(name)
    )


def facts_of(schema: Any, known: Known) -> Facts:
    facts = Facts(schema)
    _collect(schema, facts, known, 0)
    return facts


def _options(schema: Any, known: Known, depth: int = 0) -> Iterator[list[Any]]:
    """Lists of schemas: whatever the schema accepts, one of each list accepts too."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    for key in ("anyOf", "oneOf"):
        if key in schema:
            yield schema[key]
    if "$ref" in schema:
        yield from _options(known.target(schema["$ref"]), known, depth + 1)
    for part in schema.get("allOf", ()):
        yield from _options(part, known, depth + 1)


def _collect(schema: Any, facts: Facts, known: Known, depth: int) -> None:
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return
    if "$ref" in schema:
        _collect(known.target(schema["$ref"]), facts, known, depth + 1)
    for part in schema.get("allOf", ()):
        _collect(part, facts, known, depth + 1)
    if "type" in schema:
        named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        kinds = set(named) | ({"integer"} if "number" in named else set())
        facts.kinds &= kinds
    facts.excluded.update(known.excluding.get(schema.get("pattern", ""), ()))
    if "enum" in schema:
        facts.kinds &= {type_of(value) for value in schema["enum"]}
        values = frozenset(canonical(value) for value in schema["enum"])
        facts.values = values if facts.values is None else facts.values & values
        facts.listed = [v for v in schema["enum"] if canonical(v) in facts.values]
    facts.required.update(schema.get("required", ()))  # asked for only where both can be nothing but objects
    for name, part in schema.get("properties", {}).items():
        facts.properties.setdefault(name, []).append(part)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        facts.closed.append(frozenset(schema.get("properties", ())))
    elif isinstance(schema.get("additionalProperties"), dict) and not schema.get("patternProperties"):
        facts.others.append((frozenset(schema.get("properties", ())), schema["additionalProperties"]))


def canonical(value: Any) -> str:
    """One spelling of equal instances: 1.0 is 1."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
