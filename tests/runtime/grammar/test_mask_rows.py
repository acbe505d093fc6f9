"""Rows of masks: two ways of making them, and two of keeping them, are one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime.grammar.byte_dfa import ByteDfa
from phloem.runtime.grammar.mask_rows import SPARSE_IDS, row_of_ids, row_of_words, token_edges, wide_masks
from phloem.runtime.grammar.regex_dfa import dfa_of_regex
from phloem.runtime.grammar.regex_syntax import parse_regex
from phloem.runtime.grammar.vocabulary import Vocabulary


def by_walking(dfa: ByteDfa, v: Vocabulary, state: int, alive: np.ndarray) -> set[int]:
    ends = {i: dfa.walk(state, v.tokens[i]) for i in v.text_ids}
    return {i for i, end in ends.items() if end and alive[end]}


@pytest.mark.parametrize("pattern", [".{0,3}", r'"[^"\\]{1,4}"', "[^a]{2}b|[à-ÿ]+", r"\d{4}-\d{2}", "(ab)*", "a|ab|abc"])
def test_both_ways_equal_walking_every_token(pattern: str, toy: Vocabulary) -> None:
    dfa = dfa_of_regex(parse_regex(pattern))
    states, bits = list(range(1, dfa.num_states)), toy.num_words * 32
    some_dead = np.arange(dfa.num_states) % 3 != 2  # as where a vocabulary can't go on (F4)
    for alive in (np.ones(dfa.num_states, np.bool_), some_dead):
        wide = wide_masks(dfa, toy.trie, states, alive & (np.arange(dfa.num_states) > 0), bits)
        at, ids, ends = token_edges(dfa, toy.trie, states)
        for i, state in enumerate(states):
            expected = by_walking(dfa, toy, state, alive)
            assert set(np.flatnonzero(wide[i]).tolist()) == expected
            assert set(ids[(at == i) & alive[ends]].tolist()) == expected


def test_both_ways_agree_on_a_real_vocabulary(smollm2: Vocabulary) -> None:
    dfa = dfa_of_regex(parse_regex(r'"[^"\\]{1,3}"x?'))
    states, alive = list(range(1, dfa.num_states)), np.arange(dfa.num_states) > 0
    wide = wide_masks(dfa, smollm2.trie, states, alive, smollm2.num_words * 32)
    at, ids, _ = token_edges(dfa, smollm2.trie, states)
    legal = np.zeros_like(wide)
    legal[at, ids] = True
    assert (wide == legal).all() and legal.sum() > 10_000


@settings(max_examples=60)
@given(st.sets(st.integers(0, 319), max_size=150))
def test_rows_keep_what_they_were_made_of(ids: set[int]) -> None:
    expected = np.zeros(320, np.bool_)
    expected[list(ids)] = True
    words = np.packbits(expected, bitorder="little").view(np.int32)
    for row in (row_of_ids(ids, 10), row_of_words(words)):
        assert row.count == len(ids)
        assert row.sole == (min(ids) if len(ids) == 1 else -1)
        assert (row.where is None) == (len(ids) > SPARSE_IDS)
        filled = np.full(10, -1, np.int32)
        row.fill(filled)
        assert (filled == words).all()
