"""Rules of every request (W1–W9) and of errors (E1–E3)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from phloem.runtime.errors import GrammarDeadEnd, NumericalError
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.errors import ApiError, escaped, failure_of, shown
from tests.serve.serving import Server, events, scripted_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def error(reply: Any, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, "E1"
    assert len(body["error"]["message"]) <= 500
    assert reply.headers["x-request-id"].startswith("req_")
    return body["error"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", ['"5"', "5.0", "true", "5.5", "1e3", "[5]"])
@pytest.mark.case("C-API-16")
def test_w1_only_an_integer_is_an_integer(server: Server, value: str) -> None:
    found = error(server.post(TEXT, f'{{"prompt": "hi", "max_tokens": {value}}}'))
    assert (found["code"], found["param"]) == ("invalid_type", "max_tokens")


@pytest.mark.parametrize(
    "text",
    [b'{"prompt": "hi", "temperature": NaN}', b'{"prompt": "hi", "temperature": 1e400}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}',
     b'{"prompt": "hi"', b"", b"[]", b"null", b'"x"', b'{"prompt": "hi", "metadata": "\\udc00"}', b'{"prompt": "hi", "x": Infinity}',
     b'{"prompt": "hi", "seed": 99999999999999999999}', b'{"prompt": "hi"} trailing', b"\x00", b'{"prompt": "hi", "logit_bias": {"5": 1e999}}'],
)  # fmt: skip
def test_w1_what_is_no_json_or_no_number_is_400(server: Server, text: bytes) -> None:
    error(server.post(TEXT, text))


def test_w1_null_equals_absent(server: Server) -> None:
    names = [
        f
        for f in json.loads(server.get("/openapi.json").text)["components"]["schemas"]["Chat"]["properties"]
        if f != "messages"
    ]
    reply = server.chat("hi", **{**dict.fromkeys(names), "temperature": 0, "seed": 3})
    assert reply.status_code == 200
    assert reply.json()["choices"] == server.chat("hi", seed=3).json()["choices"]


def test_w2_strict_params_refuses_unknown_names() -> None:
    server = scripted_server(ServerConfig(strict_params=True))
    try:
        found = error(server.complete("hi", nonsense=1))
        assert (found["code"], found["param"]) == ("unsupported_parameter", "nonsense")
        assert server.complete("hi", user="u").headers["x-phloem-ignored-params"] == "user"
        assert error(server.chat(messages=[{"role": "user", "content": "x", "foo": 1}]))["param"] == "messages.foo"
        server.assert_idle()
    finally:
        server.close()


def test_w3_one_warning_a_name(server: Server) -> None:
    server.host._warned.clear()
    for _ in range(3):
        server.complete("hi", user="u")
    assert len(server.watcher.warnings) == 1 and "'user'" in server.watcher.warnings[0]


def test_w3_at_most_32_names_are_listed_and_none_forges_a_header(server: Server) -> None:
    reply = server.complete("hi", **{f"x{i:03}": 1 for i in range(100)}, **{"a\r\nset-cookie: b": 1})
    assert reply.status_code == 200
    names = reply.headers["x-phloem-ignored-params"].split(", ")
    assert len(names) == 32 and names[0] == "a%0D%0Aset-cookie%3A%20b" and "set-cookie" not in reply.headers


def test_w3_what_is_clipped_is_told(server: Server) -> None:
    reply = server.complete("hi", max_tokens=1_000_000, n=2)
    assert reply.status_code == 200
    room = 2048 - 6
    assert reply.headers["x-phloem-warnings"] == f"max_tokens.clipped={room}"


@pytest.mark.case("C-SAMP-12", "C-LOAD-11")
@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": "x"}, {"repetition_penalty": 1e9}, {"regex": "(?=a)b"},
     {"messages": [{"role": "user", "content": None}]}, {"stop": [""]}, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nope"}}}},
     {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"type": "function", "function": {"name": "g"}}}, {"model": "other"}],
)  # fmt: skip
def test_w4_a_stream_is_refused_as_a_whole_reply_is(server: Server, fields: dict[str, Any]) -> None:
    whole, stream = server.chat("hi", **fields), server.chat("hi", stream=True, **fields)
    assert whole.status_code == stream.status_code and whole.status_code in (400, 404), whole.text
    assert whole.json() == stream.json()
    assert stream.headers["content-type"] == "application/json"
    assert server.chat("hi").status_code == server.chat("hi", stream=True).status_code == 200


@pytest.mark.case("C-API-16")
def test_w7_spellings_may_repeat_but_not_contradict(server: Server) -> None:
    assert server.complete("hello", max_tokens=3, max_new_tokens=3).json()["usage"]["completion_tokens"] == 3
    assert error(server.complete("hello", max_tokens=3, max_new_tokens=4))["code"] == "conflicting_parameters"
    assert error(server.complete("hello", seed=1, sampling_seed=2))["param"] == "sampling_seed"
    for fields, length in (({"max_completion_tokens": 3}, 3), ({"max_tokens": 3}, 3), ({"max_completion_tokens": 3, "max_tokens": 7}, 3),
                           ({"max_completion_tokens": 7, "max_tokens": 3}, 6), ({"max_completion_tokens": None, "max_tokens": 2}, 2)):  # fmt: skip
        for stream in (False, True):
            reply = server.chat(
                "hello", **fields, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
            )
            usage = events(reply.text)[-2]["usage"] if stream else reply.json()["usage"]
            assert usage["completion_tokens"] == length, fields


def test_w8_ids(server: Server) -> None:
    chat, text = server.chat("a"), server.complete("a")
    name = re.fullmatch(r"req_([0-9A-Za-z]{22})", chat.headers["x-request-id"])
    assert name is not None and chat.json()["id"] == f"chatcmpl-{name[1]}"
    assert text.json()["id"] == f"cmpl-{text.headers['x-request-id'][4:]}"
    stream = server.chat("a", stream=True, headers={"x-request-id": "theirs\x7f"})
    assert {e["id"] for e in events(stream.text)[:-1]} == {f"chatcmpl-{stream.headers['x-request-id'][4:]}"}
    assert server.watcher.records[-1].client_id == "theirs\x7f"


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (TEXT, '{"prompt": "' + "x" * (8 << 20) + '"}', 413, "request_too_large"),
        (TEXT, '{"prompt": "hi", "metadata": ' + "[" * 64 + "]" * 64 + "}", 400, "invalid_json"),
        (TEXT, '{"prompt": "hi", "metadata": ' + "[" * 100_000 + "]" * 100_000 + "}", 400, "invalid_json"),
        (TEXT, "[" * 100_000, 400, "invalid_type"),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": "x"}] * 8193}), 400, "invalid_value"),
        (TEXT, json.dumps({"prompt": ["x"] * 1025}), 400, "invalid_value"),
        (TEXT, json.dumps({"prompt": "x", "n": 129}), 400, "invalid_value"),
        (TEXT, json.dumps({"prompt": ["x"] * 100, "n": 41, "max_tokens": 1}), 400, "invalid_value"),
        (CHAT, json.dumps({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}), 400, "invalid_value"),
    ],
    ids=["body", "depth", "brackets", "open brackets", "messages", "prompts", "n", "prompts times n", "tools"],
)  # fmt: skip
@pytest.mark.case("C-OPS-14", "C-SCHED-08")
def test_w9_limits(server: Server, path: str, body: str, status: int, code: str) -> None:
    assert error(server.post(path, body), status)["code"] == code
    assert server.complete("hi").status_code == 200


def test_w9_what_is_at_the_limit_is_served(server: Server) -> None:
    nested = '{"prompt": "hi", "max_tokens": 1, "metadata": ' + "[" * 63 + "]" * 63 + "}"
    assert server.post(TEXT, nested).status_code == 200
    assert server.post(TEXT, '{"prompt": "' + "[{" * 500 + '", "max_tokens": 1}').status_code == 200, (
        "brackets in text are text"
    )


@pytest.mark.case("C-OPS-14")
def test_what_cannot_fit_is_refused_before_it_is_tokenised(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(type(server.model.tokenizer), "encode", never)
    for text in ("x" * 5_000_000, " " * 1_000_000, "é" * 200_000):
        for reply in (server.complete(prompt=text), server.chat(messages=[{"role": "user", "content": text}])):
            assert error(reply)["code"] == "context_length_exceeded"


def test_e1_messages_quote_little_and_show_nothing_of_ours(server: Server) -> None:
    found = error(server.post(TEXT, {"prompt": "x", "model": "\x1b[31m" + "é\u2028" * 5000}), 404)
    assert "\x1b" not in found["message"] and "\\x1b[31m" in found["message"]
    for reply in (server.post("/etc/passwd"), server.get("/v1/chat/completions"), server.get("/v1/models/../../x")):
        assert "/work/" not in reply.text and "Traceback" not in reply.text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nope", 404, "not_found"), ("GET", CHAT, 405, "method_not_allowed"), ("DELETE", "/v1/models", 405, "method_not_allowed"),
     ("GET", "/docs", 404, "not_found"), ("GET", "/v1/models/other", 404, "model_not_found"), ("POST", "/", 404, "not_found")],
)  # fmt: skip
def test_e1_also_where_no_handler_is(server: Server, method: str, path: str, status: int, code: str) -> None:
    assert error(server.request(method, path), status)["code"] == code


def test_no_route_redirects(server: Server) -> None:
    for path in ("/v1/models", "/v1/models/", "/health/", "/version/"):
        assert server.get(path).status_code == 200
    assert server.post("/v1/completions/", prompt="[[hi]]", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("problem", "status", "code", "headers"),
    [
        (ApiError(429, "engine_overloaded", "x"), 429, "engine_overloaded", {"retry-after": "7", "retry-after-ms": "7000"}),
        (ApiError(503, "loading", "x"), 503, "loading", {"retry-after": "7", "retry-after-ms": "7000"}),
        (ApiError(409, "busy", "x"), 409, "busy", {"x-should-retry": "false"}),
        (ApiError(400, "invalid_value", "x"), 400, "invalid_value", {}),
        (NumericalError("x"), 500, "non_finite_logits", {"x-should-retry": "false"}),
        (GrammarDeadEnd("x"), 500, "grammar_dead_end", {"x-should-retry": "false"}),
        (ValueError("/secret/path"), 500, "internal_error", {"x-should-retry": "false"}),
    ],
)  # fmt: skip
def test_e2_e3_the_status_is_the_exceptions_own(problem: Exception, status: int, code: str, headers: dict[str, str]) -> None:
    failure = failure_of(problem, retry_after=7)
    assert (failure.status, failure.code, failure.headers) == (status, code, headers)
    assert b"secret" not in failure.body


def test_e2_retry_after_is_1_to_60() -> None:
    assert failure_of(ApiError(429, "engine_overloaded", "x"), retry_after=1000).headers["retry-after"] == "60"
    assert failure_of(ApiError(429, "engine_overloaded", "x"), retry_after=0).headers["retry-after"] == "1"


def test_g7_what_is_shown_is_escaped_and_cut() -> None:
    assert escaped("a\x1b[1m\u2028\n\x9b") == "a\\x1b[1m\\u2028\\x0a\\x9b"
    assert len(shown("x" * 1000)) == 80


def test_e3_a_bug_of_ours_is_500_with_the_id_and_its_trace_goes_to_the_log(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("boom /work/secret")

    monkeypatch.setattr("phloem.runtime.serve.completions.prompts_of", broken)
    reply = server.complete("hi")
    found = error(reply, 500)
    assert found["code"] == "internal_error" and "boom" not in reply.text
    (failure,) = server.watcher.failures
    assert isinstance(failure, RuntimeError)
    server.watcher.failures.clear()
    assert server.watcher.records[-1].status == 500
