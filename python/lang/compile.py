"""Stages become segment trees: requests merged by token id, prefixes that several need computed first (Y2, Y3). Only hints: no output depends on it.

    prompts                 tree                        sent
    A B C                   A ─ B ─┬─ C                 warm "A B" (max_tokens=0, hold)
    A B D                          └─ D                 then C, D, next to each other

R5 computes a shared full page once whatever is sent together; only the part of a page that simultaneous siblings share would be
computed by each. A node whose depth is no page boundary is warmed for that, unless a state's own last request has left it in the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from phloem.lang.backend import Job, Record
from phloem.runtime.request import Request, SamplingParams
from phloem.runtime.text.joint import common_length

if TYPE_CHECKING:
    from phloem.lang.session import Session

__all__ = ["Arranger", "Node", "segment_tree"]

WARM = SamplingParams(max_tokens=0, temperature=0.0)


@dataclass(eq=False)
class Node:
    """ids[:end] of any job below it is the path; start: where its parent ends.   jobs: those whose whole prompt it is."""

    start: int
    end: int
    ids: tuple[int, ...]
    jobs: list[Job] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.end - self.start


def segment_tree(jobs: Sequence[Job]) -> list[Node]:
    """The tree of their prompts, one root for each namespace and first token. Each token of the union stands in exactly one node (Y2)."""
    order = sorted(jobs, key=lambda job: (job.request.namespace, job.request.token_ids))
    roots = list[Node]()
    stack = list[Node]()
    space: str | None = None
    for job in order:
        ids = job.request.token_ids
        if job.request.namespace != space:
            stack, space = [], job.request.namespace
        common = common_length(stack[-1].ids, ids, stack[-1].end) if stack else 0
        while stack and stack[-1].start >= common:
            stack.pop()
        if stack and stack[-1].end > common:  # it is split
            upper = stack[-1]
            lower = Node(common, upper.end, upper.ids, upper.jobs, upper.children)
            upper.end, upper.jobs, upper.children = common, [], [lower]
        if stack and stack[-1].end == len(ids) == common:
            stack[-1].jobs.append(job)
            continue
        node = Node(common if stack else 0, len(ids), ids, [job])
        (stack[-1].children if stack else roots).append(node)
        stack.append(node)
    return roots


@dataclass(eq=False)
class _Warm:
    """Jobs that wait for `job` to have computed its prompt."""

    job: Job
    node: Node
    rest: list[Node]
    more: list[Job]


class Arranger:
    """Orders the jobs of a stage, sends warm-ups first, and what waits for them when they are done."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._warm: dict[Job, _Warm] = {}
        self._known: set[tuple[str, tuple[int, ...]]] = set()
        self._holds: dict[Job, list[_Hold]] = {}
        self._held: dict[str, _Hold] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._warm)

    def arrange(self, jobs: Sequence[Job]) -> list[Job]:
        """What to send now, in depth-first order."""
        if len(jobs) == 1 or not self._session.backend.capabilities.tokens:
            return list(jobs)
        out = list[Job]()
        for root in segment_tree(jobs):
            self._place(root, out)
        return out

    def _place(self, node: Node, out: list[Job]) -> None:
        page = self._session.backend.page_size
        first = node.jobs[0] if node.jobs else None
        followers = node.jobs[1:]
        if first is not None and followers:
            self._group(node.jobs)
            own = first.request.group
            followers = [job for job in node.jobs[1:] if own is None or job.request.group != own]
            together = [job for job in node.jobs[1:] if job not in followers]
        else:
            together = []
        if not node.children and not followers:
            if first is not None:
                out += [first, *together]
            return
        key = (self._space(node), node.ids[: node.end])
        known = key in self._known or self._cached(node) >= node.end
        if first is not None:
            # Its own prompt is what the others share: they go once it is computed.
            out += [first, *together]
            self._known.add(key)
            self._warm[first] = _Warm(first, node, node.children, followers)
        elif node.end % page == 0 or known or self._scored(node):
            for child in node.children:
                self._place(child, out)
        else:
            self._known.add(key)
            job = self._warm_job(node)
            self._warm[job] = _Warm(job, node, node.children, [])
            out.append(job)

    def _group(self, jobs: Sequence[Job]) -> None:
        """Equal prompts share their last row (S4), where they are served alike."""
        same: dict[object, list[Job]] = {}
        for job in jobs:
            r = job.request
            # Those that are samples of a gen already join too: else the second gen would compute the last token again. Seeds are their own.
            if r.sampling.seed is not None and r.sampling.prompt_logprobs is None and r.sampling.max_tokens != 0:
                same.setdefault((r.grammar, r.priority), []).append(job)
        for each in same.values():
            if len(each) > 1:
                name = self._session.new_id("g")
                for job in each:
                    job.record.request = msgspec.structs.replace(job.request, group=name)

    @staticmethod
    def _scored(node: Node) -> bool:
        """All below it wants logits of this very part, so nobody could take it from the tree."""
        todo = [node]
        while todo:
            at = todo.pop()
            todo += at.children
            for job in at.jobs:
                start = job.request.sampling.prompt_logprobs
                if start is None or start >= node.end:
                    return False
        return True

    @staticmethod
    def _space(node: Node) -> str:
        while not node.jobs:
            node = node.children[0]
        return node.jobs[0].request.namespace

    @staticmethod
    def _cached(node: Node) -> int:
        """Tokens of the path that some state's last request has left in the tree."""
        best, todo = 0, [node]
        while todo:
            at = todo.pop()
            for job in at.jobs:
                slot = job.slot
                if slot is not None:
                    best = max(best, slot.path.known)
            todo += at.children
        return best

    def _warm_job(self, node: Node) -> Job:
        session = self._session
        first = node
        while not first.jobs:
            first = first.children[0]
        like = first.jobs[0]
        can_hold = session.backend.capabilities.hold
        request = Request(
            id=session.new_id("w"), token_ids=node.ids[: node.end], sampling=WARM, namespace=like.request.namespace, hold=can_hold, priority=like.request.priority,
            parent=like.request.parent,
        )  # fmt: skip
        r = like.record
        job = Job(
            Record("warm", request, r.at, None, r.branch, r.ordinal, 0, r.program), session.backend.tokenizer, session._wake
        )
        if can_hold:
            hold = self._held[request.id] = _Hold(request.id)
            todo = [node]
            while todo:
                at = todo.pop()
                todo += at.children
                for each in at.jobs:
                    hold.left += 1
                    self._holds.setdefault(each, []).append(hold)
        return job

    def computed(self, job: Job) -> None:
        """Its prompt is in the tree, or it has failed: whoever waited for it goes."""
        for hold in self._holds.pop(job, ()):
            self._admitted(hold)
        warm = self._warm.pop(job, None)
        if warm is None:
            return
        out = list[Job](warm.more)
        for child in warm.rest:
            self._place(child, out)
        self._session.submit([each for each in out if not self._over(each)])
        for each in out:
            if self._over(each):
                self.computed(each)

    @staticmethod
    def _over(job: Job) -> bool:
        """It was aborted before it was ever sent."""
        return job.slot is not None and job.slot.done

    def _admitted(self, hold: _Hold) -> None:
        hold.left -= 1
        if hold.left == 0 and self._held.pop(hold.name, None) is not None:
            self._session.release(hold.name)

    def forget(self, job: Job) -> None:
        """It is being aborted: nobody holds anything for it; who waits for it goes when its end comes back."""
        for hold in self._holds.pop(job, ()):
            self._admitted(hold)

    def held(self) -> list[str]:
        """Holds still open, for the end of the session."""
        names = list(self._held)
        self._held.clear()
        self._warm.clear()
        return names


@dataclass(eq=False)
class _Hold:
    name: str
    left: int = 0
