"""What a simple schema excludes, as alternatives: how `not`, `if` and an overlapping `oneOf` become `anyOf` (A2).

    {"type": "object", "required": ["a"], "properties": {"b": {"maxLength": 3}}}
      excludes    every other type | objects without a | objects whose b is a string of 4 or more

Exact, or None: what is too little refuses valid values. `most` may be too little, never too much: what keeps one option of a
`oneOf` out of another may refuse a few values that only one of them takes, and lets none through that both do. Works on lowered
schemas.
"""

from __future__ import annotations

from typing import Any

from phloem.runtime.grammar.disjoint import TYPES, Facts, Known, are_disjoint, canonical, facts_of, type_of

__all__ = ["MAX_ALTERNATIVES", "complement", "most_of_complement", "without_words"]

MAX_ALTERNATIVES, MAX_DEPTH = 16, 4
MAX_WORD, MAX_WORDS = 100, 1_000
ANYTHING = r"[\s\S]*"

_TURNED = {
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1), "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip
_ORDER = ("null", "boolean", "integer", "number", "string", "array", "object")


def complement(schema: Any, known: Known, within: Any = None, depth: int = 0) -> list[Any] | None:
    """Alternatives that hold of exactly the instances of `within` (None: all) that `schema` does not accept; None: not expressible.

    [] : it accepts all of them.
    """
    if schema is False:
        return [{}]
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    facts = facts_of(within if within is not None else {}, known)
    found: list[Any] = []
    for keyword, value in schema.items():
        part = _of_keyword(schema, keyword, value, facts, known, depth)
        if part is None:
            return None
        found += part
        if len(found) > MAX_ALTERNATIVES:
            return None
    return found


def most_of_complement(schema: Any, known: Known, within: Any) -> list[Any] | None:
    """Alternatives that hold of instances of `within` that `schema` does not accept, of as many as can be said; None: of none.

    A property of which the two say disjoint things tells them apart as soon as it is there: that alternative goes first.
    """
    while isinstance(schema, dict) and "$ref" in schema and set(schema) <= {"$ref", "$defs"}:
        schema = known.target(schema["$ref"])
    if not isinstance(schema, dict):
        return None
    facts, found = facts_of(within, known), list[Any]()
    theirs = facts_of(schema, known).properties
    telling = [
        name
        for name, parts in facts.properties.items()
        if any(are_disjoint(a, b, known) for a in parts for b in theirs.get(name, ()))
    ]
    found += [{"type": "object", "required": [name]} for name in telling]
    for keyword, value in schema.items():
        if keyword == "properties":
            for name, part in value.items():
                if name not in telling:
                    found += _of_properties({name: part}, known, 0, most=True) or []
        elif keyword == "type":
            found += _other_types(value, facts, most=True) or []
        else:
            found += _of_keyword(schema, keyword, value, facts, known, 0) or []
    found = [one for one in found if not are_disjoint(within, one, known)]
    return found[:MAX_ALTERNATIVES] or None


def _of_keyword(schema: dict[str, Any], keyword: str, value: Any, facts: Facts, known: Known, depth: int) -> list[Any] | None:
    if keyword == "type":
        return _other_types(value, facts)
    if keyword in _TURNED:
        kind, turned, step = _TURNED[keyword]
        return [] if step < 0 and value == 0 else [{"type": kind, turned: value + step}]
    if keyword == "required":
        return [{"type": "object", "properties": {name: False}} for name in value]
    if keyword == "properties":
        return _of_properties(value, known, depth)
    if keyword == "enum":
        return _other_values(value, facts, known)
    if keyword == "additionalProperties" and value is False and "patternProperties" not in schema and facts.closed:
        possible = frozenset.intersection(*facts.closed)
        return [{"type": "object", "required": [name]} for name in sorted(possible.difference(schema.get("properties", ())))]
    if keyword == "$ref":
        target = known.target(value)
        return None if target is None else complement(target, known, facts.source, depth + 1)
    if keyword == "allOf":
        parts = [complement(part, known, facts.source, depth + 1) for part in value]
        return None if None in parts else [alternative for part in parts for alternative in part or ()]
    return None


def _other_types(value: Any, facts: Facts, most: bool = False) -> list[Any] | None:
    named = {value} if isinstance(value, str) else set(value)
    named |= {"integer"} if "number" in named else set()
    left = facts.kinds - named
    if "number" in left and "integer" in named:
        if not most:
            return None  # numbers with a fraction: no keyword says that
        left -= {"number"}
    left -= {"integer"} if "number" in left else set()
    ordered = [kind for kind in _ORDER if kind in left]
    return [] if not ordered else [{"type": ordered[0] if len(ordered) == 1 else ordered}]


def _of_properties(properties: dict[str, Any], known: Known, depth: int, most: bool = False) -> list[Any] | None:
    found: list[Any] = []
    for name, part in properties.items():
        outside = most_of_complement(part, known, {}) if most else complement(part, known, None, depth + 1)
        if outside is None:
            return None
        found += [{"type": "object", "properties": {name: one}, "required": [name]} for one in outside]
    return found


def _other_values(values: list[Any], facts: Facts, known: Known) -> list[Any] | None:
    if facts.listed is not None:  # a finite set: what is left of it
        left = [v for v in facts.listed if not any(_same(v, one) for one in values)]
        return [{"enum": left}] if left else []
    values = [v for v in values if type_of(v) in facts.kinds]
    if not values:
        return [{}]
    if not all(isinstance(v, str) and len(v) <= MAX_WORD for v in values) or sum(map(len, values)) > MAX_WORDS:
        return None
    others = [
        kind for kind in _ORDER if kind in facts.kinds - {"string"} and not (kind == "integer" and "number" in facts.kinds)
    ]
    found: list[Any] = [{"type": others[0] if len(others) == 1 else others}] if others else []
    if "string" in facts.kinds:
        pattern = without_words(values)
        known.exclude(pattern, values)
        found.append({"type": "string", "pattern": pattern})
    return found


def _same(a: Any, b: Any) -> bool:
    return canonical(a) == canonical(b)


def without_words(words: list[str]) -> str:
    """A pattern of every string but these: a trie of them, left at each character."""

    def others(rest: list[str]) -> str:
        heads = sorted({word[0] for word in rest if word})
        options = [] if "" in rest else [""]
        options.append(f"[^{''.join(map(_in_class, heads))}]{ANYTHING}" if heads else ANYTHING.replace("*", "+"))
        options += [_escaped(head) + others([word[1:] for word in rest if word[:1] == head]) for head in heads]
        return f"(?:{'|'.join(options)})"

    return f"^{others(words)}$"


def _in_class(c: str) -> str:
    return f"\\{c}" if c in "\\]^-[" else _escaped(c) if c < " " else c


def _escaped(c: str) -> str:
    if c < " ":
        return f"\\x{ord(c):02x}"
    return f"\\{c}" if c in r"\.^$*+?()[]{}|/" else c


assert set(_ORDER) == TYPES
