"""Disconnects, full queues, slow readers (L7, L8), and the records that the log is made of."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from phloem.runtime.serve.config import ServerConfig
from tests.serve.serving import Loopback, Server, events, scripted_server


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Few run at once, few may wait."""
    made = scripted_server(ServerConfig(max_queue=6), max_running=2)
    yield made
    made.assert_idle()
    made.close()


@pytest.fixture(scope="module")
def socket_of_small(small: Server) -> Iterator[Loopback]:
    made = Loopback(small.app)
    yield made
    made.close()


def wait(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def opened(port: int, path: str, **fields: Any) -> socket.socket:
    body = json.dumps({"temperature": 0, **fields}).encode()
    made = socket.create_connection(("127.0.0.1", port), timeout=60)
    made.sendall(
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return made


LONG = {"prompt": f"[[{'x' * 1800}]]"[-1000:] + "[[" + "y" * 900 + "]]", "max_tokens": 900, "ignore_eos": True}


@pytest.mark.case("C-API-09")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 4])
def test_l7_a_client_that_leaves_aborts_its_samples(small: Server, socket_of_small: Loopback, stream: bool, n: int) -> None:
    small.watcher.records.clear()
    before = small.stats()
    for _ in range(3):
        connection = opened(socket_of_small.port, "/v1/completions", stream=stream, n=n, **LONG)
        if stream:
            connection.recv(10)
        else:
            wait(lambda: small.host.num_open == 1, "submitted")
        connection.close()
        wait(lambda: small.host.num_open == 0, "let go")
    small.assert_idle()
    after = small.stats()
    assert after.finished.get("abort", 0) - before.finished.get("abort", 0) == 3 * n
    assert [r.status for r in small.watcher.records] == [499] * 3
    assert all(r.finish == ["abort"] * n for r in small.watcher.records)
    assert small.complete("hi").json()["choices"][0]["text"] == "hi"


@pytest.mark.case("C-API-09")
def test_l7_also_while_it_waits_in_the_queue(small: Server, socket_of_small: Loopback) -> None:
    running = [opened(socket_of_small.port, "/v1/completions", stream=True, **LONG) for _ in range(2)]
    for connection in running:
        connection.recv(10)
    queued = opened(
        socket_of_small.port, "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], stream=True, max_tokens=5
    )
    wait(lambda: small.host.num_open == 3, "queued")
    queued.close()
    wait(lambda: small.host.num_open == 2, "let go")
    assert small.host.waiting == 0
    for connection in running:
        connection.close()
    small.assert_idle()


def test_l8_a_full_queue_is_429_before_anything_is_read(small: Server, socket_of_small: Loopback) -> None:
    held = [opened(socket_of_small.port, "/v1/completions", stream=True, **LONG) for _ in range(2)]
    for connection in held:
        connection.recv(10)
    waiting = [opened(socket_of_small.port, "/v1/completions", stream=True, **LONG) for _ in range(6)]
    wait(lambda: small.host.waiting == 6, "the queue is full")
    for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
        reply = small.post(path, b"this is never looked at")
        assert reply.status_code == 429
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "engine_overloaded")
        assert (
            1 <= int(reply.headers["retry-after"]) <= 60
            and reply.headers["retry-after-ms"] == reply.headers["retry-after"] + "000"
        )
    assert small.get("/health").status_code == small.get("/v1/models").status_code == 200
    for connection in held + waiting:
        connection.close()
    small.assert_idle()
    assert small.complete("hi").status_code == 200


def test_l8_prompt_tokens_count_too() -> None:
    server = scripted_server(ServerConfig(max_queue_tokens=1))
    try:
        server.host.waiting_tokens = 1
        assert server.complete("hi").status_code == 429
        server.host.waiting_tokens = 0
        assert server.complete("hi").status_code == 200
    finally:
        server.close()


def test_a_slow_reader_gets_all_of_it_in_larger_chunks(small: Server, socket_of_small: Loopback) -> None:
    """The engine goes on at its own pace; what nobody reads is merged."""
    said = "abcdefghij" * 20
    connection = http.client.HTTPConnection("127.0.0.1", socket_of_small.port, timeout=60)
    body = json.dumps({"prompt": f"[[{said}]]", "temperature": 0, "max_tokens": 700, "stream": True, "logprobs": 1})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    first = reply.read(100)
    wait(lambda: small.stats().running == 0, "the engine has long finished")
    text = (first + reply.read()).decode()
    connection.close()
    found = events(text)
    assert "".join(e["choices"][0]["text"] for e in found[:-1]) == said
    assert sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in found[:-1] if e["choices"][0]["logprobs"]) == len(said) + 1


def test_merging_keeps_text_ids_and_logprobs(small: Server) -> None:
    """A reader that looks once, at the end, sees one chunk with everything."""
    from phloem.runtime.serve.jobs import Wakeups

    class Late(Wakeups):
        def ring(self, job: Any) -> None:
            job._rung = False
            if job.num_over == len(job.samples):
                super().ring(job)

    async def made() -> Late:
        return Late()

    late = small.run(made())
    small.app.state.phloem.wakeups = {id(late.loop): late}
    try:
        stream = small.chat("hello", stream=True, logprobs=True, return_token_ids=True)
    finally:
        small.app.state.phloem.wakeups = {}
    whole = small.chat("hello", logprobs=True, return_token_ids=True).json()["choices"][0]
    chunks = [e["choices"][0] for e in events(stream.text)[:-1]]
    assert [c["delta"] for c in chunks] == [{"role": "assistant", "content": ""}, {"content": "hello"}, {}]
    assert chunks[1]["token_ids"] == whole["token_ids"] and chunks[1]["logprobs"] == whole["logprobs"]


def test_sse_pings_while_there_is_silence() -> None:
    server = scripted_server(ServerConfig(sse_ping=0.05), max_running=1)
    device = server.client._core.executor  # type: ignore[attr-defined]
    script = device.f
    device.f = lambda history, width: (time.sleep(0.2), script(history, width))[1]
    try:
        reply = server.chat("ab", stream=True)
        assert reply.text.startswith(": ping\n\n") and reply.text.count(": ping") >= 3
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events(reply.text)[:-1]) == "ab"
        assert ": ping" not in server.generate("ab", stream=True).text, "on /v1 only"
        refused = server.chat("ab", stream=True, temperature=-1)
        assert refused.status_code == 400
    finally:
        server.close()


def test_one_record_a_request(server: Server) -> None:
    server.chat("hello", n=3, temperature=0.5, seed=1, max_tokens=3)
    server.complete("hello", stream=True, regex="hello")
    server.complete("hello", temperature=-1)
    server.generate("hello", sampling={"max_new_tokens": 2})
    a, b, c, d = server.watcher.records
    assert (a.endpoint, a.status, a.stream, a.num_choices, a.finish, a.completion_tokens) == (
        "/v1/chat/completions",
        200,
        False,
        3,
        ["length"] * 3,
        9,
    )
    assert a.prompt_tokens == 28 and a.first_token is not None and a.arrived <= a.submitted <= a.first_token <= a.ended  # type: ignore[operator]
    assert len(a.gaps) == len(a.gap_tokens) == 6
    assert (b.endpoint, b.stream, b.grammar, b.finish, b.status) == ("/v1/completions", True, "regex", ["stop"], 200)
    assert (c.status, c.code, c.submitted) == (400, "invalid_value", None)
    assert (d.endpoint, d.finish, d.completion_tokens) == ("/generate", ["length"], 2)
    assert not server.watcher.others and all(r.text == "" for r in server.watcher.records), "prompts only under --log-prompts"


def test_prompts_are_logged_only_when_asked() -> None:
    server = scripted_server(ServerConfig(log_prompts=True))
    try:
        server.complete("secret")
        assert server.watcher.records[-1].text == "[[secret]]"
    finally:
        server.close()


def test_abort_all_ends_every_stream_with_an_error_event() -> None:
    server = scripted_server(ServerConfig(admin_key="admin"))
    replies: list[Any] = []
    try:
        threads = [
            threading.Thread(target=lambda s=s: replies.append(server.complete("x" * 900, max_tokens=1000, stream=s)))
            for s in (True, False)
        ]
        for thread in threads:
            thread.start()
        wait(
            lambda: server.host.num_open == 2 and server.host.waiting == 0 and server.answers == 1,
            "both run, the stream has begun",
        )
        reply = server.post("/abort_request", abort_all=True, headers={"authorization": "Bearer admin"})
        assert reply.json() == {"aborted": 2}
        for thread in threads:
            thread.join(60)
        server.assert_idle()
        stream = next(r for r in replies if r.status_code == 200)
        assert events(stream.text)[-2]["error"]["code"] == "request_aborted" and events(stream.text)[-1] == "[DONE]"
        assert next(r for r in replies if r.status_code == 503).json()["error"]["code"] == "request_aborted"
    finally:
        server.close()


@pytest.mark.case("C-RL-03")
def test_flush_waits_for_idleness_or_refuses() -> None:
    server = scripted_server(ServerConfig(admin_key="admin"))
    admin = {"authorization": "Bearer admin"}
    try:
        server.complete("warm the cache")
        thread = threading.Thread(target=lambda: server.complete("x" * 900, max_tokens=1000))
        thread.start()
        wait(lambda: server.host.num_open == 1, "busy")
        busy = server.post("/flush_cache", headers=admin)
        assert busy.status_code == 409 and busy.json()["error"]["code"] == "busy" and busy.headers["x-should-retry"] == "false"
        assert server.stats().pages_tree > 0
        assert server.post("/flush_cache?timeout=60", headers=admin).status_code == 200
        thread.join(60)
        assert server.stats().pages_tree == 0
        for bad in ("-1", "x", "nan", "1e9"):
            assert server.post(f"/flush_cache?timeout={bad}", headers=admin).status_code == 400
    finally:
        server.close()


def test_a_dead_engine_fails_what_is_pending_and_refuses_the_rest() -> None:
    server = scripted_server()
    replies: list[Any] = []
    try:
        threads = [
            threading.Thread(target=lambda s=s: replies.append(server.complete("x" * 900, max_tokens=1000, stream=s)))
            for s in (True, False)
        ]
        for thread in threads:
            thread.start()
        wait(
            lambda: server.host.num_open == 2 and server.host.waiting == 0 and server.answers == 1,
            "both run, the stream has begun",
        )
        server.client.close()
        for thread in threads:
            thread.join(60)
        stream = next(r for r in replies if r.status_code == 200)
        assert "error" in events(stream.text)[-2] and events(stream.text)[-1] == "[DONE]"
        assert next(r for r in replies if r is not stream).status_code == 503
        assert server.complete("hi").status_code == 503
        assert server.host.num_open == server.host.waiting == server.host.waiting_tokens == 0
    finally:
        server.close()
