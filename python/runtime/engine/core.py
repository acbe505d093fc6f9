"""EngineCore: requests in, output deltas out, one step at a time. Sans-IO: no sockets, threads or asyncio; time is an argument.

    plan n  ->  launch n  ->  commit n-1  ->  mask and draw n            (architecture.md §4; overlap off: then commit n)

    add --> door --> Sequence --> Scheduler.plan --StepPlan--> Executor
                                     ^                             |
    deltas <-- touched, ended <-- commit <-------StepResult--------'

A request that cannot be served is answered by an Output with an error: `add` never raises for the caller's input, and each
request ends in exactly one final delta (S6). A failed forward voids its steps, which are planned again (R5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from phloem.runtime.cache.prefix import Explanation, PrefixCache
from phloem.runtime.engine.compiling import Compiling, GrammarService, PendingCursor
from phloem.runtime.engine.control import Control, InFlight
from phloem.runtime.engine.door import check_namespace, check_prompt, check_request, pages_needed
from phloem.runtime.engine.outputs import final_deltas, new_deltas, refusal
from phloem.runtime.engine.pipeline import Pipeline
from phloem.runtime.engine.seeds import Seeds
from phloem.runtime.engine.stats import EngineStats, collect_stats
from phloem.runtime.errors import EngineBusyError, EngineClosedError, EngineDeadError, EngineSuspendedError, InvalidRequestError
from phloem.runtime.executor.base import Executor
from phloem.runtime.request import OutputDelta, Request
from phloem.runtime.scheduler import audit
from phloem.runtime.scheduler.flight import Flight
from phloem.runtime.scheduler.scheduler import Scheduler
from phloem.runtime.scheduler.sequence import Sequence

__all__ = ["CoreSettings", "EngineCore", "EngineStats", "Explanation", "GrammarService", "PendingCursor"]

MAX_SAME_FAILURES = 3  # a forward that fails so often in a row with the same error will not get better


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """page_size, num_pages: the executor's.   max_context: prompt + output.   vocab_size: ids below it are tokens; width: of a
    logits row.   eos_ids: the model's own end tokens.   seed: of the seeds drawn for requests without one.
    hold_ttl: seconds a hold lives unless told otherwise; hold_share: of the pool, at most so much may be held (R7).
    """

    page_size: int
    num_pages: int
    max_context: int
    vocab_size: int
    width: int
    max_running: int = 64
    max_step_tokens: int = 256
    policy: Literal["prefix", "fcfs", "priority"] = "prefix"
    max_wait: int = 16_384
    overlap: bool = False
    cache_enabled: bool = True
    eos_ids: frozenset[int] = frozenset()
    seed: int | None = None
    hold_ttl: float = 600.0
    hold_share: float = 0.5


@dataclass(slots=True)
class _Ends:
    ids: frozenset[int]
    grammar_eos: int | None


class EngineCore:
    """See the module's drawing. Not thread-safe: one thread calls it."""

    def __init__(self, settings: CoreSettings, executor: Executor, *, grammar: GrammarService | None = None) -> None:
        s = self.settings = settings
        self.executor = executor
        cache = PrefixCache(s.page_size, s.num_pages, enabled=s.cache_enabled, max_held_pages=int(s.num_pages * s.hold_share))
        self.scheduler = Scheduler(
            cache,
            max_running=s.max_running,
            max_step_tokens=s.max_step_tokens,
            policy=s.policy,
            max_wait=s.max_wait,
            vocab_size=s.vocab_size,
            width=s.width,
            hold_ttl=s.hold_ttl,
        )
        self.closed = False
        self._control = Control(self)
        self.last_violation: Exception | None = None  # of our own invariants: a bug to report
        self._pipeline = Pipeline(executor)
        self._compiling = Compiling(grammar, self.scheduler)
        self._seeds = Seeds(s.seed)
        self._ends = _Ends(s.eos_ids, grammar.eos_id if grammar is not None else None)
        self._live: dict[str, Sequence] = {}
        self._new: list[Sequence] = []  # added since the last step, which tells them the time
        self._deltas: list[OutputDelta] = []
        self._now = 0.0
        self._steps = self._launched = self._requests = self._refused = self._forced = self._dropped = self._violations = 0
        self._last_failure, self._same_failures, self._violated_in = "", 0, -1

    # ------------------------------------------------------------------------------------------------------ requests in

    def add(self, request: Request) -> None:
        """Queue a request. One that is refused gets its final delta from the next `step` or `drain`."""
        self._requests += 1
        try:
            if self.closed:
                raise EngineClosedError("this engine was closed; make a new one.")
            if self._control.suspended:
                raise EngineSuspendedError("the engine's memory was handed back, so nothing can run; resume() first.")
            if request.id in self._live:
                raise InvalidRequestError(
                    f"a request with the id {request.id!r} is still running; ids must be unique among live requests.",
                    param="id",
                    code="duplicate_request_id",
                )
            tokens, max_tokens = check_request(request, self.settings)
            pending = self._compiling.begin(request)
        except Exception as error:  # whatever an odd request makes our checks raise is that request's own
            self._refused += 1
            self._deltas.append(refusal(request, error, self.scheduler.version))
            return
        q = Sequence(request, tokens, max_tokens, 0, self._ends)
        q.seed = self._seeds.seed_of(q)
        q.need_pages = pages_needed(q.num_prompt, max_tokens, self.settings.page_size)
        self._live[request.id] = q
        self._new.append(q)
        if pending is not None:
            self._compiling.wait_for(q, pending)
        self.scheduler.add(q)
        self._compiling.poll()

    def abort(self, request_id: str) -> None:
        """End it now, in any state (S5). An id that is not live is ignored."""
        q = self._live.get(request_id)
        if q is not None and q.state != "done":
            self.scheduler.finish(q, "abort")

    def stop(self, request_id: str, num_tokens: int) -> None:
        """The Collector found a stop string, complete with output token `num_tokens`: what was drawn beyond is dropped."""
        q = self._live.get(request_id)
        if q is not None and q.state != "done":
            keep = min(num_tokens, q.num_new)
            self._dropped += q.num_new - keep
            q.emitted = keep
            self.scheduler.finish(q, "stop_string")

    # --------------------------------------------------------------------------------------------------------- the loop

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._pipeline or self._deltas or self._control.waits)

    @property
    def is_blocked(self) -> bool:
        """All there is to do is to wait, for grammars that compile elsewhere or for `unpause`: the caller may sleep a little."""
        if self._control.paused:
            return not self._deltas
        return 0 < len(self._compiling) == len(self._live) and not self._pipeline and not self._deltas

    def step(self, now: float = 0.0) -> list[OutputDelta]:
        """One step of the loop; what there is to say after it. `now`: seconds of any clock that never goes back."""
        if self.closed:
            raise EngineClosedError("this engine was closed; make a new one.")
        try:
            self._begin(now)
            if not self._control.paused:
                self._step()
            assert audit.balanced(self.scheduler), "P2: pages were lost or are owned twice"
        except Exception as error:  # an invariant of ours is broken: isolate, rebuild, count, live on (P2)
            self._recover(error)
        return self.drain()

    def _begin(self, now: float) -> None:
        self._now = now
        self._steps += 1
        for q in self._new:
            q.arrived_at = now
        self._new.clear()
        self.scheduler.cache.holds.expire(now)
        self._compiling.poll()
        if self.scheduler.gate and not self.scheduler.any_started():
            self.land()
            self._control.drained()

    def _step(self) -> None:
        flight = self.scheduler.plan()
        planned = bool(flight.plan.rows)
        if not planned and not self._pipeline:
            assert self.scheduler.is_idle(), "nothing is planned or in flight, and somebody is ready"
        self._launched += planned
        if planned:
            self._pipeline.launch(flight)
        self.scheduler.cache.launched()
        if self._commit(keep=int(planned)) and planned:
            newest = self._pipeline.newest()
            if newest is not None:
                self._pipeline.sample(self.scheduler.sample_spec(newest))
            if not self.settings.overlap:
                self._commit(keep=0)

    def _commit(self, keep: int) -> bool:
        """Apply what the device did, but for the last `keep` steps. False: a forward failed, and all launched since is void."""
        while len(self._pipeline) > keep:
            flight, result = self._pipeline.collect()
            if result.failed is not None:
                self._void(flight, result.failed)
                return False
            self._same_failures = 0
            self.scheduler.commit(flight, result)
        return True

    def _void(self, flight: Flight, error: Exception) -> None:
        """That forward failed. Its rows are planned again; if that does not help, their requests end (R5)."""
        self.scheduler.forward_failed([flight, *self._pipeline.land()])
        failure = f"{type(error).__name__}: {error}"
        self._same_failures = self._same_failures + 1 if failure == self._last_failure else 1
        self._last_failure = failure
        try:
            self.executor.reset()
        except Exception as fatal:
            self.closed = True
            for q in list(self._live.values()):
                self.scheduler.fail(q, EngineDeadError(f"the device failed ({failure}) and could not be reset ({fatal})."))
            return
        if self._same_failures >= MAX_SAME_FAILURES:
            self._same_failures = 0
            for q in flight.sequences:
                self.scheduler.fail(q, error)

    def _recover(self, error: Exception) -> None:
        self._violations += 1
        self.last_violation = error
        self._pipeline.land()
        for q in self._live.values():  # rows of a plan that was never launched, too
            q.in_flight, q.drawing = 0, False
        audit.rebuild(self.scheduler)
        if self._violated_in == self._steps - 1:  # isolating those that ran did not help: it comes from one that waits
            for q in list(self._live.values()):
                self.scheduler.fail(q, error)
        self._violated_in = self._steps

    def drain(self) -> list[OutputDelta]:
        """What there is to say now, without a step."""
        version = self.scheduler.version
        for q in self.scheduler.touched:
            if q.state != "done":
                self._deltas += new_deltas(q, version)
        self.scheduler.touched.clear()
        for q in self.scheduler.ended:
            self._deltas += final_deltas(q, version)
            self._forget(q)
        self.scheduler.ended.clear()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _forget(self, q: Sequence) -> None:
        if q.finish != "stop_string":  # `stop` has counted its own
            self._dropped += q.num_new - q.emitted
        self._dropped += q.num_dropped
        self._forced += q.num_forced()
        del self._live[q.request.id]
        self._compiling.forget(q)
        self._seeds.forget(q)

    # ---------------------------------------------------------------------------------------------------------- control

    @property
    def weights_version(self) -> int:
        return self.scheduler.version

    def commit_weights(self, policy: InFlight | None = None, version: int | None = None) -> None:
        """The weights have changed, or will have once the requests under way have ended (rl W6, R8).

        finish: started requests end under the old version, new ones wait; the version moves in the `step` that finds none left.
        abort: all end now.   recompute: tokens are kept, their keys and values computed anew.   continue: they are kept too, and
        the Outputs say so.   None: EngineBusyError if any lives.   version: the new one; by default the next.
        """
        self._control.commit(policy, version)

    def control(self, verb: str, *args: Any) -> Any:
        """A method of engine/control.py by its name: what trainers and operators ask."""
        return getattr(self._control, verb)(*args)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def live_ids(self, count: int) -> list[str]:
        """The first `count` of them."""
        return list(self._live)[:count]

    def land(self) -> None:
        """Commit everything that was launched."""
        self._commit(keep=0)

    def hold(self, name: str, token_ids: list[int], namespace: str = "", ttl: float | None = None) -> int:
        """Pin what is cached of these tokens (R7); how many that is. Ends by `release`, after `ttl` seconds, or under want."""
        if not self.settings.cache_enabled:
            return 0
        ttl = self.settings.hold_ttl if ttl is None else ttl
        key = check_prompt(token_ids, self.settings).tobytes()
        return self.scheduler.cache.hold(name, (namespace, self.scheduler.version), key, ttl)

    def release(self, name: str) -> bool:
        """End a hold, by its name or by the id of the request that asked for it. False: there is none, or no more."""
        return self.scheduler.cache.holds.release(name)

    def explain(self, token_ids: list[int], namespace: str = "") -> Explanation:
        """What the cache would give this prompt now (R9). Changes nothing. Raises InvalidRequestError, as `add` would refuse it."""
        check_namespace(namespace)
        key = check_prompt(token_ids, self.settings).tobytes()
        return self.scheduler.cache.explain((namespace, self.scheduler.version), key, self.scheduler.step + 1)

    def flush(self) -> int:
        """Forget everything that nobody holds; how many pages that freed. Raises EngineBusyError while requests live."""
        if self._live:
            raise EngineBusyError(f"{len(self._live)} requests are under way; flush needs an idle engine.")
        self._commit(keep=0)
        return self.scheduler.cache.flush()

    def stats(self) -> EngineStats:
        return collect_stats(
            self.scheduler,
            self._now,
            self._compiling.counters(),
            steps=self._launched,
            requests=self._requests,
            refused=self._refused,
            forced=self._forced,
            dropped=self._dropped,
            violations=self._violations,
            device_seconds=self._pipeline.device_seconds,
            stall_seconds=self._pipeline.stall_seconds,
        )

    def check(self) -> None:
        """Every invariant, in full. Raises AssertionError that says which does not hold. For tests: it walks the whole tree."""
        audit.check(self.scheduler)

    def close(self) -> None:
        """Abort what lives, wait for the device, let go of it. The last deltas come from `drain`. May be called again."""
        if not self.closed:
            for q in list(self._live.values()):
                if q.state != "done":
                    self.scheduler.finish(q, "abort")
            self._pipeline.land()
            self.closed = True
        self.executor.close()
