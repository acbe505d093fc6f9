"""The reuse law (lang.md's Y6) counted by something too simple to be wrong: a set of all prefixes that the model has read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Law:
    """unique: tokens of the trie of all prompts.   fed: of these, tokens that some generation fed first.   whole: tokens computed again
    because a prompt was found whole (R4), or its logits were wanted (a select)."""

    unique: int = 0
    fed: int = 0
    whole: int = 0

    @property
    def computed(self) -> int:
        return self.unique - self.fed + self.whole


def law_of(records: Sequence[Any]) -> Law:
    """In the order of submission, which is the order in which requests are admitted. Of samples of one prompt, only the first needs
    its last row computed (S4)."""
    law = Law()
    read: set[tuple[str, tuple[int, ...]]] = set()
    fed: set[tuple[str, tuple[int, ...]]] = set()
    prompts: set[tuple[str, tuple[int, ...]]] = set()
    groups: set[tuple[str, tuple[int, ...]]] = set()
    for record in records:
        request, output = record.request, record.output
        space, ids = request.namespace, request.token_ids
        prefixes = [(space, ids[: n + 1]) for n in range(len(ids))]
        known = next((n for n, p in enumerate(prefixes) if p not in read), len(ids))
        start = request.sampling.prompt_logprobs
        needed = len(ids) - 1 if start is None else min(len(ids), max(start, 1)) - 1
        if request.group is not None:
            if (request.group, ids) in groups:
                needed = len(ids)
            groups.add((request.group, ids))
        law.whole += max(0, known - needed)
        prompts.update(prefixes)
        read.update(prefixes)
        whole = ids + tuple(output.token_ids[: len(output.token_ids) - record.num_unfed])
        for n in range(len(ids), len(whole)):
            prefix = (space, whole[: n + 1])
            if prefix not in read:
                read.add(prefix)
                fed.add(prefix)
    law.unique, law.fed = len(prompts), len(prompts & fed)
    return law
