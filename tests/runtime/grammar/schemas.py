"""The real schemas and the feature matrix of tests/data/schemas, and what the project does with an instance of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from phloem.runtime.grammar.audit import route
from phloem.runtime.grammar.base import Cursor, Limits
from phloem.runtime.grammar.compile import Served, serve
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec

FOLDER = Path(__file__).parents[2] / "data" / "schemas"


@functools.cache
def real_schemas() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / "schemas.jsonl").read_text().splitlines()]


@functools.cache
def feature_matrix() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((FOLDER / "feature_matrix.json").read_text())
    return rows


def spec_of(schema: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", source=json.dumps(schema, ensure_ascii=False), **options)


def compiled(spec: GrammarSpec, vocabulary: Vocabulary) -> Served:
    """Audit, route, compile, first mask: what the service does, in this thread."""
    return serve(route(spec, Limits()), vocabulary, Limits())


def written(value: Any, whitespace: str = "spaced") -> str:
    separators = (",", ":") if whitespace == "compact" else (", ", ": ")
    return json.dumps(value, ensure_ascii=False, separators=separators)


def takes(grammar: Served, vocabulary: Vocabulary, text: str) -> bool:
    """Scripted logits: the tokens of `text`, each checked against the mask, to the end of the value."""
    cursor, row = grammar.cursor(), np.empty(vocabulary.num_words, np.int32)
    for token in vocabulary.encode(text):
        if cursor.done:
            return False
        cursor.fill(row)
        legal = bool(int(row[token >> 5]) >> (token & 31) & 1)
        assert cursor.accept(token) == legal, "the mask and accept differ (G1)"
        if not legal:
            return False
    return may_end(cursor, vocabulary)


def may_end(cursor: Cursor, vocabulary: Vocabulary) -> bool:
    if cursor.done:
        return True
    return not cursor.forced() and cursor.accept(vocabulary.stop_ids[0])


def in_declared_order(schema: Any, value: Any) -> bool:
    """Whether the keys of `value` come as `schema` declares them, as far as can be seen without following combinators (A6)."""
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return all(in_declared_order(items if isinstance(items, dict) else {}, item) for item in value)
    if not isinstance(value, dict) or not isinstance(schema, dict):
        return True
    properties = schema.get("properties", {})
    order = [key for key in properties if key in value]
    if [key for key in value if key in properties] != order:
        return False
    return all(in_declared_order(properties.get(key, {}), item) for key, item in value.items())
