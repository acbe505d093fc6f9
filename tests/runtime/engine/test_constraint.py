"""The keyword arguments of a constraint, and the GrammarSpec that comes of them."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.runtime.engine.constraint import grammar_spec
from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import GrammarSpec

LARK = '%llguidance {"no_forcing": false}\nstart: "ab" /[0-9]{2}/'


def test_grammar_is_ebnf_lark_or_a_spec() -> None:
    spec = GrammarSpec(kind="regex", source="a+", open_end=True)
    assert grammar_spec(grammar=spec) is spec
    ebnf, lark = grammar_spec(grammar='root ::= "a"'), grammar_spec(grammar=LARK, open_end=True)
    assert ebnf == GrammarSpec(kind="ebnf", source='root ::= "a"')
    assert lark == GrammarSpec(kind="lark", source=LARK, open_end=True)
    assert grammar_spec() is None


@pytest.mark.parametrize(
    "options, param, says",
    [
        ({"grammar": GrammarSpec(kind="regex", source="a"), "open_end": True}, "open_end", "a GrammarSpec, which has a field for it"),
        ({"regex": GrammarSpec(kind="regex", source="a")}, "regex", "pass it as grammar="),
        ({"grammar": 5}, "grammar", "expected a string"),
        ({"open_end": True}, "open_end", "without a constraint"),
        ({"regex": "a", "open_end": 1}, "open_end", "expected True or False"),
        ({"regex": "a", "choices": ["a"]}, "choices", "one kind of constraint"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        grammar_spec(**options)
    assert caught.value.param == param
