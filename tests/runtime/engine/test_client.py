"""InprocClient over a scripted core: who pumps, who is told what, and what happens when something ends early."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from typing import Any

import pytest

from phloem.runtime.engine.client import InprocClient
from phloem.runtime.errors import EngineClosedError, EngineDeadError
from phloem.runtime.request import OutputDelta, Request, SamplingParams, WireError


class ScriptedCore:
    """Gives each request token 0, 1, 2 … one a step, until max_tokens. A prompt of [666] is refused."""

    is_blocked = False

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.live: dict[str, tuple[Request, int]] = {}
        self.ready: list[OutputDelta] = []
        self.steps, self.closes = 0, 0
        self.stopped: list[tuple[str, int]] = []
        self.inside = threading.Lock()
        self.explode: Exception | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.live or self.ready)

    def add(self, request: Request) -> None:
        if request.token_ids == (666,):
            error = WireError("InvalidRequestError", "666 is no token.")
            self.ready.append(OutputDelta(request.id, finish_reason="error", error=error))
            return
        self.live[request.id] = (request, 0)

    def abort(self, request_id: str) -> None:
        if self.live.pop(request_id, None):
            self.ready.append(OutputDelta(request_id, finish_reason="abort"))

    def stop(self, request_id: str, num_tokens: int) -> None:
        self.stopped.append((request_id, num_tokens))
        if self.live.pop(request_id, None):
            self.ready.append(OutputDelta(request_id, finish_reason="stop_string"))

    def step(self, now: float) -> list[OutputDelta]:
        assert self.inside.acquire(blocking=False), "two threads in the core at once"
        try:
            self.steps += 1
            if self.explode:
                raise self.explode
            time.sleep(self.pause)
            out = self.drain()
            for request_id, (request, drawn) in list(self.live.items()):
                last = drawn + 1 == request.sampling.max_tokens
                out.append(OutputDelta(request_id, token_ids=[drawn], finish_reason="length" if last else None))
                self.live[request_id] = (request, drawn + 1)
                if last:
                    del self.live[request_id]
            return out
        finally:
            self.inside.release()

    def drain(self) -> list[OutputDelta]:
        out, self.ready = self.ready, []
        return out

    def stats(self) -> int:
        return self.steps

    def explain(self, ids: tuple[int, ...], namespace: str) -> Any:
        return (ids, namespace)

    def flush(self) -> None:
        raise ValueError("no flush today")

    def check(self) -> None: ...
    def close(self) -> None:
        self.closes += 1


class Log:
    """A sink that remembers."""

    def __init__(self, cut_at: int | None = None) -> None:
        self.tokens: list[int] = []
        self.endings: list[Any] = []
        self.cut_at = cut_at

    def push(self, delta: OutputDelta) -> int | None:
        self.tokens += delta.token_ids
        if delta.finish_reason:
            self.endings.append(delta.finish_reason)
        return self.cut_at if self.cut_at is not None and len(self.tokens) >= self.cut_at else None

    def fail(self, error: Exception) -> None:
        self.endings.append(error)

    def over(self) -> bool:
        return bool(self.endings)


def request(name: str, max_tokens: int = 4, prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request(id=name, token_ids=prompt, sampling=SamplingParams(max_tokens=max_tokens))


def test_a_caller_pumps_until_its_own_request_is_over() -> None:
    client, short, long = InprocClient(ScriptedCore()), Log(), Log()
    client.submit([(request("long", 9), long), (request("short", 3), short)], atomic=True)
    assert client.run(short.over)
    assert short.tokens == [0, 1, 2] and short.endings == ["length"]
    assert long.tokens == [0, 1, 2] and not long.over()
    assert client.run(long.over)
    assert long.tokens == list(range(9))


def test_a_stop_string_reaches_the_core_in_the_same_pump() -> None:
    core = ScriptedCore()
    client, sink = InprocClient(core), Log(cut_at=2)
    client.submit([(request("a", 50), sink)], atomic=True)
    client.run(sink.over)
    assert core.stopped == [("a", 2)]
    assert sink.tokens == [0, 1] and sink.endings == ["stop_string"]


def test_of_an_atomic_call_with_a_bad_request_nothing_is_computed() -> None:
    core = ScriptedCore()
    client, good, bad = InprocClient(core), Log(), Log()
    admitted = client.submit([(request("good"), good), (request("bad", prompt=(666,)), bad)], atomic=True)
    assert client.run(admitted.done)
    assert core.steps == 0
    assert bad.endings == ["error"]
    assert good.tokens == [] and good.endings == ["abort"] and not core.has_work


def test_without_atomic_the_others_go_on() -> None:
    client, good, bad = InprocClient(ScriptedCore()), Log(), Log()
    client.submit([(request("bad", prompt=(666,)), bad), (request("good"), good)], atomic=False)
    client.run(lambda: good.over() and bad.over())
    assert good.endings == ["length"] and bad.endings == ["error"]


def test_control_calls_run_between_steps_and_compute_nothing() -> None:
    core = ScriptedCore()
    client = InprocClient(core)
    client.submit([(request("a"), Log())], atomic=True)
    explained = client.call("explain", (1, 2), "x")
    assert client.run(explained.done)
    assert explained.result() == ((1, 2), "x") and core.steps == 0
    failed = client.call("flush")
    client.run(failed.done)
    with pytest.raises(ValueError, match="no flush today"):
        failed.result()
    with pytest.raises(ValueError, match="no control verb"):
        client.call("dance")  # type: ignore[arg-type]


def test_a_deadline_ends_the_wait_not_the_request() -> None:
    core = ScriptedCore(pause=0.01)
    client, sink = InprocClient(core), Log()
    client.submit([(request("a", 10_000), sink)], atomic=True)
    start = time.monotonic()
    assert client.run(sink.over, deadline=start + 0.1) is False
    assert time.monotonic() - start < 10 and not sink.over()
    client.abandon(["a"])
    assert sink.endings == ["abort"] and not core.has_work


def test_abandon_leaves_nothing_in_the_core() -> None:
    core = ScriptedCore()
    client, sink = InprocClient(core), Log()
    client.submit([(request("a", 100), sink)], atomic=True)
    client.abandon(["a", "never heard of"])
    assert sink.endings == ["abort"] and not core.has_work
    client.abandon(["a"])


def test_a_sink_that_raises_fails_its_request_alone() -> None:
    class Broken(Log):
        def push(self, delta: OutputDelta) -> int | None:
            raise RuntimeError("the loop is closed")

    core = ScriptedCore()
    client, broken, fine = InprocClient(core), Broken(), Log()
    client.submit([(request("broken"), broken), (request("fine"), fine)], atomic=True)
    client.run(fine.over)
    assert fine.endings == ["length"] and [type(e) for e in broken.endings] == [RuntimeError]
    assert not core.has_work or client.run(lambda: not core.has_work)


def test_many_threads_each_get_their_own_and_the_core_sees_one_at_a_time() -> None:
    core = ScriptedCore()
    client = InprocClient(core)
    results: dict[str, list[int]] = {}

    def work(number: int) -> None:
        for turn in range(5):
            sink, name = Log(), f"{number}-{turn}"
            client.submit([(request(name, 1 + (number + turn) % 7), sink)], atomic=True)
            assert client.run(sink.over, deadline=time.monotonic() + 20)
            results[name] = sink.tokens

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {f"{n}-{t}": list(range(1 + (n + t) % 7)) for n in range(8) for t in range(5)}


def test_a_thread_whose_pumping_neighbour_leaves_takes_over() -> None:
    client, short, long = InprocClient(ScriptedCore(pause=0.002)), Log(), Log()
    client.submit([(request("short", 3), short), (request("long", 40), long)], atomic=True)
    first = threading.Thread(target=client.run, args=(short.over,))
    second = threading.Thread(target=client.run, args=(long.over,))
    first.start(), second.start()
    first.join(10), second.join(10)
    assert long.tokens == list(range(40))


def test_serve_sleeps_without_work_and_wakes_for_it() -> None:
    core = ScriptedCore()
    client, sink = InprocClient(core), Log()
    thread = threading.Thread(target=client.serve, daemon=True)
    thread.start()
    time.sleep(0.05)
    cpu = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - cpu < 0.1 and core.steps == 0
    client.submit([(request("a"), sink)], atomic=True)
    while not sink.over():
        time.sleep(0.001)
    assert sink.tokens == [0, 1, 2, 3] and core.steps == 4
    client.close()
    thread.join(2)
    assert not thread.is_alive() and core.closes == 1


def test_close_fails_what_is_pending_once_and_refuses_the_rest() -> None:
    core = ScriptedCore(pause=0.005)
    client, sinks = InprocClient(core), [Log() for _ in range(3)]
    client.submit([(request(f"r{i}", 10_000), s) for i, s in enumerate(sinks)], atomic=True)
    raised: list[Exception] = []

    def wait() -> None:
        try:
            client.run(sinks[0].over)
        except EngineClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while core.steps < 3:
        time.sleep(0.001)
    client.close()
    client.close()
    thread.join(5)
    assert not thread.is_alive() and core.closes == 1
    for sink in sinks:
        assert len(sink.endings) == 1 and isinstance(sink.endings[0], EngineClosedError)
    for use in (
        lambda: client.submit([], atomic=True),
        lambda: client.run(lambda: True),
        lambda: client.call("stats"),
        lambda: client.abort(["r0"]),
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            use()
    client.abandon(["r0"])


def test_a_step_that_raises_kills_the_engine_and_tells_everybody() -> None:
    core = ScriptedCore()
    client, sink = InprocClient(core), Log()
    client.submit([(request("a"), sink)], atomic=True)
    core.explode = RuntimeError("boom")
    client.run(sink.over)
    assert isinstance(sink.endings[0], EngineDeadError) and "boom" in str(sink.endings[0])
    with pytest.raises(EngineDeadError, match="boom") as caught:
        client.call("stats")
    assert isinstance(caught.value.__cause__, RuntimeError)
    client.close()
    assert core.closes == 1


def test_a_lost_request_is_an_error_not_a_hang() -> None:
    core = ScriptedCore()
    client, sink = InprocClient(core), Log()
    client.submit([(request("a"), sink)], atomic=True)
    client.run(client.call("stats").done)
    core.live.clear()
    client.run(sink.over)
    assert isinstance(sink.endings[0], EngineDeadError)


def test_ctrl_c_waits_for_the_end_of_the_step() -> None:
    class Interrupted(ScriptedCore):
        whole_steps = 0

        def step(self, now: float) -> list[OutputDelta]:
            if self.steps == 2:
                signal.raise_signal(signal.SIGINT)
            out = super().step(now)
            self.whole_steps += 1
            return out

    core = Interrupted()
    client, sink = InprocClient(core), Log()
    client.submit([(request("a", 100), sink)], atomic=True)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        client.run(sink.over)
    assert core.whole_steps == core.steps == 3
    assert signal.getsignal(signal.SIGINT) is handler
    client.abandon(["a"])
    again = Log()
    client.submit([(request("b", 2), again)], atomic=True)
    assert client.run(again.over) and again.tokens == [0, 1]


def test_a_closed_client_lets_its_core_go() -> None:
    core = ScriptedCore()
    client, alive = InprocClient(core), weakref.ref(core)
    client.close()
    del core
    gc.collect()
    assert alive() is None


def test_a_forked_child_is_refused_at_once_also_with_the_lock_taken() -> None:
    code = textwrap.dedent(
        """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from test_client import InprocClient, Log, ScriptedCore, request
        from phloem.runtime.errors import EngineClosedError
        client = InprocClient(ScriptedCore())
        client._lock.acquire()
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (lambda: client.submit([(request("a"), Log())], atomic=True), lambda: client.run(lambda: False),
                        lambda: client.call("stats"), client.ensure_usable):
                try:
                    use()
                except EngineClosedError as error:
                    refused += "Create the engine in the child" in str(error)
            client.abandon(["a"])
            client.close()
            os._exit(0 if refused == 4 else 1)
        assert os.waitpid(pid, 0)[1] == 0
        client._lock.release()
        client.ensure_usable()
        """
    )
    subprocess.run([sys.executable, "-c", code, os.path.dirname(__file__)], check=True, timeout=20)


def test_endings_are_exactly_one_a_request_under_random_aborts() -> None:
    core = ScriptedCore(pause=0.0005)
    client = InprocClient(core)
    thread = threading.Thread(target=client.serve, daemon=True)
    thread.start()
    sinks = {f"r{i}": Log() for i in range(200)}
    for i, (name, sink) in enumerate(sinks.items()):
        client.submit([(request(name, 1 + i % 9), sink)], atomic=True)
        if i % 3 == 0:
            client.abort([name, f"r{i // 2}"])
    deadline = time.monotonic() + 20
    while not all(s.over() for s in sinks.values()) and time.monotonic() < deadline:
        time.sleep(0.005)
    client.close()
    thread.join(5)
    assert Counter(len(s.endings) for s in sinks.values()) == {1: 200}
