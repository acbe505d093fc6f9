"""Grammars of strangers compile where they can be killed (C2, C3), and the worker leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phloem.runtime.errors import EngineClosedError, GrammarError, PhloemError
from phloem.runtime.grammar import audit
from phloem.runtime.grammar import compile as compiling
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.compile import Workers
from phloem.runtime.grammar.static import Statics
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec

CLOSED = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


def schema(value: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", source=json.dumps(value), **options)


def bushy(depth: int) -> Any:
    """4 ** depth paths: a second of compiling, and small as text."""
    if depth == 0:
        return {"type": "integer"}
    return {"anyOf": [{"type": "object", "properties": {f"a{i}": bushy(depth - 1)}, "required": [f"a{i}"]} for i in range(4)]}


@pytest.fixture
def workers(smollm2: Vocabulary) -> Iterator[Workers]:
    made = Workers(lambda: smollm2, Limits(), most=1)
    yield made
    made.close()
    assert made.num_alive() == 0


def pids(workers: Workers) -> list[int]:
    return [worker.process.pid for worker in workers._all]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_worker_vets_and_is_kept(workers: Workers) -> None:
    assert workers.num_alive() == 0  # started when first needed
    path = workers.vet(schema({"type": "object", "properties": {"d": {"type": "string", "format": "date"}}}))
    assert path.engines == ("llguidance",) and ("/properties/d", "format") in path.lowered
    closed = workers.vet(schema(CLOSED))
    assert closed.engines == ("xgrammar",)
    static = workers.static(closed.spec, quiet=0)
    assert static is not None and static.seconds > 0
    assert workers.num_alive() == 1 and workers.killed == 0


def test_a_worker_never_imports_torch(workers: Workers) -> None:
    workers.static(workers.vet(schema(CLOSED)).spec, quiet=0)
    (pid,) = pids(workers)
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.case("C-STRUCT-02")
def test_a_refusal_comes_back_whole(workers: Workers) -> None:
    with pytest.raises(GrammarError, match="'uniqueItems'") as caught:
        workers.vet(schema({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}))
    assert caught.value.param == "json_schema/properties/a" and caught.value.code == "invalid_json_schema"
    dropped = workers.vet(schema({"type": "array", "uniqueItems": True}, strict=False)).dropped
    assert dropped == (("", "uniqueItems"),)


@pytest.mark.case("C-STRUCT-13")
def test_too_much_time_kills_the_worker_and_the_next_job_gets_another(workers: Workers) -> None:
    workers.vet(schema(CLOSED))
    workers.limits = Limits(cpu_seconds=0.05)
    with pytest.raises(GrammarError, match=r"took more than 0\.05 s") as caught:
        workers.vet(schema(bushy(5)))
    assert caught.value.code == "invalid_json_schema"
    assert workers.killed == 1 and workers.num_alive() == 0
    workers.limits = Limits()
    assert workers.vet(schema({"type": "boolean"})).engines == ("token_fsm",)


def test_too_much_memory_is_a_refusal(workers: Workers) -> None:
    workers.vet(schema(CLOSED))
    workers.limits = Limits(worker_bytes=1 << 20)
    with pytest.raises(GrammarError, match="memory"):
        workers.vet(schema(bushy(5)))


def test_a_killed_worker_is_an_error_of_its_job_alone(workers: Workers) -> None:
    workers.vet(schema({"type": "boolean"}))
    (pid,) = pids(workers)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(GrammarError, match="too much time or memory"):
        workers.vet(schema({"type": "boolean"}))
    assert workers.vet(schema({"type": "boolean"})).engines == ("token_fsm",)


def test_who_waits_for_a_worker_gets_it(workers: Workers) -> None:
    done: list[int] = []

    def vet(i: int) -> None:
        workers.vet(schema({"enum": [i, f"x{i}"]}))
        done.append(i)

    threads = [threading.Thread(target=vet, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [0, 1, 2, 3] and workers.num_alive() == 1


def test_a_worker_may_be_started_ahead(workers: Workers) -> None:
    workers.warm()
    workers.warm()
    workers.vet(schema({"type": "boolean"}))
    assert workers.num_alive() == 1


def test_nobody_waits_for_a_start_when_another_worker_is_free(smollm2: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting one takes most of a second; what is given back meanwhile takes the job."""
    workers, gate = Workers(lambda: smollm2, Limits(), most=2), threading.Event()
    try:
        busy = workers._take()
        made = workers._vocabulary
        monkeypatch.setattr(workers, "_vocabulary", lambda: (gate.wait(60), made())[1])
        found: list[Any] = []
        waiter = threading.Thread(target=lambda: found.append(workers.vet(schema({"type": "boolean"}))))
        waiter.start()
        while not workers._starting:
            time.sleep(0.001)
        workers._give(busy)
        waiter.join(60)
        assert len(found) == 1 and not gate.is_set()
    finally:
        gate.set()
        workers.close()


def test_a_static_grammar_waits_for_requests(smollm2: Vocabulary) -> None:
    """Neither while one is compiled, nor for a while after; and whoever waits for an idle moment goes with the workers."""
    workers, found = Workers(lambda: smollm2, Limits(), most=2), list[Any]()
    try:
        closed = workers.vet(schema(CLOSED)).spec
        busy = workers._take()
        thread = threading.Thread(target=lambda: found.append(workers.static(closed, quiet=0)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and not found and workers.num_alive() == 1
        workers._give(busy)
        thread.join(60)
        assert found.pop() is not None
        thread = threading.Thread(target=lambda: found.append(workers.static(closed, quiet=3600)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    finally:
        workers.close()
    thread.join(60)
    assert found == [None]


class _Grammar:
    """As much of an XGrammarGrammar as Statics touches."""

    def __init__(self) -> None:
        self.used = threading.Event()

    def use(self, compiled: Any) -> None:
        self.used.set()


def test_static_grammars_are_made_for_those_that_are_still_kept(workers: Workers, smollm2: Vocabulary) -> None:
    """And one that takes too much is let go, with its worker, and refuses nothing."""
    made, kept, gone = Statics(workers, lambda: smollm2), _Grammar(), _Grammar()
    asked, original = list[str](), workers.static
    workers.static = lambda spec, quiet=0.0: (asked.append(spec.source), original(spec, 0))[1]  # type: ignore[method-assign]
    first = workers.vet(schema(CLOSED)).spec
    busy = workers._take()
    made.want(kept, first)  # type: ignore[arg-type]
    made.want(gone, schema({}))  # type: ignore[arg-type]
    del gone
    workers._give(busy)
    assert kept.used.wait(60)
    kept.used.clear()
    made.want(kept, first)  # type: ignore[arg-type]
    assert kept.used.wait(60)
    assert set(asked) == {first.source}
    large = workers.vet(
        schema({**CLOSED, "properties": {f"p{i}": {"type": "string"} for i in range(500)}, "required": []})
    ).spec
    workers.limits = Limits(cpu_seconds=0.05)
    assert original(large, 0) is None
    assert workers.killed == 0 and workers.num_alive() == 0
    workers.limits = Limits()
    assert workers.vet(schema(CLOSED)).engines == ("xgrammar",)


def test_a_start_that_fails_is_an_error_of_the_job(smollm2: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(lambda: smollm2, Limits(), most=1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("sys.executable", "/bin/false")
            with pytest.raises(PhloemError, match="did not start"):
                workers.vet(schema({"type": "boolean"}))
        assert workers.vet(schema({"type": "boolean"})).engines == ("token_fsm",)
    finally:
        workers.close()


def test_closing_ends_the_workers_and_whoever_waits(smollm2: Vocabulary) -> None:
    workers = Workers(lambda: smollm2, Limits(cpu_seconds=60, subschemas=10**6, source_bytes=10**8), most=1)
    workers.vet(schema({"type": "boolean"}))
    (pid,) = pids(workers)
    caught: list[Exception] = []

    def vet() -> None:
        try:
            workers.vet(schema(bushy(7)))
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=vet)
    thread.start()
    time.sleep(0.3)
    workers.close()
    thread.join(30)
    assert not alive(pid) and isinstance(caught[0], EngineClosedError)
    with pytest.raises(EngineClosedError):
        workers.vet(schema({"type": "boolean"}))


def test_no_worker_outlives_its_engine() -> None:
    """Also when that is killed in the middle of a compile."""
    program = """
import json, os, sys, threading, time
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.compile import Workers
from phloem.runtime.grammar.static import Statics
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.oracle import toy_vocabulary
from tests.runtime.grammar.test_compile import bushy, schema
workers = Workers(lambda: toy_vocabulary(), Limits(cpu_seconds=60, subschemas=10**6, source_bytes=10**8), most=1)
workers.vet(schema({"type": "boolean"}))
threading.Thread(target=workers.vet, args=(schema(bushy(7)),), daemon=True).start()
time.sleep(0.2)
print(*[w.process.pid for w in workers._all], flush=True)
os.kill(os.getpid(), 9)
"""
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    pid = int(ran.stdout)
    deadline = time.monotonic() + 20
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


BOMBS: dict[str, tuple[Any, str | None]] = {
    "minItems 1e5": ({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}, None),
    "maxItems 2**63": ({"type": "array", "items": {"type": "integer"}, "maxItems": 2**63}, None),
    "lengths 1e6": ({"type": "string", "minLength": 10**6, "maxLength": 10**6}, None),
    "nested repeats": ({"type": "string", "pattern": "^((a{1,1000}){1,1000})$"}, "repeats 1000000 times"),
    "a power of states": ({"type": "string", "pattern": "^(a|b)*a(a|b){18}$"}, None),
    "500 optional": ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}, "additionalProperties": False}, None),
    "5000 optional": ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}, "at most 1000"),
    "enum of 10000": ({"enum": [f"v{i}" for i in range(10_000)]}, None),
    "enum of 10001": ({"enum": [f"v{i}" for i in range(10_001)]}, "more than 10000 values"),
    "60 overlapping": ({"oneOf": [{"type": "object", "properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(60)]}, "'oneOf'"),
    "4**5": (bushy(5), None),
    "300 deep": (json.loads('{"type": "array", "items": ' * 300 + "{}" + "}" * 300), "deeper than 64"),
    "itself": ({"$ref": "#"}, "leads back to itself"),
}  # fmt: skip
"""Schema -> served (None), or what its refusal says."""


@pytest.mark.case("C-STRUCT-13", "C-STRUCT-08")
@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_served_or_refused_within_their_time(name: str, bomb_workers: Workers) -> None:
    value, refusal = BOMBS[name]
    if refusal is None:
        path = bomb_workers.vet(schema(value))
        if path.engines == ("xgrammar",):
            bomb_workers.static(path.spec, quiet=0)
    else:
        with pytest.raises(GrammarError, match=refusal):
            bomb_workers.vet(schema(value))


@pytest.fixture(scope="module")
def bomb_workers(smollm2: Vocabulary) -> Iterator[Workers]:
    """The static stage gets killed over some of them; what matters is what comes before it."""
    made = Workers(lambda: smollm2, Limits(cpu_seconds=5), most=1)
    yield made
    made.close()


def test_an_engine_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, smollm2: Vocabulary) -> None:
    for module in (audit, compiling):
        monkeypatch.setattr(module, "is_audited", lambda name: name == "token_fsm")
    with pytest.raises(GrammarError, match=r"needs .*llguidance 1\.9\.1.*audited"):
        compiling.serve(audit.route(schema(CLOSED), Limits()), smollm2, Limits())
