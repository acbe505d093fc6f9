"""The headline metrics under vLLM's or SGLang's names, for boards, autoscalers and gateways that ask for those (O1).

Same numbers, other names: each entry is one of our metrics, or a few lines of arithmetic on them. Labels are `model_name` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from phloem.runtime.serve.metrics import Store

__all__ = ["NAMES", "compat_text"]


@dataclass(frozen=True, slots=True)
class As:
    """name: theirs.   source: our metric.   labels: which of its series count; () sums all."""

    name: str
    source: str
    labels: tuple[str, ...] = ()


NAMES: dict[Literal["vllm", "sglang"], tuple[As, ...]] = {
    "vllm": (
        As("vllm:num_requests_running", "num_requests_running"),
        As("vllm:num_requests_waiting", "num_requests_waiting"),
        As("vllm:kv_cache_usage_perc", "kv_cache_usage_ratio"),  # theirs is a ratio, too
        As("vllm:prompt_tokens_total", "prompt_tokens_total"),
        As("vllm:generation_tokens_total", "generation_tokens_total"),
        As("vllm:prefix_cache_queries_total", "prompt_tokens_total"),
        As("vllm:prefix_cache_hits_total", "prompt_tokens_total", ("cached",)),
        As("vllm:num_preemptions_total", "preemptions_total"),
        As("vllm:request_success_total", "requests_total", ("200",)),
        As("vllm:time_to_first_token_seconds", "time_to_first_token_seconds"),
        As("vllm:inter_token_latency_seconds", "inter_token_latency_seconds"),
        As("vllm:time_per_output_token_seconds", "inter_token_latency_seconds"),
        As("vllm:e2e_request_latency_seconds", "e2e_request_latency_seconds"),
        As("vllm:request_queue_time_seconds", "request_queue_time_seconds"),
        As("vllm:request_prefill_time_seconds", "request_prefill_time_seconds"),
        As("vllm:request_decode_time_seconds", "request_decode_time_seconds"),
        As("vllm:iteration_tokens_total", "step_tokens"),
    ),
    "sglang": (
        As("sglang:num_running_reqs", "num_requests_running"),
        As("sglang:num_queue_reqs", "num_requests_waiting", ("queue",)),
        As("sglang:num_grammar_queue_reqs", "num_requests_waiting", ("grammar",)),
        As("sglang:num_retracted_reqs", "num_requests_waiting", ("preempted",)),
        As("sglang:token_usage", "kv_cache_usage_ratio"),
        As("sglang:num_used_tokens", "kv_tokens", ("used",)),
        As("sglang:max_total_num_tokens", "kv_tokens"),
        As("sglang:prompt_tokens_total", "prompt_tokens_total"),
        As("sglang:cached_tokens_total", "prompt_tokens_total", ("cached",)),
        As("sglang:generation_tokens_total", "generation_tokens_total"),
        As("sglang:num_requests_total", "requests_total"),
        As("sglang:time_to_first_token_seconds", "time_to_first_token_seconds"),
        As("sglang:inter_token_latency_seconds", "inter_token_latency_seconds"),
        As("sglang:e2e_request_latency_seconds", "e2e_request_latency_seconds"),
        As("sglang:queue_time_seconds", "request_queue_time_seconds"),
    ),
}


class _Renamed:
    """A collector for prometheus_client."""

    def __init__(self, style: Literal["vllm", "sglang"], store: Store) -> None:
        self._style, self._store = style, store

    def collect(self) -> Iterator[Metric]:
        ours = {family.name.removeprefix("phloem_"): family for family in self._store.collect()}
        for entry in NAMES[self._style]:
            family = ours[entry.source.removesuffix("_total")]
            wanted = [s for s in family.samples if not entry.labels or set(entry.labels) <= set(s.labels.values())]
            names, values = ("model_name",), (self._store.model,)
            if family.type == "histogram":
                buckets = [(s.labels["le"], s.value) for s in wanted if s.name.endswith("_bucket")]
                total = sum(s.value for s in wanted if s.name.endswith("_sum"))
                histogram = HistogramMetricFamily(entry.name, family.documentation, labels=names)
                histogram.add_metric(values, buckets, sum_value=total)
                yield histogram
            else:
                kind = CounterMetricFamily if family.type == "counter" else GaugeMetricFamily
                number = kind(entry.name, family.documentation, labels=names)
                number.add_metric(values, sum(s.value for s in wanted))
                yield number


def compat_text(style: Literal["vllm", "sglang"], store: Store) -> bytes:
    """Prometheus text, to follow ours."""
    return generate_latest(_Renamed(style, store))
