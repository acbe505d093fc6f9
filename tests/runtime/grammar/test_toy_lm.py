"""Whole distributions, enumerated over a toy model with exact fractions: what forcing changes, and what it must not (§9.6)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from fractions import Fraction

import pytest

from phloem.runtime.grammar.base import CompiledGrammar, Cursor, Limits
from phloem.runtime.grammar.token_fsm import FsmGrammar, TokenFsm
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.oracle import EOS, Oracle, bits_of, toy_vocabulary

Distribution = dict[tuple[int, ...], Fraction]
FSM = TokenFsm()
LANGUAGE = {b"yesabab!1", b"yesabab!12", b"yesabab?", b"noabab"}
PATTERN = r"yesabab(!12?|\?)|noabab"


@pytest.fixture(scope="module")
def small() -> Vocabulary:
    """Few tokens, many spellings."""
    return toy_vocabulary(
        missing=set(range(256)) - set(b"yesnoab!?12"), merges=["a b", "ab ab", "y e", "ye s", "n o", "! 1", "ab !"]
    )


def weight(ids: tuple[int, ...], token: int) -> int:
    """The toy model: a fixed number from 1 to 100 for each token behind each prefix."""
    return hashlib.sha256(repr((ids, token)).encode()).digest()[0] % 100 + 1


def enumerated(legal: Callable[[tuple[int, ...]], set[int]], forced: Callable[[tuple[int, ...]], list[int]]) -> Distribution:
    """Every output with its probability. No legal token: it has ended."""
    found: Distribution = {}
    todo: list[tuple[tuple[int, ...], Fraction]] = [((), Fraction(1))]
    while todo:
        ids, p = todo.pop()
        run = forced(ids)
        if run:
            todo.append(((*ids, *run), p))
            continue
        options = legal(ids)
        if not options:
            found[ids] = found.get(ids, Fraction(0)) + p
            continue
        total = sum(weight(ids, t) for t in options)
        todo += [((*ids, t), p * Fraction(weight(ids, t), total)) for t in options]
    return found


def distance(a: Distribution, b: Distribution) -> Fraction:
    return sum((abs(a.get(k, Fraction(0)) - b.get(k, Fraction(0))) for k in a.keys() | b.keys()), Fraction(0)) / 2


def at(grammar: CompiledGrammar, ids: tuple[int, ...]) -> Cursor:
    cursor = grammar.cursor()
    for token in ids:
        assert cursor.accept(token)
    return cursor


def by_cursor(grammar: CompiledGrammar, v: Vocabulary, jump: bool) -> Distribution:
    """As the engine does it: done ends with EOS (J8); jump takes the whole run, else it is sampled through its masks."""

    def legal(ids: tuple[int, ...]) -> set[int]:
        if ids[-1:] == (EOS,):
            return set()
        cursor = at(grammar, ids)
        return {EOS} if cursor.done else bits_of(cursor, v) - set(v.stop_ids[1:])

    def forced(ids: tuple[int, ...]) -> list[int]:
        return list(at(grammar, ids).forced()) if jump and ids[-1:] != (EOS,) else []

    return enumerated(legal, forced)


def plain(v: Vocabulary, language: set[bytes]) -> Distribution:
    """Ordinary constrained sampling, by brute force, no engine in sight."""
    oracle = Oracle(language, v)
    return enumerated(
        lambda ids: set() if ids[-1:] == (EOS,) else oracle.legal(v.join(ids)) - set(v.stop_ids[1:]), lambda ids: []
    )


@pytest.mark.parametrize("kind", ["regex", "choices"])
def test_permissive_is_exactly_constrained_sampling(kind: str, small: Vocabulary) -> None:
    """J4: total variation 0, with forced tokens and without."""
    grammar: CompiledGrammar
    if kind == "regex":
        grammar = FSM.regex(PATTERN, small, Limits(), "permissive")
    else:
        grammar = FSM.choices(sorted(w.decode() for w in LANGUAGE), small, Limits(), "permissive")
    expected = plain(small, LANGUAGE)
    assert len(expected) > 20
    assert by_cursor(grammar, small, jump=True) == expected
    assert by_cursor(grammar, small, jump=False) == expected


@pytest.mark.parametrize("kind", ["regex", "choices"])
def test_canonical_jumping_is_canonical_stepping(kind: str, small: Vocabulary) -> None:
    """J3: total variation 0."""
    grammar: CompiledGrammar
    if kind == "regex":
        grammar = FSM.regex(PATTERN, small, Limits())
    else:
        grammar = FSM.choices(sorted(w.decode() for w in LANGUAGE), small, Limits())
    stepped = by_cursor(grammar, small, jump=False)
    assert by_cursor(grammar, small, jump=True) == stepped
    assert {small.join(ids[:-1]) for ids in stepped} == LANGUAGE


def test_canonical_is_another_distribution_than_plain_masks(small: Vocabulary) -> None:
    """The proof that these tests can see: a choice of distribution, not a neutral speed-up."""
    canonical = by_cursor(FSM.regex(PATTERN, small, Limits()), small, jump=True)
    assert distance(canonical, plain(small, LANGUAGE)) > Fraction(1, 20)


def test_jumping_without_the_cut_would_be_seen(small: Vocabulary) -> None:
    """ "abab" behind "yes" may become "ab" "ab!": the run has to end before it."""
    grammar: FsmGrammar = FSM.regex(PATTERN, small, Limits())
    canonical = by_cursor(grammar, small, jump=False)

    def naive(ids: tuple[int, ...]) -> list[int]:
        if ids[-1:] == (EOS,):
            return []
        state = grammar.start
        for token in ids:
            state = grammar.step(state, token)
        data, _ = grammar.chain(state)
        return small.encode_bytes(data) or []

    def legal(ids: tuple[int, ...]) -> set[int]:
        if ids[-1:] == (EOS,):
            return set()
        state = grammar.start
        for token in ids:
            state = grammar.step(state, token)
        if grammar.done(state):
            return {EOS}
        oracle = Oracle(LANGUAGE, small)
        return oracle.legal(small.join(ids)) - set(small.stop_ids[1:])

    assert distance(enumerated(legal, naive), canonical) > Fraction(1, 20)


def test_choices_are_spelled_as_the_tokenizer_spells_them(small: Vocabulary) -> None:
    grammar = FSM.choices(sorted(w.decode() for w in LANGUAGE), small, Limits())
    assert {ids[:-1] for ids in by_cursor(grammar, small, jump=True)} == {tuple(small.encode(w.decode())) for w in LANGUAGE}
