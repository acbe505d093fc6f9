"""A StepPlan as the arrays of the page contract (backends/base.py). Pure numpy: knows nothing of models, threads or draws.

    Row(start=6, tokens=[7, 8, FUTURE], pages=[4, 9, 2])  page_size 4
        positions 6 7 8      kv_slots 9*4+2  9*4+3  2*4+0      kv pages 4 9 2, last page holds 1
        logits_from 7  ──►  logit rows of tokens 1 and 2; targets [8] are scored by the first, the last is there to draw from

Positions below `write_from` get slots of the scratch page. A plan that wants more logits rows than the runner's buffer holds
becomes several batches, in plan order, each token once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.backends.base import ForwardBatch
from phloem.runtime.step import FUTURE, PageCopy, Row

__all__ = ["PackedRows", "Part", "first_logit", "pack", "split"]


@dataclass(slots=True)
class PackedRows:
    """future_at: batch tokens to be read from future_slots before the forward.
    logit_indptr: [B + 1], row b's logits are logits[logit_indptr[b] : logit_indptr[b + 1]]."""

    batch: ForwardBatch
    future_at: NDArray[np.int64]
    future_slots: NDArray[np.int64]
    logit_indptr: list[int]


@dataclass(slots=True)
class Part:
    """Rows, or pieces of rows, that go into one forward. source[i]: the plan's row that rows[i] is or was cut from."""

    rows: list[Row]
    source: list[int]


def first_logit(row: Row) -> int:
    """The first position whose logits are computed."""
    return min(max(row.logits_from, row.start), row.end)


def pack(rows: Sequence[Row], copies: Sequence[PageCopy], page_size: int, num_pages: int) -> PackedRows:
    """The arrays of one forward. Copies everything: nothing of the rows is read again later.

    Asserts the contract of `Row`: it has tokens, FUTURE only as the last, pages for every position, targets for all its logits
    or all but the last.
    """
    num_rows = len(rows)
    lens_list, starts_list, counts_list = list[int](), list[int](), list[int]()  # one walk: rows are Python objects
    for row in rows:
        length, start = len(row.tokens), row.start
        count = min(max(start + length - row.logits_from, 0), length)
        assert not len(row.targets) or count - 1 <= len(row.targets) <= count, "targets do not match the logits wanted"
        lens_list.append(length)
        starts_list.append(start)
        counts_list.append(count)
    lens, starts = np.array(lens_list, np.int32), np.array(starts_list, np.int32)
    assert num_rows and lens.min() > 0, "a row without tokens"
    qo_indptr, kv_indptr = np.zeros(num_rows + 1, np.int32), np.zeros(num_rows + 1, np.int32)
    np.cumsum(lens, out=qo_indptr[1:])
    num_tokens = int(qo_indptr[-1])
    kv_lens = starts + lens
    pages = (kv_lens + (page_size - 1)) // page_size
    np.cumsum(pages, out=kv_indptr[1:])
    kv_indices = np.concatenate([row.pages[:n] for row, n in zip(rows, pages.tolist())]).astype(np.int32, copy=False)
    assert len(kv_indices) == kv_indptr[-1], "a page table is shorter than its row"
    token_ids = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int32, num_tokens)

    if num_tokens == num_rows:  # decodes alone: a token is a row
        row_of, positions = np.arange(num_rows), starts
    else:
        row_of = np.repeat(np.arange(num_rows), lens)
        positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(qo_indptr[:-1] - starts, lens)
    page_at, offsets = positions // page_size, positions % page_size
    pages_of_tokens = kv_indices[kv_indptr[row_of] + page_at]
    write_from = np.array([row.write_from for row in rows], np.int32)
    if (write_from > starts).any():
        pages_of_tokens = np.where(positions < write_from[row_of], np.int32(num_pages), pages_of_tokens)
    kv_slots = pages_of_tokens.astype(np.int64) * page_size + offsets

    future_at = np.flatnonzero(token_ids == FUTURE)
    future_rows = row_of[future_at]
    assert (future_at == qo_indptr[future_rows + 1] - 1).all(), "FUTURE is not the last token of its row"
    slots = np.fromiter((rows[b].slot for b in future_rows.tolist()), np.int64, len(future_at))

    counts = np.array(counts_list)
    logit_indptr = np.zeros(num_rows + 1, np.int64)
    np.cumsum(counts, out=logit_indptr[1:])
    first = qo_indptr[1:] - counts
    logit_rows = np.arange(logit_indptr[-1]) + np.repeat(first - logit_indptr[:-1], counts)
    batch = ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        kv_slots=kv_slots,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=(kv_lens - (pages - 1) * page_size).astype(np.int32, copy=False),
        logit_rows=logit_rows.astype(np.int32),
    )
    if copies:
        batch.copies = np.array([(c.src, c.dst) for c in copies], np.int32)
    return PackedRows(batch, future_at, slots, logit_indptr.tolist())


def split(rows: Sequence[Row], max_logits: int, page_size: int) -> list[Part]:
    """Pieces with at most `max_logits` logits rows each, in plan order.

    Chunk boundaries change no bit (B1). A row may read pages that another row of the plan writes (R5); it stands behind that
    row then, since pages enter the tree as their rows are planned, and so its piece runs later or with it.
    """
    if sum(len(row.tokens) for row in rows) <= max_logits or sum(row.end - first_logit(row) for row in rows) <= max_logits:
        return [Part(list(rows), list(range(len(rows))))]
    assert _writers_come_first(rows, page_size), "a row reads a page that a later row of its plan writes"
    parts, room = [Part([], [])], max_logits
    for index, row in enumerate(rows):
        start = row.start
        while start < row.end:
            first = max(first_logit(row), start)
            end = min(row.end, first + room)
            if end == start or (room == 0 and end < row.end):
                parts.append(Part([], []))
                room = max_logits
                continue
            parts[-1].rows.append(_piece(row, start, end))
            parts[-1].source.append(index)
            room -= max(0, end - first)
            start = end
    return parts


def _piece(row: Row, start: int, end: int) -> Row:
    """Positions start .. end - 1 of a row, and their share of its targets."""
    first = max(first_logit(row), start)
    at = first - first_logit(row)
    return Row(
        request_id=row.request_id,
        slot=row.slot,
        start=start,
        tokens=row.tokens[start - row.start : end - row.start],
        pages=row.pages,
        write_from=row.write_from,
        logits_from=first,
        targets=row.targets[at : at + max(0, end - first)],
        top_logprobs=row.top_logprobs,
        under=row.under[at : at + max(0, end - first)],
    )


def _writers_come_first(rows: Sequence[Row], page_size: int) -> bool:
    writer: dict[int, int] = {}
    for index, row in enumerate(rows):
        low = max(row.start, row.write_from)
        if low < row.end:
            for page in row.pages[low // page_size : (row.end - 1) // page_size + 1].tolist():
                writer[page] = index
    return all(
        writer.get(page, -1) <= index
        for index, row in enumerate(rows)
        for page in row.pages[: (row.end - 1) // page_size + 1].tolist()
    )
