"""Random logits under the mask, drawn towards closers: whatever comes out is valid. And no mask leads into a dead end."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.compile import Served
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.schemas import compiled, feature_matrix, real_schemas, spec_of

CLOSERS = ('"', "}", "]", '"}', '"]', "]}", "}}", '",', '"}}', '"]}', "0", "1", "true", "null")
MAX_TOKENS = 400


def closers(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """A mask of them, stop ids too."""
    texts, row = {text.encode() for text in CLOSERS}, vocabulary.stop_mask.view(np.uint32).copy()
    for i in vocabulary.text_ids:
        if vocabulary.tokens[i] in texts:
            row[i >> 5] |= np.uint32(1 << (i & 31))
    return row.view(np.int32)


def ids_of(row: NDArray[np.int32]) -> NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def generate(grammar: Served, vocabulary: Vocabulary, rng: random.Random, likely: NDArray[np.int32]) -> str | None:
    """A finished text, or None when MAX_TOKENS were not enough."""
    cursor, row, ids = grammar.cursor(), np.empty(vocabulary.num_words, np.int32), list[int]()
    for _ in range(MAX_TOKENS):
        if cursor.done:
            return vocabulary.join(ids).decode()
        cursor.fill(row)
        assert row.any(), f"a dead end behind {vocabulary.join(ids)!r}"
        closing = row & likely
        drawn_from = ids_of(closing if closing.any() and rng.random() < 0.7 else row)
        token = int(drawn_from[rng.randrange(len(drawn_from))])
        assert cursor.accept(token)
        if token in vocabulary.stop_ids:
            return vocabulary.join(ids).decode()
        ids.append(token)
    return None


def check(schema: Any, text: str) -> None:
    value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
    text.encode()  # no half surrogates


def run(vocabulary: Vocabulary, count: int, seed: int) -> tuple[int, int]:
    """(finished, begun) generations over all schemas that are served, in every mode in turn."""
    rng, likely = random.Random(seed), closers(vocabulary)
    schemas = [row["schema"] for row in (*real_schemas(), *feature_matrix())]
    rng.shuffle(schemas)
    finished = begun = 0
    while begun < count:
        for i, schema in enumerate(schemas):
            mode, blanks = ("canonical", "permissive")[i % 2], ("flexible", "spaced", "compact")[(i + begun) % 3]
            try:
                grammar = compiled(spec_of(schema, jump_forward=mode, json_whitespace=blanks), vocabulary)
            except GrammarError:
                continue
            for _ in range(max(1, count // len(schemas))):
                text = generate(grammar, vocabulary, rng, likely)
                begun += 1
                if text is not None:
                    finished += 1
                    check(schema, text)
            if begun >= count:
                break
    return finished, begun


def test_random_generations_are_valid(smollm2: Vocabulary) -> None:
    finished, begun = run(smollm2, 40, seed=1)
    assert finished >= begun // 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_random_generations_are_valid(smollm2: Vocabulary) -> None:
    finished, begun = run(smollm2, 5_000, seed=2)
    assert begun >= 5_000 and finished >= begun // 3
