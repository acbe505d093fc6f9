"""What a server tells of itself: metrics, one log line a request, engine lines, spans. Told by the app and by the engine's client.

app ── RequestRecord ──> request() ─┬─> Store (metrics.py)     engine client ── Outputs ──> outputs() ─┬─> Store
                                    ├─> Log (logs.py)                                                  └─> Log, ≤ 1 line a second
                                    └─> Spans (spans.py)
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from phloem.runtime.engine import wire
from phloem.runtime.engine.stats import EngineStats
from phloem.runtime.serve.host import RequestRecord, Served
from phloem.runtime.serve.logs import Log
from phloem.runtime.serve.metrics import Store

if TYPE_CHECKING:
    from phloem.runtime.serve.config import ServerConfig
    from phloem.runtime.serve.spans import Spans

__all__ = ["Monitor", "finish_word"]

FINISH_WORDS = ("stop", "length", "tool_calls", "abort", "error", "mixed", "none")
LINE_SECONDS = 1.0
LONGEST_PROMPT = 2048
"""Characters of a prompt under --log-prompts."""
VIOLATION = "grammar_dead_end"


class Monitor:
    """Follows host.Observer. model: the label; known before the engine is."""

    def __init__(
        self,
        config: ServerConfig,
        model: str,
        *,
        log: Log | None = None,
        spans: Spans | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.store = Store(model)
        self.log = log if log is not None else Log(config.log_level, config.log_format)
        self._spans, self._prompts, self._clock, self._on_close = spans, config.log_prompts, clock, on_close
        self._compat = config.metrics_compat
        self._page_size = 1
        self._said = clock()
        self._before = EngineStats()

    # ---- host.Observer: the event loop's thread -------------------------------------------------------------------------

    def request(self, record: RequestRecord) -> None:
        self._count(record)
        self.log.put("info" if record.status < 500 else "error", "request", self._fields(record))
        if self._prompts and record.text:
            self.log.put("info", "prompt", {"id": record.id, "text": record.text}, LONGEST_PROMPT)
        if self._spans is not None:
            self._spans.request(record)

    def other(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        self.log.put("debug", "http", {"endpoint": endpoint, "method": method, "status": status, "ms": seconds * 1000})

    def warn(self, message: str) -> None:
        self.log.put("warning", "notice", {"message": message}, 512)

    def failed(self, request_id: str, error: BaseException) -> None:
        trace = "".join(traceback.format_exception(error))
        self.log.put("error", "internal_error", {"id": request_id, "error": repr(error), "trace": trace}, 16_384)

    def metrics(self) -> bytes:
        text = self.store.text()
        if self._compat != "none":
            from phloem.runtime.serve.compat import compat_text

            text += compat_text(self._compat, self.store)
        return text

    # ---- lifecycle --------------------------------------------------------------------------------------------------------

    def ready(self, model: Served, hello: wire.Hello, shares: Mapping[str, float], *, again: bool = False) -> None:
        store, config, resolved = self.store, model.engine, model.resolved
        self._page_size = config.page_size
        store.set("engine_up", 1)
        if not again:
            for stage, seconds in {**hello.seconds, **shares}.items():
                store.set("startup_seconds", seconds, stage)
        store.only("build_info", 1, version("phloem"), resolved.device, hello.device_name, hello.fingerprint)
        store.only(
            "config_info", 1, config.dtype, resolved.kv_dtype, str(config.page_size), str(resolved.num_pages),
            str(resolved.max_context), str(config.max_running), config.policy, config.cache_mode,
        )  # fmt: skip
        self.log.put(
            "info", "ready", {"model": model.name, "engine_pid": hello.pid, **{k: round(v, 3) for k, v in shares.items()}}
        )

    def age(self, seconds: float) -> None:
        self.store.set("engine_last_step_age_seconds", seconds)

    def died(self) -> None:
        self.store.set("engine_up", 0)
        self.store.forget()
        self._before = EngineStats()
        self.log.put("error", "engine_died", {})

    def restarted(self) -> None:
        self.store.add("engine_restarts_total", 1)

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()
        self.log.close()

    # ---- the engine's words: its client's reader thread -------------------------------------------------------------------

    def outputs(self, word: wire.Outputs) -> None:
        store = self.store
        for seconds, tokens in word.steps:
            store.observe("step_seconds", seconds)
            store.observe("step_tokens", tokens)
        for timing in word.timings.values():
            if timing.queue is not None:
                store.observe("request_queue_time_seconds", timing.queue)
            if timing.prefill is not None:
                store.observe("request_prefill_time_seconds", timing.prefill)
        if word.beat is not None:
            self._beat(word.beat)

    def _beat(self, beat: wire.Beat) -> None:
        s, store, page = beat.stats, self.store, self._page_size
        preempted, grammar = beat.waiting_preempted, beat.waiting_grammar
        store.set("num_requests_running", s.running)
        store.set("num_requests_waiting", max(0, s.waiting - preempted - grammar), "queue")
        store.set("num_requests_waiting", grammar, "grammar")
        store.set("num_requests_waiting", preempted, "preempted")
        pages = s.pages_free + s.pages_tree + s.pages_live
        leased = min(s.pages_tree, beat.pages_leased)
        held = min(s.held_pages, s.pages_tree - leased)
        store.set("kv_cache_usage_ratio", (s.pages_live + leased) / pages if pages else 0.0)
        store.set("kv_tokens", (s.pages_live + leased) * page, "used")
        store.set("kv_tokens", held * page, "pinned")
        store.set("kv_tokens", (s.pages_tree - leased - held) * page, "evictable")
        store.set("kv_tokens", s.pages_free * page, "free")
        store.set("radix_nodes", s.nodes)
        store.follow("evicted_tokens_total", s.evicted_pages * page)
        store.follow("discarded_tokens_total", s.surplus_tokens)
        store.follow("preemptions_total", s.preemptions)
        store.follow("device_seconds_total", s.device_seconds)
        store.follow("device_stall_seconds_total", s.device_stall_seconds)
        store.follow("invariant_repairs_total", s.violations)
        store.follow("grammar_compile_total", s.grammar_cache_hits, "cached")
        store.follow("grammar_compile_total", s.grammar_cache_misses - s.grammar_refused, "ok")
        store.follow("grammar_compile_total", s.grammar_refused - s.grammar_timeouts, "refused")
        store.follow("grammar_compile_total", s.grammar_timeouts, "timeout")
        if beat.compile_times is not None:
            store.follow_times("grammar_compile_seconds", beat.compile_times)
        for backend, times in beat.fill_times.items():
            store.follow_times("grammar_fill_seconds", times, backend)
        store.set("engine_last_step_age_seconds", 0.0)
        self._engine_line(s)

    def _engine_line(self, s: EngineStats) -> None:
        """At most one a second, and only of what moved."""
        now, before = self._clock(), self._before
        if now - self._said < LINE_SECONDS:
            return
        computed, decoded = s.prefill_tokens - before.prefill_tokens, s.decode_tokens - before.decode_tokens
        seconds, self._said, self._before = now - self._said, now, s
        usage = self.store.value("kv_cache_usage_ratio")
        if computed > 0:
            fields = {"new_seq": s.requests - before.requests, "new_tok": computed, "cached_tok": s.cached_tokens - before.cached_tokens, "usage": usage}  # fmt: skip
            self.log.put("info", "prefill", fields)
        if decoded > 0:
            self.log.put(
                "info", "decode", {"running": s.running, "queue": s.waiting, "tok_s": decoded / seconds, "usage": usage}
            )

    # ---- inside -----------------------------------------------------------------------------------------------------------

    def _count(self, r: RequestRecord) -> None:
        store = self.store
        store.add("requests_total", 1, r.endpoint, str(r.status), finish_word(r.finish))
        if r.status >= 400 and r.status != 499:
            store.add("rejected_requests_total", 1, r.code or "none")
        if r.ignored:
            store.add("ignored_params_total", len(r.ignored), "ignored")
        if r.clipped:
            store.add("ignored_params_total", 1, "clipped")
        if r.code == VIOLATION:
            store.add("structured_output_violations_total", 1)
        store.add("prompt_tokens_total", max(0, r.prompt_tokens - r.cached_tokens), "computed")
        store.add("prompt_tokens_total", min(r.cached_tokens, r.prompt_tokens), "cached")
        store.add("generation_tokens_total", max(0, r.completion_tokens - r.forced_tokens), "sampled")
        store.add("generation_tokens_total", min(r.forced_tokens, r.completion_tokens), "forced")
        if r.submitted is None:
            return  # refused at the door: it has no latency to speak of
        store.observe("e2e_request_latency_seconds", r.ended - r.arrived)
        if r.first_token is not None:
            store.observe("time_to_first_token_seconds", r.first_token - r.arrived)
            store.observe("request_decode_time_seconds", r.ended - r.first_token)
        for gap, tokens in zip(r.gaps, r.gap_tokens):
            if tokens > 0:
                store.observe("inter_token_latency_seconds", gap / tokens, times=tokens)

    def _fields(self, r: RequestRecord) -> dict[str, Any]:
        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else round(seconds * 1000, 3)

        latencies = [gap / tokens for gap, tokens in zip(r.gaps, r.gap_tokens) if tokens > 0]
        return {
            "id": r.id, "client_id": r.client_id, "rid": r.handle, "trace": r.trace, "key": r.key, "endpoint": r.endpoint, "model": r.model,
            "stream": r.stream, "status": r.status, "code": r.code, "finish": ",".join(r.finish), "prompt": r.prompt_tokens,
            "cached": r.cached_tokens, "completion": r.completion_tokens, "forced": r.forced_tokens, "queue_ms": ms(r.queue_seconds),
            "ttft_ms": ms(r.first_token - r.arrived) if r.first_token is not None else None,
            "itl_p50_ms": ms(statistics.median(latencies)) if latencies else None, "e2e_ms": ms(r.ended - r.arrived),
            "preemptions": r.preemptions, "grammar": r.grammar,
        }  # fmt: skip


def finish_word(finish: list[str]) -> str:
    """One word for a request, of a closed set."""
    words = set(finish)
    word = words.pop() if len(words) == 1 else "mixed" if words else "none"
    return word if word in FINISH_WORDS else "error"
