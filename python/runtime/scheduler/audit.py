"""P2 and its consequences, checked in full; and what to do in production when they do not hold: isolate, rebuild, go on.

every page is owned by exactly one of: the free list, a tree node, a live sequence
a lease ends where its table's shared part ends, and pins are exactly the leases, holds and pending copy sources
"""

from __future__ import annotations

from collections import Counter

from phloem.runtime.cache.radix import TOKEN_BYTES, Node
from phloem.runtime.errors import PhloemError
from phloem.runtime.scheduler.scheduler import Scheduler
from phloem.runtime.scheduler.sequence import Sequence

__all__ = ["balanced", "check", "rebuild"]


def balanced(scheduler: Scheduler) -> bool:
    """The cheap half of P2, every step: page counts add up. O(running)."""
    cache = scheduler.cache
    live = sum(q.grant.num_pages - q.grant.num_shared for q in scheduler.running if q.grant is not None)
    return len(cache.pool.free) + cache.tree.num_pages + live == cache.pool.num_pages


def check(scheduler: Scheduler) -> None:
    """Every invariant of pages, tree, leases, slots and queue. Raises AssertionError that says which does not hold."""
    cache, tree, size = scheduler.cache, scheduler.cache.tree, scheduler.cache.page_size
    owned = list(cache.pool.free)
    pins = Counter[Node]()
    num_nodes = num_pages = 0
    for node in tree.nodes():
        owned += node.pages
        num_pages += len(node.pages)
        num_nodes += node.parent is not None
        _check_node(node, size)
        pins[node] = node.pins
    assert (tree.num_nodes, tree.num_pages) == (num_nodes, num_pages), "the tree's counters are wrong"
    for hold in cache.holds.holds.values():
        pins[hold.node] -= 1
    for pending in cache._pending:
        pins[pending] -= 1
    for q in scheduler.running:
        assert q.grant is not None and q.state == "running" and q not in scheduler.waiting, f"{q.request.id}: state {q.state}"
        owned += q.grant.own_pages()
        pins[q.grant.lease] -= 1
        _check_grant(q, scheduler)
    wrong = [page for page, n in Counter(owned).items() if n != 1]
    lost = set(range(cache.pool.num_pages)) - set(owned)
    assert not wrong and not lost, f"P2: pages {sorted(wrong)} are owned twice, {sorted(lost)} by nobody"
    assert not any(pins.values()), f"pins without an owner, or owners without a pin: {[n for n in pins.values() if n]}"
    slots = scheduler.slots + [q.slot for q in scheduler.running]
    assert sorted(slots) == list(range(scheduler.max_running)), f"slots: {sorted(slots)}"
    assert scheduler.running == sorted(scheduler.running, key=lambda q: q.rank), "running is out of rank order"
    for q in scheduler.waiting:
        assert q.state == "waiting" and q.grant is None, f"{q.request.id} waits and holds pages"
        ready = not (q.in_flight or q.drawing or q.compiling or q.leader)
        assert q.queued == ready, f"{q.request.id}: ready {ready}, queued {q.queued}"
    assert len(scheduler.queue) == sum(q.queued for q in scheduler.waiting), "the queue and the waiting disagree"


def _check_node(node: Node, size: int) -> None:
    page_bytes = size * TOKEN_BYTES
    assert node.pins >= 0 and len(node.pages) == len(node.steps) and not node.dead
    assert sorted(node.children) == list(node.order), "sorted keys and children disagree"
    for key, child in node.children.items():
        assert child.parent is node and child.tokens[:page_bytes] == key and child.pages
        if len(key) < page_bytes:
            assert key == child.tokens and len(child.pages) == 1 and not child.children, "a tail is one partial page, a leaf"
        else:
            assert len(child.tokens) == len(child.pages) * page_bytes, "an edge is whole pages"
    for grant in node.open:
        assert getattr(grant, "lease", node) is node, "listed at a node where its lease does not end"


def _check_grant(q: Sequence, scheduler: Scheduler) -> None:
    grant, tree, size = q.grant, scheduler.cache.tree, scheduler.cache.page_size
    assert grant is not None and grant in grant.lease.open, f"{q.request.id}: not listed at its lease"
    path = tree.path(grant.lease)
    pages = [page for node in path for page in node.pages]
    assert pages == grant.table[: grant.num_shared].tolist(), f"{q.request.id}: lease and table disagree"
    assert b"".join(node.tokens for node in path) == q.key[: len(pages) * size * TOKEN_BYTES], f"{q.request.id}: a wrong prefix"
    assert len(q.key) == len(q.tokens) * TOKEN_BYTES
    assert q.computed <= q.scheduled <= len(q.tokens) + q.drawing, f"{q.request.id}: S1"
    assert q.scheduled <= grant.num_pages * size
    # Slots beyond what is scheduled are only those of the last page (the memory bound of the issue).
    assert grant.num_pages <= max(grant.num_shared, -(-q.scheduled // size)), f"{q.request.id}: it holds a page too many"


def rebuild(scheduler: Scheduler) -> list[Sequence]:
    """P2 does not hold: fail the sequences that run, forget the tree, make all pages free. Returns who was failed.

    Nobody can say which of two owners a page belongs to, nor whose prefix it spoiled, so all running ones are isolated;
    those that wait hold no pages and are computed anew. Nothing is in flight when this is called.
    """
    error = PhloemError("the engine found its page accounting broken and isolated the running requests. Please report this.")
    failed = list(scheduler.running)
    for q in failed:
        scheduler.detach(q)
    scheduler.cache.reset()
    scheduler.queue.rebuild()
    for q in list(scheduler.waiting):
        if q not in failed:
            scheduler.settle(q)
    for q in failed:
        scheduler.fail(q, error)
    return failed
