"""The engine process: the loop of InprocClient behind two sockets. Started by process.py, ends with it; acts on no signal.

    in   reader thread ── Add, Abort, Stop, Control ──> client's inbox
                                                         main thread: client.serve() ── Relay.push ──> Outbox
    out  <── one Outputs a turn, Answers ────────────────────────────────────── on_turn: Outbox.leave ──┘
    stdin  says nothing; its end is the parent's end

What the loop says of itself (step times, beats) it says itself: a loop that stands still is silent, whoever else may be well.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from phloem.runtime.config import Resolved, make_config
from phloem.runtime.engine import wire
from phloem.runtime.engine.client import InprocClient
from phloem.runtime.engine.core import EngineCore
from phloem.runtime.errors import ConfigError, EngineDeadError, PhloemError
from phloem.runtime.request import OutputDelta, Request, WireError

if TYPE_CHECKING:
    from phloem.runtime.engine.grammars import Grammars
    from phloem.runtime.models.loader import OpenModel
    from phloem.runtime.scheduler.sequence import Sequence as Live

__all__ = ["BEAT_SECONDS", "Made", "Report", "fingerprint", "load", "main"]

BEAT_SECONDS = 1.0
"""An idle loop beats so often; L3 allows it five of them."""
STATS_SECONDS = 0.1
"""A busy loop counts what it holds so often: the counting walks what waits."""
LINGER_MS = 1000
"""The last words may take so long to leave."""


class Report(Protocol):
    """What a factory tells of its work."""

    def stage(self, stage: str) -> None: ...
    def opened(self, opened: wire.Opened) -> None: ...


@dataclass(frozen=True, slots=True)
class Made:
    """An engine that a factory made. close: frees what the core does not own, after the core was closed.

    grammars: whose compiling and filling is timed, or None.
    """

    core: EngineCore
    resolved: Resolved
    vocab_size: int
    fingerprint: str
    device_name: str
    close: Callable[[], None]
    grammars: Grammars | None = None


def load(options: Mapping[str, Any], report: Report) -> Made:
    """The usual factory. options: fields of EngineConfig. Raises what `build` raises."""
    report.stage("importing")
    from phloem.runtime.engine.build import build
    from phloem.runtime.native import supported_variants

    hashing: list[_Hash] = []

    def on_open(opened: OpenModel) -> None:
        report.opened(_opened(opened))
        hashing.append(_Hash(opened.path))

    config = make_config(**options)
    parts = build(config, report.stage, on_open)
    assert isinstance(parts.core, EngineCore)
    variant = supported_variants()[-1] if parts.resolved.device == "cpu" else ""
    word = fingerprint(hashing[0].hexdigest(), config.dtype, parts.resolved.kv_dtype, parts.resolved.device, variant)
    return Made(parts.core, parts.resolved, parts.core.settings.vocab_size, word, variant, parts.on_close, parts.grammars)


def fingerprint(*parts: str) -> str:
    """Eight hex digits of all that decides a greedy text beside the request (B1)."""
    from importlib.metadata import version

    return hashlib.sha256("\0".join((version("phloem"), *parts)).encode()).hexdigest()[:8]


class _Hash(threading.Thread):
    """SHA-256 over the files of a checkpoint, names and contents, while they are loaded anyway."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True, name="phloem-fingerprint")
        self._path, self._hash = path, hashlib.sha256()
        self.start()

    def run(self) -> None:
        files = [self._path] if self._path.is_file() else sorted(self._path.glob("*.safetensors"))
        for file in files:
            self._hash.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as f:
                while chunk := f.read(1 << 20):
                    self._hash.update(chunk)

    def hexdigest(self) -> str:
        self.join()
        return self._hash.hexdigest()


def _opened(opened: OpenModel) -> wire.Opened:
    metadata = opened.metadata
    numbers = {
        name: float(value)
        for name, value in opened.generation_config.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    return wire.Opened(
        metadata=None if metadata is None else dict(metadata),
        directory=str(opened.path) if metadata is None else None,
        width=opened.config.vocabulary,
        source=str(opened.path),
        name=opened.name,
        model_type=opened.config.architecture.removesuffix("ForCausalLM").lower(),
        architectures=[opened.config.architecture],
        generation=numbers,
    )


# --------------------------------------------------------------------------------------------------------------------- the loop


class Outbox:
    """Gathers what one turn of the loop has to say. The loop's thread alone touches it."""

    def __init__(self, send: Callable[[bytes], None], core: Watched) -> None:
        self._send, self._core = send, core
        self.deltas: list[OutputDelta] = []
        self.failed: list[wire.Failed] = []
        self.taken: list[int] = []
        self.dropped_frames = 0  # the reader's count
        self._seq = 0
        self._left = self._counted = -1e9  # when the last frame left, when the last beat was in it
        self._was_idle = False

    def say(self, frame: wire.FromEngine) -> None:
        self._send(wire.encode(frame))

    def answer(self, ticket: int, value: Any, error: BaseException | None) -> None:
        if error is None:
            try:
                self.say(wire.Answer(ticket, msgspec.Raw(msgspec.msgpack.encode(value))))
                return
            except (TypeError, ValueError, OverflowError) as unspeakable:
                error = unspeakable
        self.say(wire.Answer(ticket, msgspec.Raw(msgspec.msgpack.encode(None)), wire.plain_error(error)))

    def leave(self) -> None:
        """After each turn: one frame, if there is something to say or it is time for a beat."""
        core, now = self._core, time.monotonic()
        idle = not core.has_work
        silent = not (self.deltas or self.failed or self.taken or core.steps)
        if silent and now - self._left < 0.9 * BEAT_SECONDS and (not idle or self._was_idle):
            return
        beat = None
        if idle or now - self._counted >= STATS_SECONDS:
            beat, self._counted = core.beat(self.dropped_frames), now
        self._seq += 1
        self.say(wire.Outputs(self._seq, core.take_steps(), self.deltas, self.failed, self.taken, core.take_timings(), beat))
        self.deltas, self.failed, self.taken = [], [], []
        self._left, self._was_idle = now, idle

    def turn(self) -> None:
        """What the loop calls. Ends it when the core has given up: nothing more would come of it."""
        self.leave()
        if self._core.closed:
            raise EngineDeadError("the device failed and could not be reset.")


class Relay:
    """The sink of one request: its text is made on the other side, so nothing is decided here."""

    __slots__ = ("_id", "_outbox")

    def __init__(self, request_id: str, outbox: Outbox) -> None:
        self._id, self._outbox = request_id, outbox

    def push(self, delta: OutputDelta) -> int | None:
        self._outbox.deltas.append(delta)
        return None

    def fail(self, error: Exception) -> None:
        self._outbox.failed.append(wire.Failed(self._id, wire.plain_error(error)))


class Watched:
    """An EngineCore whose steps and requests are timed. What it does not name is the core's own."""

    def __init__(
        self, core: EngineCore, grammars: Grammars | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._core, self._grammars, self._clock = core, grammars, clock
        self.steps: list[tuple[float, int]] = []
        self._tokens = 0
        self._step = (0.0, 0.0)
        self._added: dict[str, _Life] = {}
        self._running: dict[Live, _Life] = {}
        self._compiling: dict[Live, _Life] = {}
        self._timings: dict[str, wire.Timing] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    @property
    def has_work(self) -> bool:
        return self._core.has_work

    @property
    def is_blocked(self) -> bool:
        return self._core.is_blocked

    def add(self, request: Request) -> None:
        added = self._clock()
        self._core.add(request)
        life = self._added[request.id] = _Life(added)
        if request.grammar is not None:
            for q in self._core.scheduler.waiting:
                if q.request is request and q.compiling:
                    self._compiling[q] = life

    def drain(self) -> Sequence[OutputDelta]:
        return self._see(self._core.drain())

    def step(self, now: float) -> Sequence[OutputDelta]:
        start = self._clock()
        deltas = self._core.step(now)
        end = self._clock()
        self._step = (start, end)
        c = self._core.scheduler.counters
        tokens = c.prefill + c.decode + c.recomputed
        if tokens != self._tokens:
            self.steps.append((end - start, tokens - self._tokens))
            self._tokens = tokens
        for q in [q for q in self._compiling if not q.compiling]:
            compiled = self._compiling.pop(q)
            compiled.compile = end - compiled.added
        running: dict[Live, _Life] = {}
        for q in self._core.scheduler.running:
            life = self._running.pop(q, None) or self._added.get(q.request.id)
            if life is not None:
                life.admitted = life.admitted or start
                if not life.first:
                    life.prefilled(q, start, end)
                running[q] = life
        for q, life in self._running.items():
            life.preemptions += q.state == "waiting"
        self._running = running
        return self._see(deltas)

    def _see(self, deltas: Sequence[OutputDelta]) -> Sequence[OutputDelta]:
        for delta in deltas:
            life = self._added.get(delta.request_id)
            if life is None:
                continue
            if delta.token_ids and not life.first:
                life.first = self._clock()
                life.chunk(*self._step)
            if delta.finish_reason is not None:
                del self._added[delta.request_id]
                if life.compile is None:
                    self._compiling = {q: other for q, other in self._compiling.items() if other is not life}
                self._timings[delta.request_id] = life.timing()
        return deltas

    def take_steps(self) -> list[tuple[float, int]]:
        steps, self.steps = self.steps, []
        return steps

    def take_timings(self) -> dict[str, wire.Timing]:
        timings, self._timings = self._timings, {}
        return timings

    def beat(self, dropped_frames: int) -> wire.Beat:
        waiting, grammars = self._core.scheduler.waiting, self._grammars
        times = grammars.times() if grammars is not None else (None, {})
        return wire.Beat(
            stats=self._core.stats(),
            pages_leased=self._pages_leased(),
            waiting_grammar=sum(q.compiling for q in waiting),
            waiting_preempted=sum(q.preempted for q in waiting),
            dropped_frames=dropped_frames,
            compile_times=times[0],
            fill_times=times[1],
        )

    def _pages_leased(self) -> int:
        """Pages of the tree on the paths that running requests read, each once."""
        seen, pages = set(), 0
        for q in self._core.scheduler.running:
            node = q.grant.lease if q.grant is not None else None
            while node is not None and node not in seen:
                seen.add(node)
                pages += len(node.pages)
                node = node.parent
        return pages


@dataclass(slots=True)
class _Life:
    """Times of one request; 0.0: not yet."""

    added: float
    admitted: float = 0.0
    first: float = 0.0
    preemptions: int = 0
    compile: float | None = None
    computed: int | None = None
    chunks: list[tuple[float, float]] = field(default_factory=list)

    def prefilled(self, q: Live, start: float, end: float) -> None:
        """A step that ended without its first token: did it compute more of its tokens?"""
        before = self.computed if self.computed is not None else q.cached_tokens or 0
        self.computed = q.computed
        if q.computed > before:
            self.chunk(start, end)

    def chunk(self, start: float, end: float) -> None:
        """A step, told once, that computed some of its prompt."""
        told = (start - self.added, end - self.added)
        if self.chunks and self.chunks[-1][1] >= told[1]:
            return
        if len(self.chunks) < wire.MAX_CHUNKS:
            self.chunks.append(told)
        else:
            self.chunks[-1] = (self.chunks[-1][0], told[1])

    def timing(self) -> wire.Timing:
        queue = self.admitted - self.added if self.admitted else None
        prefill = self.first - self.admitted if self.admitted and self.first else None
        return wire.Timing(queue, prefill, self.preemptions, self.compile, self.chunks)


# ------------------------------------------------------------------------------------------------------------------ the process


def main(folder: str) -> None:
    """Serve the parent whose sockets lie in `folder`, to its end or ours. Never returns."""
    # Ctrl-C and a supervisor's SIGTERM reach the whole group; the parent decides what becomes of them (L4).
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True, name="phloem-parent").start()
    os.dup2(2, 1)
    context = zmq.Context()
    inward, outward = (context.socket(zmq.PAIR) for _ in range(2))
    for socket in (inward, outward):
        socket.set_hwm(0)
    inward.bind(f"ipc://{folder}/in")
    outward.connect(f"ipc://{folder}/out")
    try:
        status = _run(inward, outward)
    except BaseException as error:
        status = 1
        if not isinstance(error, PhloemError):
            traceback.print_exc()
        outward.send(wire.encode(wire.Failure(_failure(error))))
    outward.close(linger=LINGER_MS)
    if threading.active_count() < 3:  # no reader yet: nobody else closes its socket
        inward.close(linger=0)
    leaving = threading.Thread(target=context.term, daemon=True)  # returns when the last words have left
    leaving.start()
    leaving.join(2 * LINGER_MS / 1000)
    sys.stderr.flush()
    os._exit(status)


def _end_with_parent(folder: str) -> None:
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed has not
    os._exit(0)


def _failure(error: BaseException) -> WireError:
    if isinstance(error, MemoryError):
        return WireError("ConfigError", f"the memory is too small: {error}", "kv_memory", "out_of_memory")
    if isinstance(error, ConfigError) and error.param in ("kv_memory", "kv_tokens"):
        return WireError("ConfigError", error.message, error.param, "out_of_memory")
    return wire.plain_error(error)


class _Reporter:
    """Follows Report. Also the clock of the start: seconds between one stage and the next, by name."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send, self._last, self._name, self._said = send, time.perf_counter(), "start", ""
        self.seconds: dict[str, float] = {}

    def stage(self, stage: str) -> None:
        words = stage.removeprefix("the ").split()
        name, done = words[0], None
        if len(words) == 2 and words[1].endswith("%"):
            done = float(words[1][:-1]) / 100
        self._tick(name)
        if stage != self._said:
            self._said = stage
            self._send(wire.encode(wire.Loading(stage, done)))

    def opened(self, opened: wire.Opened) -> None:
        self._send(wire.encode(opened))

    def _tick(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._last
        self._last, self._name = now, name

    def end(self) -> dict[str, float]:
        self._tick("")
        return self.seconds


def _run(inward: zmq.Socket[bytes], outward: zmq.Socket[bytes]) -> int:
    launch = wire.decoder_to_engine().decode(inward.recv())
    assert isinstance(launch, wire.Launch)
    reporter = _Reporter(outward.send)
    module, _, function = launch.factory.partition(":")
    made: Made = getattr(importlib.import_module(module), function)(launch.options, reporter)
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection needs to walk it again
    watched = Watched(made.core, made.grammars)
    outbox = Outbox(outward.send, watched)
    client = InprocClient(watched, on_close=made.close, on_turn=outbox.turn, turn_seconds=BEAT_SECONDS)
    hello = wire.Hello(made.resolved, made.vocab_size, made.fingerprint, made.device_name, reporter.end(), os.getpid())
    outbox.say(hello)
    if made.grammars is not None:
        made.grammars.warm()  # so that the first JSON request does not pay for a worker's start
    threading.Thread(target=_listen, args=(inward, client, outbox), daemon=True, name="phloem-reader").start()
    client.serve()
    outbox.leave()
    try:
        client.ensure_usable()
    except EngineDeadError as error:
        outbox.say(wire.Failure(wire.plain_error(error)))
        return 1
    except PhloemError:  # it was shut
        return 0
    return 1


def _listen(inward: zmq.Socket[bytes], client: InprocClient, outbox: Outbox) -> None:
    decoder = wire.decoder_to_engine()
    while True:
        try:
            frame = inward.recv()
        except zmq.ZMQError:
            inward.close(linger=0)
            return
        try:
            word = decoder.decode(frame)
        except (msgspec.DecodeError, ValueError, RecursionError):
            outbox.dropped_frames += 1
            continue
        with suppress(PhloemError):  # the loop has ended, and says so itself
            client.do(functools.partial(_do, word, client, outbox))


def _do(word: wire.ToEngine, client: InprocClient, outbox: Outbox) -> None:
    """In the loop's thread, so that what answers is heard there too: the outbox and its socket are that thread's."""
    if isinstance(word, wire.Add):
        ticket = word.ticket
        entries = [(request, Relay(request.id, outbox)) for request in word.requests]
        client.submit(entries, atomic=word.atomic).add_done_callback(lambda _: outbox.taken.append(ticket))
    elif isinstance(word, wire.Abort):
        client.abort(word.ids)
    elif isinstance(word, wire.Stop):
        client.stop(word.id, word.num_tokens)
    elif isinstance(word, wire.Control):
        try:
            future = client.call(word.verb, *word.args)  # type: ignore[arg-type]
        except ValueError as error:  # no such verb
            outbox.answer(word.ticket, None, error)
        else:
            future.add_done_callback(lambda f: outbox.answer(word.ticket, f.exception() or f.result(), f.exception()))
    elif isinstance(word, wire.Shut):
        client.close()
