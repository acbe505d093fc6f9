"""Inside a free string the engine is not asked, and nobody can tell: masks, runs and ends are those of a cursor that asks each time."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Cursor
from phloem.runtime.grammar.engine_cursor import EngineCursor
from phloem.runtime.grammar.free_text import FreeStrings, free_strings, inside_value
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.oracle import toy_vocabulary
from tests.runtime.grammar.schemas import compiled, real_schemas, spec_of

STRING = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "string": STRING,
    "bounded": {"type": "string", "minLength": 3, "maxLength": 60},
    "long": {"type": "string", "minLength": 40},
    "closed": {
        "type": "object",
        "properties": {"a": STRING, "b": {"type": "string", "minLength": 1}, "c": {"type": "array", "items": STRING}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    },
    "open": {"type": "object", "properties": {"name": STRING, "nam": {"type": "integer"}}, "required": ["name"]},
    "anything": {"type": "object"},
    "either": {
        "type": "object",
        "properties": {"a": {"anyOf": [STRING, {"type": "null"}, {"type": "array", "items": STRING}]}},
    },
}
TEXTS = ["yes", "a b", " é", "😀", "true ", "12", "no", '\\"', "\\n", '"', '", "', '": "', "nam", "name", "]", "}"]


def asking(cursor: Cursor) -> EngineCursor:
    """The same place, but its engine is asked at every token."""
    assert isinstance(cursor, EngineCursor)
    twin = cursor.fork()
    twin._rules = dataclasses.replace(twin._rules, free=None)
    twin._inside = None
    return twin


def walk(schema: Any, vocabulary: Vocabulary, rng: random.Random, steps: int, **options: Any) -> int:
    """How many tokens the engine was not asked about, along a random path with undone detours."""
    cursor = compiled(spec_of(schema, **options), vocabulary).cursor()
    other, kept = asking(cursor), 0
    one, two = np.empty(vocabulary.num_words, np.int32), np.empty(vocabulary.num_words, np.int32)
    likely = {i for text in TEXTS for i in vocabulary.encode(text)}
    accepted = 0
    for _ in range(steps):
        assert cursor.done == other.done and list(cursor.forced()) == list(other.forced())
        if cursor.done:
            break
        cursor.fill(one), other.fill(two)
        assert (one == two).all()
        legal = np.flatnonzero(np.unpackbits(one.view(np.uint8), bitorder="little")).tolist()
        some = [i for i in legal if i in likely and i not in vocabulary.stop_ids]
        token = rng.choice(some or legal)
        for illegal in rng.sample(range(vocabulary.width), 2):
            if illegal not in legal:
                assert not cursor.accept(illegal) and not other.accept(illegal)
        assert cursor.accept(token) and other.accept(token)
        accepted += 1
        if rng.random() < 0.1:
            back = rng.randint(1, min(3, accepted))
            cursor.rollback(back), other.rollback(back)
            accepted -= back
        if rng.random() < 0.1:
            cursor = cursor.fork()
        assert isinstance(cursor, EngineCursor)
        kept += len(cursor._kept) > 0
        if token in vocabulary.stop_ids:
            break
    return kept


@pytest.mark.parametrize("mode", ["canonical", "permissive"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_nobody_can_tell(name: str, mode: str, smollm2: Vocabulary) -> None:
    rng, kept = random.Random(name), 0
    for blanks in ("spaced", "flexible"):
        for seed in range(6):
            for vocabulary in (smollm2, toy_vocabulary()):
                rng = random.Random(f"{name} {seed}")
                kept += walk(SCHEMAS[name], vocabulary, rng, 60, jump_forward=mode, json_whitespace=blanks)
    assert kept or name == "bounded", "the shortcut was never taken: this test sees nothing"


def test_of_real_schemas_some_have_free_strings(smollm2: Vocabulary) -> None:
    rng, found = random.Random(3), 0
    for row in real_schemas()[::3]:
        try:
            grammar = compiled(spec_of(row["schema"], json_whitespace="spaced"), smollm2)
        except GrammarError:
            continue
        if isinstance(grammar.cursor(), EngineCursor) and grammar.compiled.rules.free is not None:  # type: ignore[attr-defined]
            found += walk(row["schema"], smollm2, rng, 40, json_whitespace="spaced") > 0
    assert found >= 3


NOT_FREE: dict[str, Any] = {
    "another reading is a const": {"anyOf": [{"const": "a"}, STRING]},
    "two objects": {"anyOf": [{"type": "object", "properties": {"k": {"const": "a"}}}, {"type": "object"}]},
    "an option without a type": {"anyOf": [{"minLength": 3}, {"type": "null"}]},
    "siblings": {"type": "object", "properties": {"a": STRING}, "anyOf": [{"required": ["a"]}]},
    "a pattern anywhere": {"type": "object", "properties": {"a": STRING, "b": {"type": "string", "pattern": "^a+$"}}},
    "a format": {"type": "string", "format": "date"},
    "keys by pattern": {"type": "object", "patternProperties": {"^a": STRING}},
    "all of": {"allOf": [STRING, {"minLength": 3}]},
    "a reference into data": {"$defs": {"a": {"default": STRING}}, "$ref": "#/$defs/a/default"},
    "a reference with siblings": {"$defs": {"a": STRING}, "$ref": "#/$defs/a", "minLength": 3},
    "what nobody here knows": {"type": "string", "contentMediaType": "x"},
    "a list of schemas": {"type": "array", "items": [STRING]},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_FREE)
def test_what_may_be_read_in_two_ways_promises_nothing(name: str) -> None:
    assert free_strings(json.dumps(NOT_FREE[name]), 16) is None


def test_bounds_are_those_of_the_whole_schema() -> None:
    schema = {"properties": {"a": {"minLength": 2, "maxLength": 90}, "b": {"items": {"maxLength": 50, "minLength": 100}}}}
    free = free_strings(json.dumps(schema), 16)
    assert free == FreeStrings((2, 100), 50, 16)
    assert free.room(0) < 0, "whether the string may end yet is open"
    assert free.room(24) == 34, "two characters at least: what is left is 50 less a token's 16"
    assert FreeStrings((100,), 10**6, 16).room(0) == 83 and FreeStrings((), 10**6, 16).room(5) == 10**6 - 16


@pytest.mark.parametrize(
    "recent, size",
    [
        (b'"', 0), (b'"abc', 3), (b'{"a": "', 0), (b'{"a":\n "xy', 2), (b'["q', 1),
        (b'{"a', None), (b'{"a": 1, "b', None), (b'["a", "b', None), (b'{"a": "x\\"', None), (b"abc", None), (b"", None),
        (bytes(64), None), (bytes(62) + b'"x', None),
    ],
)  # fmt: skip
def test_where_a_string_was_opened(recent: bytes, size: int | None) -> None:
    assert inside_value(recent) == size


def test_a_shortcut_saves_the_engine(smollm2: Vocabulary) -> None:
    """As long as the string goes on, no mask is made."""
    cursor = compiled(spec_of(SCHEMAS["closed"], json_whitespace="spaced"), smollm2).cursor()
    assert isinstance(cursor, EngineCursor)
    for token in smollm2.encode('{"a": "Once upon a time'):  # twelve bytes are one character at least
        cursor.forced()
        assert cursor.accept(token)
    cursor.forced()
    matcher: Any = cursor._matcher
    cursor._matcher = None  # type: ignore[assignment]
    for token in smollm2.encode(" there was a ship and a sea"):
        assert cursor.forced() == () and not cursor.done and cursor.accept(token)
    cursor._matcher = matcher
    for token in smollm2.encode('", "b": "x'):
        cursor.forced()
        assert cursor.accept(token), token
