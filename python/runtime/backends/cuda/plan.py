"""How one step's attention is cut up: which rows share leading pages, and whether reading those pages once is worth it. numpy only.

    rows      pages            flat: every row reads its own table        cascade: shared pages once, for all the rows at once
    0         5 8 | 2          [5 8 2]                                     level 0   rows 0-2: [5 8]      not causal
    1         5 8 | 9 4        [5 8 9 4]                                   level 1   row 0: [2]  row 1: [9 4]  row 2: [7]   causal
    2         5 8 | 7          [5 8 7]                                     states of the levels are merged by their log-sum-exp
    3         6                [6]                                         flat, behind them

Rows are put in an order in which those that share stand together; tokens follow their rows, and `logit_rows` is renumbered, so
logits come out in the caller's order. A shared run ends before the first page that any of its rows still writes, so only the last
level is causal. The cost rule counts bytes that memory has to deliver (COSTS); what it decides is a fact of the arrays alone.

Nothing here knows FlashInfer or torch: tests evaluate a Layout by its definition and compare with `reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.backends.base import ForwardBatch

__all__ = ["Costs", "Layout", "Level", "Part", "plan_layout"]

Ints = NDArray[np.int32]
MAX_LEVELS = (
    3  # two shared runs, then the row's own pages: a third shared run saved less than its merge in every shape we counted
)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a byte of the cost rule is.

    token_bytes: K and V of one token of one layer.   query_bytes: a token's output of one layer, all heads, with its log-sum-exp:
    each merge reads two and writes one.   tile: query rows (tokens x q heads per kv head) that one pass over the keys serves.
    launch_bytes: what memory delivers while a kernel starts (two more a level: attention and merge).
    margin: how many times the saving must pay; caches make the flat reading cheaper than its bytes.
    apart: so many rows of one token beside longer ones are worth a call of their own: the prefill kernels give each a whole tile.
    """

    token_bytes: int
    query_bytes: int
    group: int
    tile: int = 64
    launch_bytes: int = 12_000_000
    margin: float = 2.0
    apart: int = 8

    def passes(self, tokens: int) -> int:
        return -(-tokens * self.group // self.tile)


@dataclass(slots=True)
class Level:
    """CSR arrays of one reading of pages, as FlashInfer plans take them; qo_indptr is relative to its part."""

    qo_indptr: Ints
    kv_indptr: Ints
    kv_indices: Ints
    kv_last_page_len: Ints


@dataclass(slots=True)
class Part:
    """Tokens first .. last - 1 of the permuted batch. levels[-1] is causal, those before it are not."""

    first: int
    last: int
    levels: list[Level]


@dataclass(slots=True)
class Layout:
    """tokens: the batch's token index at each permuted place; None if nothing moved.   flat: the whole permuted batch in one level.
    parts: the cut; layers with a window take `flat` if pages are shared.   saved_bytes: by the rule."""

    tokens: NDArray[np.int64] | None
    flat: Level
    parts: list[Part]
    decode: bool
    saved_bytes: int = 0


@dataclass(slots=True)
class _Group:
    """Rows first .. last - 1 of the sorted order that all read pages[depth : end] of their tables, through this level."""

    first: int
    last: int
    depth: int
    end: int
    below: list[_Group] = field(default_factory=list)


def plan_layout(batch: ForwardBatch, page_size: int, costs: Costs | None, least: int = 0) -> Layout:
    """costs: None cuts nothing.   least: bytes a layer that sharing must save besides (what is lost by it that `costs` does not know)."""
    q_len = np.diff(batch.qo_indptr)
    decode = bool((q_len == 1).all())
    flat = Level(batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.kv_last_page_len)
    whole = Layout(None, flat, [Part(0, int(batch.qo_indptr[-1]), [flat])], decode)
    if costs is None or len(q_len) < 2:
        return whole
    if not _may_share(batch):
        return _apart(batch, q_len, costs.apart, whole)
    tables = [batch.kv_indices[a:b] for a, b in zip(batch.kv_indptr[:-1], batch.kv_indptr[1:])]
    kv_len = (np.diff(batch.kv_indptr) - 1) * page_size + batch.kv_last_page_len
    # Pages before the first one that the row still writes: the only ones that it may read in a level without a causal mask.
    settled = ((kv_len - q_len) // page_size).tolist()
    # Big-endian bytes compare as the page lists would, by memcmp.
    order = sorted(range(len(tables)), key=lambda r: tables[r].astype(">i4").tobytes())
    rows = _Rows([tables[r] for r in order], [settled[r] for r in order], [int(q_len[r]) for r in order], page_size, costs)
    groups, saved = rows.best(0, len(order), 0, MAX_LEVELS - 1)
    if not groups or saved < least:
        return _apart(batch, q_len, costs.apart, whole)
    return _cut(batch, order, groups, rows, saved)


def _apart(batch: ForwardBatch, q_len: Ints, least: int, whole: Layout) -> Layout:
    """Rows of one token first, as a part of their own, where there are `least` of them and longer ones; else the whole."""
    single, longer = np.flatnonzero(q_len == 1), np.flatnonzero(q_len != 1)
    if len(single) < least or not len(longer):
        return whole

    def level(rows: NDArray[np.intp]) -> Level:
        tables = [batch.kv_indices[batch.kv_indptr[r] : batch.kv_indptr[r + 1]] for r in rows]
        return _level([(1, int(q_len[r]), t, int(batch.kv_last_page_len[r])) for r, t in zip(rows, tables)])

    order = np.concatenate([single, longer])
    tokens = np.concatenate([np.arange(batch.qo_indptr[r], batch.qo_indptr[r + 1]) for r in order])
    parts = [Part(0, len(single), [level(single)]), Part(len(single), len(tokens), [level(longer)])]
    if np.array_equal(order, np.arange(len(order))):  # as the scheduler lists them: decodes first
        return Layout(None, whole.flat, parts, False)
    return Layout(tokens, level(order), parts, False)


def _may_share(batch: ForwardBatch) -> bool:
    """Two rows whose first pages are equal."""
    first = batch.kv_indices[batch.kv_indptr[:-1]]
    return len(np.unique(first)) < len(first)


class _Rows:
    """Sorted rows, and what sharing among them saves."""

    def __init__(
        self, tables: Sequence[Ints], settled: Sequence[int], q_len: Sequence[int], page_size: int, costs: Costs
    ) -> None:
        self.tables, self.settled, self.q_len, self.page_size, self.costs = tables, settled, q_len, page_size, costs

    def best(self, first: int, last: int, depth: int, levels: int) -> tuple[list[_Group], int]:
        """The groups of rows first .. last - 1, whose tables agree up to `depth`, and the bytes that they save together."""
        found, total = list[_Group](), 0
        if levels:
            for a, b in self._runs(first, last, depth):
                group, saved = self._best_of(a, b, depth, levels)
                found += group
                total += saved
        return found, total

    def _best_of(self, a: int, b: int, depth: int, levels: int) -> tuple[list[_Group], int]:
        """One run of rows with an equal page at `depth`: shared here, shared further down only, or not at all."""
        end = self._common(a, b, depth)
        split, split_saved = self.best(a, b, end, levels) if end > depth else ([], 0)
        below, below_saved = self.best(a, b, end, levels - 1)
        own = self._saving(a, b, end - depth)
        if own > 0 and own + below_saved >= split_saved:
            return [_Group(a, b, depth, end, below)], own + below_saved
        # Not worth a level of its own here: the pages stay with whoever shares more of them further down.
        for group in split:
            group.depth = depth
        return split, split_saved

    def _runs(self, first: int, last: int, depth: int) -> Iterator[tuple[int, int]]:
        a = first
        while a < last:
            b = a + 1
            if self.settled[a] > depth:
                page = self.tables[a][depth]
                while b < last and self.settled[b] > depth and self.tables[b][depth] == page:
                    b += 1
                if b - a > 1:
                    yield a, b
            a = b

    def _common(self, a: int, b: int, depth: int) -> int:
        """How far the tables of the run agree. Rows are sorted, so the first and the last differ earliest."""
        most = min(self.settled[a:b])
        one, other = self.tables[a][depth:most], self.tables[b - 1][depth:most]
        differ = np.flatnonzero(one != other)
        return depth + (int(differ[0]) if len(differ) else len(one))

    def _saving(self, a: int, b: int, pages: int) -> int:
        c, tokens = self.costs, sum(self.q_len[a:b])
        passes = sum(c.passes(n) for n in self.q_len[a:b]) - c.passes(tokens)
        price = 3 * tokens * c.query_bytes + 2 * c.launch_bytes
        saved = passes * pages * self.page_size * c.token_bytes
        return saved - price if saved >= c.margin * price else 0


def _cut(batch: ForwardBatch, order: list[int], groups: list[_Group], rows: _Rows, saved: int) -> Layout:
    """Rows by the number of levels over them (most first), each number a part; within a part the sorted order stays."""
    chains: list[list[_Group]] = [[] for _ in order]

    def walk(these: list[_Group]) -> None:
        for group in these:
            for row in range(group.first, group.last):
                chains[row].append(group)
            walk(group.below)

    walk(groups)
    places = sorted(range(len(order)), key=lambda p: -len(chains[p]))  # stable: sorted order within
    permuted = [order[p] for p in places]
    starts, ends = batch.qo_indptr[:-1], batch.qo_indptr[1:]
    tokens = np.concatenate([np.arange(starts[r], ends[r]) for r in permuted])
    whole = _level([(1, rows.q_len[p], rows.tables[p], int(batch.kv_last_page_len[order[p]])) for p in places])
    parts, at, first = list[Part](), 0, 0
    while at < len(places):
        depth = len(chains[places[at]])
        here = [p for p in places[at:] if len(chains[p]) == depth]
        levels = [
            _shared_level([(chains[p][k], rows.q_len[p], rows.tables[p]) for p in here], rows.page_size) for k in range(depth)
        ]
        own = [
            (1, rows.q_len[p], rows.tables[p][chains[p][-1].end if depth else 0 :], int(batch.kv_last_page_len[order[p]]))
            for p in here
        ]
        last = first + sum(rows.q_len[p] for p in here)
        parts.append(Part(first, last, [*levels, _level(own)]))
        at, first = at + len(here), last
    return Layout(tokens, whole, parts, bool((np.diff(batch.qo_indptr) == 1).all()), saved)


def _shared_level(rows: list[tuple[_Group, int, Ints]], page_size: int) -> Level:
    """One entry a group: consecutive rows under the same group read its pages together. Settled pages are full."""
    entries: list[tuple[int, int, Ints, int]] = []
    before: _Group | None = None
    for group, q_len, table in rows:
        if group is before:
            n, tokens, pages, last = entries[-1]
            entries[-1] = (n + 1, tokens + q_len, pages, last)
        else:
            entries.append((1, q_len, table[group.depth : group.end], page_size))
        before = group
    return _level(entries)


def _level(entries: list[tuple[int, int, Ints, int]]) -> Level:
    """entries: (rows, tokens, pages, tokens on the last page)."""
    qo, kv = np.zeros(len(entries) + 1, np.int32), np.zeros(len(entries) + 1, np.int32)
    np.cumsum([tokens for _, tokens, _, _ in entries], out=qo[1:])
    np.cumsum([len(pages) for _, _, pages, _ in entries], out=kv[1:])
    return Level(
        qo, kv, np.concatenate([pages for _, _, pages, _ in entries]), np.array([last for *_, last in entries], np.int32)
    )
