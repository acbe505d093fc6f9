"""Random schemas, lowered: jsonschema must find that they say what they said, or less where `oneOf` was narrowed; never more."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.lower import lower_schema
from tests.runtime.grammar.test_lower import INSTANCES, valid

LIMITS = Limits()
ARRAYS: list[Any] = [[a, b] for a in (1, 2.5, "a", None, {}) for b in (1, "a", [])] + [[1, 2, 3], [{"k": 1}], [["a"]]]
NESTED: list[Any] = [{"k": {"a": 1}}, {"k": {"a": "a", "b": 1}}, {"a": [1, "a"]}, {"ab": 1}, {"ab": "a", "k": 1}]
EVERY = [*INSTANCES, *ARRAYS, *NESTED]


def schema_of(rng: random.Random, depth: int = 0) -> Any:
    def part() -> Any:
        return schema_of(rng, depth + 1)

    def chance(p: float) -> bool:
        return rng.random() < p

    if depth > 2 or chance(0.05):
        return rng.choice([True, False, {}, {"type": "integer"}, {"type": "string", "maxLength": 2}, {"const": 1}])
    node: dict[str, Any] = {}
    if chance(0.6):
        node["type"] = rng.choice(
            ["object", "object", "array", "string", "integer", "number", ["object", "null"], ["array", "string"]]
        )
    if chance(0.05):
        node["enum"] = rng.sample(INSTANCES, 4)
    if chance(0.45):
        node["properties"] = {name: part() for name in rng.sample("kab", rng.randint(1, 2))}
    if chance(0.4):
        node["additionalProperties"] = part()
    if chance(0.15):
        node["patternProperties"] = {rng.choice(["^a", "b$", "k"]): part()}
    if chance(0.3):
        node["required"] = rng.sample("kab", rng.randint(1, 2))
    if chance(0.3):
        node["items"] = part()
    if chance(0.2):
        node["prefixItems"] = [part() for _ in range(rng.randint(1, 2))]
    for keyword, p in (("allOf", 0.4), ("anyOf", 0.2), ("oneOf", 0.15)):
        if chance(p):
            node[keyword] = [part() for _ in range(rng.choice((1, 1, 2, 3)))]
    if chance(0.1):
        node["not"] = part()
    if chance(0.1):
        node |= {"if": part(), "then": part()} | ({"else": part()} if chance(0.5) else {})
    if chance(0.1):
        node[rng.choice(["unevaluatedProperties", "unevaluatedItems"])] = part()
    if chance(0.1):
        node["dependentRequired"] = {rng.choice("kab"): [rng.choice("kab")]}
    if chance(0.1):
        node[rng.choice(["minProperties", "maxProperties", "minItems", "maxItems", "minimum", "maximum", "minLength"])] = 1
    if depth == 0 and chance(0.3):
        node |= {"$defs": {"x": part()}, "$ref": "#/$defs/x"}
    return node


def check(rng: random.Random) -> bool:
    """False: it is refused."""
    schema = schema_of(rng)
    try:
        lowered = lower_schema(schema, LIMITS).schema
    except GrammarError:
        return False
    exact = "oneOf" not in json.dumps(schema)
    for instance in EVERY:
        before, after = valid(schema, instance), valid(lowered, instance)
        assert before == after or (before and not exact), (json.dumps(schema), json.dumps(lowered), instance)
    return True


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a2_a_lowered_schema_says_the_same(rng: random.Random) -> None:
    check(rng)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a2_ten_thousand_lowered_schemas_say_the_same() -> None:
    rng = random.Random(1)
    served = sum(check(rng) for _ in range(10_000))
    assert served > 3_000
