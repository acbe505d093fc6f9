"""Lark grammars: what they open with is theirs, and permissive masks (J4) need one option more."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.schemas import compiled, takes

LARK = '%llguidance {"no_forcing": false}\nstart: "ab" /[0-9]{2}/'


@pytest.mark.parametrize("source", [LARK, LARK.split("\n")[1]])
@pytest.mark.parametrize("jump", ["canonical", "permissive"])
def test_lark_keeps_its_own_options(jump: Any, source: str, smollm2: Vocabulary) -> None:
    grammar = compiled(GrammarSpec(kind="lark", source=source, jump_forward=jump), smollm2)
    assert takes(grammar, smollm2, "ab12") and not takes(grammar, smollm2, "ab1") and not takes(grammar, smollm2, "abcd")
