"""server §10 over real processes: how a server starts, drains, and ends; what a frozen, dead or slow neighbour does to it (L1–L8)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from phloem.runtime.config import make_config
from phloem.runtime.errors import ConfigError, EngineDeadError, ModelLoadError, PhloemError
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.lifecycle import Lifecycle, PortError, Said, bind, exit_code
from tests.serve.processes import PATIENCE, Process, alive
from tests.serve.serving import events

KEY, ADMIN = "sk-user-3fd0c6", "sk-admin-91ab77"
AUTH = {"authorization": f"Bearer {KEY}"}
LONG = {"prompt": "noise", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One server for the tests that leave it as it was. A step takes 4 ms."""
    ready = tmp_path_factory.mktemp("serve") / "ready"
    words = ("--port", "0", "--api-key", KEY, "--admin-key", ADMIN, "--ready-file", str(ready), "--max-num-seqs", "8")
    with Process(*words, engine={"pause": 0.004}) as process:
        yield process.ready()
        engine = process.engine_pid
        assert process.stop() == 0
        assert process.left_over() == []
        assert not alive(engine)


def running(process: Process) -> float:
    return process.metric("num_requests_running") + process.metric("num_requests_waiting")


def complete(process: Process, **fields: Any) -> httpx.Response:
    return process.post("/v1/completions", json={"temperature": 0, **fields}, headers=AUTH)


class Streaming(threading.Thread):
    """A client that reads a stream to its end. text: what came; over: whether the body ended in order."""

    def __init__(self, process: Process, headers: Mapping[str, str] = {}, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.url, self.headers, self.fields = process.url, headers, {**LONG, **fields}
        self.began, self.text, self.status, self.error = threading.Event(), "", 0, ""
        self.start()

    def run(self) -> None:
        try:
            body = {"stream": True, **self.fields}
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=PATIENCE
            ) as answer:
                self.status = answer.status_code
                for piece in answer.iter_text():
                    self.text += piece
                    self.began.set()
        except httpx.HTTPError as error:
            self.error = repr(error)
        self.began.set()

    def ended(self) -> Streaming:
        self.join(PATIENCE)
        assert not self.is_alive()
        return self


# ----------------------------------------------------------------------------------------------------------------------- start


def test_the_ready_line_and_file(shared: Process) -> None:
    """server.L2."""
    assert re.fullmatch(r"ready url=http://127\.0\.0\.1:\d+ seconds=\d+\.\d import=\S+ weights=\S+ warmup=\S+", shared.line)
    arguments = Path(f"/proc/{shared.process.pid}/cmdline").read_bytes().decode().split("\0")
    file = Path(arguments[arguments.index("--ready-file") + 1])
    assert file.read_text() == shared.line + "\n"
    banner = [line for line in shared.errors if line.startswith(("phloem ", "KV:", "pool:", "weights:", "keys on", "try:"))]
    assert 3 <= len(banner) <= 8
    assert any("keys on, admin routes on" in line for line in banner)
    assert "phloem: --max-num-seqs is --max-running here." not in shared.out  # stdout has the ready line alone
    assert len(shared.out) == 1


def test_requests_while_loading_are_told_so() -> None:
    """server.L1: the port answers before the weights are there; a signal then ends it at once, with 0."""
    with Process("--port", "0", "--log-level", "debug", engine={"load_seconds": 60}) as process:
        process.wait_for(lambda: any("phloem: weights" in line for line in process.errors))
        port = listening(process)
        url = f"http://127.0.0.1:{port}"
        for path, word in (("/health", "loading"), ("/ready", "loading")):
            answer = httpx.get(url + path, timeout=PATIENCE)
            assert (answer.status_code, answer.json()["status"]) == (503, word)
        refused = httpx.post(f"{url}/v1/completions", json=LONG, timeout=PATIENCE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert int(refused.headers["retry-after"]) >= 1
        engine = process.engine_pid
        assert process.stop() == 0
        assert not alive(engine) and process.left_over() == []


def listening(process: Process) -> int:
    """The port of its one listening TCP socket (C-OPS-05: there is no other)."""
    ports = tcp_listeners(process.process.pid)
    process.wait_for(lambda: tcp_listeners(process.process.pid))
    ports = tcp_listeners(process.process.pid)
    assert len(ports) == 1
    return ports[0]


def tcp_listeners(*pids: int) -> list[int]:
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            columns = row.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.append(int(columns[1].rsplit(":", 1)[1], 16))
    return found


@pytest.mark.case("C-OPS-03")
def test_a_port_in_use_ends_it_before_any_weight() -> None:
    """server.L6: exit 5, one clear line, and no engine process was started."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process("--port", str(port), engine={"load_seconds": 60}) as process:
            assert process.code() == 5
            assert process.errors == [
                f"phloem: port {port} of 127.0.0.1 cannot be had: another process listens there. "
                "Stop it, or choose another with --port."
            ]
            assert process.left_over() == []


@pytest.mark.case("C-OPS-03")
@pytest.mark.parametrize("fails, code", [("model", 3), ("memory", 4)])
def test_what_it_cannot_start_with(fails: str, code: int) -> None:
    with Process("--port", "0", engine={"fails": fails}) as process:
        assert process.code() == code
        said = [line for line in process.errors if line.startswith("phloem: ") and "weights" not in line]
        assert len(said) == 1
        assert not [line for line in process.errors if "Traceback" in line]
        assert process.out == [] and process.left_over() == []


def test_exit_codes() -> None:
    """server.L6."""
    assert exit_code(PortError("x")) == 5
    assert exit_code(ModelLoadError("x")) == 3
    assert exit_code(ConfigError("x", code="out_of_memory")) == 4
    assert exit_code(ConfigError("x")) == 2
    assert exit_code(EngineDeadError("x")) == 6
    assert exit_code(PhloemError("x")) == 1
    with pytest.raises(PortError, match="--host"):
        bind("no.such.host.invalid", 0)


# -------------------------------------------------------------------------------------------------------------------- while it runs


@pytest.mark.parametrize("longest, silent, told", [(0.1, 4.9, None), (0.1, 5.1, 5.1), (4.0, 11.9, None), (4.0, 12.1, 12.1)])
def test_five_seconds_without_a_word_are_a_stall(longest: float, silent: float, told: float | None) -> None:
    """server.L3: an idle engine beats each second and a busy one after each step; slow steps that have ended earn more patience."""
    said = Said(lambda stage, done: None, lambda lines: None, lambda line: None, lambda text: None)
    with bind("127.0.0.1", 0) as listener, pytest.MonkeyPatch.context() as patch:
        life = Lifecycle(ServerConfig(), make_config(), listener, said)
        life._current = SimpleNamespace(last_heard=100.0, longest_step=longest)  # type: ignore[assignment]
        patch.setattr("phloem.runtime.serve.lifecycle.time", SimpleNamespace(monotonic=lambda: 100.0 + silent))
        life.phase = "ready"
        assert life.stalled() == (None if told is None else pytest.approx(told))
        life.phase = "loading"
        assert life.stalled() is None


@pytest.mark.case("C-OPS-02")
def test_a_frozen_engine_is_unhealthy_and_recovers(shared: Process) -> None:
    """server.L3: from the last beat, never queued; 503 within about 5 s, 200 again when it moves, and what waited is answered."""
    assert shared.get("/health").json() == {"status": "ok"}
    engine = shared.engine_pid
    waiting = Streaming(shared, AUTH, max_tokens=300)
    assert waiting.began.wait(PATIENCE)
    os.kill(engine, signal.SIGSTOP)
    try:
        asked = time.monotonic()
        shared.wait_for(lambda: shared.get("/health").status_code == 503)
        frozen_for = time.monotonic() - asked
        stalled = shared.get("/health").json()
        assert stalled["status"] == "stalled" and stalled["last_step_s"] >= 5
        assert shared.get("/ready").status_code == 503
        assert frozen_for < 60
    finally:
        os.kill(engine, signal.SIGCONT)
    shared.wait_for(lambda: shared.get("/health").status_code == 200)
    assert waiting.ended().text.endswith("data: [DONE]\n\n")
    assert events(waiting.text)[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.case("C-API-09")
def test_a_client_that_goes_away_frees_its_pages(shared: Process) -> None:
    """server.L7: streaming and waiting ones, all samples, and the next request is served as ever. Logged and counted as 499."""
    before = shared.metric('requests_total{status="499"}')
    for n in range(6):
        body = {**LONG, "stream": n % 2 == 0, "n": 1 + n % 3}
        with httpx.Client() as http:
            if body["stream"]:
                with http.stream("POST", f"{shared.url}/v1/completions", json=body, headers=AUTH, timeout=PATIENCE) as answer:
                    next(answer.iter_raw())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(f"{shared.url}/v1/completions", json=body, headers=AUTH, timeout=0.1)
    shared.wait_for(lambda: shared.metric('requests_total{status="499"}') == before + 6)
    shared.wait_for(lambda: running(shared) == 0)
    shared.wait_for(lambda: shared.metric('kv_tokens{state="used"}') == 0)
    assert complete(shared, prompt="[[fine]]").json()["choices"][0]["text"] == "fine"
    shared.wait_for(lambda: any("status=499" in line for line in shared.errors))
    assert not [line for line in shared.errors if "internal_error" in line]


def test_bodies_that_are_too_much(shared: Process) -> None:
    """100 MB, 100 000 stop strings, 100 000 brackets: each its answer, at once, and /health goes on."""
    head = {**AUTH, "content-type": "application/json"}
    huge = shared.post("/v1/completions", content=b'{"prompt":"' + b"x" * 100_000_000 + b'"}', headers=head)
    assert (huge.status_code, huge.json()["error"]["code"]) == (413, "request_too_large")
    stops = shared.post("/v1/completions", json={"prompt": "a", "stop": [f"s{n}" for n in range(100_000)]}, headers=AUTH)
    assert stops.status_code == 400 and stops.json()["error"]["param"] == "stop"
    deep = shared.post("/v1/completions", content=b"[" * 100_000, headers=head)
    assert deep.status_code == 400
    assert shared.get("/health").status_code == 200


@pytest.mark.slow
def test_a_slow_reader_slows_nobody(shared: Process) -> None:
    """server §1: its deltas merge and wait; the engine and other clients go on, and what it reads at last is the whole text."""
    port = int(shared.url.rsplit(":", 1)[1])
    body = json.dumps({**LONG, "stream": True, "max_tokens": 600, "logprobs": 5}).encode()
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        slow.sendall(request.encode() + body)
        fast = complete(shared, prompt="[[quick]]")
        assert fast.json()["choices"][0]["text"] == "quick"
        shared.wait_for(lambda: running(shared) == 0)  # the engine has finished, though nobody has read
        read = b""
        while piece := slow.recv(65536):
            read += piece
    text = unchunked(read.partition(b"\r\n\r\n")[2]).decode()
    said = events(text)
    assert said[-1] == "[DONE]" and said[-2]["choices"][0]["finish_reason"] == "length"
    whole = complete(shared, **{**LONG, "max_tokens": 600}).json()["choices"][0]["text"]
    assert "".join(e["choices"][0]["text"] for e in said[:-1]) == whole


def unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        found, body = found + body[:length], body[length + 2 :]
    return found


@pytest.mark.case("C-OPS-05")
def test_http_is_the_only_tcp_listener_and_sockets_are_private(shared: Process) -> None:
    """server.G6."""
    assert tcp_listeners(shared.process.pid, shared.engine_pid) == [int(shared.url.rsplit(":", 1)[1])]
    folder = Path(shared.folder) / next(p for p in os.listdir(shared.folder) if p.startswith("phloem-"))
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.case("C-OPS-06")
def test_keys_appear_nowhere(shared: Process) -> None:
    """server.G7: not in replies, metrics, errors or the log; not in the engine's process title."""
    admin = {"authorization": f"Bearer {ADMIN}"}
    seen = [shared.get(path, headers=h).text for path in ("/metrics", "/get_server_info", "/get_model_info", "/openapi.json", "/version", "/v1/models") for h in (AUTH, admin)]  # fmt: skip
    seen += [shared.post("/v1/completions", content=b"{", headers={"authorization": f"Bearer {KEY}x"}).text]
    seen += [shared.post("/flush_cache", headers=AUTH).text]
    seen += [Path(f"/proc/{shared.engine_pid}/cmdline").read_bytes().decode()]
    seen += shared.errors
    for secret in (KEY, ADMIN):
        assert not [text for text in seen if secret in text]
    assert shared.get("/get_server_info").status_code == 401


def test_a_request_line_cannot_be_forged(shared: Process) -> None:
    """server.G7."""
    marker = "forged-7f3a"
    forged = f'x event=request id=req_{marker} status=200 "q" ' + "\x85\x9b31m" + "y" * 300
    shared.post("/v1/completions", json={"prompt": "[[a]]"}, headers={**AUTH, "x-request-id": forged.encode("latin-1")})  # type: ignore[dict-item]
    shared.wait_for(lambda: any(marker in line for line in shared.errors))
    line = next(line for line in shared.errors if marker in line)
    assert re.search(r'client_id="x event=request id=req_forged-7f3a status=200 \\"q\\" \\x85\\x9b31my+…"', line)
    assert line.count(" status=200") == 2 and len(line) < 1000


# -------------------------------------------------------------------------------------------------------------------- its ends


def test_a_first_signal_drains() -> None:
    """server.L4: what runs ends in its own time, what is new is told 503 draining; then 0, nothing left, the port free."""
    with Process("--port", "0", engine={"pause": 0.01}) as process:
        process.ready()
        engine, port = process.engine_pid, int(process.url.rsplit(":", 1)[1])
        stream = Streaming(process, max_tokens=150)
        assert stream.began.wait(PATIENCE)
        process.signal()
        process.wait_for(lambda: process.get("/ready").status_code == 503)
        assert process.get("/health").status_code == 200  # draining is alive
        refused = process.complete(prompt="[[late]]")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert stream.ended().text.endswith("data: [DONE]\n\n")
        assert events(stream.text)[-2]["choices"][0]["finish_reason"] == "length"
        assert process.code() == 0
        assert not alive(engine) and process.left_over() == []
        socket.create_server(("127.0.0.1", port)).close()


def test_what_does_not_end_in_time_is_aborted_and_told_so() -> None:
    """server.L4: an error event and an orderly end; never a bare cut."""
    with Process("--port", "0", "--shutdown-timeout", "0.2", engine={"pause": 0.02}) as process:
        process.ready()
        stream = Streaming(process)
        assert stream.began.wait(PATIENCE)
        process.signal(signal.SIGINT)
        said = events(stream.ended().text)
        assert said[-1] == "[DONE]" and said[-2]["error"]["code"] == "request_aborted"
        assert process.code() == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with Process("--port", "0", engine={"pause": 0.02}) as process:
        process.ready()
        engine = process.engine_pid
        stream = Streaming(process)
        assert stream.began.wait(PATIENCE)
        process.signal()
        process.wait_for(lambda: process.get("/ready").status_code == 503)
        process.signal()
        assert process.code() == 130
        assert not alive(engine) and process.left_over() == []
        stream.ended()


@pytest.mark.case("C-OPS-03")
def test_the_death_of_the_engine_ends_the_server() -> None:
    """server.L5: pending requests fail with 503 or an error event, the process ends with 6, nothing is orphaned."""
    with Process("--port", "0", engine={"pause": 0.02}) as process:
        process.ready()
        streams = [Streaming(process) for _ in range(4)] + [Streaming(process, stream=False) for _ in range(4)]
        assert streams[0].began.wait(PATIENCE)
        process.wait_for(lambda: process.metric("num_requests_running") == 8)
        os.kill(process.engine_pid, signal.SIGKILL)
        for stream in streams[:4]:
            said = events(stream.ended().text)
            assert said[-1] == "[DONE]" and said[-2]["error"]["code"] == "engine_dead", stream.text[-300:]
        for stream in streams[4:]:
            assert stream.ended().status == 503 and json.loads(stream.text)["error"]["code"] == "engine_dead"
        assert process.code() == 6
        assert [line for line in process.errors if line.startswith("phloem: the engine process ended by signal 9")]
        assert process.left_over() == []


def test_a_dead_engine_is_restarted_as_often_as_allowed() -> None:
    """server.L5: --restart-engine."""
    with Process("--port", "0", "--restart-engine", "1", engine={"pause": 0.005}) as process:
        process.ready()
        first = process.engine_pid
        stream = Streaming(process)
        assert stream.began.wait(PATIENCE)
        os.kill(first, signal.SIGKILL)
        assert events(stream.ended().text)[-2]["error"]["code"] == "engine_dead"
        process.wait_for(lambda: process.get("/ready").status_code == 200)
        assert process.engine_pid != first
        assert process.complete(prompt="[[again]]").json()["choices"][0]["text"] == "again"
        assert process.metric("engine_restarts_total") == 1 and process.metric("engine_up") == 1
        os.kill(process.engine_pid, signal.SIGKILL)
        assert process.code() == 6


def test_a_killed_server_leaves_no_engine_and_no_socket() -> None:
    """server.L4: no orphan, though nothing could be cleaned up."""
    with Process("--port", "0", engine={}) as process:
        process.ready()
        engine = process.engine_pid
        process.process.kill()
        process.code()
        process.wait_for(lambda: not alive(engine))
        process.wait_for(lambda: process.left_over() == [])


def test_the_death_of_an_engine_that_never_was_up() -> None:
    """A process that dies while it loads (the system takes memory back so) ends the server with 6, not with a hang."""
    with Process("--port", "0", engine={"load_seconds": 60}) as process:
        process.wait_for(lambda: any("phloem: weights" in line for line in process.errors))
        os.kill(process.engine_pid, signal.SIGKILL)
        assert process.code() == 6


@pytest.mark.slow
def test_engines_that_die_at_random_moments_lose_no_reply() -> None:
    """server.L5 under load: each request that the server took is answered, with its text or with an error; it ends with 6.

    Who connects after the end is refused by the system; the server's own log says which requests it took.
    """
    for steps in (1, 2, 7, 30, 60, 110):  # the longest stream alone takes 122: however they arrive, the engine gets so far
        with Process("--port", "0", engine={"pause": 0.002, "die_after": steps + 2}) as process:
            process.ready()
            streams = [Streaming(process, stream=n % 2 == 0, max_tokens=5 + 3 * n) for n in range(40)]
            answered = [stream.ended() for stream in streams if not stream.ended().error]
            for stream in answered:
                assert stream.status in (200, 503), stream.text
                if stream.fields["stream"] and stream.status == 200:
                    assert stream.text.endswith("data: [DONE]\n\n"), stream.text[-200:]
                else:
                    json.loads(stream.text)
            assert process.code() == 6
            taken = [line for line in process.errors if "event=request" in line]
            assert len(answered) == len(taken) > 0, (len(answered), len(taken))
            assert not [line for line in taken if "status=499" in line]
            assert process.left_over() == []


@pytest.mark.slow
@pytest.mark.case("C-OPS-03")
def test_the_real_command_and_a_model_that_is_not_there(tmp_path: Path) -> None:
    for words, code in ((("/nowhere/at/all",), 3), (("--kv-memory", "1000TB"), 4), (("--port", "x"), 2)):
        with Process("--port", "0", *words) if code != 2 else Process(*words) as process:
            assert process.code() == code, process.errors
            assert [line for line in process.errors if line.startswith("phloem: ")]
            assert not [line for line in process.errors if "Traceback" in line]
