"""Structural tags: free text stays free, what stands in a tag is enforced, blanks are bounded there too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.audit import route
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.compile import serve
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.schemas import takes

ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


def tag(schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    tags = [{"begin": "<function=f>", "content": content, "end": "</function>"}]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<function="], "tags": tags}}


def grammar(vocabulary: Vocabulary, schema: Any = ARGUMENTS, **options: Any) -> Any:
    spec = GrammarSpec(kind="structural_tag", source=json.dumps(tag(schema)), **options)
    return serve(route(spec, Limits()), vocabulary, Limits())


CALL = '<function=f>{"a": "x", "n": 1}</function>'
TEXTS = {
    "Hello, world.": True,
    f"I call it: {CALL}": True,
    f"{CALL} and {CALL}": True,
    "<function=g>{}</function>": False,
    CALL.replace("1", '"1"'): False,
    CALL.replace(', "n": 1', ""): False,
    CALL.replace("</function>", "</f>"): False,
}


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_free_and_tags_are_not(text: str, smollm2: Vocabulary) -> None:
    assert takes(grammar(smollm2), smollm2, text) == TEXTS[text]


@pytest.mark.parametrize(("whitespace", "text", "good"), [
    ("flexible", '{ "a":"x",\n"n":1 }', True), ("flexible", '{"a":' + " " * 9 + '"x", "n": 1}', False),
    ("spaced", '{"a": "x", "n": 1}', True), ("spaced", '{"a":"x","n":1}', False),
    ("compact", '{"a":"x","n":1}', True), ("compact", '{"a": "x", "n": 1}', False),
])  # fmt: skip
def test_w1_blanks_inside_tags(whitespace: Any, text: str, good: bool, smollm2: Vocabulary) -> None:
    assert takes(grammar(smollm2, json_whitespace=whitespace), smollm2, f"<function=f>{text}</function>") == good


def test_half_a_surrogate_pair_is_no_text_of_any_tag(smollm2: Vocabulary) -> None:
    """Each tag has rules of its own in xgrammar's grammar: only those of the first were corrected."""
    content = {"type": "json_schema", "json_schema": ARGUMENTS}
    tags = [{"begin": f"<function={name}>", "content": content, "end": "</function>"} for name in "fgh"]
    source = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<function="], "tags": tags}}
    several = serve(route(GrammarSpec(kind="structural_tag", source=json.dumps(source)), Limits()), smollm2, Limits())
    for name in "fgh":
        for escape, good in (("\\u00e9", True), ("\\ud83d\\ude00", True), ("\\ud83d", False), ("\\ude00", False)):
            text = f'<function={name}>{{"a": "{escape}", "n": 1}}</function>'
            assert takes(several, smollm2, text) == good, text


def test_no_special_token_is_free_text(smollm2: Vocabulary) -> None:
    cursor = grammar(smollm2).cursor()
    for token in smollm2.special_ids.difference(smollm2.stop_ids):
        assert not cursor.fork().accept(token)
    assert cursor.fork().accept(smollm2.stop_ids[0])


@pytest.mark.parametrize(
    "schema",
    [{"type": "object", "properties": {"a": {}}}, {**ARGUMENTS, "minProperties": 1}, {"type": "array", "uniqueItems": True}],
)
def test_what_is_not_exact_inside_a_tag_is_refused_with_its_place(schema: Any, smollm2: Vocabulary) -> None:
    with pytest.raises(GrammarError) as caught:
        grammar(smollm2, schema)
    assert caught.value.status == 400 and caught.value.param is not None
    assert caught.value.param.startswith(("structural_tag/format/tags/0/content/json_schema", "json_schema"))
