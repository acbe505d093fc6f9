"""Seeds for requests that name none (M2): drawn in order from the engine's, one for a group while any of it lives."""

from __future__ import annotations

import random

from phloem.runtime.scheduler.sequence import Sequence

__all__ = ["Seeds"]


class Seeds:
    def __init__(self, seed: int | None) -> None:
        self._stream = random.Random(seed)
        self.groups: dict[str, tuple[int, set[Sequence]]] = {}

    def seed_of(self, q: Sequence) -> int:
        own, group = q.request.sampling.seed, q.request.group
        if own is not None:
            return own
        if group is None:
            return self._stream.getrandbits(63)
        if group not in self.groups:
            self.groups[group] = self._stream.getrandbits(63), set()
        seed, members = self.groups[group]
        members.add(q)
        return seed

    def forget(self, q: Sequence) -> None:
        group = q.request.group
        if group is not None and group in self.groups:
            members = self.groups[group][1]
            members.discard(q)
            if not members:
                del self.groups[group]
