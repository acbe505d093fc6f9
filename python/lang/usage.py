"""What a run cost, in tokens (U8), and whether each was computed once (Y6). Counts records; knows no engine.

prompts of all requests, sorted     A B C D      unique = sum of (length − common prefix with the one before)
                                    A B E        fed    = of these, tokens that a generation fed to the model
computed == unique − fed            and apart: tokens computed for their logits only (R4)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phloem.lang.backend import Record
from phloem.lang.compile import _common

__all__ = ["RunUsage", "usage_of"]


@dataclass(frozen=True, slots=True)
class RunUsage:
    """prompt: tokens sent, of all requests = cached + computed.   unique: size of the trie of all prompts.   fed: of these, tokens that were fed
    to the model while they were being generated.   completion, forced: tokens drawn, and of these without asking the model.   dropped: drawn,
    and on no path.   recomputed: computed again for their logits, beyond unique − fed.   requests, warmups, forwards: counted; forwards is the
    longest chain of draws, and at least so many steps.
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

    @property
    def hit(self) -> float:
        """Share of the tokens sent that did not have to be computed."""
        return 1 - self.computed / self.prompt if self.prompt else 0.0

    @property
    def recomputed(self) -> int:
        return self.computed - (self.unique - self.fed)


def usage_of(records: Sequence[Record]) -> RunUsage:
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
    return RunUsage(prompt, cached, prompt - cached, unique, fed, completion, forced, dropped, len(done), warmups, scored)


def _trie(records: Sequence[Record]) -> tuple[int, int]:
    """Size of the trie of the prompts, and how many of its tokens some generation fed."""
    spaces: dict[str, list[Record]] = {}
    for r in records:
        spaces.setdefault(r.request.namespace, []).append(r)
    unique = fed = 0
    for each in spaces.values():
        prompts = sorted({r.request.token_ids for r in each})
        unique += _size(prompts)
        # What generations read of their own: paths of prompt + output, less what the model never saw. Their common part with the
        # prompts' trie, beyond the prompts that they began from.
        grown = sorted(
            {(*r.request.token_ids, *r.output.token_ids[: len(r.output.token_ids) - r.num_unfed]) for r in each if r.kind == "gen" and r.output is not None}
        )  # fmt: skip
        starts = sorted({r.request.token_ids for r in each})
        # Tokens of the prompts' trie that are fed = size(trie of prompts ∩ grown) − size(prompts known before they grew).
        fed += _fed(prompts, grown, {r.request.token_ids for r in each if r.kind == "gen"}, starts)
    return unique, fed


def _size(paths: Sequence[tuple[int, ...]]) -> int:
    total, before = 0, ()
    for path in paths:
        total += len(path) - _common(before, path, len(before))
        before = path
    return total


def _fed(
    prompts: Sequence[tuple[int, ...]], grown: Sequence[tuple[int, ...]], begun: set[tuple[int, ...]], starts: Sequence[tuple[int, ...]]
) -> int:  # fmt: skip
    """Tokens of the prompts' trie that lie on a grown path behind the prompt it began from, each once."""
    merged = sorted([(p, 0) for p in prompts] + [(g, 1) for g in grown])
    beginnings = sorted(begun)
    covered: set[tuple[int, ...]] = set()
    found = 0
    # The longest prompt that follows a grown path is one of its neighbours in sorted order.
    parts: list[tuple[tuple[int, ...], int, int]] = []
    for at, (path, kind) in enumerate(merged):
        if kind != 1:
            continue
        reach = 0
        for step in (-1, 1):
            i = at + step
            while 0 <= i < len(merged) and merged[i][1] == 1:
                i += step
            if 0 <= i < len(merged):
                other = merged[i][0]
                reach = max(reach, _common(path, other, len(path)))
        own = max((len(b) for b in _prefixes(beginnings, path)), default=0)
        if reach > own:
            parts.append((path[:reach], own, reach))
    for path, own, reach in sorted(parts):
        for end in range(own + 1, reach + 1):
            key = path[:end]
            if key not in covered:
                covered.add(key)
                found += 1
    return found


def _prefixes(sorted_paths: Sequence[tuple[int, ...]], path: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [p for p in sorted_paths if path[: len(p)] == p]
