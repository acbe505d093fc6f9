"""Lowering: equivalent to jsonschema's eyes on both sides, or sound where it says so; what is left is refused by name and place."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.audit import ENGINES_OF, is_audited, route, xgrammar_objection
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.complement import without_words
from phloem.runtime.grammar.disjoint import Known, are_disjoint
from phloem.runtime.grammar.lower import FORMAT_PATTERNS, NARROWING, lower_schema
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.schemas import real_schemas, spec_of

LIMITS = Limits()
SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    1.0,
    2.5,
    -3,
    900,
    "",
    "a",
    "CAN",
    "MEX",
    "x" * 25,
    "2024-02-29",
    [],
    [1],
    ["a", 2],
    {},
]
OBJECTS: list[Any] = [
    dict(zip(keys, values))
    for size in (1, 2, 3)
    for keys in itertools.combinations(("k", "a", "b"), size)
    for values in itertools.product((1, "a", "CAN", None), repeat=size)
]
INSTANCES = [*SCALARS, *OBJECTS, {"country": "CAN", "state": "AB"}, {"country": "USA", "state": "X"}, {"state": "AB"}]


def valid(schema: Any, instance: Any) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return bool(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(instance))


OBJECT = {"type": "object", "properties": {"k": {"enum": [1, "a"]}, "a": {}, "b": {}}}
EQUIVALENT: dict[str, Any] = {
    "allOf of one": {"allOf": [{"type": "string", "minLength": 1}]},
    "allOf of one beside": {"type": "string", "allOf": [{"minLength": 1}]},
    "const": {"const": 1},
    "const beside a type": {"const": 1, "type": ["integer", "null"]},
    "enum filtered": {"type": "string", "enum": ["a", 1, None, "CAN"]},
    "no-ops": {"type": "integer", "minLength": 3, "required": ["a"], "uniqueItems": True, "format": "nonsense"},
    "no-op contains": {"contains": {}, "minContains": 0},
    "contains anything": {"type": "array", "contains": True},
    "integer beside number": {"type": ["integer", "number"]},
    "oneOf by type": {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "array", "maxItems": 1}]},
    "oneOf by const": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": 1}, "a": {"type": "string"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"enum": ["a", None]}}, "required": ["k"]},
        ]
    },
    "oneOf by absence": {
        "oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "properties": {"b": {}}, "additionalProperties": False}]
    },
    "oneOf by the parent": {
        "type": "object", "required": ["k"],
        "oneOf": [{"properties": {"k": {"const": 1}}}, {"properties": {"k": {"not": {"enum": [1, "CAN"]}, "type": "string"}}}],
    },
    "not enum of strings": {"not": {"enum": ["CAN", "MEX"]}},
    "not const, typed": {"type": "string", "not": {"const": "a"}},
    "not a type": {"not": {"type": ["string", "object"]}},
    "not required": {**OBJECT, "not": {"required": ["a"]}},
    "not required, several": {**OBJECT, "not": {"required": ["a", "b"]}},
    "not beside an enum": {"enum": [1, "a", "CAN"], "not": {"const": 1}},
    "not a range": {"type": "integer", "not": {"minimum": 1, "maximum": 5}},
    "if on a listed property": {
        **OBJECT, "if": {"properties": {"k": {"const": 1}}}, "then": {"required": ["a"]}, "else": {"required": ["b"]},
    },
    "if that requires it": {
        **OBJECT, "if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["a"]}, "else": {"required": ["b"]},
    },
    "if on a type": {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"not": {"type": "null"}}},
    "if without branches": {"type": "string", "if": {"minLength": 2}},
    "dependentRequired": {**OBJECT, "dependentRequired": {"a": ["b"]}},
    "dependentRequired, required": {**OBJECT, "required": ["a"], "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**OBJECT, "dependentSchemas": {"a": {"required": ["b"], "properties": {"b": {"type": "string"}}}}},
    "propertyNames pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    "propertyNames length": {"type": "object", "propertyNames": {"maxLength": 0}},
    "propertyNames enum": {"type": "object", "propertyNames": {"enum": ["a", "k"]}, "additionalProperties": {"type": "string"}},
    "unevaluated alone": {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
    "$ref to a property": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#/properties/a"}}},
    "$ref with siblings": {"$defs": {"p": {"type": "integer"}}, "$ref": "#/$defs/p", "maximum": 1},
    "$anchor": {"$defs": {"p": {"$anchor": "pp", "type": "integer"}}, "$ref": "#pp"},
    "$id": {"$id": "http://x.y/z", "$defs": {"p": {"$id": "p", "type": "integer"}}, "$ref": "p"},
    "escaped pointers": {"$defs": {"x/y~z": {"type": "integer"}}, "$ref": "#/$defs/x~1y~0z"},
    "date": {"type": "string", "format": "date"},
    "additional beside allOf": {"type": "object", "allOf": [{"properties": {"a": {}}}], "additionalProperties": {"type": "string"}},
    "closed inside allOf": {"type": "object", "properties": {"a": {}}, "allOf": [{"additionalProperties": False}]},
    "closed beside a pattern": {"type": "object", "allOf": [{"patternProperties": {"^a": {}}}], "additionalProperties": False},
    "unevaluated inside allOf": {"type": "object", "properties": {"a": {}}, "allOf": [{"unevaluatedProperties": False}], "unevaluatedProperties": True},
    "items beside allOf": {"type": "array", "allOf": [{"prefixItems": [{}]}], "items": {"type": "string"}},
    "items inside allOf": {"type": "array", "prefixItems": [{"type": "integer"}], "allOf": [{"items": False}]},
    "true": True, "anyOf with true": {"type": "string", "anyOf": [True, {"minLength": 3}]},
}  # fmt: skip


@pytest.mark.parametrize("name", EQUIVALENT)
def test_a2_the_lowered_schema_says_the_same(name: str) -> None:
    schema = EQUIVALENT[name]
    found = lower_schema(schema, LIMITS)
    assert not found.dropped and not found.unproved
    for instance in INSTANCES:
        assert valid(schema, instance) == valid(found.schema, instance), (instance, found.schema)


@pytest.mark.parametrize("row", real_schemas(), ids=lambda row: row["id"])
def test_a2_real_schemas_say_the_same_of_their_instances(row: dict[str, Any]) -> None:
    try:
        found = lower_schema(row["schema"], LIMITS)
    except GrammarError as error:
        assert error.code == "invalid_json_schema"
        return
    for test in row["tests"]:
        assert valid(found.schema, test["data"]) == test["valid"], test["data"]


SOUND = {
    "two open objects": {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}]},
    "optional discriminator": {
        "type": "object",
        "oneOf": [{"properties": {"k": {"enum": [1]}}}, {"properties": {"k": {"enum": ["a"]}}}],
    },
    "integers among numbers": {"oneOf": [{"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "object", "required": ["b"]}]},
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_an_overlapping_one_of_becomes_narrower_and_never_wider(name: str) -> None:
    schema = SOUND[name]
    found = lower_schema(schema, LIMITS)
    assert not found.unproved
    taken = [instance for instance in INSTANCES if valid(found.schema, instance)]
    assert taken and all(valid(schema, instance) for instance in taken)


DRAFTS = [
    ({"type": "number", "minimum": 3, "exclusiveMinimum": True}, {"type": "number", "exclusiveMinimum": 3}),
    ({"type": "number", "minimum": 3, "exclusiveMinimum": False}, {"type": "number", "minimum": 3}),
    ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, {"type": "array", "prefixItems": [{"type": "integer"}], "items": False}),
    ({"type": "object", "dependencies": {"a": ["b"]}}, {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ({"definitions": {"p": {"id": "#pp", "type": "integer"}}, "$ref": "#pp"}, {"type": "integer"}),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), DRAFTS)
def test_a2_older_drafts_are_read_as_they_were_meant(old: Any, new: Any) -> None:
    lowered = lower_schema(old, LIMITS).schema
    for instance in INSTANCES:
        assert valid(lowered, instance) == valid(new, instance), instance


REFUSED: list[tuple[Any, str, str]] = [
    ({"type": "array", "uniqueItems": True}, "", "'uniqueItems'"),
    ({"type": "object", "properties": {"a/b": {"type": "array", "contains": {"type": "string"}}}}, "/properties/a~1b", "'contains'"),
    ({"anyOf": [{"type": "string", "pattern": "(?=a)b"}]}, "/anyOf/0", "look-ahead"),
    ({"type": "string", "pattern": "[[:alpha:]]"}, "", "POSIX"),
    ({"type": "string", "format": "topic"}, "", "'format'"),
    ({"$ref": "http://example.com/x.json"}, "", "nothing is ever fetched"),
    ({"$ref": "#/$defs/nothing"}, "", "not in the schema"),
    ({"$ref": "#"}, "", "leads back"),
    ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "", "leads back"),
    ({"enum": []}, "", "lists nothing"),
    ({"enum": [1], "type": "string"}, "", "no value of the enum"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "", "minimum 5 is above maximum 3"),
    ({"type": "bogus"}, "", "expected one or more of"),
    ({"properties": {"a": 5}}, "/properties/a", "expected a schema"),
    ({"type": "object", "required": "a"}, "", "not a list of property names"),
    ({"minLength": -1}, "", "whole number"),
    ({"multipleOf": 0}, "", "above 0"),
    ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "", "'unevaluatedProperties'"),
    ({"$dynamicRef": "#x"}, "", "'$dynamicRef'"),
    (False, "", "it is false"),
    ({"allOf": [False], "$defs": {"a": {"$ref": "#/$defs/a/b", "b": {}}}, "anyOf": [{"$ref": "#/$defs/a"}]}, "", "it is false"),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"$id": "x", "$ref": "y"}}}, "/properties/a", "beside '$id'"),
]  # fmt: skip


@pytest.mark.case("C-STRUCT-02", "C-STRUCT-07", "C-STRUCT-08")
@pytest.mark.parametrize(("schema", "pointer", "says"), REFUSED)
def test_a4_refusals_name_the_place_and_the_keyword(schema: Any, pointer: str, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        route(spec_of(schema), LIMITS)
    error = caught.value
    places = (
        [f"json_schema{pointer}", "json_schema/$defs/a", "json_schema/$defs/b"]
        if "leads" in says
        else [f"json_schema{pointer}"]
    )
    assert error.param in places and says in error.message and error.code == "invalid_json_schema" and error.status == 400


@pytest.mark.parametrize("keyword", sorted(NARROWING))
def test_a5_what_only_narrows_may_be_dropped_and_is_listed(keyword: str) -> None:
    examples: dict[str, Any] = {
        "not": {"not": {"pattern": "a"}}, "if": {"if": {"pattern": "a"}, "then": {"minLength": 3}},
        "contains": {"contains": {"type": "string"}}, "uniqueItems": {"uniqueItems": True},
        "propertyNames": {"properties": {"a": {}}, "propertyNames": {"pattern": "a"}},
        "dependentRequired": {"dependentRequired": {"a": ["b"]}}, "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
        "dependencies": {"dependencies": {"a": ["b"]}}, "unevaluatedItems": {"allOf": [{}], "unevaluatedItems": False},
        "unevaluatedProperties": {"allOf": [{}], "unevaluatedProperties": False}, "format": {"format": "topic"},
        "pattern": {"pattern": "(?=a)"}, "oneOf": {"oneOf": [{"minLength": 1}, {"pattern": "a"}]},
    }  # fmt: skip
    if keyword == "multipleOf":
        assert lower_schema({"type": "number", "multipleOf": 0.25}, LIMITS).schema["multipleOf"] == 0.25  # enforced after all
        return
    path = route(spec_of({"properties": {"p": examples[keyword]}}, strict=False), LIMITS)
    dropped = path.dropped or (path.fallback.dropped if path.fallback else ())
    assert ("/properties/p", keyword) in dropped
    with pytest.raises(GrammarError):
        route(spec_of({"$ref": "http://x"}, strict=False), LIMITS)


def test_a1_only_schemas_are_walked() -> None:
    schema = {
        "enum": [{"uniqueItems": True, "$ref": "nowhere"}], "default": {"not": {}}, "examples": [{"contains": 1}], "x-what": {"if": 1},
        "$comment": "uniqueItems",
    }  # fmt: skip
    assert lower_schema(schema, LIMITS).schema == {"enum": schema["enum"]}


def test_a_schemas_own_x_guidance_never_reaches_an_engine() -> None:
    """F8: it could switch `lenient` on."""
    path = route(spec_of({"type": "object", "x-guidance": {"lenient": True}, "properties": {"a": {"x-guidance": {}}}}), LIMITS)
    assert "x-guidance" not in path.spec.source


def test_a3_what_an_engine_gets() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
    assert route(spec_of(closed), LIMITS).engines == ("xgrammar", "llguidance")
    assert route(spec_of({**closed, "additionalProperties": True}), LIMITS).engines == ("llguidance",)
    assert route(spec_of({"enum": ["a"]}), LIMITS).engines[0] == "token_fsm"
    for part, keyword in [
        ({"minLength": 3}, "type"), ({"type": "string", "pattern": "^a$"}, "pattern"), ({"type": "number", "minimum": 0}, "minimum"),
        ({"type": "string", "format": "uuid"}, "format"), ({"type": ["string", "integer"]}, "type"),
        ({"type": "array", "prefixItems": [{"type": "null"}]}, "prefixItems"), ({"type": "object", "properties": {}}, "properties"),
    ]:  # fmt: skip
        assert xgrammar_objection({**closed, "properties": {"a": part}}) == ("/properties/a", keyword), part


def test_an_engine_of_another_version_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "99.0")
    is_audited.cache_clear()
    try:
        for kind, engines in ENGINES_OF.items():
            if kind != "json_schema":
                source = "{}" if kind == "structural_tag" else "a"
                assert route(GrammarSpec(kind=kind, source=source), LIMITS).engines == tuple(
                    e for e in engines if e == "token_fsm"
                )  # type: ignore[arg-type]
    finally:
        is_audited.cache_clear()


FORMATS = {
    "date": (["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "24-01-01"]),
    "time": (["12:00:00Z", "23:59:59.123+01:00"], ["24:00:00Z", "12:00:00", "12:60:00Z", "22:59:60Z"]),
    "date-time": (["2024-02-29T12:00:00Z"], ["2023-02-29T12:00:00Z", "2024-02-29", "2024-02-29T25:00:00Z"]),
    "ipv4": (["0.0.0.0", "255.249.199.99"], ["256.0.0.0", "01.0.0.0", "1.2.3", "1.2.3.4.5"]),
    "hostname": (["a", "a-b.c9", "x" * 63 + ".de"], ["-a", "a-", "x" * 64, "a..b", "a_b", "xn--x", ""]),
}


@pytest.mark.parametrize("name", FORMAT_PATTERNS)
def test_formats_are_exact(name: str) -> None:
    schema = lower_schema({"type": "string", "format": name}, LIMITS).schema
    good, bad = FORMATS[name]
    assert all(valid(schema, text) for text in good) and not any(valid(schema, text) for text in bad)


@pytest.mark.parametrize("words", [["CAN", "MEX", "CAT"], ["", "a"], ["a.b", "x]y", "^", "-", "\\", "\t"], ["é", "éa"]])
def test_the_complement_of_words(words: list[str]) -> None:
    pattern = without_words(words)
    for text in [*words, *[w[:-1] for w in words if w], *[w + "x" for w in words], "", "zzz"]:
        assert valid({"pattern": pattern}, text) == (text not in words), text


def test_disjointness_is_said_only_where_it_is_proved() -> None:
    known = Known({"n": {"type": "integer"}})
    assert are_disjoint({"$ref": "#/$defs/n"}, {"type": "string"}, known)
    assert not are_disjoint({"$ref": "#/$defs/n"}, {"type": "number"}, known)
    assert not are_disjoint({"required": ["a"]}, {"properties": {"a": False}}, known)  # both take a string
    assert are_disjoint({"enum": [1, 2]}, {"enum": [3]}, known) and not are_disjoint({"enum": [1]}, {"enum": [1.0]}, known)
    assert not are_disjoint({"minimum": 5}, {"maximum": 3}, known)


def test_a_property_that_one_requires_tells_objects_apart() -> None:
    """The other need not ask for it: what has it must obey both."""
    tagged = {"type": "object", "required": ["k"], "properties": {"k": {"enum": ["x"]}}}
    others: list[tuple[Any, bool]] = [
        ({"type": "object", "properties": {"k": {"type": "integer"}}}, True),
        ({"type": "object", "additionalProperties": {"enum": [False]}}, True),
        ({"type": "object", "properties": {"k": {}}, "additionalProperties": {"enum": [False]}}, False),
        ({"type": "object", "patternProperties": {"^k": {}}, "additionalProperties": {"enum": [False]}}, False),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, False),
        ({"type": "object", "anyOf": [{"properties": {"k": {"enum": [n]}}} for n in (1, 2)]}, True),
        ({"type": "object", "oneOf": [{"type": "object", "properties": {"k": {"enum": [n]}}} for n in (1, 2)]}, True),
        ({"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}]}, True),
    ]
    for other, disjoint in others:
        assert are_disjoint(tagged, other, Known()) == are_disjoint(other, tagged, Known()) == disjoint, other


@given(st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_what_is_called_disjoint_shares_no_instance(rng: random.Random) -> None:
    def schema(depth: int = 0) -> Any:
        node: dict[str, Any] = {}
        if rng.random() < 0.5:
            node["type"] = rng.choice(["object", "string", "integer", "array"])
        if rng.random() < 0.2:
            node["enum"] = rng.sample(SCALARS, 3)
        if depth < 2:
            if rng.random() < 0.5:
                node["properties"] = {name: schema(depth + 1) for name in rng.sample("kab", rng.randint(1, 2))}
            if rng.random() < 0.4:
                node["required"] = rng.sample("kab", rng.randint(1, 2))
            if rng.random() < 0.3:
                node["additionalProperties"] = rng.choice([False, True, {"type": "string"}, {"enum": [1, "a"]}])
            if rng.random() < 0.1:
                node["patternProperties"] = {"^a": schema(depth + 1)}
            if rng.random() < 0.3:
                node[rng.choice(["anyOf", "oneOf", "allOf"])] = [schema(depth + 1) for _ in range(2)]
        return node

    one, other = schema(), schema()
    if are_disjoint(one, other, Known()):
        for value in (*SCALARS, *OBJECTS):
            assert not (valid(one, value) and valid(other, value)), (one, other, value)


@pytest.mark.case("C-STRUCT-07")
def test_recursion_that_consumes_is_served() -> None:
    tree = {
        "$defs": {"n": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
        "$ref": "#/$defs/n",
    }
    lowered = lower_schema(tree, LIMITS).schema
    assert json.loads(json.dumps(lowered)) and valid(lowered, {"c": [{"c": []}]}) and not valid(lowered, {"c": [1]})
    itself = lower_schema({"type": "object", "additionalProperties": {"$ref": "#"}}, LIMITS).schema
    assert valid(itself, {"a": {"b": {}}}) and not valid(itself, {"a": {"b": 1}})
