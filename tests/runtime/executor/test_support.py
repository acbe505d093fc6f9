"""Supports: bit rows in, the smaller of two forms out, equal ones one object."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phloem.runtime.executor.support import Supports, cuts
from phloem.runtime.request import SamplingParams, Support


@given(st.integers(1, 200), st.data())
def test_a_support_means_the_ids_it_was_made_of(vocab, data):
    ids = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1))
    legal = np.zeros(vocab, np.bool_)
    legal[sorted(ids)] = True
    supports = Supports(vocab, vocab)
    made = supports.of(legal)
    assert (made is None) == (len(ids) == vocab)
    assert np.flatnonzero(supports.mask(made)).tolist() == sorted(ids)
    if made is not None:
        assert len(made.data) <= 4 * supports.num_words
        assert supports.of(legal.copy()) is made  # L4: one object for all draws of a grammar's state


def test_padding_is_always_cut():
    whole, padded = Supports(64, 64), Supports(60, 64)
    assert whole.of(np.ones(64, np.bool_)) is None
    made = padded.of(np.ones(60, np.bool_))
    assert made is not None and padded.mask(made).sum() == 60


def test_ids_beyond_the_vocabulary_name_nothing():
    supports = Supports(40, 40)
    assert np.flatnonzero(supports.mask(Support("ids", np.array([3, 39, 40, 900, -1], "<i4").tobytes()))).tolist() == [3, 39]
    assert supports.mask(Support("bits", b"\xff" * 64)).sum() == 40


def test_a_filter_is_what_reads_the_logits():
    assert not cuts(SamplingParams(top_k=0, allowed_token_ids=(1,)), 10)
    assert not cuts(SamplingParams(top_k=10), 10)
    assert all(
        cuts(SamplingParams(**{k: v}), 10) for k, v in {"temperature": 0, "top_k": 9, "top_p": 0.9, "min_p": 0.1}.items()
    )
