"""make_row: which logits are wanted of a row, against the definition spelled out position by position."""

from __future__ import annotations

from array import array

import pytest

from phloem.runtime.cache.prefix import PrefixCache
from phloem.runtime.request import Request, SamplingParams
from phloem.runtime.scheduler.rows import make_row
from phloem.runtime.scheduler.sequence import Sequence
from phloem.runtime.step import FUTURE
from tests.runtime.scheduler.test_sequence import Ends

PROMPT = tuple(range(1, 11))


def sequence(max_tokens: int, prompt_logprobs: int | None) -> Sequence:
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs, logprobs=True, top_logprobs=3)
    q = Sequence(Request(id="q", token_ids=PROMPT, sampling=sampling), array("i", PROMPT), max_tokens, 0, Ends())
    cache = PrefixCache(4, 16)
    got = cache.acquire("r", q.key, 0, 1, 8, cache.take, True)
    assert got is not None
    q.grant = got[0]
    q.grant.add(cache.take(5))
    q.slot = 3
    return q


@pytest.mark.parametrize("max_tokens", [0, 5])
@pytest.mark.parametrize("prompt_logprobs", [None, 0, 1, 4, 9])
@pytest.mark.parametrize("start", range(10))
@pytest.mark.parametrize("length", [1, 3, 10])
def test_logits_and_targets(max_tokens: int, prompt_logprobs: int | None, start: int, length: int) -> None:
    q, end = sequence(max_tokens, prompt_logprobs), min(start + length, 10)
    row = make_row(q, start, end, 4)
    assert (row.start, row.end, list(row.tokens)) == (start, end, list(PROMPT[start:end]))
    first = 10 if prompt_logprobs is None else max(1, prompt_logprobs)
    scored = [p for p in range(start, end) if first <= p + 1 < 10]  # positions whose logits give a wanted logprob
    draws = end == 10 and max_tokens > 0
    wanted = [*scored, *([9] if draws else [])]
    assert row.logits_from == (min(wanted) if wanted else end)
    positions = dict(zip(range(row.logits_from, row.end), row.targets))
    assert all(positions[p] == PROMPT[p + 1] for p in scored)
    if row.targets:
        assert len(row.targets) in (row.end - row.logits_from, row.end - row.logits_from - 1)
    if draws:
        assert len(row.targets) < row.end - row.logits_from, "the last logits are there to draw from"
    assert row.top_logprobs == 3 and row.pages.tolist() == q.grant.table[:5].tolist()  # type: ignore[union-attr]


def test_a_future_row() -> None:
    q = sequence(5, 0)
    row = make_row(q, 10, 11, 4)
    assert (list(row.tokens), row.logits_from, list(row.targets), row.slot) == ([FUTURE], 10, [], 3)


def test_a_row_keeps_its_own_page_table() -> None:
    """The plan may be read while the sequence goes on."""
    q = sequence(5, None)
    row = make_row(q, 0, 10, 4)
    before = row.pages.tolist()
    assert q.grant is not None
    q.grant.table[:] = -1
    assert row.pages.tolist() == before
