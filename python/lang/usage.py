"""What a run cost, in tokens (U8), and whether each was computed once (Y6). Counts records; knows no engine.

prompts of all requests, sorted     A B C D      unique = sum of (length − common prefix with the one before)
                                    A B E        fed    = of these, tokens that a generation fed to the model
computed == unique − fed            and apart: tokens computed for their logits only (R4), and the part of a page that siblings under
                                    way at the same time share, computed by each (R5)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from phloem.lang.backend import Record
from phloem.runtime.text.joint import common_length

__all__ = ["RunUsage", "usage_of"]


@dataclass(frozen=True, slots=True)
class RunUsage:
    """prompt: tokens sent, of all requests = cached + computed.   unique: size of the trie of all prompts.   fed: of these, tokens that were fed
    to the model while they were being generated.   completion, forced: tokens drawn, and of these without asking the model.   dropped: drawn,
    and on no path.   again: tokens known before that had to be computed once more for their logits: the last of a prompt found whole (R4), and
    of scored paths what they share.   forwards: steps that the engine made from the first request to the last end, whoever caused them; None
    where the backend does not tell.   siblings: of prompts that were under way together, the part of a page that they share and that
    several computed (R5); less than a page each. Not predicted but what is left, at most what R5 allows given what each prompt found: more than
    that shows as recomputed > again + siblings.   recomputed: what was computed beyond unique − fed; Y6 says that it is again + siblings,
    and no more.
    """

    prompt: int = 0
    cached: int = 0
    computed: int = 0
    unique: int = 0
    fed: int = 0
    completion: int = 0
    forced: int = 0
    dropped: int = 0
    requests: int = 0
    warmups: int = 0
    scored: int = 0
    again: int = 0
    siblings: int = 0
    forwards: int | None = field(
        default=None, compare=False
    )  # of whoever shared the engine too, so no figure of the run's alone

    @property
    def hit(self) -> float:
        """Share of the tokens sent that did not have to be computed."""
        return 1 - self.computed / self.prompt if self.prompt else 0.0

    @property
    def recomputed(self) -> int:
        return self.computed - (self.unique - self.fed)


def usage_of(records: Sequence[Record], forwards: int | None = None, *, page_size: int = 16) -> RunUsage:
    """Of records, of one run or of several, in the order in which they were sent.   page_size: of the backend, in tokens."""
    done = [r for r in records if r.output is not None]
    prompt = cached = completion = forced = dropped = warmups = scored = 0
    for r in done:
        assert r.output is not None
        u = r.output.usage
        prompt += u.prompt_tokens
        cached += u.cached_tokens
        completion += u.completion_tokens
        forced += u.forced_tokens
        dropped += r.num_dropped
        warmups += r.kind == "warm"
        scored += r.kind == "score"
    unique, fed = _trie(done)
    again = _again(done)
    beyond = prompt - cached - (unique - fed) - again
    return RunUsage(
        prompt,
        cached,
        prompt - cached,
        unique,
        fed,
        completion,
        forced,
        dropped,
        len(done),
        warmups,
        scored,
        again,
        min(beyond, _siblings(done, page_size)) if beyond > 0 else 0,
        forwards,
    )


def _trie(records: Sequence[Record]) -> tuple[int, int]:
    """Size of the trie of the prompts, and how many of its tokens some generation fed before any prompt brought them."""
    spaces: dict[str, list[Record]] = {}
    for r in records:
        spaces.setdefault(r.request.namespace, []).append(r)
    unique = fed = 0
    for each in spaces.values():
        prompts = sorted((r.request.token_ids, r.started, r.output.usage.cached_tokens) for r in each if r.output is not None)
        unique += _size([ids for ids, _, _ in prompts])
        fed += _fed(prompts, [r for r in each if r.kind == "gen"])
    return unique, fed


def _again(records: Sequence[Record]) -> int:
    """Predicted from what was asked, not from what was computed."""
    count = 0
    selects: dict[tuple[object, ...], list[Record]] = {}
    for number, r in enumerate(records):
        assert r.output is not None
        ids, cached = r.request.token_ids, r.output.usage.cached_tokens
        if r.kind == "score":
            start = r.request.sampling.prompt_logprobs or 0
            selects.setdefault((r.program, r.branch, r.ordinal, start), []).append(r)
            count += start > 0 and cached == start - 1
        elif cached == len(ids) - 1:
            count += any(_knows(other, ids, r.started) for other in records[:number])
    for (_, _, _, at), paths in selects.items():
        assert isinstance(at, int)
        tails = sorted(r.request.token_ids[at:] for r in paths)
        count += sum(map(len, tails)) - _size(tails)
    return count


def _siblings(records: Sequence[Record], page_size: int) -> int:
    """The most that R5 lets siblings compute twice, given what each found: of the longest prefix that a request shares with one which was
    sent before it and had not ended, what lies in a page that is not full. Whole pages are found, whoever computes them.
    """
    count = 0
    before: dict[str, list[tuple[tuple[int, ...], float]]] = {}
    for r in records:
        assert r.output is not None
        ids, cached = r.request.token_ids, r.output.usage.cached_tokens
        sent = before.setdefault(r.request.namespace, [])
        at = bisect_left(sent, (ids, -inf))
        start = r.request.sampling.prompt_logprobs
        limit = len(ids) - 1 if start is None else max(start, 1) - 1
        shared = 0
        for step, i in ((-1, at - 1), (1, at)):
            while 0 <= i < len(sent):
                other, ended = sent[i]
                common = common_length(ids, other, len(ids))
                if common <= max(cached, shared):
                    break
                if ended > r.started:
                    shared = common
                i += step
        if cached < limit:  # else all that it may find was found
            count += max(0, min(shared, limit + 1) - max(cached, shared - shared % page_size))
        sent.insert(at, (ids, r.ended))
    return count


def _knows(record: Record, ids: tuple[int, ...], when: float) -> bool:
    """It had these tokens in the tree by then, or was computing them."""
    own = record.request.token_ids
    if own[: len(ids)] == ids:
        return True
    if record.output is None or record.ended > when:
        return False
    drawn = record.output.token_ids[: len(record.output.token_ids) - record.num_unfed]
    return len(own) + len(drawn) >= len(ids) and (*own, *drawn)[: len(ids)] == ids


def _size(paths: Sequence[tuple[int, ...]]) -> int:
    total = 0
    before: tuple[int, ...] = ()
    for path in paths:
        total += len(path) - common_length(before, path, len(before))
        before = path
    return total


def _fed(prompts: Sequence[tuple[tuple[int, ...], float, int]], generated: Sequence[Record]) -> int:
    """Tokens of the prompts' trie that lie behind a prompt on what was generated from it; not those that another prompt, sent before that
    generation had ended, did not find and so computed itself.
    """
    parts: list[tuple[tuple[int, ...], int]] = []
    for r in generated:
        assert r.output is not None
        ids, own = r.request.token_ids, len(r.request.token_ids)
        path = (*ids, *r.output.token_ids[: max(0, len(r.output.token_ids) - r.num_unfed)])
        reach, brought = own, list[tuple[int, int]]()
        at = bisect_left(prompts, (path, -inf, 0))
        for step, i in ((-1, at - 1), (1, at)):
            while 0 <= i < len(prompts):
                other, started, cached = prompts[i]
                common = common_length(path, other, len(path))
                if common <= own:
                    break
                reach = max(reach, common)
                if started < r.ended and cached < common:
                    brought.append((cached, common))
                i += step
        for start, end in sorted(brought):
            if start > own:
                parts.append((path[:start], own))
            own = max(own, end)
        if reach > own:
            parts.append((path[:reach], own))
    found, upto = 0, 0
    before: tuple[int, ...] = ()
    for path, own in sorted(parts):
        shared = min(common_length(before, path, len(before)), upto)
        found += max(0, len(path) - max(own, shared))
        before, upto = path, len(path)
    return found
