"""ProcessClient: an EngineClient whose core lives in a process of its own. Knows frames and one child; no text, no HTTP.

    any thread ── submit, abort, call ──in──>  engine process (child.py)
    reader thread <──out── Outputs, Answer ──┘     │
         └─ sink.push ── a stop string? ──in: Stop─┘      sentinel: a pipe that only the child holds; its end is the child's end

The sockets lie in a directory of mode 0700. When the child ends, for whatever reason, all that is pending fails at once; when
this process ends, the child's stdin ends, and with it the child.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import zmq

from phloem.runtime.config import EngineConfig, Resolved
from phloem.runtime.engine import wire
from phloem.runtime.engine.client import INTERRUPT_SECONDS, VERBS, Sink, Verb, _fail, _InterruptsLater
from phloem.runtime.engine.textside import Text
from phloem.runtime.errors import (
    EngineBusyError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    PhloemError,
    from_wire,
)
from phloem.runtime.request import OutputDelta, Request, Usage
from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["DEFAULT_FACTORY", "ProcessClient", "RemoteSide", "Watcher", "side_of", "tokenizer_of"]

DEFAULT_FACTORY = "phloem.runtime.engine.child:load"
LONGEST_SOCKET_PATH = 100
"""Bytes of a socket's path, which the system keeps in 108."""
LAST_WORDS_MS = 20
"""How long to look for frames that the child sent before it ended."""
ABANDON_SECONDS = 30.0


class Watcher(Protocol):
    """Told of what is no request's own, by the reader thread: be quick, and do not call the client's `run` or `close`."""

    def heard(self, word: wire.Loading | wire.Opened | wire.Hello | wire.Outputs) -> None: ...
    def ended(self, error: PhloemError) -> None:
        """The child is gone: EngineClosedError after `close`, what it could not load with, or EngineDeadError."""


class ProcessClient:
    """Starts the engine process and returns at once. What is submitted before it is up waits for it.

    opened, hello: done when the child says so; they raise what it could not start with.
    options: of the factory; of the usual one the fields of EngineConfig, to be checked by `make_config` before.
    """

    def __init__(
        self, options: Mapping[str, Any] | None = None, *, factory: str = DEFAULT_FACTORY, watcher: Watcher | None = None
    ) -> None:
        self.opened: Future[wire.Opened] = Future()
        self.hello: Future[wire.Hello] = Future()
        self.last_heard = time.monotonic()
        """When the loop last said that it moves: a step, or an idle turn."""
        self.longest_step = 0.0
        self.beat: wire.Beat | None = None
        self.dropped_frames = 0
        self._watcher = watcher
        self._pid = os.getpid()
        # As in InprocClient: `with` on the lock itself, reentrant because a garbage collection inside may bring us back.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count(1)
        self._sinks: dict[str, Sink] = {}
        self._admissions: dict[int, Future[None]] = {}
        self._calls: dict[int, tuple[str, Future[Any]]] = {}
        self._outgoing: deque[bytes] = deque()
        self._sending = False
        self._ending: PhloemError | None = None
        self._seq = 0
        self._folder = socket_folder()
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._context = zmq.Context()
        self._in, self._out = (self._context.socket(zmq.PAIR) for _ in range(2))
        for socket in (self._in, self._out):
            socket.set_hwm(0)  # a step never waits for a slow reader; what may wait here is bounded by what may be submitted
        self._in.setsockopt(zmq.RECONNECT_IVL, 5)
        self._out.bind(f"ipc://{self._folder}/out")
        self._in.connect(f"ipc://{self._folder}/in")
        self._sentinel, held = os.pipe()
        # Not multiprocessing: its spawn would run the user's main module again. The path is ours: no file of the current
        # directory stands for a module.
        code = (
            f"import sys, os; os.set_inheritable({held}, False); sys.path[:] = {sys.path!r}; "
            f"from phloem.runtime.engine.child import main; main({self._folder!r})"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, pass_fds=(held,), start_new_session=True
        )
        os.close(held)
        self._send(wire.Launch(factory, dict(options or {})))
        self._thread = threading.Thread(target=self._read, name="phloem-frames", daemon=True)
        self._thread.start()

    # ---- EngineClient ---------------------------------------------------------------------------------------------------

    def ensure_usable(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork of it. Create the engine in the child."
            )
        if self._ending is not None:
            raise self._refusal()

    def submit(self, entries: Sequence[tuple[Request, Sink]], *, atomic: bool) -> Future[None]:
        self.ensure_usable()
        admitted: Future[None] = Future()
        refused: list[tuple[Sink, PhloemError]] = []
        with self._lock:
            if self._ending is not None:
                raise self._refusal()
            good: list[tuple[Request, Sink]] = []
            for request, sink in entries:
                problem = self._unsendable(request)
                if problem is None:
                    good.append((request, sink))
                    self._sinks[request.id] = sink
                else:
                    refused.append((sink, problem))
            if atomic and refused:
                for request, _ in good:
                    del self._sinks[request.id]
            elif good:
                ticket = next(self._numbers)
                self._admissions[ticket] = admitted
                self._send(wire.Add(ticket, [request for request, _ in good], atomic))
                good = []
        for sink, error in refused:
            _fail(sink, error)
        for request, sink in good:  # of an atomic submission that is refused
            last = OutputDelta(request.id, finish_reason="abort", usage=Usage(len(request.token_ids)))
            with suppress(Exception):
                sink.push(last)
        if not entries or len(refused) == len(entries) or (atomic and refused):
            admitted.set_result(None)
        return admitted

    def abort(self, request_ids: Iterable[str]) -> None:
        self.ensure_usable()
        with self._lock:
            ids = [i for i in request_ids if i in self._sinks]
            if ids:
                self._send(wire.Abort(ids))

    def call(self, verb: Verb, *args: Any) -> Future[Any]:
        if verb not in VERBS:
            raise ValueError(f"there is no control verb {verb!r}; the verbs are {', '.join(VERBS)}.")
        self.ensure_usable()
        future: Future[Any] = Future()
        with self._lock:
            if self._ending is not None:
                raise self._refusal()
            ticket = next(self._numbers)
            try:
                frame = wire.encode(wire.Control(ticket, verb, list(args)))
            except (TypeError, ValueError, OverflowError) as error:
                future.set_exception(InvalidRequestError(f"{verb}: {error}.", param="args"))
                return future
            self._calls[ticket] = verb, future
            self._send_frame(frame)
        return future

    def run(self, done: Callable[[], bool], deadline: float | None = None) -> bool:
        self.ensure_usable()
        if threading.current_thread() is self._thread:
            raise EngineBusyError("this is the thread that brings the engine's answers: a callback cannot wait for one.")
        while True:
            with _InterruptsLater() as interrupts, self._lock:
                while not done() and not interrupts.pending:
                    if self._ending is not None:
                        raise self._refusal()
                    left = INTERRUPT_SECONDS if deadline is None else min(deadline - time.monotonic(), INTERRUPT_SECONDS)
                    if left <= 0:
                        return False
                    self._changed.wait(left)
                if done():
                    return True

    def abandon(self, request_ids: Sequence[str]) -> None:
        ids = tuple(request_ids)
        if os.getpid() != self._pid or not ids:
            return
        with _InterruptsLater(), suppress(PhloemError):  # closed or dead meanwhile: nothing is held any more
            self.abort(ids)
            if threading.current_thread() is not self._thread:
                self.run(lambda: not any(i in self._sinks for i in ids), time.monotonic() + ABANDON_SECONDS)

    def serve(self) -> None:
        """Nothing is left to do but to wait: the child works, and the reader thread brings what it says."""
        self._thread.join()

    def close(self, grace: float = 5.0) -> None:
        """grace: seconds that the child has to end its step before it is killed."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._ending is None:
                self._ending = EngineClosedError("the engine was closed. Create a new one, or close it later.")
                self._send(wire.Shut())
            self._changed.notify_all()
        if threading.current_thread() is self._thread:
            return
        if not self.hello.done():
            self.process.kill()  # it listens to nothing while it loads
        self._thread.join(grace)
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join()

    def kill(self) -> None:
        """End the child now, whatever it does. What is pending fails as after any death."""
        self.process.kill()

    # ---- sending --------------------------------------------------------------------------------------------------------

    def _refusal(self) -> PhloemError:
        assert self._ending is not None
        return type(self._ending)(self._ending.message, param=self._ending.param, code=self._ending.code)

    def _unsendable(self, request: Request) -> PhloemError | None:
        """A request that the other side could not read would be a reply that never comes: it is read here first."""
        if request.id in self._sinks:
            return InvalidRequestError(
                f"a request with the id {request.id!r} is still running; ids must be unique among live requests.",
                param="id",
                code="duplicate_request_id",
            )
        try:
            msgspec.msgpack.decode(wire.encode(request), type=Request)
        except PhloemError as error:
            return error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return InvalidRequestError(f"the request cannot be sent to the engine: {error}.", param="request")
        return None

    def _send(self, word: wire.ToEngine) -> None:
        self._send_frame(wire.encode(word))

    def _send_frame(self, frame: bytes) -> None:
        with self._lock:
            self._outgoing.append(frame)
            if self._sending:
                return  # a garbage collection inside the loop below
            self._sending = True
            try:
                while self._outgoing:
                    if not self._in.closed:
                        self._in.send(self._outgoing[0])
                    self._outgoing.popleft()
            finally:
                self._sending = False

    # ---- the reader thread ----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        decoder, poller = wire.decoder_of_engine(), zmq.Poller()
        poller.register(self._out, zmq.POLLIN)
        poller.register(self._sentinel, zmq.POLLIN)
        failure: PhloemError | None = None
        lives = True
        while lives:
            lives = self._sentinel not in (ready[0] for ready in poller.poll())
            while self._out.poll(0 if lives else LAST_WORDS_MS):
                try:
                    word = decoder.decode(self._out.recv())
                except (msgspec.DecodeError, ValueError, RecursionError):
                    self.dropped_frames += 1
                    continue
                if isinstance(word, wire.Failure):
                    failure = from_wire(word.error.name, word.error.message, word.error.param, word.error.code)
                else:
                    self._hear(word)
        self._end(failure)

    def _hear(self, word: wire.FromEngine) -> None:
        if isinstance(word, wire.Outputs):
            self._hear_outputs(word)
        elif isinstance(word, wire.Answer):
            self._hear_answer(word)
        elif isinstance(word, wire.Opened):
            self.opened.set_result(word)
        elif isinstance(word, wire.Hello):
            self.last_heard = time.monotonic()
            self.hello.set_result(word)
        if self._watcher is not None and isinstance(word, (wire.Loading, wire.Opened, wire.Hello, wire.Outputs)):
            self._watcher.heard(word)
        with self._lock:
            self._changed.notify_all()

    def _hear_outputs(self, word: wire.Outputs) -> None:
        self._seq += 1
        if word.seq != self._seq:
            # A frame of this child was lost, and with it, perhaps, a reply that somebody waits for.
            self.process.kill()
            return
        self.last_heard = time.monotonic()
        self.longest_step = max((self.longest_step, *(seconds for seconds, _ in word.steps)))
        if word.beat is not None:
            self.beat = word.beat
        for delta in word.deltas:
            self._deliver(delta, word.timings)
        for failed in word.failed:
            sink = self._pop(failed.id)
            if sink is not None:
                _fail(sink, from_wire(failed.error.name, failed.error.message, failed.error.param, failed.error.code))
        for ticket in word.taken:
            self._admissions.pop(ticket).set_result(None)

    def _deliver(self, delta: OutputDelta, timings: Mapping[str, wire.Timing]) -> None:
        sink = self._sinks.get(delta.request_id)
        if sink is None:
            return
        last = delta.finish_reason is not None
        try:
            if last:
                told = getattr(sink, "timing", None)
                if told is not None and delta.request_id in timings:
                    told(timings[delta.request_id])
            cut = sink.push(delta)
        except Exception as error:
            self._pop(delta.request_id)
            if not last:
                self._send(wire.Abort([delta.request_id]))
            _fail(sink, error)
            return
        if last:
            self._pop(delta.request_id)
        elif cut is not None:
            self._send(wire.Stop(delta.request_id, cut))

    def _pop(self, request_id: str) -> Sink | None:
        with self._lock:
            return self._sinks.pop(request_id, None)

    def _hear_answer(self, word: wire.Answer) -> None:
        verb, future = self._calls.pop(word.ticket)
        if not future.set_running_or_notify_cancel():
            return
        if word.error is not None:
            future.set_exception(from_wire(word.error.name, word.error.message, word.error.param, word.error.code))
        else:
            future.set_result(wire.decode_value(verb, word.value))

    def _end(self, failure: PhloemError | None) -> None:
        """The child has ended: everything that waits for it hears so, and what it leaves is cleared away."""
        status = self.process.wait()
        with self._lock:
            if self._ending is None:
                how = f"by signal {-status}" if status < 0 else f"with status {status}"
                self._ending = failure or EngineDeadError(f"the engine process ended {how}. Create a new engine.")
            sinks, self._sinks = self._sinks, {}
            admissions, self._admissions = self._admissions, {}
            calls, self._calls = self._calls, {}
        if self._watcher is not None:  # first: who hears that a request failed must not find a server that calls itself ready
            self._watcher.ended(self._refusal())
        for sink in sinks.values():
            _fail(sink, self._refusal())
        for admission in admissions.values():
            admission.set_result(None)  # each sink has heard
        for future in (*(future for _, future in calls.values()), self.opened, self.hello):
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(self._refusal())
        with self._lock:
            for socket in (self._in, self._out):
                socket.close(linger=0)
            self._changed.notify_all()
        self._context.term()
        os.close(self._sentinel)
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        self._remove()


@dataclass(frozen=True, slots=True)
class RemoteSide:
    """Follows textside.Side: what a facade keeps of an engine that runs elsewhere."""

    text: Text
    tokenizer: Tokenizer
    config: EngineConfig
    resolved: Resolved


def tokenizer_of(opened: wire.Opened) -> Tokenizer:
    """The tokenizer of a checkpoint, from what the engine process read of it. Raises ModelLoadError, UnsupportedModelError."""
    if opened.metadata is not None:
        return Tokenizer.from_gguf_metadata(opened.metadata, width=opened.width, source=opened.source)
    assert opened.directory is not None
    return Tokenizer.from_directory(opened.directory, width=opened.width)


def side_of(client: ProcessClient, timeout: float | None = None) -> RemoteSide:
    """Waits until the engine is up. Raises what it could not start with, TimeoutError after `timeout` seconds."""
    tokenizer = tokenizer_of(client.opened.result(timeout))
    resolved = client.hello.result(timeout).resolved
    return RemoteSide(Text(tokenizer), tokenizer, resolved.config, resolved)


def socket_folder() -> str:
    """A new directory of mode 0700, with a path short enough for a socket's."""
    folder = tempfile.mkdtemp(prefix="phloem-")
    if len(os.fsencode(folder)) + len("/out") > LONGEST_SOCKET_PATH:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="phloem-", dir="/tmp")
    return folder
