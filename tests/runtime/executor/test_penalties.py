"""Penalty counts: kept token by token, equal to counting from the start; histories are told apart."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phloem.runtime.executor.penalties import CountsCache

VOCAB = 10
TOKENS = st.lists(st.integers(-2, VOCAB + 2), max_size=300)


def counted(history, num_prompt):
    """The specification: one pass with a Counter."""
    output = Counter(history[num_prompt:])
    return {t: output[t] for t in history if 0 <= t < VOCAB}


def as_dict(arrays):
    ids, times = arrays
    assert ids.dtype == times.dtype == np.int32
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), times.tolist()))


@given(TOKENS, TOKENS, st.booleans())
def test_counts_kept_incrementally_equal_counts_from_the_start(prompt, output, grows_in_place):
    cache, history = CountsCache(VOCAB, 8), list(prompt)
    for token in [None, *output]:
        if token is not None:
            history.append(token)
        given_history = history if grows_in_place else tuple(history)
        assert as_dict(cache.get("r", given_history, len(prompt))) == counted(history, len(prompt))


def test_another_history_under_the_same_id_is_counted_anew():
    cache = CountsCache(VOCAB, 8)
    cache.get("r", [1, 2, 3, 3], 2)
    assert as_dict(cache.get("r", [4, 5, 3, 3, 3], 2)) == {4: 0, 5: 0, 3: 3}  # same length of prompt, same last token
    assert as_dict(cache.get("r", [4, 5, 3], 2)) == {4: 0, 5: 0, 3: 1}  # shorter
    assert as_dict(cache.get("r", [4, 5, 3], 1)) == {4: 0, 5: 1, 3: 1}  # another border of the prompt


def test_more_distinct_ids_than_room_at_first():
    cache, history = CountsCache(1000, 8), [0]
    for token in range(1, 500):
        history.append(token)
        cache.get("r", history, 1)
    assert as_dict(cache.get("r", history, 1)) == {0: 0, **dict.fromkeys(range(1, 500), 1)}


def test_only_so_many_requests_are_remembered():
    cache = CountsCache(VOCAB, 3)
    for i in range(20):
        cache.get(str(i), [1], 1)
    assert len(cache) == 3


def test_what_was_handed_out_does_not_change_later():
    cache, history = CountsCache(VOCAB, 3), [1, 2]
    _, times = cache.get("r", history, 1)
    history.append(2)
    cache.get("r", history, 1)
    assert times.tolist() == [0, 1]
