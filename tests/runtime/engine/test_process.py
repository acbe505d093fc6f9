"""ProcessClient: the same words as in-process, from another process; and what is said when that process ends."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import phloem
from phloem.runtime.engine import wire
from phloem.runtime.engine.aio import AsyncEngine
from phloem.runtime.engine.client import EngineClient, InprocClient
from phloem.runtime.engine.process import ProcessClient, RemoteSide, side_of, socket_folder
from phloem.runtime.engine.sync import Engine
from phloem.runtime.errors import (
    ConfigError,
    ContextLengthError,
    EngineBusyError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    PhloemError,
    RequestTimeoutError,
)
from phloem.runtime.request import OutputDelta, Request, SamplingParams
from tests.runtime.engine.child_parts import SCRIPTED, scripted
from tests.runtime.engine.parts import Bytes, ByteText

PATIENCE = 60.0  # seconds: for hangs, not for speed


class Heard:
    """A sink that keeps all, and stops at `stop_at` tokens."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.deltas: list[OutputDelta] = []
        self.error: Exception | None = None
        self.over = threading.Event()
        self.began = threading.Event()
        self.stop_at = stop_at
        self.raises: Exception | None = None
        self.times: wire.Timing | None = None

    def timing(self, timing: wire.Timing) -> None:
        self.times = timing

    def push(self, delta: OutputDelta) -> int | None:
        assert not self.over.is_set(), "S6: a delta after the end"
        self.deltas.append(delta)
        if self.raises is not None:
            raise self.raises
        if delta.token_ids:
            self.began.set()
        if delta.finish_reason is not None:
            self.over.set()
        return self.stop_at if self.stop_at is not None and len(self.tokens) >= self.stop_at else None

    def fail(self, error: Exception) -> None:
        assert not self.over.is_set()
        self.error = error
        self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [i for delta in self.deltas for i in delta.token_ids]

    def ended(self) -> Heard:
        assert self.over.wait(PATIENCE)
        return self

    def words(self) -> Any:
        """All that was said, as one value to compare."""
        last = self.deltas[-1]
        logprobs = [entry for d in self.deltas for entry in d.logprobs]
        prompt = [entry for d in self.deltas for entry in d.prompt_logprobs]
        return self.tokens, logprobs, prompt, last.finish_reason, last.usage, last.seed, last.error


class Quiet:
    def stage(self, stage: str) -> None: ...
    def opened(self, opened: wire.Opened) -> None: ...


def request(name: str, ids: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> Request:
    sampling.setdefault("ignore_eos", True)
    return Request(id=name, token_ids=ids, sampling=SamplingParams(**sampling))


def start(**options: Any) -> ProcessClient:
    return ProcessClient(options, factory=SCRIPTED)


@pytest.fixture(scope="module")
def client() -> Iterator[ProcessClient]:
    shared = start()
    shared.hello.result(PATIENCE)
    yield shared
    shared.close()


def workload() -> list[Request]:
    """Prompts that share prefixes, greedy and drawn, with and without seeds, logprobs of all kinds, stops, refusals."""
    draw = random.Random(7)
    stem = tuple(draw.randrange(1, 128) for _ in range(9))
    found = []
    for n in range(40):
        ids = stem[: draw.randrange(1, 10)] + tuple(draw.randrange(1, 128) for _ in range(draw.randrange(4)))
        sampling: dict[str, Any] = {"max_tokens": draw.randrange(0, 20), "temperature": draw.choice((0.0, 0.7, 1.3))}
        if n % 3 == 0:
            sampling |= {"logprobs": draw.choice(("model", "sampled", "both")), "top_logprobs": draw.randrange(4)}
        if n % 5 == 0:
            sampling |= {"prompt_logprobs": draw.randrange(len(ids)), "seed": n}
        if n % 7 == 0:
            sampling |= {"stop_token_ids": tuple(draw.randrange(128) for _ in range(20))}
        if n % 11 == 0:
            ids = (*ids, 4000)  # no such token
        found.append(request(f"w{n}", ids, **sampling))
    return found


def run_all(client: EngineClient, requests: list[Request]) -> list[Any]:
    sinks = [Heard() for _ in requests]
    admitted = client.submit(list(zip(requests, sinks)), atomic=False)
    client.run(lambda: admitted.done() and all(s.over.is_set() for s in sinks), time.monotonic() + PATIENCE)
    return [s.ended().words() for s in sinks]


# -------------------------------------------------------------------------------------------------------------- the same words


def test_the_same_words_as_in_this_process(client: ProcessClient) -> None:
    here = InprocClient(scripted({}, Quiet()).core)
    client.call("flush").result(PATIENCE)
    fresh = start()  # seeds of requests without one are drawn in order, so both begin at the first
    try:
        assert run_all(fresh, workload()) == run_all(here, workload())
    finally:
        fresh.close()
        here.close()


def test_a_stop_found_on_this_side_cuts_there_as_here(client: ProcessClient) -> None:
    one, other = Heard(stop_at=3), Heard(stop_at=3)
    client.submit([(request("stop", max_tokens=200, temperature=0.0), one)], atomic=True)
    here = InprocClient(scripted({}, Quiet()).core)
    here.submit([(request("stop", max_tokens=200, temperature=0.0), other)], atomic=True)
    here.run(other.over.is_set)
    last, expected = one.ended().deltas[-1], other.deltas[-1]
    assert last.finish_reason == expected.finish_reason == "stop_string"
    assert last.usage == expected.usage
    assert one.tokens[:3] == other.tokens[:3]


def test_control_verbs_answer_with_their_own_types(client: ProcessClient) -> None:
    run_all(client, [request("a", (9, 8, 7, 6, 5, 4, 3, 2), max_tokens=8, temperature=0.0)])
    stats = client.call("stats").result(PATIENCE)
    assert stats.requests >= 1 and stats.running == 0 and stats.pages_live == 0
    explained = client.call("explain", (9, 8, 7, 6, 5), "").result(PATIENCE)
    assert explained.num_tokens == 5 and explained.num_cached == 4
    assert explained.nodes[0].num_tokens == 4
    assert client.call("flush").result(PATIENCE) >= 2
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        client.call("explain", (4000,), "").result(PATIENCE)
    with pytest.raises(ValueError, match="no control verb"):
        client.call("destroy")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError):
        client.call("explain", object(), "").result(PATIENCE)


def test_a_refused_request_is_answered_and_its_atomic_companions_are_aborted(client: ProcessClient) -> None:
    good, bad = Heard(), Heard()
    taken = client.submit([(request("good"), good), (request("bad", (1,) * 600), bad)], atomic=True)
    taken.result(PATIENCE)
    error = bad.ended().deltas[-1].error
    assert error is not None and error.name == ContextLengthError.__name__
    assert good.ended().deltas[-1].finish_reason == "abort"


@pytest.mark.parametrize(
    "broken",
    [
        Request(id="x", token_ids=(1, 2), priority=1.5),  # type: ignore[arg-type]
        Request(id="x", token_ids=(1, 2**70)),
        Request(id="x", token_ids=("one",)),  # type: ignore[arg-type]
        Request(id="x", token_ids=(1,), namespace="\ud800"),
    ],
    ids=["float", "huge", "text", "surrogate"],
)
def test_what_cannot_cross_is_refused_here(client: ProcessClient, broken: Request) -> None:
    """A frame that the engine drops would be a reply that never comes."""
    bad, good, other = Heard(), Heard(), Heard()
    client.submit([(broken, bad), (request("other", max_tokens=1), other)], atomic=True).result(PATIENCE)
    assert isinstance(bad.ended().error, InvalidRequestError)
    assert other.ended().deltas[-1].finish_reason == "abort"
    client.submit([(broken, Heard()), (request("good", max_tokens=2), good)], atomic=False).result(PATIENCE)
    assert good.ended().deltas[-1].finish_reason == "length"


def test_an_id_in_use_is_refused(client: ProcessClient) -> None:
    first, second = Heard(), Heard()
    client.submit([(request("same", max_tokens=400), first)], atomic=True)
    client.submit([(request("same"), second)], atomic=True)
    error = second.ended().error
    assert isinstance(error, InvalidRequestError) and error.code == "duplicate_request_id"
    client.abort(["same", "no such"])
    assert first.ended().deltas[-1].finish_reason == "abort"


def test_a_sink_that_raises_ends_its_request_alone(client: ProcessClient) -> None:
    bad, good = Heard(), Heard()
    bad.raises = RuntimeError("its loop is gone")
    client.submit([(request("bad", max_tokens=400), bad), (request("good", max_tokens=9), good)], atomic=False)
    assert good.ended().deltas[-1].finish_reason == "length"
    assert bad.ended().error is bad.raises
    deadline = time.monotonic() + PATIENCE
    while client.call("stats").result(PATIENCE).running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert client.call("stats").result(PATIENCE).running == 0


def test_a_callback_cannot_wait_for_the_engine(client: ProcessClient) -> None:
    found: list[Exception] = []

    class Waits(Heard):
        def push(self, delta: OutputDelta) -> int | None:
            try:
                client.run(lambda: False)
            except EngineBusyError as error:
                found.append(error)
            return super().push(delta)

    sink = Waits()
    client.submit([(request("w", max_tokens=1), sink)], atomic=True)
    sink.ended()
    assert found


def test_run_returns_at_its_deadline(client: ProcessClient) -> None:
    assert client.run(lambda: False, time.monotonic() + 0.05) is False


def test_abandon_waits_until_the_engine_has_let_go(client: ProcessClient) -> None:
    sink = Heard()
    client.submit([(request("long", max_tokens=400), sink)], atomic=True)
    assert sink.began.wait(PATIENCE)
    client.abandon(["long"])
    assert sink.over.is_set()
    client.abandon(["long"])


def test_the_loop_tells_how_long_a_request_waited(client: ProcessClient) -> None:
    sink = Heard()
    client.submit([(request("t", max_tokens=3), sink)], atomic=True)
    times = sink.ended().times
    assert times is not None and times.queue is not None and times.prefill is not None
    assert 0 <= times.queue < PATIENCE and 0 <= times.prefill < PATIENCE and times.preemptions == 0
    assert times.compile is None and len(times.chunks) == 1


def test_the_loop_tells_the_chunks_of_a_long_prompt(client: ProcessClient) -> None:
    """server.O2: a step's budget is 256 tokens, so 400 are two steps; cached the second time, they are one."""
    client.call("flush").result(PATIENCE)
    counts = []
    for name in ("long", "again"):
        sink = Heard()
        client.submit([(request(name, tuple(n % 120 + 1 for n in range(400)), max_tokens=3), sink)], atomic=True)
        times = sink.ended().times
        assert times is not None and times.queue is not None and times.prefill is not None
        moments = [moment for chunk in times.chunks for moment in chunk]
        assert moments == sorted(moments) and moments[0] >= 0
        counts.append(len(times.chunks))
    assert counts == [2, 1]


# ------------------------------------------------------------------------------------------------------------------- the frames


def test_a_frame_that_does_not_decode_is_dropped_and_counted(client: ProcessClient) -> None:
    """server §1."""
    before = client.beat.dropped_frames if client.beat else 0
    for frame in (b"", b"\xc1", b"not msgpack", msgspec.msgpack.encode({"type": "Launch"}), msgspec.msgpack.encode([1])):
        client._send_frame(frame)
    sink = Heard()
    client.submit([(request("after", max_tokens=2), sink)], atomic=True)
    assert sink.ended().deltas[-1].finish_reason == "length"
    deadline = time.monotonic() + PATIENCE
    while (client.beat is None or client.beat.dropped_frames < before + 5) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.beat is not None and client.beat.dropped_frames == before + 5


def test_an_idle_loop_beats(client: ProcessClient) -> None:
    """L3 reads the beats: an idle engine is heard each second."""
    heard = client.last_heard
    deadline = time.monotonic() + PATIENCE
    while client.last_heard <= heard + 0.5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.last_heard > heard


def test_the_sockets_lie_in_a_private_directory(client: ProcessClient) -> None:
    """server.G6."""
    folder = Path(client._folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {p.name for p in folder.iterdir()} == {"in", "out"}
    arguments = Path(f"/proc/{client.process.pid}/cmdline").read_bytes()
    assert b"kv_tokens" not in arguments  # options travel in a frame, not where `ps` shows them


def test_a_long_temporary_directory_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    folder = socket_folder()
    assert len(folder) < 100 and stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    os.rmdir(folder)
    assert not list(deep.iterdir())


def test_no_frame_of_the_wire_is_pickle() -> None:
    """server.G6: what crosses is msgpack, decoded into types that are known beforehand."""
    for module in ("wire", "child", "process"):
        text = (Path(wire.__file__).parent / f"{module}.py").read_text()
        assert not [w for w in ("import pickle", "import dill", "import marshal", "recv_pyobj", "send_pyobj") if w in text]
    with pytest.raises(msgspec.DecodeError):
        wire.decoder_to_engine().decode(msgspec.msgpack.encode({"type": "os.system", "args": ["true"]}))


# ----------------------------------------------------------------------------------------------------------------------- ends


def test_death_fails_all_that_is_pending_at_once() -> None:
    """server.L5: by the sentinel; no timeout is involved."""
    client = start(pause=0.02)
    sinks = [Heard() for _ in range(20)]
    client.submit([(request(f"d{n}", max_tokens=400), s) for n, s in enumerate(sinks)], atomic=False)
    assert sinks[0].began.wait(PATIENCE)
    os.kill(client.process.pid, signal.SIGKILL)
    for sink in sinks:
        assert isinstance(sink.ended().error, EngineDeadError)
        assert "signal 9" in str(sink.error)
    client._thread.join(PATIENCE)
    for use in (lambda: client.submit([], atomic=False), lambda: client.abort(["d1"]), lambda: client.call("stats")):
        with pytest.raises(EngineDeadError):
            use()
    assert not os.path.exists(client._folder)
    client.close()  # of a dead one: nothing to do


def test_a_call_that_is_pending_at_death_raises() -> None:
    client = start(load_seconds=30)
    future, admitted = client.call("stats"), client.submit([(request("x"), sink := Heard())], atomic=True)
    client.opened.result(PATIENCE)
    client.kill()
    with pytest.raises(EngineDeadError):
        future.result(PATIENCE)
    with pytest.raises(EngineDeadError):
        client.hello.result(PATIENCE)
    admitted.result(PATIENCE)
    assert isinstance(sink.ended().error, EngineDeadError)


def test_a_device_that_cannot_be_reset_ends_the_process() -> None:
    client = start(breaks_at=3)
    sink = Heard()
    client.submit([(request("x", max_tokens=50), sink)], atomic=True)
    last = sink.ended()
    assert last.error is not None or last.deltas[-1].error is not None
    client._thread.join(PATIENCE)
    assert client.process.returncode == 1
    with pytest.raises(EngineDeadError, match="device"):
        client.ensure_usable()


@pytest.mark.parametrize(
    "fails, kind, code",
    [("model", ModelLoadError, None), ("memory", ConfigError, "out_of_memory"), ("bug", PhloemError, None)],
)
def test_what_an_engine_cannot_start_with_is_said(fails: str, kind: type[PhloemError], code: str | None, capfd: Any) -> None:
    client = start(fails=fails)
    with pytest.raises(kind) as caught:
        client.hello.result(PATIENCE)
    assert code is None or caught.value.code == code
    client._thread.join(PATIENCE)
    trace = capfd.readouterr().err
    assert ("ZeroDivisionError" in trace) == (fails == "bug")  # a clear error needs no trace
    client.close()


def test_close_fails_what_is_pending_and_leaves_nothing() -> None:
    client = start(pause=0.02)
    sink = Heard()
    client.submit([(request("x", max_tokens=400), sink)], atomic=True)
    assert sink.began.wait(PATIENCE)
    client.close()
    assert isinstance(sink.ended().error, EngineClosedError)
    assert client.process.returncode == 0
    assert not os.path.exists(client._folder)
    with pytest.raises(EngineClosedError):
        client.ensure_usable()
    client.close()


def test_a_frozen_engine_is_killed_by_close() -> None:
    client = start()
    client.hello.result(PATIENCE)
    os.kill(client.process.pid, signal.SIGSTOP)
    client.close(grace=0.2)
    assert client.process.returncode == -signal.SIGKILL


def test_the_engine_acts_on_no_signal_of_its_group(client: ProcessClient) -> None:
    """server.L4: only the API process does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(client.process.pid, number)
    assert run_all(client, [request("s", max_tokens=2)])[0][3] == "length"


def test_the_engine_ends_with_its_parent() -> None:
    """server.L4: no orphan, even when nothing could be cleaned up."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from phloem.runtime.engine.process import ProcessClient\n"
        f"c = ProcessClient({{}}, factory={SCRIPTED!r}); c.hello.result(60); print(c.process.pid, flush=True)\n"
        "import time; time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + PATIENCE
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_forked_child_cannot_use_it(client: ProcessClient) -> None:
    code = client._pid
    client._pid = -1
    try:
        with pytest.raises(EngineClosedError, match="fork"):
            client.submit([], atomic=False)
        client.close()  # does nothing there
    finally:
        client._pid = code
    client.ensure_usable()


@pytest.mark.slow
def test_random_kills_lose_no_reply() -> None:
    """server.L5: ten engines, each killed at a random moment; every request has exactly one ending."""
    draw = random.Random(3)
    for _ in range(10):
        client = start(pause=0.001)
        client.hello.result(PATIENCE)
        sinks = [Heard() for _ in range(64)]
        killer = threading.Timer(draw.random() * 0.3, client.kill)
        killer.start()
        for n, sink in enumerate(sinks):
            try:
                client.submit([(request(f"k{n}", max_tokens=draw.randrange(1, 60)), sink)], atomic=True)
            except EngineDeadError as error:
                sink.fail(error)
            time.sleep(draw.random() * 0.005)
        for sink in sinks:
            sink.ended()
            finished = bool(sink.deltas) and sink.deltas[-1].finish_reason is not None
            assert finished != isinstance(sink.error, EngineDeadError)
        killer.join()
        client.close()


def test_the_embedded_model_says_the_same_from_another_process(idle_engine: phloem.Engine) -> None:
    """Bitwise: text, ids, logprobs, usage, of greedy, drawn, constrained and stopped requests; through Engine and AsyncEngine."""
    calls: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("Once upon a time", {"max_tokens": 12, "temperature": 0.0, "seed": 1, "logprobs": True, "top_logprobs": 3}, {}),
        ("Once upon a time there", {"max_tokens": 12, "seed": 5, "prompt_logprobs": 2}, {"n": 2}),
        ("A number: ", {"max_tokens": 8, "temperature": 0.0, "seed": 1}, {"regex": "[0-9]{3}"}),
        ("One, two, three,", {"max_tokens": 24, "temperature": 0.0, "seed": 1, "stop": ["six"]}, {}),
    ]
    here = [idle_engine.generate(prompt, sampling, **more) for prompt, sampling, more in calls]
    client = ProcessClient({"kv_tokens": 8192})
    with Engine.from_client(client, side_of(client, PATIENCE)) as there:
        assert [there.generate(prompt, sampling, **more) for prompt, sampling, more in calls] == here
        assert "".join(delta.text for delta in there.stream(calls[0][0], calls[0][1])) == here[0].text
        chosen = there.select("The sky is", [" blue", " loud"])
        assert chosen == idle_engine.select("The sky is", [" blue", " loud"])
        there.check()
        assert there.stats().pages_live == 0
        assert there.flush() > 0
    with pytest.raises(EngineClosedError):
        there.generate("late")


def test_an_async_engine_may_sit_on_a_process() -> None:
    async def ask() -> list[int]:
        client = start()
        hello = await asyncio.wrap_future(client.hello)
        side = RemoteSide(ByteText(), Bytes(), hello.resolved.config, hello.resolved)  # type: ignore[arg-type]
        async with AsyncEngine.from_client(client, side) as engine:
            outputs = await asyncio.gather(
                *(engine.generate([5, 6, n], {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}) for n in (7, 8, 7))
            )
            assert outputs[0].token_ids == outputs[2].token_ids
            with pytest.raises(RequestTimeoutError):
                await engine.generate([1, 2], {"max_tokens": 500, "ignore_eos": True}, timeout=0.01)
            return list(outputs[0].token_ids)

    here = InprocClient(scripted({}, Quiet()).core)
    sink = Heard()
    here.submit([(request("x", (5, 6, 7), max_tokens=4, temperature=0.0), sink)], atomic=True)
    here.run(sink.over.is_set)
    assert asyncio.run(ask()) == sink.tokens
