"""server §11: every metric that a board or a rule names exists; counters add up; lines cannot be forged; spans say what happened."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from phloem.runtime.engine import wire
from phloem.runtime.engine.child import Watched
from phloem.runtime.engine.stats import EngineStats
from phloem.runtime.errors import ConfigError
from phloem.runtime.request import GrammarSpec, Request, SamplingParams
from phloem.runtime.serve.compat import NAMES, compat_text
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.host import RequestRecord
from phloem.runtime.serve.logs import Log, escaped
from phloem.runtime.serve.metrics import TABLE, Store
from phloem.runtime.serve.observe import Monitor, finish_word
from phloem.runtime.serve.spans import Spans, export_to
from tests.serve.child_parts import scripted, tokenizer_folder

ROOT = Path(__file__).resolve().parents[2]


def monitor(log: io.StringIO | None = None, **config: Any) -> Monitor:
    settings = ServerConfig(**config)
    stream = log if log is not None else io.StringIO()
    return Monitor(settings, "m", log=Log(settings.log_level, settings.log_format, stream))


def record(**fields: Any) -> RequestRecord:
    known: dict[str, Any] = {
        "id": "req_1",
        "endpoint": "/v1/completions",
        "arrived": 10.0,
        "submitted": 10.1,
        "ended": 12.0,
        "status": 200,
    }
    return RequestRecord(**{**known, **fields})  # fmt: skip


def exported(text: bytes) -> set[str]:
    """The names of all series, as a query would spell them."""
    found = set()
    for family in text_string_to_metric_families(text.decode()):
        found |= {sample.name for sample in family.samples}
    return found


def named(text: str) -> set[str]:
    return set(re.findall(r"\bphloem_[a-z_0-9]+", text))


# ------------------------------------------------------------------------------------------------------------------ boards, rules


def names_of_everything() -> set[str]:
    m = monitor()
    m.request(record(gaps=array("d", [0.1]), gap_tokens=array("q", [1]), first_token=11.0))
    m.store.set("startup_seconds", 1.0, "total")
    m.store.only("build_info", 1, "1", "cpu", "avx2", "abcd")
    m.store.only("config_info", 1, *["x"] * 8)
    m.request(record(status=400, code="invalid_value"))
    return exported(m.metrics())


def test_a_board_or_a_rule_names_no_metric_that_is_not_there() -> None:
    known = names_of_everything()
    for file in (*sorted((ROOT / "observability").rglob("*.json")), ROOT / "observability" / "alerts.yaml"):
        used = named(file.read_text())
        assert used and used <= known, (file, used - known)


def test_each_metric_is_on_the_board() -> None:
    used = named((ROOT / "observability/grafana/phloem.json").read_text())
    for row in TABLE:
        assert row.full_name in used or f"{row.full_name}_bucket" in used, row.name


def test_kv_utilisation_and_preemptions_have_alerts() -> None:
    rules = yaml.safe_load((ROOT / "observability/alerts.yaml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    text = " ".join(rule["expr"] for rule in alerts)
    for name in ("phloem_kv_cache_usage_ratio", "phloem_preemptions_total", "phloem_engine_up", "phloem_num_requests_waiting"):
        assert name in text
    assert all({"summary", "action"} <= set(rule["annotations"]) for rule in alerts)
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    assert set(re.findall(r"phloem:[a-z0-9_:]+", text)) <= recorded


def test_the_board_is_well_formed() -> None:
    board = json.loads((ROOT / "observability/grafana/phloem.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_table_of_metrics_is_the_one_that_is_documented() -> None:
    """server §11."""
    names = {row.name for row in TABLE}
    assert names >= {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "kv_tokens", "radix_nodes", "prompt_tokens_total",
        "generation_tokens_total", "evicted_tokens_total", "discarded_tokens_total", "requests_total", "rejected_requests_total",
        "ignored_params_total", "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds", "step_seconds", "step_tokens",
        "device_seconds_total", "device_stall_seconds_total",
        "grammar_compile_seconds", "grammar_fill_seconds", "grammar_compile_total", "preemptions_total",
        "invariant_repairs_total", "structured_output_violations_total", "engine_restarts_total", "engine_up",
        "engine_last_step_age_seconds", "startup_seconds", "build_info", "config_info",
    }  # fmt: skip
    assert len(names) == len(TABLE)
    for row in TABLE:
        assert row.name.endswith("_total") == (row.kind == "counter"), row
        assert bool(row.buckets) == (row.kind == "histogram"), row
        assert list(row.buckets) == sorted(set(row.buckets)), row


# ------------------------------------------------------------------------------------------------------------------ counting


@pytest.mark.case("C-OPS-12")
def test_counters_add_up_to_the_usages() -> None:
    """server.O1: aborted requests count with what they were sent; a refused one is no success; n counts once."""
    m = monitor()
    usages = [(10, 4, 7, 2), (3, 0, 5, 0), (8, 8, 1, 1), (20, 0, 3, 0)]
    finishes: list[list[str]] = [["stop"], ["length", "stop", "length"], ["abort"], ["length"]]
    for (prompt, cached, completion, forced), finish in zip(usages, finishes):
        m.request(
            record(
                prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion, forced_tokens=forced, finish=finish
            )
        )
    m.request(record(status=400, code="invalid_value", submitted=None))
    store = m.store
    assert store.value("prompt_tokens_total", "computed") + store.value("prompt_tokens_total", "cached") == sum(
        u[0] for u in usages
    )
    assert store.value("prompt_tokens_total", "cached") == 12
    assert store.value("generation_tokens_total", "sampled") + store.value("generation_tokens_total", "forced") == 16
    for word, count in (("stop", 1), ("length", 1), ("abort", 1), ("mixed", 1)):
        assert store.value("requests_total", "/v1/completions", "200", word) == count
    assert store.value("requests_total", "/v1/completions", "400", "none") == 1
    assert store.value("rejected_requests_total", "invalid_value") == 1


def test_an_itl_is_of_tokens_not_of_deltas() -> None:
    m = monitor()
    m.request(record(first_token=10.5, gaps=array("d", [0.3, 0.02]), gap_tokens=array("q", [3, 1])))
    lines = m.metrics().decode()
    assert 'phloem_inter_token_latency_seconds_count{model="m"} 4.0' in lines
    assert 'phloem_inter_token_latency_seconds_sum{model="m"} 0.32' in lines
    assert 'phloem_inter_token_latency_seconds_bucket{le="0.1",model="m"} 4.0' in lines


def beat(**stats: Any) -> wire.Beat:
    return wire.Beat(EngineStats(**stats), pages_leased=2, waiting_grammar=1, waiting_preempted=2, dropped_frames=0)


def test_gauges_say_what_is_held_and_counters_survive_a_restart() -> None:
    m = monitor()
    m._page_size = 16
    held = {"running": 3, "waiting": 7, "pages_free": 10, "pages_tree": 6, "pages_live": 4, "held_pages": 1}
    m.outputs(
        wire.Outputs(
            1, [(0.2, 40)], [], beat=beat(**held, preemptions=5, evicted_pages=2, device_seconds=1.5, device_stall_seconds=0.25)
        )
    )
    value = m.store.value
    assert (value("device_seconds_total"), value("device_stall_seconds_total")) == (1.5, 0.25)
    assert value("num_requests_running") == 3
    assert [value("num_requests_waiting", r) for r in ("queue", "grammar", "preempted")] == [4, 1, 2]
    assert value("kv_cache_usage_ratio") == 6 / 20  # live and leased, not what is only cached
    tokens = [value("kv_tokens", s) for s in ("used", "pinned", "evictable", "free")]
    assert tokens == [96, 16, 48, 160] and sum(tokens) == 20 * 16
    assert (value("preemptions_total"), value("evicted_tokens_total")) == (5, 32)
    m.outputs(wire.Outputs(2, [], [], beat=beat(preemptions=6)))
    assert value("preemptions_total") == 6
    m.died()
    m.outputs(wire.Outputs(1, [], [], beat=beat(preemptions=2)))  # a new engine counts from 0
    assert value("preemptions_total") == 8
    assert b'phloem_step_tokens_bucket{le="64",model="m"} 1.0' in m.metrics()


def test_an_unknown_metric_is_an_error() -> None:
    with pytest.raises(KeyError):
        Store("m").add("no_such_total", 1)


def test_finish_words_are_a_closed_set() -> None:
    assert [finish_word(f) for f in ([], ["stop"], ["stop", "length"], ["made up"])] == ["none", "stop", "mixed", "error"]


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_headline_metrics_under_other_names(style: Any) -> None:
    """server.O1: the same numbers."""
    m = monitor(metrics_compat=style)
    m.request(record(prompt_tokens=9, cached_tokens=4, completion_tokens=2, first_token=11.0))
    text = m.metrics().decode()
    assert exported(m.metrics()) > exported(compat_text(style, m.store))
    total, cached = {"vllm": ("vllm:prompt_tokens_total", "vllm:prefix_cache_hits_total"), "sglang": ("sglang:prompt_tokens_total", "sglang:cached_tokens_total")}[style]  # fmt: skip
    assert f'{total}{{model_name="m"}} 9.0' in text and f'{cached}{{model_name="m"}} 4.0' in text
    assert f'{style}:time_to_first_token_seconds_count{{model_name="m"}} 1.0' in text
    assert {entry.source for entry in NAMES[style]} <= {row.name for row in TABLE}


# ------------------------------------------------------------------------------------------------------------------ log lines


def line_of(form: str = "text", **fields: Any) -> str:
    stream = io.StringIO()
    log = Log("info", form, stream)  # type: ignore[arg-type]
    log.put("info", "request", fields)
    log.put("debug", "unseen", {})
    log.close()
    return stream.getvalue()


def test_a_request_has_one_line_with_its_figures() -> None:
    """server.O3."""
    stream = io.StringIO()
    m = monitor(stream)
    m.request(
        record(
            model="smollm2", stream=True, finish=["stop"], prompt_tokens=5, cached_tokens=1, completion_tokens=3, first_token=10.5,
            gaps=array("d", [0.02, 0.04]), gap_tokens=array("q", [1, 1]), key="team", grammar="regex", queue_seconds=0.25, preemptions=0,
        )
    )  # fmt: skip
    m.close()
    line = stream.getvalue()
    assert line.count("\n") == 1
    fields = dict(word.split("=", 1) for word in line.split()[2:])
    assert fields == {
        "event": "request", "id": "req_1", "key": "team", "endpoint": "/v1/completions", "model": "smollm2", "stream": "true", "status": "200",
        "finish": "stop", "prompt": "5", "cached": "1", "completion": "3", "forced": "0", "queue_ms": "250", "ttft_ms": "500",
        "itl_p50_ms": "30", "e2e_ms": "2000", "preemptions": "0", "grammar": "regex",
    }  # fmt: skip


def test_engine_lines_come_at_most_once_a_second_and_only_when_something_moved() -> None:
    """server.O3."""
    stream, now = io.StringIO(), [0.0]
    m = Monitor(ServerConfig(), "m", log=Log("info", "text", stream), clock=lambda: now[0])
    for n in range(40):
        now[0] += 0.1
        busy = n < 20
        m.outputs(wire.Outputs(n, [], [], beat=beat(prefill_tokens=min(n, 20) * 5, decode_tokens=min(n, 20), running=busy)))
    m.close()
    lines = stream.getvalue().splitlines()
    prefills = [line for line in lines if "event=prefill" in line]
    assert 1 <= len(prefills) <= 3
    assert sum(int(re.findall(r"new_tok=(\d+)", line)[0]) for line in prefills) == 100
    assert all("tok_s=" in line for line in lines if "event=decode" in line)


@settings(deadline=None)
@given(st.text(max_size=300))
def test_no_value_can_end_a_line_or_look_like_a_field(text: str) -> None:
    """server.G7."""
    line = line_of(client_id=text)
    assert line.count("\n") == 1
    body = line.rstrip("\n")
    assert not set(body) & {chr(c) for c in (*range(32), *range(127, 160), 0x2028, 0x2029, 0x202E, 0x2066)}
    assert body.count("event=") == 1 + text[:128].count("event=")
    assert len(body) < 128 * 6 + 100
    parsed = json.loads(line_of("json", client_id=text) or "{}")
    assert set(parsed) <= {"ts", "level", "event", "client_id"}


def test_escaping() -> None:
    assert escaped('a\nb\x1b[31m"\\\u2028\u202e') == 'a\\x0ab\\x1b[31m\\"\\\\\\u2028\\u202e'
    assert escaped("é → 漢") == "é → 漢"
    assert len(escaped("x" * 1000)) == 129


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log = Log(stream=Broken())
    for n in range(100):
        log.put("info", "request", {"n": n})
    log.close()


def test_prompts_are_logged_only_if_asked_for() -> None:
    """server.G7."""
    for wanted in (False, True):
        stream = io.StringIO()
        m = monitor(stream, log_prompts=wanted)
        m.request(record(text="my secret"))
        m.close()
        assert ("my secret" in stream.getvalue()) == wanted


def test_a_bug_of_ours_leaves_its_trace_in_one_line() -> None:
    stream = io.StringIO()
    m = monitor(stream)
    try:
        raise ZeroDivisionError("one\nover nought")
    except ZeroDivisionError as error:
        m.failed("req_9", error)
    m.close()
    assert stream.getvalue().count("\n") == 1 and "test_observe.py" in stream.getvalue() and "id=req_9" in stream.getvalue()


# ------------------------------------------------------------------------------------------------------------------ spans


class Told:
    """A provider, tracer and span that remember."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def get_tracer(self, *names: Any, **more: Any) -> Told:
        return self

    def start_span(self, name: str, context: Any = None, kind: Any = None, start_time: int = 0) -> Any:
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, get_current_span

        told = {"name": name, "parent": get_current_span(context).get_span_context().span_id, "start": start_time, "attributes": {}, "events": []}  # fmt: skip
        self.spans.append(told)
        number = len(self.spans)

        class Span(NonRecordingSpan):
            def is_recording(self) -> bool:
                return True

            def set_attribute(self, key: str, value: Any) -> None:
                told["attributes"][key] = value

            def set_attributes(self, attributes: Any) -> None:
                told["attributes"].update(attributes)

            def set_status(self, status: Any, description: Any = None) -> None:
                told["status"] = status.status_code.name

            def add_event(self, name: str, attributes: Any = None, timestamp: Any = None) -> None:
                told["events"].append(name)

            def end(self, end_time: int | None = None) -> None:
                told["end"] = end_time

        return Span(SpanContext(1, number, is_remote=False, trace_flags=TraceFlags(1)))


def test_a_request_is_a_span_with_its_stages() -> None:
    """server.O2."""
    told = Told()
    r = record(
        endpoint="/v1/chat/completions", model="smollm2", started_at=1000.0, first_token=11.0, queue_seconds=0.4, preemptions=2, finish=["stop"],
        trace="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", prompt_tokens=7, cached_tokens=3, completion_tokens=4,
        params={"temperature": 0.5, "max_tokens": 9},
    )  # fmt: skip
    Spans(told).request(r)
    root, *stages = told.spans
    assert root["name"] == "chat smollm2" and root["parent"] == 0xB7AD6B7169203331
    assert (root["start"], root["end"]) == (1000 * 10**9, 1002 * 10**9)
    assert root["events"] == ["preempted"]
    assert root["attributes"].items() >= {
        "gen_ai.operation.name": "chat", "gen_ai.request.temperature": 0.5, "gen_ai.request.max_tokens": 9, "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 4, "gen_ai.usage.cache_read.input_tokens": 3, "gen_ai.response.finish_reasons": ("stop",),
        "http.response.status_code": 200,
    }.items()  # fmt: skip
    assert [s["name"] for s in stages] == ["queue", "prefill", "decode"] and {s["parent"] for s in stages} == {1}
    ends = [round((s["end"] - 1000 * 10**9) / 1e9, 6) for s in stages]
    assert ends == [0.5, 1.0, 2.0]


def test_compiling_and_each_chunk_of_a_prompt_are_spans() -> None:
    """server.O2."""
    told = Told()
    r = record(
        started_at=1000.0, first_token=11.0, queue_seconds=0.4, compile_seconds=0.3, finish=["stop"], chunks=[(0.4, 0.6), (0.6, 0.85)]
    )  # fmt: skip
    Spans(told).request(r)
    offset = 1000 - r.arrived
    spans = [(s["name"], round(s["start"] / 1e9 - offset - (r.submitted or 0), 3), round(s["end"] / 1e9 - offset - (r.submitted or 0), 3)) for s in told.spans[1:]]  # fmt: skip
    assert spans[:4] == [("grammar.compile", 0, 0.3), ("queue", 0, 0.4), ("prefill", 0.4, 0.6), ("prefill", 0.6, 0.85)]
    assert [name for name, _, _ in spans[4:]] == ["decode"]


def test_the_engine_tells_how_long_a_grammar_was_compiled(tmp_path: Path) -> None:
    """Once: the second time the compiled one is there."""

    class Quiet:
        def stage(self, stage: str) -> None: ...
        def opened(self, opened: Any) -> None: ...

    made = scripted({"directory": str(tokenizer_folder(tmp_path))}, Quiet())
    watched, seconds = Watched(made.core, made.grammars), []
    for name in ("first", "again"):
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        watched.add(
            Request(id=name, token_ids=(65, 66), sampling=sampling, grammar=GrammarSpec(kind="regex", source="[ab]{3}"))
        )
        while watched.has_work:
            watched.step(time.monotonic())
        seconds.append(watched.take_timings()[name].compile)
    made.close()
    assert seconds[0] is not None and 0 < seconds[0] < 60 and seconds[1] is None


def test_a_failure_is_the_span_s_error() -> None:
    told = Told()
    Spans(told).request(record(status=503, code="engine_dead", submitted=None))
    assert told.spans[0]["status"] == "ERROR" and told.spans[0]["attributes"]["error.type"] == "engine_dead"
    assert len(told.spans) == 1


def test_without_an_sdk_nothing_is_recorded_and_nothing_is_needed() -> None:
    Spans().request(record(trace="nonsense"))


def test_an_endpoint_without_the_sdk_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="opentelemetry-sdk"):
        export_to("http://127.0.0.1:4318/v1/traces", {})
