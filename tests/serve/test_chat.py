"""POST /v1/chat/completions: whole replies and streams."""

from __future__ import annotations

from tests.serve.serving import Server, events


def test_a_whole_reply(server: Server) -> None:
    reply = server.chat("hello")
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 6


def test_a_stream(server: Server) -> None:
    reply = server.chat("hello", stream=True)
    assert reply.status_code == 200, reply.text
    found = events(reply.text)
    assert found[-1] == "[DONE]"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in found[:-1]) == "hello"
