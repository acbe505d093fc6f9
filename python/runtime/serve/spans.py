"""OpenTelemetry spans of a request, made at its end from its times (O2). The API alone: without an SDK nothing is recorded.

    chat smollm2 (SERVER) ─┬─ grammar.compile, queue ─ prefill (one a chunk) ─ decode        event: preempted
                           └─ parent: the client's traceparent

Names follow the GenAI conventions as they stand; they still move, so they stand here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from phloem.runtime.errors import ConfigError
from phloem.runtime.serve.host import RequestRecord

__all__ = ["Spans", "export_to"]

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/generate": "text_completion"}
REQUEST = {
    "max_tokens": "gen_ai.request.max_tokens", "temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k", "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty", "seed": "gen_ai.request.seed", "n": "gen_ai.request.choice.count",
}  # fmt: skip
OPERATION, MODEL, RESPONSE_MODEL = "gen_ai.operation.name", "gen_ai.request.model", "gen_ai.response.model"
RESPONSE_ID, FINISH, PROVIDER = "gen_ai.response.id", "gen_ai.response.finish_reasons", "gen_ai.provider.name"
INPUT, OUTPUT, CACHED = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens"
STATUS, ERROR, ROUTE = "http.response.status_code", "error.type", "http.route"


class Spans:
    """provider: for tests; else the one that the program has set up, which by default records nothing."""

    def __init__(self, provider: Any = None) -> None:
        self._tracer = trace.get_tracer("phloem", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()

    def request(self, record: RequestRecord) -> None:
        def ns(moment: float) -> int:
            return int((record.started_at + moment - record.arrived) * 1e9)

        parent = self._propagator.extract({"traceparent": record.trace}) if record.trace else None
        operation = OPERATIONS.get(record.endpoint, "generate")
        span = self._tracer.start_span(
            f"{operation} {record.model}", context=parent, kind=SpanKind.SERVER, start_time=ns(record.arrived)
        )
        if not span.is_recording():
            return
        span.set_attributes(_attributes(record, operation))
        if record.status >= 400:
            span.set_attribute(ERROR, record.code or str(record.status))
            if record.status >= 500:
                span.set_status(Status(StatusCode.ERROR, record.code))
        inside = trace.set_span_in_context(span)
        for name, start, end in _stages(record):
            self._tracer.start_span(name, context=inside, start_time=ns(start)).end(ns(end))
        if record.preemptions:
            span.add_event("preempted", {"count": record.preemptions}, timestamp=ns(record.ended))
        span.end(ns(record.ended))


def _attributes(record: RequestRecord, operation: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        OPERATION: operation,
        PROVIDER: "phloem",
        MODEL: record.model,
        RESPONSE_MODEL: record.model,
        RESPONSE_ID: record.id,
        ROUTE: record.endpoint,
        STATUS: record.status,
        INPUT: record.prompt_tokens,
        OUTPUT: record.completion_tokens,
        CACHED: record.cached_tokens,
    }
    if record.finish:
        found[FINISH] = tuple(record.finish)
    for name, attribute in REQUEST.items():
        value = record.params.get(name)
        if isinstance(value, (int, float, str)):
            found[attribute] = value
    return found


def _stages(record: RequestRecord) -> list[tuple[str, float, float]]:
    """(name, start, end) of what the request went through, as far as it came."""
    if record.submitted is None:
        return []
    stages, at = [], record.submitted
    if record.compile_seconds is not None:  # while it waits
        stages.append(("grammar.compile", at, at + record.compile_seconds))
    if record.queue_seconds is not None:
        stages.append(("queue", at, at + record.queue_seconds))
        at += record.queue_seconds
    if record.first_token is not None:
        at = min(at, record.first_token)
        chunks = [(record.submitted + begin, record.submitted + end) for begin, end in record.chunks] or [
            (at, record.first_token)
        ]
        stages += [("prefill", begin, end) for begin, end in chunks]
        stages.append(("decode", record.first_token, record.ended))
    return stages


def export_to(endpoint: str, resource: Mapping[str, str]) -> tuple[Any, Callable[[], None]]:
    """(a provider that sends spans there, what ends it). Raises ConfigError without OpenTelemetry's SDK and its OTLP exporter."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # type: ignore[import-not-found,unused-ignore]
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # type: ignore[import-not-found,unused-ignore]
        from opentelemetry.sdk.trace import TracerProvider  # type: ignore[import-not-found,unused-ignore]
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry's SDK: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http.",
            param="otlp_endpoint",
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "phloem", **resource}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider, provider.shutdown
