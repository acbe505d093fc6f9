"""The real schemas and the feature matrix of tests/data/schemas, and what the project does with an instance of them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import referencing.exceptions

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.audit import route
from phloem.runtime.grammar.base import CompiledGrammar, Cursor, Limits, NotMine
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


def takes(grammar: CompiledGrammar, vocabulary: Vocabulary, text: str) -> bool:
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


def _fits(schema: Any, value: Any, root: Any) -> bool:
    try:
        return bool(root.evolve(schema=schema).is_valid(value))
    except referencing.exceptions.Unresolvable:  # out of its place a schema may not find what it refers to
        return False


@dataclass(frozen=True)
class Verdict:
    """What becomes of one schema's instances. engine: "" if it is refused. An instance is a value: it counts as taken when one
    spelling of it is, with its keys as declared or as they stand in the file.

    valid, as_written: (taken, all) of the valid instances, so and as they stand.   invalid: (taken, all) of the others.
    """

    engine: str
    valid: tuple[int, int] = (0, 0)
    as_written: tuple[int, int] = (0, 0)
    invalid: tuple[int, int] = (0, 0)

    @property
    def is_right(self) -> bool:
        return bool(self.engine) and self.valid[0] == self.valid[1] and not self.invalid[0]


def judge(row: dict[str, Any], vocabulary: Vocabulary, make: Callable[[Any], CompiledGrammar], whitespace: str) -> Verdict:
    """make: schema -> grammar, or GrammarError."""
    try:
        grammar = make(row["schema"])
    except (GrammarError, NotMine):
        return Verdict("")
    good, raw, bad = list[bool](), list[bool](), list[bool]()
    for test in row["tests"]:
        as_written = takes(grammar, vocabulary, written(test["data"], whitespace))
        taken = as_written or takes(grammar, vocabulary, written(declared(row["schema"], test["data"]), whitespace))
        if test["valid"]:
            good.append(taken), raw.append(as_written)
        else:
            bad.append(taken)
    counts = [(sum(each), len(each)) for each in (good, raw, bad)]
    return Verdict(grammar.report.backend, *counts)


def may_end(cursor: Cursor, vocabulary: Vocabulary) -> bool:
    if cursor.done:
        return True
    return not cursor.forced() and cursor.accept(vocabulary.stop_ids[0])


def declared(schema: Any, value: Any) -> Any:
    """The same value with its keys as the schema declares them (A6): JSON objects have no order, generated text has one.

    Declared ones come first, those of combinators in the order in which they are met, further keys after them as they were. Of
    options, those count that accept the value.
    """
    return _declared([schema], value, jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema))


def _declared(nodes: list[Any], value: Any, root: Any) -> Any:
    nodes = list(_met(nodes, value, root))
    if isinstance(value, list):
        below = [node[key] for node in nodes for key in ("items", "additionalItems") if isinstance(node.get(key), dict)]
        places = [node[key] for node in nodes for key in ("prefixItems", "items") if isinstance(node.get(key), list)]
        return [_declared(below + [p[i] for p in places if i < len(p)], item, root) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    order = list(dict.fromkeys(key for node in nodes for key in node.get("properties", ()) if key in value))
    order += [key for key in value if key not in order]
    made = {}
    for key in order:
        below = [node["properties"][key] for node in nodes if key in node.get("properties", ())]
        below += [part for node in nodes for name, part in node.get("patternProperties", {}).items() if re.search(name, key)]
        below += [node["additionalProperties"] for node in nodes if "additionalProperties" in node]
        made[key] = _declared(below, value[key], root)
    return made


def _met(nodes: list[Any], value: Any, root: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """These schemas and the ones that apply at the same place, if the value fits them."""
    for node in nodes if depth < 16 else ():
        if isinstance(node, dict):
            yield node
            parts = [part for key in ("allOf", "anyOf", "oneOf") for part in node.get(key, ())]
            parts += [node[key] for key in ("if", "then", "else") if key in node]
            more = [part for part in parts if _fits(part, value, root)]
            target: Any = node.get("$ref", "")
            if isinstance(target, str) and target.startswith("#"):
                at = root.schema
                for step in target[1:].split("/")[1:]:
                    at = at.get(step.replace("~1", "/").replace("~0", "~"), {}) if isinstance(at, dict) else {}
                more.append(at)
            yield from _met(more, value, root, depth + 1)
