"""A constraint from behind the thoughts on: free until the mark, matched as an id, and then the grammar's own cursor."""

from __future__ import annotations

import random
from typing import Any

import pytest

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import CompiledGrammar
from phloem.runtime.grammar.thoughts import ThoughtsFirst
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.oracle import BOS, EOS, EOS2, Oracle, bits_of, check_place
from tests.runtime.grammar.schemas import compiled

WORDS = ["ab", "abno", "yes", "yester"]
CLOSE, OPENER = BOS, 77  # a special token, and one that is text


@pytest.fixture(scope="module")
def grammar(toy: Vocabulary) -> CompiledGrammar:
    return compiled(GrammarSpec(kind="regex", source="|".join(WORDS)), toy)


def everything(vocabulary: Vocabulary) -> set[int]:
    return set(vocabulary.text_ids) | (vocabulary.special_ids - set(vocabulary.stop_ids))


def snapshot(cursor: ThoughtsFirst, vocabulary: Vocabulary) -> Any:
    return cursor.done, cursor.dropped, tuple(cursor.forced()), bits_of(cursor, vocabulary)


@pytest.mark.parametrize("opener", [None, OPENER])
def test_thoughts_are_free_and_what_follows_is_the_grammar(
    opener: int | None, grammar: CompiledGrammar, toy: Vocabulary
) -> None:
    oracle, rng = Oracle([word.encode() for word in WORDS], toy), random.Random(1)
    for _ in range(6):
        cursor = ThoughtsFirst(grammar.cursor(), toy, CLOSE, opener)
        if opener is not None:
            assert bits_of(cursor, toy) == bits_of(grammar.cursor(), toy) | {opener} and not cursor.forced()
            assert cursor.accept(opener)
        for _ in range(5):
            assert bits_of(cursor, toy) == everything(toy) and not cursor.done and not cursor.forced()
            for i in [-1, *range(toy.width), toy.width, toy.width + 7]:
                assert cursor.fork().accept(i) == (i in everything(toy))
            token = rng.choice(sorted(everything(toy) - {CLOSE}))
            assert cursor.accept(token)
        assert not cursor.accept(EOS) and not cursor.accept(EOS2)
        assert cursor.accept(CLOSE)  # within the same accept: what is forced then is known
        assert list(cursor.forced()) == list(grammar.cursor().forced())
        text = b""
        while not cursor.done:
            token = rng.choice(sorted(check_place(cursor, text, oracle)))
            assert cursor.accept(token)
            text += toy.tokens[token] if token not in toy.stop_ids else b""
        assert text in oracle.language


def test_whoever_does_not_think_says_it_at_once(toy: Vocabulary) -> None:
    """From an opener's place on the grammar goes on as ever, its runs too; and the opener is text there."""
    grammar = compiled(GrammarSpec(kind="regex", source="(ab)?" + toy.tokens[OPENER].decode() + "yes"), toy)
    cursor, plain = ThoughtsFirst(grammar.cursor(), toy, CLOSE, OPENER), grammar.cursor()
    first = toy.encode("ab")[0]
    assert cursor.accept(first) and plain.accept(first)
    while not plain.done:
        assert bits_of(cursor, toy) == bits_of(plain, toy) and list(cursor.forced()) == list(plain.forced())
        token = min(bits_of(plain, toy))
        assert cursor.accept(token) and plain.accept(token)
    assert cursor.done


@pytest.mark.parametrize("opener", [None, OPENER])
def test_g2_it_is_a_function_of_what_it_accepted(opener: int | None, grammar: CompiledGrammar, toy: Vocabulary) -> None:
    rng = random.Random(2)
    for _ in range(30):
        cursor, ids = ThoughtsFirst(grammar.cursor(), toy, CLOSE, opener), list[int]()
        for _ in range(25):
            move = rng.random()
            legal = sorted(bits_of(cursor, toy))
            if move < 0.6 and legal:
                marks = [i for i in (CLOSE, OPENER) if i in legal]
                token = rng.choice(marks if marks and rng.random() < 0.4 else legal)
                assert cursor.accept(token)
                ids.append(token)
            elif move < 0.85:
                n = rng.randrange(len(ids) + 3)
                if n > len(ids):
                    with pytest.raises(ValueError, match="rollback"):
                        cursor.rollback(n)
                else:
                    cursor.rollback(n)
                    del ids[len(ids) - n :]
            else:
                other = cursor.fork()
                if legal:
                    assert cursor.accept(legal[0])  # whoever goes on, the other stays
                cursor = other
            fresh = ThoughtsFirst(grammar.cursor(), toy, CLOSE, opener)
            for token in ids:
                assert fresh.accept(token)
            assert snapshot(fresh, toy) == snapshot(cursor, toy)


@pytest.mark.parametrize(("close", "opener", "named"), [(EOS, None, "thoughts_close"), (311, None, "thoughts_close"), (999, None, "thoughts_close"), (BOS, -1, "thoughts_open")])  # fmt: skip
def test_marks_that_are_no_tokens_are_refused(
    close: int, opener: int | None, named: str, grammar: CompiledGrammar, toy: Vocabulary
) -> None:
    with pytest.raises(GrammarError, match=named):
        ThoughtsFirst(grammar.cursor(), toy, close, opener)
