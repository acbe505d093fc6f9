"""Is this ForwardBatch one that the page contract allows? Plain numpy, no device: any backend can ask before it touches memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.backends.base import ForwardBatch, KVSpec, Limits
from phloem.runtime.errors import KernelError

__all__ = ["check_batch"]


def check_batch(batch: ForwardBatch, spec: KVSpec, limits: Limits, vocabulary: int) -> None:
    """Raises KernelError that names the array, what it holds, and what the page contract allows."""
    tokens, rows, pages = len(batch.token_ids), len(batch.kv_last_page_len), len(batch.kv_indices)
    for name, count, most in (
        ("tokens", tokens, limits.max_tokens),
        ("rows", rows, limits.max_rows),
        ("pages", pages, limits.max_pages),
    ):
        _require(count <= most, f"the batch has {count} {name}; the limits of this runner say {most}")
    for name, dtype, length in (
        ("token_ids", np.int32, tokens),
        ("positions", np.int32, tokens),
        ("kv_slots", np.int64, tokens),
        ("qo_indptr", np.int32, rows + 1),
        ("kv_indptr", np.int32, rows + 1),
        ("kv_indices", np.int32, pages),
        ("kv_last_page_len", np.int32, rows),
        ("logit_rows", np.int32, len(batch.logit_rows)),
    ):
        array = getattr(batch, name)
        _require(
            array.dtype == dtype and array.shape == (length,),
            f"{name} is {array.dtype}{array.shape}; expected {np.dtype(dtype)}({length},)",
        )
    _inside("token_ids", batch.token_ids, 0, vocabulary)
    _inside("logit_rows", batch.logit_rows, 0, tokens)
    _inside("kv_indices", batch.kv_indices, 0, spec.num_pages)
    _inside("kv_slots", batch.kv_slots, 0, (spec.num_pages + 1) * spec.page_size)
    _inside("kv_last_page_len", batch.kv_last_page_len, 1, spec.page_size + 1)
    _require(bool(np.all(np.diff(batch.logit_rows) > 0)), "logit_rows must ascend")
    for name, indptr, total in (("qo_indptr", batch.qo_indptr, tokens), ("kv_indptr", batch.kv_indptr, pages)):
        ends = (int(indptr[0]), int(indptr[-1]))
        _require(ends == (0, total), f"{name} runs from {ends[0]} to {ends[1]}; expected 0 to {total}")
        _require(bool(np.all(np.diff(indptr) >= 1)), f"{name} must ascend: each row has at least one entry")
    kv_len = (np.diff(batch.kv_indptr) - 1) * spec.page_size + batch.kv_last_page_len
    q_len = np.diff(batch.qo_indptr)
    _require(bool(np.all(q_len <= kv_len)), "a row has more tokens than keys")
    expected = np.arange(tokens, dtype=np.int32) + np.repeat(kv_len - batch.qo_indptr[1:], q_len).astype(np.int32)
    _require(np.array_equal(batch.positions, expected), "positions differ from those that the page table and qo_indptr give")
    kept = batch.kv_slots[batch.kv_slots < spec.num_pages * spec.page_size]
    _require(len(np.unique(kept)) == len(kept), "two tokens share a slot of kv_slots")
    row_of = np.repeat(np.arange(rows), q_len)
    page = batch.kv_indices[batch.kv_indptr[row_of] + batch.positions // spec.page_size]
    own = page.astype(np.int64) * spec.page_size + batch.positions % spec.page_size
    scratch = batch.kv_slots >= spec.num_pages * spec.page_size
    _require(bool(np.all(scratch | (batch.kv_slots == own))), "kv_slots disagrees with the page table")
    copies = batch.copies
    _require(
        copies.dtype == np.int32 and copies.ndim == 2 and copies.shape[1] == 2,
        f"copies is {copies.dtype}{copies.shape}; expected int32(C, 2)",
    )
    _inside("copies", copies, 0, spec.num_pages)
    targets = copies[:, 1]
    distinct = len(np.unique(targets)) == len(targets) and not np.isin(targets, copies[:, 0]).any()
    _require(distinct, "copies must commute: targets are distinct and none is a source")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise KernelError(f"bad batch: {message}.")


def _inside(name: str, values: NDArray[Any], low: int, high: int) -> None:
    if values.size and (values.min() < low or values.max() >= high):
        raise KernelError(f"bad batch: {name} spans {values.min()} .. {values.max()}; expected {low} .. {high - 1}.")
