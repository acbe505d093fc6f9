"""How a step's attention is cut up: every key is read once for every token that may see it, whatever is shared; and the rule."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

from phloem.runtime.backends.base import ForwardBatch, KVSpec
from phloem.runtime.backends.cuda.plan import Costs, Layout, plan_layout
from tests.paged_runs import Piece, make_batch

PAGE = 4
SPEC = KVSpec(1, 1, 8, 4096, PAGE, "f32")
FREE = Costs(token_bytes=1, query_bytes=0, group=1, launch_bytes=0, margin=1.0)


def seen(layout: Layout, batch: ForwardBatch) -> Counter[tuple[int, int, int]]:
    """(token of the batch, page, offset) -> how often it is read, by the definition of a level."""
    found: Counter[tuple[int, int, int]] = Counter()
    order = np.arange(len(batch.token_ids)) if layout.tokens is None else layout.tokens
    at = 0
    for part in layout.parts:
        assert part.first == at and part.last > at
        at = part.last
        for i, level in enumerate(part.levels):
            assert level.qo_indptr[0] == 0 and level.qo_indptr[-1] == part.last - part.first
            assert all(
                a.dtype == np.int32 for a in (level.qo_indptr, level.kv_indptr, level.kv_indices, level.kv_last_page_len)
            )
            for e in range(len(level.kv_last_page_len)):
                pages = level.kv_indices[level.kv_indptr[e] : level.kv_indptr[e + 1]]
                keys = (len(pages) - 1) * PAGE + int(level.kv_last_page_len[e])
                tokens = order[part.first + level.qo_indptr[e] : part.first + level.qo_indptr[e + 1]]
                assert len(pages) and len(tokens)
                for n, token in enumerate(tokens):
                    visible = keys - (len(tokens) - 1 - n) if i == len(part.levels) - 1 else keys
                    found.update((int(token), int(pages[j // PAGE]), j % PAGE) for j in range(visible))
    assert at == len(batch.token_ids)
    return found


def wanted(batch: ForwardBatch) -> Counter[tuple[int, int, int]]:
    flat = plan_layout(batch, PAGE, None)
    assert flat.tokens is None and len(flat.parts) == 1 and flat.parts[0].levels == [flat.flat]
    found: Counter[tuple[int, int, int]] = Counter()
    for b in range(len(batch.kv_last_page_len)):
        pages = batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b + 1]]
        for t in range(batch.qo_indptr[b], batch.qo_indptr[b + 1]):
            found.update((t, int(pages[j // PAGE]), j % PAGE) for j in range(int(batch.positions[t]) + 1))
    return found


def tree(rng: random.Random, rows: int) -> list[Piece]:
    """Rows on a random tree of pages; each ends with pages of its own, or with tokens that it recomputes on a shared page's end."""
    free = list(range(4000))
    rng.shuffle(free)
    paths: list[list[int]] = [[]]
    for _ in range(rng.randrange(1, 6)):
        paths.append([*rng.choice(paths), *(free.pop() for _ in range(rng.randrange(1, 5)))])
    pieces = []
    for _ in range(rows):
        path = rng.choice(paths)
        own = [free.pop() for _ in range(rng.randrange(1, 4))]
        length = len(path) * PAGE + rng.randrange(1, len(own) * PAGE + 1)
        start = max(0, length - rng.choice([1, 1, 1, 2, 5, 9]))
        pieces.append(Piece([3] * (length - start), start, [*path, *own]))
    return pieces


@pytest.mark.parametrize("seed", range(25))
def test_every_key_is_read_once_for_every_token_that_sees_it(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        batch = make_batch(tree(rng, rng.randrange(1, 9)), SPEC)
        layout = plan_layout(batch, PAGE, FREE)
        assert seen(layout, batch) == wanted(batch)
        if layout.tokens is not None:
            assert sorted(layout.tokens.tolist()) == list(range(len(batch.token_ids)))
            assert all(1 <= len(part.levels) <= 3 for part in layout.parts) and layout.saved_bytes > 0


def test_rows_of_one_token_are_a_part_of_their_own_beside_longer_ones() -> None:
    apart = dataclasses.replace(FREE, apart=2, launch_bytes=1 << 40)
    kinds: Counter[str] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        batch = make_batch(tree(rng, rng.randrange(1, 9)), SPEC)
        layout, lengths = plan_layout(batch, PAGE, apart), np.diff(batch.qo_indptr)
        assert seen(layout, batch) == wanted(batch) and layout.saved_bytes == 0
        singles = int((lengths == 1).sum())
        if 2 <= singles < len(lengths):
            one, longer = layout.parts
            assert one.last == singles and (np.diff(longer.levels[0].qo_indptr) > 1).all() and not layout.decode
            assert layout.flat.qo_indptr[-1] == len(batch.token_ids)
            kinds["moved" if layout.tokens is not None else "in place"] += 1
        else:
            assert layout.tokens is None and layout.parts[0].levels == [layout.flat]
            kinds["whole"] += 1
    assert len(kinds) == 3, kinds


def test_random_trees_reach_every_depth() -> None:
    """The test above is worth something only if it meets layouts of all kinds."""
    depths: Counter[int] = Counter()
    for seed in range(25):
        rng = random.Random(seed)
        for _ in range(8):
            layout = plan_layout(make_batch(tree(rng, rng.randrange(1, 9)), SPEC), PAGE, FREE)
            depths.update(len(part.levels) for part in layout.parts)
    assert all(depths[d] > 20 for d in (1, 2, 3)), depths


def llama(**changes: float) -> Costs:
    """A layer of Llama 3.1 8B in bf16: 8 kv heads of 128, 32 q heads."""
    return Costs(token_bytes=4096, query_bytes=32 * (128 * 2 + 4), group=4, **changes)  # type: ignore[arg-type]


def fan(rows: int, shared: int, own: int = 1, branches: int = 1, middle: int = 0) -> ForwardBatch:
    trunk = list(range(shared))
    pieces = []
    for r in range(rows):
        branch = [1000 + 100 * (r % branches) + i for i in range(middle)]
        pages = [*trunk, *branch, *(2000 + 10 * r + i for i in range(own))]
        pieces.append(Piece([3], len(pages) * PAGE - 2, pages))
    return make_batch(pieces, SPEC)


def test_the_rule_shares_what_saves_more_than_it_costs() -> None:
    """64 decodes behind 2,048 shared tokens are worth it; two behind 16 are not; nor is what no two rows share."""
    many = plan_layout(fan(64, 512), PAGE, llama())
    assert [len(p.levels) for p in many.parts] == [2] and many.decode
    # 64 rows need 4 passes of 16 rows (64 query rows each) in one level: 60 passes over 2,048 tokens of 4 KB saved, less the price.
    price = 3 * 64 * llama().query_bytes + 2 * llama().launch_bytes
    assert many.saved_bytes == 60 * 2048 * 4096 - price
    assert len(many.parts[0].levels[0].kv_indices) == 512 and len(many.parts[0].levels[1].kv_indices) == 64
    for batch in (fan(2, 4), fan(64, 0, own=40), fan(1, 512)):
        assert plan_layout(batch, PAGE, llama()).tokens is None
    assert plan_layout(fan(64, 512), PAGE, None).tokens is None
    assert plan_layout(fan(64, 512), PAGE, llama(launch_bytes=10**9)).tokens is None


def test_a_tree_of_two_shared_stretches_has_three_levels() -> None:
    layout = plan_layout(fan(64, 900, branches=2, middle=99), PAGE, llama(launch_bytes=1_000_000))
    (part,) = layout.parts
    assert [len(level.kv_last_page_len) for level in part.levels] == [1, 2, 64]
    assert [len(level.kv_indices) for level in part.levels] == [900, 198, 64]


def test_strangers_stand_behind_in_a_part_of_their_own() -> None:
    pieces = [Piece([3], 30, [500 + i for i in range(8)])]
    pieces += [Piece([4], 2 * PAGE + 1, [7, 8, 20 + i]) for i in range(3)]
    pieces.insert(2, Piece([5, 6], 3, [600, 601]))
    batch = make_batch(pieces, SPEC)
    layout = plan_layout(batch, PAGE, FREE)
    assert [len(p.levels) for p in layout.parts] == [2, 1] and not layout.decode
    assert layout.tokens is not None and sorted(layout.tokens[:3].tolist()) == [1, 4, 5]
    assert seen(layout, batch) == wanted(batch)


def test_a_page_that_a_row_still_writes_is_never_in_a_shared_level() -> None:
    """Rows of one plan may read a page that one of them writes (R5): before it is settled for all, it is read causally."""
    pages = [3, 4, 5]
    batch = make_batch([Piece([1] * 9, 0, pages), Piece([2], 8, pages)], SPEC)
    assert plan_layout(batch, PAGE, FREE).tokens is None
    batch = make_batch([Piece([1] * 5, 4, pages), Piece([2], 8, pages), Piece([2], 9, [3, 4, 6])], SPEC)
    layout = plan_layout(batch, PAGE, FREE)
    assert seen(layout, batch) == wanted(batch)
    for part in layout.parts:
        for level in part.levels[:-1]:
            assert 5 not in level.kv_indices
