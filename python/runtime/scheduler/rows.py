"""The words of one row: tokens, pages, and which logits are wanted of it. A pure function."""

from __future__ import annotations

from phloem.runtime.scheduler.sequence import Sequence
from phloem.runtime.step import FUTURE, Row, Under

__all__ = ["make_row"]


def make_row(q: Sequence, start: int, end: int, page_size: int) -> Row:
    """Positions start .. end - 1 of q.

    Logits: of the last position if it may be drawn from, and of those before each token whose logprob a row has to give.
    """
    grant, known, request = q.grant, len(q.tokens), q.request
    assert grant is not None
    pages, write_from = grant.table[: grant.num_pages].copy(), grant.num_shared * page_size
    if start >= known:
        return Row(request.id, q.slot, start, (FUTURE,), pages, write_from, start)
    logits_from, targets = end - 1 if end == known and q.may_draw() else end, list[int]()
    wanted = q.first_wanted()
    if wanted is not None:
        first = max(wanted - 1, start)
        if first < min(end, q.last_wanted()):
            logits_from, targets = first, q.tokens[first + 1 : min(end, known - 1) + 1]
    tokens, s = q.tokens[start:end], request.sampling
    under = list[Under | None]()
    if targets and s.logprobs == "both":
        under = [q.drawn_from(position) for position in range(logits_from + 1, logits_from + 1 + len(targets))]
    return Row(request.id, q.slot, start, tokens, pages, write_from, logits_from, targets, s.top_logprobs, under)
