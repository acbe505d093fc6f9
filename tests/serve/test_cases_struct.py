"""Faults of structured outputs that users of such servers met, over the wire (tests/cases.yaml). Noise draws every legal token."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.serve.serving import Server
from tests.serve.test_cases import NOISE, refused, strict_json


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def choices(server: Server, schema: Any, n: int, **fields: Any) -> list[tuple[str, str]]:
    """(text, finish reason) of n samples."""
    reply = server.chat(**{**NOISE, "temperature": 1.0, "max_tokens": 200, "seed": 3, "n": n, **schema_of(schema), **fields})
    assert reply.status_code == 200, reply.text
    return [(c["message"]["content"], c["finish_reason"]) for c in reply.json()["choices"]]


KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": -3, "maximum": 12}, "minimum"), ({"type": "number", "exclusiveMinimum": 0, "maximum": 2.5}, "exclusiveMinimum"),
    ({"type": "string", "minLength": 2, "maxLength": 5}, "minLength"), ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}, "minItems"),
    ({"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 3, "uniqueItems": True}, "uniqueItems"), ({"type": "integer", "minimum": 0, "maximum": 40, "multipleOf": 7}, "multipleOf"),
    ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "additionalProperties": False, "minProperties": 1, "maxProperties": 1}, "minProperties"),
    ({"type": "string", "format": "date-time"}, "format"), ({"type": "string", "format": "uuid"}, "format"),
    ({"type": "integer", "minimum": 0, "maximum": 3, "not": {"const": 2}}, "not"),
    ({"if": {"type": "integer"}, "then": {"minimum": 5}, "type": ["integer", "boolean"]}, "if"),
    ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "dependentRequired": {"a": ["b"]}, "additionalProperties": False}, "dependentRequired"),
]  # fmt: skip


@pytest.mark.case("C-STRUCT-04")
@pytest.mark.parametrize(("schema", "keyword"), KEYWORDS, ids=[f"{n}-{k}" for n, (_, k) in enumerate(KEYWORDS)])
def test_a_keyword_is_enforced_or_the_request_is_refused_with_its_name(
    server: Server, schema: dict[str, Any], keyword: str
) -> None:
    reply = server.chat(**NOISE, temperature=1.0, max_tokens=200, n=5, seed=1, **schema_of(schema))
    if reply.status_code == 400:
        found = refused(reply, "response_format.json_schema.schema")
        assert found["code"] == "invalid_json_schema" and keyword in found["message"]
        return
    assert reply.status_code == 200, reply.text
    check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    finished = [c["message"]["content"] for c in reply.json()["choices"] if c["finish_reason"] == "stop"]
    assert finished
    for text in finished:
        check.validate(strict_json(text))


FIELDS = {
    "type": "object", "additionalProperties": False, "required": ["a", "b", "c", "d"],
    "properties": {"a": {"type": "string", "maxLength": 20}, "b": {"type": "integer", "minimum": 0, "maximum": 99},
                   "c": {"type": "string", "maxLength": 20}, "d": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip


def longest_blank(text: str) -> int:
    outside = re.sub(r'"(?:\\.|[^"\\])*("|$)', '""', text)
    return max((len(run) for run in re.findall(r"\s+", outside)), default=0)


@pytest.mark.case("C-STRUCT-05")
def test_white_space_in_json_has_an_end(server: Server) -> None:
    found = choices(server, FIELDS, 20, max_tokens=400)
    assert all(longest_blank(text) <= 8 for text, _ in found), max(longest_blank(text) for text, _ in found)
    assert sum(finish == "stop" for _, finish in found) >= 19
    reply = server.chat(**NOISE, temperature=1.0, max_tokens=250, n=10, seed=2, response_format={"type": "json_object"})
    assert all(longest_blank(c["message"]["content"]) <= 8 for c in reply.json()["choices"])


@pytest.mark.case("C-STRUCT-05")
def test_what_noise_says_within_a_schema_validates(server: Server) -> None:
    for text, finish in choices(server, FIELDS, 20, max_tokens=400):
        if finish == "stop":
            jsonschema.validate(strict_json(text), FIELDS)


NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
        "required": ["v", "c"], "additionalProperties": False}  # fmt: skip


@pytest.mark.case("C-STRUCT-08")
@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
        {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"], "additionalProperties": False},
        {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 2},
                   "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "additionalProperties": False}}, "$ref": "#/$defs/a"},
    ],
)  # fmt: skip
def test_a_schema_may_refer_to_itself(server: Server, schema: dict[str, Any]) -> None:
    for text, finish in choices(server, schema, 5):
        if finish == "stop":
            jsonschema.validate(strict_json(text), schema)


@pytest.mark.case("C-STRUCT-08")
def test_a_schema_that_is_nothing_but_itself_is_refused(server: Server) -> None:
    found = refused(server.chat(**NOISE, **schema_of({"$ref": "#"})), "response_format.json_schema.schema")
    assert found["code"] == "invalid_json_schema"


VALUES: list[Any] = ['a"b', "c\\d", "e/f", "é", "\n", 1, 1.5, True, None, {"k": [1, 2]}]


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


@pytest.mark.case("C-STRUCT-09")
def test_constants_and_enums_of_any_value_come_back_as_they_are(server: Server) -> None:
    for value in VALUES:
        ((text, finish),) = choices(server, {"const": value}, 1)
        assert finish == "stop" and same(strict_json(text), value)
    for text, finish in choices(server, {"enum": VALUES}, 30):
        assert finish == "stop" and any(same(strict_json(text), value) for value in VALUES)
    names = ['a"b', "c\\d", "e.f", "é", " ", "$x"]
    closed = {
        "type": "object",
        "properties": {n: {"type": "null"} for n in names},
        "required": names,
        "additionalProperties": False,
    }
    ((text, finish),) = choices(server, closed, 1, max_tokens=400)
    assert finish == "stop" and list(strict_json(text)) == names


@pytest.mark.case("C-STRUCT-11")
@pytest.mark.parametrize(
    "pattern",
    [
        "[é]{2}",
        "[à-ÿ]{3}",
        "[^a]{2}",
        "[一-龥]{2}",
        "😀+x",
        "(é|ü)z",
        ".",
    ],
)
def test_a_class_holds_characters_not_bytes(server: Server, pattern: str) -> None:
    reply = server.chat(**NOISE, temperature=1.0, max_tokens=20, n=10, seed=4, regex=pattern)
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        text = choice["message"]["content"]
        text.encode()  # no lone surrogate, and what was cut off inside a character is not shown as one
        if choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, text), text


@pytest.mark.case("C-STRUCT-18")
def test_a_token_of_several_characters_does_not_slip_past_the_end_of_a_string() -> None:
    from tests.serve.serving import scripted_server

    words = ['",', '"}', '":', '"a', 'x"', '\\"', '"]', '},{', '":"', ',"', '""', "}}", '"b":', 'x",']  # fmt: skip
    schema = {
        "type": "object", "required": ["a", "l"], "additionalProperties": False,
        "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "string", "maxLength": 3},
                       "l": {"type": "array", "maxItems": 2, "items": {"type": "object", "properties": {"k": {"type": "string", "maxLength": 3}},
                                                                       "additionalProperties": False}}},
    }  # fmt: skip
    server = scripted_server(words=words)
    try:
        finished = 0
        for seed in range(2):
            for text, finish in choices(server, schema, 100, temperature=1.5, seed=seed, max_tokens=120):
                if finish == "stop":
                    jsonschema.validate(json.loads(text), schema)
                    finished += 1
        assert finished > 100
    finally:
        server.close()
