"""What an engine has done and what it holds, as one frozen record. Tokens are counted once: prefill, cached, decode, recomputed
are disjoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phloem.runtime.engine.compiling import GrammarCounters
    from phloem.runtime.scheduler.scheduler import Scheduler

__all__ = ["EngineStats", "collect_stats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """prefill_tokens: prompt tokens computed, each once.   cached_tokens: prompt tokens that did not have to be.
    decode_tokens: output tokens computed.   recomputed_tokens: computed again after a preemption or a failed forward; neither
    prefill nor cached.   scratch_tokens: of all these, computed for their logits only (R4, prompt logprobs).
    pages_*: every page is in one of the three (P2).   wasted_slots: slots allocated to running sequences and not in use.
    surplus_tokens: drawn beyond an end, never delivered.   oldest_wait_*: of the longest waiting request, in served tokens (the
    clock of ageing) and in the caller's seconds.   grammar_fill_seconds: of the loop, for grammar_fills masks; grammar_compile_seconds:
    of compiling, off the loop.   device_seconds: of steps; device_stall_seconds: when the device waited for the host
    although there was work (0 where the host is the device).   violations: page accounting that had to be rebuilt: bugs of ours.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    scratch_tokens: int = 0
    forced_tokens: int = 0
    surplus_tokens: int = 0
    surplus_rows: int = 0
    steps: int = 0
    failed_steps: int = 0
    running: int = 0
    waiting: int = 0
    requests: int = 0
    refused: int = 0
    aborted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    pages_free: int = 0
    pages_tree: int = 0
    pages_live: int = 0
    nodes: int = 0
    evicted_pages: int = 0
    copied_pages: int = 0
    adopted_pages: int = 0
    duplicate_pages: int = 0
    preemptions: int = 0
    fallbacks: int = 0
    holds: int = 0
    held_pages: int = 0
    broken_holds: int = 0
    wasted_slots: int = 0
    oldest_wait_tokens: int = 0
    oldest_wait_seconds: float = 0.0
    grammar_fill_seconds: float = 0.0
    grammar_fills: int = 0
    grammar_compile_seconds: float = 0.0
    grammar_cache_hits: int = 0
    grammar_cache_misses: int = 0
    grammar_refused: int = 0
    grammar_timeouts: int = 0
    device_seconds: float = 0.0
    device_stall_seconds: float = 0.0
    weights_version: int = 0
    violations: int = 0


def collect_stats(
    scheduler: Scheduler,
    now: float,
    grammar: GrammarCounters,
    *,
    steps: int,
    requests: int,
    refused: int,
    forced: int,
    dropped: int,
    violations: int,
    device_seconds: float,
    stall_seconds: float,
) -> EngineStats:
    c, cache = scheduler.counters, scheduler.cache
    live = wasted = 0
    for q in scheduler.running:
        assert q.grant is not None
        live += q.grant.num_pages - q.grant.num_shared
        wasted += max(0, q.grant.num_pages * cache.page_size - q.scheduled)
    oldest = min(scheduler.waiting, key=lambda q: q.served_before, default=None)
    return EngineStats(
        prefill_tokens=c.prefill,
        cached_tokens=c.cached,
        decode_tokens=c.decode,
        recomputed_tokens=c.recomputed,
        scratch_tokens=c.scratch,
        forced_tokens=forced,
        surplus_tokens=c.surplus_tokens + dropped,
        surplus_rows=c.surplus_rows,
        steps=steps,
        failed_steps=c.failed_steps,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        requests=requests,
        refused=refused,
        aborted=c.finished.get("abort", 0),
        finished=dict(c.finished),
        pages_free=len(cache.pool.free),
        pages_tree=cache.tree.num_pages,
        pages_live=live,
        nodes=cache.tree.num_nodes,
        evicted_pages=cache.evicted,
        copied_pages=cache.copied,
        adopted_pages=cache.adopted,
        duplicate_pages=cache.duplicates,
        preemptions=c.preemptions,
        fallbacks=c.fallbacks,
        holds=len(cache.holds),
        held_pages=cache.holds.num_pages(),
        broken_holds=cache.holds.broken,
        wasted_slots=wasted,
        oldest_wait_tokens=scheduler.served - oldest.served_before if oldest else 0,
        oldest_wait_seconds=max(0.0, now - oldest.arrived_at) if oldest else 0.0,
        grammar_fill_seconds=grammar.fill_seconds,
        grammar_fills=grammar.fills,
        grammar_compile_seconds=grammar.compile_seconds,
        grammar_cache_hits=grammar.cache_hits,
        grammar_cache_misses=grammar.cache_misses,
        grammar_refused=grammar.refused,
        grammar_timeouts=grammar.timeouts,
        device_seconds=device_seconds,
        device_stall_seconds=stall_seconds,
        weights_version=scheduler.version,
        violations=violations,
    )
