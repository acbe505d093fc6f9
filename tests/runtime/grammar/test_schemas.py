"""Sound and complete on 120 real schemas and 81 one-keyword ones: every instance, through the cursor that would constrain it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.schemas import compiled, feature_matrix, real_schemas, spec_of, takes, written

MODES = ["canonical", "permissive"]
SPACES = ["flexible", "spaced", "compact"]

KEY_ORDER = {
    "Glaiveai2K---calculate_area_bd151164", "Snowplow---sp_163_Normalized", "Snowplow---sp_378_Normalized", "Github_hard---o35867",
    "Github_ultra---o33032",
}  # fmt: skip
"""Schemas some of whose valid instances write their keys in another order than the schema declares (A6)."""


def judge(row: dict[str, Any], vocabulary: Vocabulary, whitespace: str, mode: str) -> tuple[str, str]:
    """(verdict, engine): right, over (a valid instance refused), under (an invalid one taken), refused (400)."""
    try:
        grammar = compiled(spec_of(row["schema"], json_whitespace=whitespace, jump_forward=mode), vocabulary)
    except GrammarError as error:
        assert error.code == "invalid_json_schema" and error.param is not None and error.param.startswith("json_schema")
        return "refused", ""
    wrong = [
        test["valid"] for test in row["tests"] if takes(grammar, vocabulary, written(test["data"], whitespace)) != test["valid"]
    ]
    return "right" if not wrong else "over" if all(wrong) else "under", grammar.report.backend


def check(rows: list[dict[str, Any]], vocabulary: Vocabulary, whitespace: str, mode: str) -> Counter[str]:
    verdicts = Counter[str]()
    for row in rows:
        verdict, _ = judge(row, vocabulary, whitespace, mode)
        verdicts[verdict] += 1
        assert verdict != "under", f"{row['id']} lets an invalid instance through"
        assert verdict != "over" or row["id"] in KEY_ORDER, f"{row['id']} refuses a valid instance"
    return verdicts


def test_real_schemas_are_sound_and_complete(smollm2: Vocabulary) -> None:
    verdicts = check(real_schemas(), smollm2, "spaced", "canonical")
    assert verdicts["right"] >= 108, verdicts  # 90 %
    assert verdicts["over"] <= len(KEY_ORDER)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("whitespace", SPACES)
def test_real_schemas_in_every_mode(whitespace: str, mode: str, smollm2: Vocabulary) -> None:
    assert check(real_schemas(), smollm2, whitespace, mode)["right"] >= 108


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
