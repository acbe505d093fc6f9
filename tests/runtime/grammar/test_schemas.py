"""Sound and complete on 120 real schemas and 81 one-keyword ones: every instance, through the cursor that would constrain it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.compile import Served
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.schemas import Verdict, compiled, declared, feature_matrix, judge, real_schemas, spec_of, takes

MODES = ["canonical", "permissive"]
SPACES = ["flexible", "spaced", "compact"]

KEY_ORDER = {
    "Glaiveai2K---calculate_area_bd151164", "Snowplow---sp_163_Normalized", "Snowplow---sp_378_Normalized", "Github_hard---o35867",
    "Github_ultra---o33032", "Github_ultra---o78463",
}  # fmt: skip
"""Schemas some of whose valid instances stand in the file with their keys in another order than the schema declares (A6)."""


def check(vocabulary: Vocabulary, whitespace: str, mode: str) -> list[Verdict]:
    verdicts = []
    for row in real_schemas():

        def make(schema: Any) -> Served:
            try:
                return compiled(spec_of(schema, json_whitespace=whitespace, jump_forward=mode), vocabulary)
            except GrammarError as error:
                assert error.code == "invalid_json_schema" and error.param is not None and error.param.startswith("json_schema")
                raise

        verdict = judge(row, vocabulary, make, whitespace)
        assert not verdict.invalid[0], f"{row['id']} lets an invalid instance through"
        assert verdict.valid[0] == verdict.valid[1], f"{row['id']} refuses a valid instance"
        assert verdict.as_written == verdict.valid or row["id"] in KEY_ORDER, (
            f"{row['id']} refuses a valid instance as it stands"
        )
        verdicts.append(verdict)
    assert sum(verdict.is_right for verdict in verdicts) >= 115
    assert sum(verdict.is_right and verdict.as_written == verdict.valid for verdict in verdicts) >= 109
    return verdicts


def test_real_schemas_are_sound_and_complete(smollm2: Vocabulary) -> None:
    """No invalid instance is taken and every valid one is, of 115 of the 120; the other five are refused by the keyword's name."""
    verdicts = check(smollm2, "spaced", "canonical")
    assert {verdict.engine for verdict in verdicts} == {"", "token_fsm", "xgrammar", "llguidance"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whitespace", SPACES)
def test_real_schemas_in_every_mode(whitespace: str, mode: str, smollm2: Vocabulary) -> None:
    check(smollm2, whitespace, mode)


def test_declared_order_is_the_schemas_through_its_options() -> None:
    schema = {
        "properties": {"a": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/o"}]}, "b": {}},
        "patternProperties": {"^x": {"properties": {"p": {}, "q": {}}}},
        "$defs": {"o": {"type": "object", "properties": {"y": {}, "x": {}}}},
    }  # fmt: skip
    value = {"z": 1, "xx": {"q": 1, "p": 2}, "b": [], "a": {"x": 1, "y": 2}}
    assert json.dumps(declared(schema, value)) == '{"a": {"y": 2, "x": 1}, "b": [], "z": 1, "xx": {"p": 2, "q": 1}}'


@pytest.mark.case("C-STRUCT-04", "C-STRUCT-09")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", feature_matrix(), ids=lambda row: row["feature"])
def test_feature(row: dict[str, Any], mode: str, smollm2: Vocabulary) -> None:
    """Invalid is refused, valid is taken unless the project never writes it so, or the schema is refused by the keyword's name."""
    undecided = any(instance["valid"] is None for instance in row["instances"])
    try:
        grammar = compiled(spec_of(row["schema"], jump_forward=mode), smollm2)
    except GrammarError as error:
        assert row["feature"] in REFUSED, f"{row['feature']} is refused: {error.message}"
        assert REFUSED[row["feature"]] in error.message
        return
    assert row["feature"] not in REFUSED and not undecided
    for instance in row["instances"]:
        taken = takes(grammar, smollm2, instance["text"])
        if not instance["valid"]:
            assert not taken, f"{instance['text']} is invalid"
        elif "may_reject" not in instance:
            assert taken, f"{instance['text']} is valid"


REFUSED = {
    "pattern lookahead": "'pattern'", "format regex(unk)": "'format'", "format custom": "'format'", "uniqueItems": "'uniqueItems'",
    "contains": "'contains'", "remote $ref": "$ref", "empty enum": "enum", "unsat": "minimum", "contradict type": "type",
    "unevaluatedProps": "'unevaluatedProperties'",
}  # fmt: skip
"""Feature -> what the refusal names. A feature that is served again must leave this list, and one that no longer is fails."""


@pytest.mark.parametrize("whitespace", SPACES)
def test_whitespace_is_what_was_asked_for(whitespace: str, smollm2: Vocabulary) -> None:
    """W1: bounded where flexible, exact elsewhere, none around the root."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    for closed in ({}, {"additionalProperties": False}):
        grammar = compiled(spec_of({**schema, **closed}, json_whitespace=whitespace, jump_forward="permissive"), smollm2)
        texts = {
            '{"a": [1, 2]}': whitespace != "compact",
            '{"a":[1,2]}': whitespace != "spaced",
            '{ "a" : [ 1 , 2 ] }': whitespace == "flexible",
            '{\n\t"a":\r\n  [1,\n2]\n}': whitespace == "flexible",
            '{"a":' + " " * 8 + "[1,2]}": whitespace == "flexible",
            '{"a":' + " " * 9 + "[1,2]}": False,
            ' {"a":[1,2]}': False,
            '{"a":[1,2]}\n': False,
        }
        for text, good in texts.items():
            assert takes(grammar, smollm2, text) == good, (grammar.report.backend, text)


def test_no_special_token_is_text(smollm2: Vocabulary) -> None:
    """G6: inside a string, every token is legal but those that end it, control characters, and the special ones."""
    for closed in (True, False):
        grammar = compiled(
            spec_of({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"], "additionalProperties": not closed}), smollm2
        )  # fmt: skip
        cursor = grammar.cursor()
        for token in smollm2.encode('{"s": "x'):
            assert cursor.accept(token)
        for token in smollm2.special_ids | set(smollm2.stop_ids):
            assert not cursor.fork().accept(token), (grammar.report.backend, token)
        assert cursor.accept(smollm2.encode("y")[0])


@pytest.mark.parametrize("text", ['"\\ud800"', '"\\udc00x"', '"\\ud800\\u0041"'])
def test_no_lone_surrogate(text: str, smollm2: Vocabulary) -> None:
    for schema in ({"type": "string"}, {"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "object"}]}):
        assert not takes(compiled(spec_of(schema), smollm2), smollm2, text), schema
    assert takes(compiled(spec_of({"type": "string"}), smollm2), smollm2, json.dumps('é😀 " \\ \n', ensure_ascii=False))


@pytest.mark.parametrize("character", ["\t", "\x01", "\x1f", "\n"])
def test_no_raw_control_character(character: str, smollm2: Vocabulary) -> None:
    for more in ({}, {"minLength": 1}, {"maxLength": 9}, {"pattern": "^[\\s\\S]+$"}):
        grammar = compiled(
            spec_of({"type": "object", "properties": {"s": {"type": "string", **more}}, "additionalProperties": False}), smollm2
        )
        assert not takes(grammar, smollm2, f'{{"s": "a{character}b"}}'), (grammar.report.backend, more)
        assert takes(grammar, smollm2, '{"s": "a b"}')
