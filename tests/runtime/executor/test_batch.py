"""A plan becomes the arrays of the page contract; a plan with too many logits rows becomes several."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.runtime.executor.batch import pack, split
from phloem.runtime.step import FUTURE, PageCopy, Row


def row(start, tokens, pages, name="r", **fields):
    fields.setdefault("logits_from", start + len(tokens) - 1)
    return Row(name, fields.pop("slot", 0), start, tokens, np.array(pages, np.int32), **fields)


def test_the_example_of_the_header():
    packed = pack([row(6, [7, 8, FUTURE], [4, 9, 2], slot=5, logits_from=7, targets=[8])], [PageCopy(1, 3)], 4, 16)
    b = packed.batch
    assert b.positions.tolist() == [6, 7, 8]
    assert b.kv_slots.tolist() == [9 * 4 + 2, 9 * 4 + 3, 2 * 4]
    assert (b.qo_indptr.tolist(), b.kv_indptr.tolist(), b.kv_indices.tolist()) == ([0, 3], [0, 3], [4, 9, 2])
    assert b.kv_last_page_len.tolist() == [1]
    assert b.logit_rows.tolist() == [1, 2]
    assert b.copies.tolist() == [[1, 3]]
    assert (packed.future_at.tolist(), packed.future_slots.tolist()) == ([2], [5])


def test_pages_beyond_the_row_are_left_out_and_a_full_last_page_is_full():
    b = pack([row(0, [1, 2, 3, 4], [7, 8, 9])], [], 4, 16).batch
    assert (b.kv_indices.tolist(), b.kv_last_page_len.tolist()) == ([7], [4])


def test_R4_positions_below_write_from_go_to_the_scratch_page():
    rows = [row(7, [1], [4, 9], write_from=8), row(6, [1, 2, 3], [5, 6, 7], write_from=8), row(8, [1], [5, 6, 7], write_from=8)]
    b = pack(rows, [], 4, 16).batch
    assert b.kv_slots.tolist() == [16 * 4 + 3, 16 * 4 + 2, 16 * 4 + 3, 7 * 4, 7 * 4]


def test_rows_are_packed_from_any_sequence_and_nothing_is_shared():
    pages, tokens = np.array([3, 4], np.int32), [5, 6, 7]
    rows = [Row("a", 0, 1, tokens, pages, logits_from=4), Row("b", 1, 0, np.array([9, 8]), pages, logits_from=1)]
    b = pack(rows, [], 2, 8).batch
    pages[:], tokens[:] = 0, [0, 0, 0]
    assert b.token_ids.tolist() == [5, 6, 7, 9, 8]
    assert b.kv_indices.tolist() == [3, 4, 3]
    assert b.logit_rows.tolist() == [4]


@pytest.mark.parametrize(
    "bad",
    [
        row(0, [], [1], logits_from=0),
        row(0, [FUTURE, 1], [1]),
        row(4, [1], [1]),
        row(0, [1, 2], [1], logits_from=0, targets=[5, 5, 5]),
        row(0, [1, 2, 3], [1], logits_from=0, targets=[5]),
    ],
    ids=["no tokens", "FUTURE inside", "page table too short", "too many targets", "too few targets"],
)
def test_a_row_that_breaks_its_contract_is_refused(bad):
    with pytest.raises(AssertionError):
        pack([bad], [], 4, 16)


@st.composite
def plans(draw):
    rows, page = [], 0
    for i in range(draw(st.integers(1, 5))):
        start, length = draw(st.integers(0, 9)), draw(st.integers(1, 12))
        count = draw(st.integers(0, length))
        targets = list(range(count - draw(st.integers(0, 1)))) if count else []
        num_pages = -(-(start + length) // 4)
        pages = np.arange(page, page + num_pages, dtype=np.int32)
        page += num_pages
        tokens = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        write_from = draw(st.integers(0, start + length))
        rows.append(Row(f"r{i}", i, start, tokens, pages, write_from, start + length - count, targets, 3))
    return rows


@given(plans(), st.integers(1, 9))
def test_parts_hold_every_token_once_in_order_with_its_targets(rows, max_logits):
    def spelled(pieces):
        """(row, position, token, slot, wants logits, target) of every token."""
        found = []
        for piece in pieces:
            packed = pack([piece], [], 4, 100)
            wanted = packed.batch.logit_rows.tolist()
            for t, token in enumerate(piece.tokens):
                target = None
                if t in wanted and wanted.index(t) < len(piece.targets):
                    target = piece.targets[wanted.index(t)]
                slot = int(packed.batch.kv_slots[t])
                found.append((piece.request_id, piece.start + t, token, slot, t in wanted, target))
        return found

    parts = split(rows, max_logits, 4)
    pieces = [piece for part in parts for piece in part.rows]
    assert spelled(pieces) == spelled(rows)
    assert [rows[s].request_id for part in parts for s in part.source] == [p.request_id for p in pieces]
    counts = [len(pack(part.rows, [], 4, 100).batch.logit_rows) for part in parts]
    assert max(counts) <= max_logits
    assert all(part.rows for part in parts)
    assert len(parts) == max(1, -(-sum(counts) // max_logits))


def test_R5_a_reader_before_its_writer_cannot_be_split():
    writer = row(0, [1, 2, 3, 4], [1], "w", logits_from=0, targets=[2, 3, 4])
    reader = row(4, [5], [1, 2], "r")
    assert len(split([writer, reader], 2, 4)) == 3
    with pytest.raises(AssertionError, match="later row"):
        split([reader, writer], 2, 4)
