"""What a server does beside and under others: a thousand requests at once, a second server, bodies that never fit and are sent all the same."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.serve.processes import Process
from tests.serve.test_load import stream

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def crowded() -> Iterator[Process]:
    with Process("--port", "0", "--log-level", "warning", engine={}) as process:
        yield process.ready()
        assert process.stop() == 0


def test_a_thousand_requests_at_once_are_all_served(crowded: Process) -> None:
    """server.L8: with the defaults there is no 429 among them; each has its own whole text, and nothing is kept."""
    port = int(crowded.url.rsplit(":", 1)[1])

    async def all_at_once() -> list[tuple[int, str, bool]]:
        bodies = [{"prompt": f"[[answer {n}]]", "max_tokens": 40, "temperature": 0} for n in range(1000)]
        return await asyncio.gather(*(stream(port, body) for body in bodies))

    found = asyncio.run(all_at_once())
    assert [text for status, text, ended in found if status == 200 and ended] == [f"answer {n}" for n in range(1000)]
    crowded.wait_for(lambda: crowded.metric("num_requests_running") == crowded.metric("num_requests_waiting") == 0)
    crowded.wait_for(lambda: crowded.metric('kv_tokens{state="used"}') == 0)
    assert crowded.metric("rejected_requests_total") == 0


def test_two_servers_side_by_side_know_nothing_of_each_other(crowded: Process) -> None:
    with Process("--port", "0", engine={}) as other:
        other.ready()
        assert other.url != crowded.url and other.engine_pid != crowded.engine_pid
        for process, word in ((crowded, "one"), (other, "two")):
            assert process.complete(prompt=f"[[{word}]]").json()["choices"][0]["text"] == word
        os.kill(other.engine_pid, signal.SIGKILL)
        assert other.code() == 6
    assert crowded.complete(prompt="[[still]]").json()["choices"][0]["text"] == "still"
    assert crowded.get("/health").status_code == 200


def test_a_body_over_the_cap_that_does_not_say_so_gets_its_413(crowded: Process) -> None:
    """server.W9: sent in chunks, of which the server stops reading; the answer is not lost on a client that writes on."""
    for _ in range(5):
        sent = httpx.post(
            f"{crowded.url}/v1/completions", content=(b"x" * 131072 for _ in range(200)), headers={"content-type": "application/json"}, timeout=60
        )  # fmt: skip
        assert (sent.status_code, sent.json()["error"]["code"]) == (413, "request_too_large")
    with socket.create_connection(("127.0.0.1", int(crowded.url.rsplit(":", 1)[1]))) as raw:
        raw.settimeout(60)
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n")
        with pytest.raises(OSError):  # the server closes, while this one still writes
            for _ in range(2000):
                raw.sendall(b"20000\r\n" + b"x" * 0x20000 + b"\r\n")
        answer = b""
        while piece := raw.recv(65536):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413")
    assert crowded.complete(prompt="[[fine]]").json()["choices"][0]["text"] == "fine"
