"""How callers reach an `EngineCore`: requests in, deltas out, from any thread. Knows nothing of text, prompts or models.

    thread A ── submit ──┐                       ┌── Sink.push(delta) -> where a stop string ended, or None
    thread B ── submit ──┤ inbox │ pump: ────────┤      core.stop(id, n) at once, in the same pump
    event loop ─ call ───┘       │ drain, step   └── Future of a control call

One thread at a time holds the *baton* and pumps for all: it empties the inbox, steps the core and hands every delta to the sink of
its request. The others wait; when the holder has what it came for, it passes the baton on. So the core needs no lock, and
nobody waits for a thread that has gone away. `run` holds the baton until its caller has what it wants (Engine); `serve` holds it
for good, and sleeps when there is nothing to do (AsyncEngine).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import FrameType
from typing import Any, Literal, Protocol

from phloem.runtime.errors import EngineBusyError, EngineClosedError, EngineDeadError, PhloemError
from phloem.runtime.request import OutputDelta, Request

__all__ = ["Core", "EngineClient", "InprocClient", "Sink", "Verb"]

Verb = Literal["stats", "explain", "flush", "check", "hold", "release", "control"]
BLOCKED_SECONDS = 0.001
"""How long to sleep between two looks at grammars that compile elsewhere."""
INTERRUPT_SECONDS = 0.1
"""How long a thread that waits for another's step takes at most to notice Ctrl-C."""
VERBS: tuple[Verb, ...] = ("stats", "explain", "flush", "check", "hold", "release", "control")


class Sink(Protocol):
    """Where the deltas of one request go. Called by the thread that holds the baton: never block, never call the client's `run`.

    push: the count of output tokens at which a stop string completed, or None to go on. An exception aborts this request alone.
    fail: the request ended without a last delta: it was refused, or the engine was closed or died.
    """

    def push(self, delta: OutputDelta) -> int | None: ...
    def fail(self, error: Exception) -> None: ...


class Core(Protocol):
    """What a client needs of `EngineCore`. `add` never raises for a bad request: its last delta comes from the next `drain`."""

    @property
    def has_work(self) -> bool: ...
    @property
    def is_blocked(self) -> bool:
        """All there is to do is to wait for work that is done elsewhere."""

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def stop(self, request_id: str, num_tokens: int) -> None: ...
    def step(self, now: float) -> Sequence[OutputDelta]: ...
    def drain(self) -> Sequence[OutputDelta]: ...
    def close(self) -> object: ...


class EngineClient(Protocol):
    """The door to an engine, in this process or another. Every method may be called from any thread."""

    def ensure_usable(self) -> None:
        """Raises EngineClosedError after `close` and in a forked child, EngineDeadError after a failure of the engine itself."""
        ...

    def submit(self, entries: Sequence[tuple[Request, Sink]], *, atomic: bool) -> Future[None]:
        """Queue requests, in order. Each sink gets exactly one ending: a delta with `finish_reason`, or `fail`.

        The Future is done once each was taken or refused; nothing is computed for that.   atomic: when one is refused, none is computed: the refused one's sink gets its error, the others are aborted.
        """
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ask for an end of these requests; unknown and finished ids are fine. Their sinks get the last delta."""
        ...

    def call(self, verb: Verb, *args: Any) -> Future[Any]:
        """Run a control verb between two steps. The result, or its exception, arrives in the Future."""
        ...

    def run(self, done: Callable[[], bool], deadline: float | None = None) -> bool:
        """Work, or let another thread work, until done(); False when the deadline (time.monotonic) passed before.

        Raises EngineBusyError inside a step of this engine (a callback's, a signal handler's): the step waits for them to return.
        """
        ...

    def abandon(self, request_ids: Sequence[str]) -> None:
        """`abort`, and return once the engine has let go of them. Never raises."""
        ...

    def serve(self) -> None:
        """Work for all callers until `close`; sleep when idle. The loop of an engine thread."""
        ...

    def close(self) -> None:
        """End the engine. What is pending fails with EngineClosedError. Idempotent; does nothing in a forked child."""
        ...


class InprocClient:
    """An EngineCore in this process, shared by any number of threads. The core is touched by the holder of the baton alone."""

    def __init__(
        self,
        core: Core,
        *,
        on_close: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_turn: Callable[[], None] | None = None,
        turn_seconds: float | None = None,
    ) -> None:
        """on_close: called once, after the core was closed.

        on_turn: called by `serve` after each turn of its loop, once every delta of it was pushed; never without one for longer
        than turn_seconds (None: for ever) while the loop is idle.
        """
        self._core = core
        self._on_close = on_close
        self._on_turn, self._turn_seconds = on_turn, turn_seconds
        self._clock = clock
        self._pid = os.getpid()
        # `with` on the lock itself: a KeyboardInterrupt cannot fall between taking it and entering the block, as it can in a
        # Condition's Python-level __enter__. Reentrant, since a garbage collection inside a block may run `close` or `abort`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._holder: int | None = None  # the thread that has the baton
        self._inbox: deque[Callable[[], None]] = deque()
        self._sinks: dict[str, Sink] = {}
        self._ending: Exception | None = None  # why no request is taken any more
        self._closed = False

    # ---- from any thread ------------------------------------------------------------------------------------------------

    def submit(self, entries: Sequence[tuple[Request, Sink]], *, atomic: bool) -> Future[None]:
        admitted: Future[None] = Future()

        def command() -> None:
            self._admit(entries, atomic)
            admitted.set_result(None)

        self._post(command)
        return admitted

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = tuple(request_ids)
        self._post(lambda: self._abort(ids))

    def do(self, command: Callable[[], None]) -> None:
        """Have the thread that works run this between two steps. What it raises ends the engine."""
        self._post(command)

    def stop(self, request_id: str, num_tokens: int) -> None:
        """What a sink says by the result of `push`, said later: by a sink whose text is made in another process."""

        def command() -> None:
            if request_id in self._sinks:
                self._core.stop(request_id, num_tokens)
                self._deliver_all(self._core.drain())

        self._post(command)

    def call(self, verb: Verb, *args: Any) -> Future[Any]:
        if verb not in VERBS:
            raise ValueError(f"there is no control verb {verb!r}; the verbs are {', '.join(VERBS)}.")
        future: Future[Any] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self._ending is not None:
                future.set_exception(self._refusal())
                return
            try:
                future.set_result(getattr(self._core, verb)(*args))
            except Exception as error:
                future.set_exception(error)

        self._post(command)
        return future

    def run(self, done: Callable[[], bool], deadline: float | None = None) -> bool:
        self.ensure_usable()
        while True:
            with _InterruptsLater() as interrupts:
                # Also while waiting: a KeyboardInterrupt in Condition.wait can leave it without the lock that it must give back.
                if not self._wait_for_baton(done, deadline, interrupts):
                    return False
                if done():
                    return True
                if not self._take_baton():
                    continue
                try:
                    while not done() and not interrupts.pending:
                        if deadline is not None and time.monotonic() >= deadline:
                            return False
                        if self._ending is not None:
                            raise self._refusal()
                        self._drain()
                        if not done() and not self._step() and not self._inbox and not done() and self._ending is None:
                            raise AssertionError("a caller waits for something that the engine does not have")
                finally:
                    self._drop_baton()
                    if self._ending is not None and not isinstance(self._ending, EngineDeadError):
                        self._finish()  # closed meanwhile, perhaps by ourselves: by a callback inside a step

    def _wait_for_baton(self, done: Callable[[], bool], deadline: float | None, interrupts: _InterruptsLater) -> bool:
        """Until it is free, done(), or Ctrl-C. False: the deadline came before."""
        with self._lock:
            while self._holder is not None and not done() and not interrupts.pending:
                if self._holder == threading.get_ident():
                    raise EngineBusyError(
                        "this thread is inside a step of this engine already: a progress callback or a signal handler cannot use "
                        "the engine. Note what you want, and do it when the call that is under way has returned."
                    )
                left = INTERRUPT_SECONDS if deadline is None else min(deadline - time.monotonic(), INTERRUPT_SECONDS)
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def abandon(self, request_ids: Sequence[str]) -> None:
        ids = tuple(request_ids)
        if os.getpid() != self._pid or not ids:
            return
        executed = Future[None]()

        def command() -> None:
            self._abort(ids)
            executed.set_result(None)

        with _InterruptsLater(), suppress(PhloemError):  # closed or dead meanwhile: nothing is held any more
            self._post(command)
            if self._holder != threading.get_ident():  # else: a garbage collection inside a step brought us here
                self.run(lambda: executed.done() and not any(i in self._sinks for i in ids))

    # ---- the engine thread ----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        while True:
            with self._lock:
                while self._holder is not None and self._ending is None:
                    self._changed.wait()
                if self._ending is not None:
                    break
                self._holder = threading.get_ident()
            try:
                while self._ending is None:
                    self._drain()
                    worked = self._step()
                    if self._on_turn is not None:
                        self._on_turn()
                    if not worked:
                        with self._lock:
                            while not self._inbox and self._ending is None and self._changed.wait(self._turn_seconds):
                                pass
            finally:
                self._drop_baton()
        self._finish()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._ending is None:
                self._ending = EngineClosedError("the engine was closed. Create a new one, or close it later.")
            self._changed.notify_all()
        self._finish()

    @property
    def closed(self) -> bool:
        return self._closed

    # ---- the baton ------------------------------------------------------------------------------------------------------

    def ensure_usable(self) -> None:
        # Before any lock: in a forked child a lock may be held for ever by a thread that does not exist there.
        if os.getpid() != self._pid:
            raise EngineClosedError(
                f"this engine belongs to process {self._pid}; process {os.getpid()} is a fork of it and has none of its threads. "
                "Create the engine in the child (multiprocessing: use the 'spawn' start method, or make it after the fork)."
            )
        if self._ending is not None:
            raise self._refusal()

    def _refusal(self) -> Exception:
        """`_ending` anew: an exception raised twice would keep the frames of both callers alive."""
        assert isinstance(self._ending, PhloemError)
        error = type(self._ending)(self._ending.message)
        error.__cause__ = self._ending.__cause__
        return error

    def _post(self, command: Callable[[], None]) -> None:
        self.ensure_usable()
        with self._lock:
            if self._ending is not None:
                raise self._refusal()
            self._inbox.append(command)
            self._changed.notify_all()

    def _take_baton(self) -> bool:
        with self._lock:
            if self._holder is not None:
                return False
            self._holder = threading.get_ident()
            return True

    def _drop_baton(self) -> None:
        with self._lock:
            self._holder = None
            self._changed.notify_all()

    def _finish(self) -> None:
        """Take the baton for good, once: fail what is pending, free the core."""
        with _InterruptsLater():
            with self._lock:
                if self._holder == threading.get_ident():
                    return  # closed inside a step, by a callback or a garbage collection: `run` and `serve` come back here
                while self._holder is not None:
                    self._changed.wait()
                if self._closed:
                    return
                self._closed = True
                self._holder = threading.get_ident()
            try:
                self._fail_all()
                self._core.close()
                if self._on_close is not None:
                    self._on_close()
            finally:
                self._core, self._on_close = _CLOSED, None
                self._drop_baton()

    def _fail_all(self) -> None:
        assert self._ending is not None
        while self._inbox:
            self._inbox.popleft()()  # each command sees `_ending` and fails what it carries
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            _fail(sink, self._refusal())

    # ---- with the baton in hand -----------------------------------------------------------------------------------------

    def _drain(self) -> None:
        try:
            while self._inbox:
                self._inbox.popleft()()
        except Exception as error:
            self._die(error)
        with self._lock:
            self._changed.notify_all()

    def _step(self) -> bool:
        """One step of the core. False when it has nothing to do."""
        try:
            if self._core.has_work:
                self._deliver_all(self._core.step(self._clock()))
                with self._lock:
                    self._changed.notify_all()
                    if self._core.is_blocked and not self._inbox and self._ending is None:
                        self._changed.wait(BLOCKED_SECONDS)
                return True
            if self._sinks:
                raise AssertionError(f"the core is idle but requests {sorted(self._sinks)[:4]} have no last delta")
        except Exception as error:
            self._die(error)
        return False

    def _die(self, error: Exception) -> None:
        """Not a request's fault (those come back as deltas): the loop itself is broken, and its state cannot be trusted."""
        dead = EngineDeadError(
            f"the engine failed in a step: {type(error).__name__}: {error}. Create a new engine; this is a bug of Phloem's."
        )
        dead.__cause__ = error
        with self._lock:
            self._ending = self._ending or dead
        self._fail_all()

    def _deliver_all(self, deltas: Sequence[OutputDelta]) -> None:
        for delta in deltas:
            self._deliver(delta)

    def _deliver(self, delta: OutputDelta) -> None:
        sink = self._sinks.get(delta.request_id)
        if sink is None:
            return
        try:
            cut = sink.push(delta)
        except Exception as error:
            del self._sinks[delta.request_id]
            if delta.finish_reason is None:
                self._core.abort(delta.request_id)
            _fail(sink, error)
            return
        if delta.finish_reason is not None:
            del self._sinks[delta.request_id]
        elif cut is not None:
            self._core.stop(delta.request_id, cut)

    def _admit(self, entries: Sequence[tuple[Request, Sink]], atomic: bool) -> None:
        if self._ending is not None:
            for _, sink in entries:
                _fail(sink, self._refusal())
            return
        for request, sink in entries:
            assert request.id not in self._sinks, f"request id {request.id!r} is in use"
            self._sinks[request.id] = sink
            self._core.add(request)
        self._deliver_all(self._core.drain())
        taken = [request.id for request, _ in entries if request.id in self._sinks]
        if atomic and len(taken) < len(entries):
            self._abort(taken)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._sinks:
                self._core.abort(request_id)
        self._deliver_all(self._core.drain())


def _fail(sink: Sink, error: Exception) -> None:
    with suppress(Exception):  # the sink's owner may be gone (its event loop is closed, say); the request is over anyway
        sink.fail(error)


class _Closed:
    """Stands where the core was, so that its memory goes. Nothing reaches it: every door checks `_ending` first."""

    has_work = is_blocked = False

    def __getattr__(self, name: str) -> Any:
        raise EngineClosedError("the engine was closed.")


_CLOSED: Any = _Closed()


class _InterruptsLater:
    """Ctrl-C waits for the end of the step: a KeyboardInterrupt inside `core.step` would tear its state.

    Only the main thread runs signal handlers, so only there something is to do. The handler of before is called on exit.
    """

    def __init__(self) -> None:
        self.pending = False
        self._frame: FrameType | None = None
        self._before: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> _InterruptsLater:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                signal.signal(signal.SIGINT, self._note)
                self._before = before
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.pending, self._frame = True, frame

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            if self.pending:
                self._before(signal.SIGINT, self._frame)
