"""Which rows the next step has, and what a finished step means. Decides; the executor does. Knows no tensors, no clock.

    plan()          decodes, then the others in rank order, then admissions; one token budget          S1, S2, S3
    sample_spec()   after the commit of the step before: who draws, under which masks                  S4
    commit()        tokens in, ends found, pages published; forward_failed() takes everything back      R5, R6
    finish()        any state, at once                                                                 S5, S6

    waiting  --head of the queue fits-->  running  --ends-->  done
       ^                                     |
       '------- preempted: last in rank -----'

Waiting but not in the queue: a draw or rows in flight, a leader that computes the prompt, a grammar that compiles.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Hashable

from phloem.runtime.cache.prefix import PrefixCache
from phloem.runtime.cache.radix import TOKEN_BYTES
from phloem.runtime.request import FinishReason
from phloem.runtime.scheduler.commit import apply_result
from phloem.runtime.scheduler.draws import SpecBuilder
from phloem.runtime.scheduler.flight import Counters, Flight, wire_error
from phloem.runtime.scheduler.policy import WaitingQueue
from phloem.runtime.scheduler.rows import make_row
from phloem.runtime.scheduler.sequence import Sequence
from phloem.runtime.step import SampleSpec, StepPlan, StepResult

__all__ = ["Scheduler"]


class Scheduler:
    """The sequences of one engine. `touched` and `ended` tell the core what to say; it empties them."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_running: int,
        max_step_tokens: int,
        policy: str,
        max_wait: int,
        vocab_size: int,
        width: int,
        hold_ttl: float = 600.0,
    ) -> None:
        self.cache = cache
        self.page_size = cache.page_size
        self.max_running, self.max_step_tokens, self.policy = max_running, max_step_tokens, policy
        self.hold_ttl = hold_ttl
        self.queue = WaitingQueue(cache, policy, max_wait, self.root_of)
        self.waiting: dict[Sequence, None] = {}
        self.running: list[Sequence] = []  # by rank
        self.leaders: dict[str, Sequence] = {}  # group -> who computes its prompt
        self.slots = list(range(max_running - 1, -1, -1))
        self.step = self.version = self.budget = 0
        self.served = self.arrivals = 0
        self.gate = False  # only started sequences are admitted (rl W6)
        self.counters = Counters()
        self.touched: dict[Sequence, None] = {}
        self.ended: list[Sequence] = []
        self.words = (width + 31) // 32
        self.padding = tuple(range(vocab_size, width))  # ids that no token has

    def root_of(self, q: Sequence) -> Hashable:
        common = (q.request.namespace, self.version)
        return common if self.cache.enabled else (*common, q.rank[1])

    # ------------------------------------------------------------------------------------------------------ requests in

    def add(self, q: Sequence) -> None:
        q.rank = (-q.request.priority if self.policy == "priority" else 0, self.arrivals)
        q.served_before = self.served
        self.arrivals += 1
        self.waiting[q] = None
        group = q.request.group
        if group is not None:
            leader = self.leaders.setdefault(group, q)
            if leader is not q and self._may_follow(q, leader):
                leader.siblings.append(q)
                q.leader = leader
        if not q.compiling:
            self.start(q)

    def _may_follow(self, q: Sequence, leader: Sequence) -> bool:
        """Its first token can come from the leader's row: the same tokens, and no logits of its own wanted."""
        a, b = q.request, leader.request
        same = a.namespace == b.namespace and a.grammar == b.grammar and a.token_ids == b.token_ids
        return (
            same
            and not (a.num_output or b.num_output)
            and q.first_wanted() is None
            and q.max_tokens > 0
            and leader.max_tokens > 0
        )

    def start(self, q: Sequence) -> None:
        """Its cursor is there, if it needs one. A forced run at the start joins the prompt (J6)."""
        q.version = self.version
        if q.cursor is not None and q.max_tokens:
            try:
                q.replay()
                self.conclude(q, q.advance())
            except Exception as error:
                self.fail(q, error)
            self.touched[q] = None
        self.settle(q)

    def settle(self, q: Sequence) -> None:
        if q.state == "waiting" and not (q.queued or q.in_flight or q.drawing or q.compiling or q.leader):
            self.queue.push(q)

    # ------------------------------------------------------------------------------------------------------------- plan

    def plan(self) -> Flight:
        self.step += 1
        self.budget = self.max_step_tokens
        self.cache.begin_plan()
        flight = Flight(StepPlan(self.step))
        decodes, others = list[Sequence](), list[Sequence]()
        for q in self.running:
            assert q.grant is not None
            q.grant.written = q.scheduled
            (decodes if q.goal() - q.scheduled == 1 else others).append(q)
        for q in decodes:
            if q.state == "running":
                self._give_row(q, flight, may_preempt=True)
        for q in others:
            if q.state == "running":
                self._give_row(q, flight, may_preempt=True)
        self._admit(flight)
        return flight

    def _admit(self, flight: Flight) -> None:
        """In queue order, up to the first that does not fit: overtaking it could go on for ever.

        Never preempts. All preempting is over when the first copy is planned, so copy sources need protection from
        eviction only.
        """
        while len(self.running) < self.max_running and self.budget > 0:
            q = self.queue.head(self.served, self.gate)
            if q is None:
                return
            if not self._acquire(q, flight, use_copy=True):
                self.counters.fallbacks += 1
                if not self._acquire(q, flight, use_copy=False):  # the copy's source may be the page that is missing (R2)
                    return

    def _acquire(self, q: Sequence, flight: Flight, use_copy: bool) -> bool:
        """Match, lease, copy, first row; or nothing at all."""

        def obtain(need: int) -> list[int]:
            return self._obtain(need, q, may_preempt=False)

        got = self.cache.acquire(self.root_of(q), q.key, q.cache_limit(), self.step, q.need_pages, obtain, use_copy)
        if got is None:
            return False
        q.grant, covered = got
        q.scheduled, q.state, q.slot = covered, "running", self.slots.pop()
        insort(self.running, q, key=_rank)
        first, high = q.cached_tokens is None, q.high
        if first:
            q.high = covered
        if not self._give_row(q, flight, may_preempt=False):
            self.cache.cancel(q.grant)
            self._leave(q)
            q.high = high
            return False
        if first:
            # One that has drawn already took its token from its leader's row (S4): no prompt token is computed for it.
            q.cached_tokens = min(covered, q.num_prompt if q.started else q.num_prompt - 1)
            self.counters.cached += q.cached_tokens
        del self.waiting[q]
        self.queue.discard(q)
        q.started = True
        copy = self.cache.confirm(q.grant)
        if copy is not None:
            flight.plan.copies.append(copy)
        return True

    def _give_row(self, q: Sequence, flight: Flight, may_preempt: bool) -> bool:
        """One row for q if budget and pages allow. False: none this time."""
        grant, size, known = q.grant, self.page_size, len(q.tokens)
        assert grant is not None
        if (grant.num_shared + 1) * size <= q.scheduled:
            self.cache.publish(grant, min(q.scheduled, known), self.step)
        if q.scheduled < known and (grant.num_shared + 1) * size <= known:
            self._adopt(q)
        start, end = q.scheduled, min(q.goal(), q.scheduled + self.budget)
        if end > start:
            need = -(-end // size) - grant.num_pages
            if need > 0:
                grant.add(self._obtain(need, q, may_preempt))
                end = min(end, grant.num_pages * size)
        if end <= start:
            return False
        row = make_row(q, start, end, size)
        flight.plan.rows.append(row)
        flight.sequences.append(q)
        q.row_step, q.scheduled = self.step, end
        q.in_flight += 1
        self.budget -= end - start
        self.served += end - start
        self.counters.count(q, row)
        if (grant.num_shared + 1) * size <= end:
            self.cache.publish(grant, min(end, known), self.step)
        return True

    def _adopt(self, q: Sequence) -> None:
        """Every row of known tokens matches again: what others have entered is not computed, and never written, twice (R5)."""
        assert q.grant is not None
        covered = min(self.cache.adopt(q.grant), q.cache_limit())
        if covered > q.scheduled:
            if not q.preempted and q.cached_tokens is not None and q.scheduled >= q.high:
                gained = max(0, min(covered, q.num_prompt) - q.scheduled)
                q.cached_tokens += gained
                self.counters.cached += gained
                q.high = covered
            q.scheduled = covered

    def _obtain(self, need: int, q: Sequence, may_preempt: bool) -> list[int]:
        """Up to `need` pages: the cache's, then those of the last in rank that has no row yet (S3), then held ones (R7)."""
        pages = self.cache.take(need)
        while len(pages) < need:
            victim = self._victim(q) if may_preempt else None
            if victim is not None:
                self.preempt(victim)
            elif all(r is q for r in self.running):  # nothing else could ever free a page, and P3 did not count holds
                if not self.cache.holds.break_oldest():
                    break
            else:
                break
            pages += self.cache.take(need - len(pages))
        return pages

    def _victim(self, q: Sequence) -> Sequence | None:
        for r in reversed(self.running):
            if r.rank <= q.rank:
                return None
            if r.row_step != self.step:
                return r
        return None

    def sample_spec(self, flight: Flight) -> SampleSpec:
        """After the commit of the step before: who draws from `flight`, under which masks."""
        return SpecBuilder(self, flight).build()

    # ------------------------------------------------------------------------------------------------------------ commit

    def commit(self, flight: Flight, result: StepResult) -> None:
        """Apply what the device did in a sound step."""
        apply_result(self, flight, result)

    def conclude(self, q: Sequence, reason: FinishReason | None) -> None:
        """It ends so, once the logprobs that rows have to give are known (J8)."""
        if reason is not None:
            if q.first_wanted() is not None:
                q.ending = reason
            else:
                self.finish(q, reason)

    # ------------------------------------------------------------------------------------------------------- out of it

    def fail(self, q: Sequence, error: BaseException) -> None:
        if q.state != "done":
            q.error = wire_error(error)
            self.finish(q, "error")

    def finish(self, q: Sequence, reason: FinishReason) -> None:
        """Pages go at once: a surplus row in flight writes only slots that no published token covers (S5, P4)."""
        if q.state == "running":
            assert q.grant is not None
            root, upto = q.grant.root, min(q.scheduled, len(q.tokens))
            self.cache.release(q.grant, upto, self.step)
            self._leave(q)
            if not self.cache.enabled:
                self.cache.tree.drop_root(root)
            elif q.request.hold and reason not in ("abort", "error"):
                self.cache.hold(q.request.id, root, bytes(q.key[: TOKEN_BYTES * upto]), self.hold_ttl)
        else:
            if not self.cache.enabled:
                self.cache.tree.drop_root(self.root_of(q))
            del self.waiting[q]
            if q.queued:
                self.queue.discard(q)
            if q.cached_tokens is None and q.started and len(q.tokens) > q.num_prompt:
                q.cached_tokens = q.num_prompt  # all that it drew came from its leader's row
                self.counters.cached += q.cached_tokens
        q.state, q.finish = "done", reason
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self.ended.append(q)
        self._pass_on(q)

    def _pass_on(self, q: Sequence) -> None:
        """The prompt passes to the next sample (S4)."""
        if q.leader is not None:
            q.leader.siblings.remove(q)
            q.leader = None
        group = q.request.group
        if q.siblings:
            heir, *heir.siblings = q.siblings
            q.siblings, heir.leader = [], None
            for each in heir.siblings:
                each.leader = heir
            self.leaders[heir.request.group or ""] = heir
            self.settle(heir)
        elif group is not None and self.leaders.get(group) is q:
            del self.leaders[group]

    def preempt(self, q: Sequence, upto: int | None = None, step: int | None = None) -> None:
        """S3. A draw in flight is still accepted, and the sequence is ready again once nothing of it is in flight.

        So a row that is committed belongs to the pages its sequence holds now, or to none: rows need no generation number.
        """
        known = len(q.tokens)
        assert q.grant is not None
        upto = min(q.scheduled if upto is None else upto, known)
        self.cache.release(q.grant, upto, self.step if step is None else step)
        self.detach(q)
        q.preempted = True
        self.counters.preemptions += 1
        self.settle(q)

    def detach(self, q: Sequence) -> None:
        """From running to waiting; its pages are gone, or were never its own."""
        self._leave(q)
        self.waiting[q] = None

    def _leave(self, q: Sequence) -> None:
        self.running.remove(q)
        self.slots.append(q.slot)
        q.state, q.grant, q.slot, q.scheduled, q.computed = "waiting", None, -1, 0, 0

    def forward_failed(self, flights: list[Flight]) -> None:
        """A failed step voids itself and every step launched since: `flights`, in order.

        All running ones are preempted with what committed steps wrote, marked as older than the failure; then the tree drops
        what the void steps wrote. No sequence keeps a page state to repair, so this needs no case analysis.
        """
        self.counters.failed_steps += 1
        first = flights[0].plan.step
        self.void(flights)
        for q in list(self.running):
            self.preempt(q, q.computed, first - 1)
        self.cache.forget_since(first)
        for q in list(self.waiting):
            self.settle(q)

    @staticmethod
    def void(flights: list[Flight]) -> None:
        for flight in flights:
            for q in flight.sequences:
                q.in_flight -= 1
            for q in flight.draws.values():
                q.drawing = False

    def any_started(self) -> bool:
        return bool(self.running) or any(q.started for q in self.waiting)

    def is_idle(self) -> bool:
        """Nobody could be planned: those that wait, wait for something outside the loop."""
        return not self.running and self.queue.head(self.served, self.gate) is None

    # ----------------------------------------------------------------------------------------------------------- weights

    def change_weights(self, version: int | None = None) -> None:
        """Nothing is in flight. Old roots are out of reach at once, and age out (R8). Who runs keeps its KV, and goes on alone:
        what its pages hold from now on is of no version, so they never enter the tree (rl W6, "continue")."""
        self.cache.holds.drop()
        kept = set[Hashable]()
        for q in self.running:
            assert q.grant is not None
            q.grant.private = q.kv_mixed = True
            kept.add(q.grant.root)
        if not self.cache.enabled:
            for name in list(self.cache.tree.roots):
                if name not in kept:
                    self.cache.tree.drop_root(name)
        self.version = self.version + 1 if version is None else version
        self.gate = False
        self.queue.rebuild()


def _rank(q: Sequence) -> tuple[int, int]:
    return q.rank
