"""check_batch: each sentence of the page contract, broken alone, is refused by name; sound batches pass."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.runtime.backends.base import ForwardBatch, KVSpec, Limits
from phloem.runtime.backends.check import check_batch
from phloem.runtime.errors import KernelError
from tests.paged_runs import Piece, make_batch

SPEC = KVSpec(1, 1, 4, 16, 4, "f32")
LIMITS = Limits(max_tokens=16, max_rows=3, max_logits=16, max_pages=12)


def sound() -> ForwardBatch:
    return make_batch(
        [Piece([1, 2, 3], 2, [5, 9]), Piece([4], 0, [3]), Piece([7], 7, [1, 2], to_scratch=True)], SPEC, [(0, 4), (6, 8)]
    )


def test_sound_batches_pass() -> None:
    check_batch(sound(), SPEC, LIMITS, 10)
    check_batch(make_batch([], SPEC, [(0, 4)]), SPEC, LIMITS, 10)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.booleans()), max_size=3), st.sampled_from([1, 2, 4, 8]))
def test_whatever_make_batch_builds_on_distinct_pages_passes(shapes: list[tuple[int, int, bool]], page_size: int) -> None:
    spec = KVSpec(1, 1, 4, 64, page_size, "f32")
    free = iter(np.random.default_rng(0).permutation(64).tolist())
    pieces = [
        Piece([0] * n, start, [next(free) for _ in range(-(-(start + n) // page_size))], 1, scratch)
        for n, start, scratch in shapes
    ]
    check_batch(make_batch(pieces, spec), spec, Limits(64, 8, 64, 64), 1)


def put(name: str, index: int, value: int) -> Callable[[ForwardBatch], None]:
    def change(batch: ForwardBatch) -> None:
        getattr(batch, name)[index] = value

    return change


def swap(name: str, make: Callable[[np.ndarray], np.ndarray]) -> Callable[[ForwardBatch], None]:  # type: ignore[type-arg]
    return lambda batch: setattr(batch, name, make(getattr(batch, name)))


@pytest.mark.parametrize(
    "change, message",
    [
        (put("token_ids", 0, 10), "token_ids spans"),
        (put("token_ids", 0, -1), "token_ids spans"),
        (put("logit_rows", 0, 5), "logit_rows spans"),
        (swap("logit_rows", lambda a: a[::-1].copy()), "logit_rows must ascend"),
        (put("kv_indices", 0, 16), "kv_indices spans"),
        (put("kv_indices", 0, -1), "kv_indices spans"),
        (put("kv_slots", 0, 68), "kv_slots spans"),
        (put("kv_slots", 0, 23), "two tokens share a slot|disagrees with the page table"),
        (put("kv_slots", 0, 60), "disagrees with the page table"),
        (put("kv_last_page_len", 0, 0), "kv_last_page_len spans"),
        (put("kv_last_page_len", 0, 5), "kv_last_page_len spans"),
        (put("kv_last_page_len", 1, 2), "positions differ"),
        (put("positions", 1, 9), "positions differ"),
        (put("qo_indptr", 0, 1), "qo_indptr runs from 1"),
        (put("qo_indptr", 1, 0), "qo_indptr must ascend"),
        (put("kv_indptr", -1, 4), "kv_indptr runs from 0 to 4"),
        (put("qo_indptr", 1, 1), "positions differ|more tokens than keys"),
        (swap("token_ids", lambda a: a.astype(np.int64)), "token_ids is int64"),
        (swap("kv_slots", lambda a: a[:-1]), r"kv_slots is int64\(4,\); expected int64\(5,\)"),
        (swap("copies", lambda a: np.array([[0, 4], [4, 5]], np.int32)), "copies must commute"),
        (swap("copies", lambda a: np.array([[0, 4], [1, 4]], np.int32)), "copies must commute"),
        (swap("copies", lambda a: np.array([[0, 16]], np.int32)), "copies spans"),
        (swap("copies", lambda a: np.zeros((2, 3), np.int32)), "copies is"),
    ],
)
def test_each_broken_promise_is_named(change: Callable[[ForwardBatch], None], message: str) -> None:
    batch = sound()
    change(batch)
    with pytest.raises(KernelError, match=message):
        check_batch(batch, SPEC, LIMITS, 10)


@pytest.mark.parametrize("name", ["max_tokens", "max_rows", "max_pages"])
def test_limits_are_kept(name: str) -> None:
    counts = {"max_tokens": 5, "max_rows": 3, "max_pages": 5}
    enough = Limits(max_tokens=5, max_rows=3, max_logits=5, max_pages=5)
    check_batch(sound(), SPEC, enough, 10)
    small = Limits(**{n: counts.get(n, 5) - (n == name) for n in ("max_tokens", "max_rows", "max_logits", "max_pages")})
    with pytest.raises(KernelError, match=f"the batch has {counts[name]} {name[4:]}"):
        check_batch(sound(), SPEC, small, 10)
