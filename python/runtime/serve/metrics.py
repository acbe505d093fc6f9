"""The metrics as data, and the store behind `/metrics`. Text format and families are prometheus_client's; the counting is ours.

Each name has one writing thread (the event loop's, or the engine client's reader), so nothing here locks. Labels come from closed
sets: no word of a request becomes one (O1).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from phloem.runtime.engine.compiling import COMPILE_BOUNDS, FILL_BOUNDS, Times

__all__ = ["TABLE", "Row", "Store"]

PREFIX = "phloem_"


@dataclass(frozen=True, slots=True)
class Row:
    """One metric. name: without the prefix.   labels: beside `model`.   values: label values that are there from the start.

    buckets: upper bounds of a histogram, in the metric's unit.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _each(*words: str) -> tuple[tuple[str, ...], ...]:
    return tuple((word,) for word in words)


DOUBLING = COMPILE_BOUNDS
SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
TOKENS = tuple(float(2**k) for k in range(15))

TABLE: tuple[Row, ...] = (
    Row("num_requests_running", "gauge", "Sequences that hold pages now."),
    Row("num_requests_waiting", "gauge", "Sequences that wait, by what for.", ("reason",), _each("queue", "grammar", "preempted")),
    Row("kv_cache_usage_ratio", "gauge", "Share of the KV pool held by requests; what is only cached is not in it."),
    Row("kv_tokens", "gauge", "Token slots of the KV pool.", ("state",), _each("used", "evictable", "pinned", "free")),
    Row("radix_nodes", "gauge", "Nodes of the prefix tree."),
    Row("prompt_tokens_total", "counter", "Prompt tokens of ended requests: the sum of their usages.", ("source",), _each("computed", "cached")),
    Row("generation_tokens_total", "counter", "Output tokens of ended requests: the sum of their usages.", ("source",), _each("sampled", "forced")),
    Row("evicted_tokens_total", "counter", "Tokens that left the prefix tree for want of room."),
    Row("discarded_tokens_total", "counter", "Tokens drawn past an end, never delivered."),
    Row("requests_total", "counter", "Ended requests, one each whatever n is; finish_reason is mixed if its choices ended differently.",
        ("endpoint", "status", "finish_reason")),
    Row("rejected_requests_total", "counter", "Requests answered with an error, by its code.", ("code",)),
    Row("ignored_params_total", "counter", "Fields of requests that had no effect, and values that were clipped.", ("kind",), _each("ignored", "clipped")),
    Row("time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.", buckets=DOUBLING),
    Row("inter_token_latency_seconds", "histogram", "Between two tokens of a choice.", buckets=SHORT),
    Row("e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.", buckets=DOUBLING),
    Row("request_queue_time_seconds", "histogram", "From submission to admission.", buckets=DOUBLING),
    Row("request_prefill_time_seconds", "histogram", "From admission to the first token.", buckets=DOUBLING),
    Row("request_decode_time_seconds", "histogram", "From the first token to the end.", buckets=DOUBLING),
    Row("step_seconds", "histogram", "Time of one step of the engine's loop.", buckets=SHORT),
    Row("step_tokens", "histogram", "Tokens computed in one step.", buckets=TOKENS),
    Row("device_seconds_total", "counter", "Time of steps on the device."),
    Row("device_stall_seconds_total", "counter", "Time that the device waited for the host although there was work."),
    Row("grammar_compile_seconds", "histogram", "Time to compile a grammar, off the loop.", buckets=DOUBLING),
    Row("grammar_fill_seconds", "histogram", "Time to fill one mask, on the loop.", ("backend",), _each("token_fsm", "llguidance", "xgrammar"), FILL_BOUNDS),
    Row("grammar_compile_total", "counter", "Grammars asked for, by what became of them.", ("result",), _each("ok", "cached", "refused", "timeout")),
    Row("preemptions_total", "counter", "Sequences that lost their pages to older ones, and were computed again."),
    Row("invariant_repairs_total", "counter", "Page accounting that had to be rebuilt: bugs."),
    Row("structured_output_violations_total", "counter", "Constrained outputs that broke off because no legal token was left: bugs."),
    Row("engine_restarts_total", "counter", "Engine processes that were started anew."),
    Row("engine_up", "gauge", "1 while an engine process is up."),
    Row("engine_last_step_age_seconds", "gauge", "Since the engine was last heard of: a step, or an idle turn."),
    Row("startup_seconds", "gauge", "Seconds of the start, by stage.", ("stage",)),
    Row("build_info", "gauge", "1; what is running.", ("version", "device", "variant", "fingerprint")),
    Row("config_info", "gauge", "1; how it is set up.", ("dtype", "kv_dtype", "page_size", "num_pages", "max_context", "max_running", "policy", "cache_mode")),
)  # fmt: skip


@dataclass(slots=True)
class _Buckets:
    bounds: Sequence[float]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def pairs(self) -> list[tuple[str, float]]:
        pairs, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            total += count
            pairs.append(("+Inf" if bound == float("inf") else f"{bound:.10g}", float(total)))
        return pairs


class Store:
    """Values of TABLE's metrics. An unknown name is a KeyError: a metric is first a row."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._rows = {row.name: row for row in TABLE}
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {}
        self._buckets: dict[str, dict[tuple[str, ...], _Buckets]] = {}
        self._seen: dict[str, float] = {}  # of counters that another process keeps: what it said last
        self._times: dict[tuple[str, ...], Times] = {}
        for row in TABLE:
            starts = row.values or (((),) if not row.labels else ())
            if row.kind == "histogram":
                self._buckets[row.name] = {labels: _Buckets(row.buckets) for labels in starts}
            else:
                self._numbers[row.name] = dict.fromkeys(starts, 0.0)

    def add(self, name: str, amount: float, *labels: str) -> None:
        numbers = self._numbers[name]
        numbers[labels] = numbers.get(labels, 0.0) + amount

    def set(self, name: str, value: float, *labels: str) -> None:
        self._numbers[name][labels] = value

    def only(self, name: str, value: float, *labels: str) -> None:
        """Set, and forget other labels: of a metric whose labels are the news."""
        self._numbers[name] = {labels: value}

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        buckets = self._buckets[name].get(labels)
        if buckets is None:
            buckets = self._buckets[name][labels] = _Buckets(self._rows[name].buckets)
        buckets.counts[bisect_left(buckets.bounds, value)] += times
        buckets.sum += value * times

    def follow(self, name: str, total: float, *labels: str) -> None:
        """A counter that the engine keeps. After a restart it counts from 0; ours goes on."""
        key = "\0".join((name, *labels))
        last = self._seen.get(key, 0.0)
        self.add(name, total - last if total >= last else total, *labels)
        self._seen[key] = total

    def follow_times(self, name: str, times: Times, *labels: str) -> None:
        """A histogram that the engine keeps, with this metric's bounds."""
        key = (name, *labels)
        last = self._times.get(key)
        buckets = self._buckets[name].setdefault(labels, _Buckets(self._rows[name].buckets))
        assert tuple(times.bounds) == tuple(buckets.bounds)
        for n, count in enumerate(times.counts):
            buckets.counts[n] += count - (last.counts[n] if last is not None else 0)
        buckets.sum += times.sum - (last.sum if last is not None else 0.0)
        self._times[key] = times

    def forget(self) -> None:
        """A new engine process counts from 0."""
        self._seen.clear()
        self._times.clear()

    def value(self, name: str, *labels: str) -> float:
        return self._numbers[name].get(labels, 0.0)

    def collect(self) -> Iterator[Metric]:
        for row in TABLE:
            labels = ("model", *row.labels)
            if row.kind == "histogram":
                histogram = HistogramMetricFamily(row.full_name, row.help, labels=labels)
                for values, buckets in list(self._buckets[row.name].items()):
                    histogram.add_metric((self.model, *values), buckets.pairs(), sum_value=buckets.sum)
                yield histogram
                continue
            kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            family = kind(row.full_name, row.help, labels=labels)
            for values, number in list(self._numbers[row.name].items()):
                family.add_metric((self.model, *values), number)
            yield family

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self)
