"""How a server lives: bind, answer, load, be ready, drain, end. Knows no route; owns the engine process, signals and exit codes.

    bind ─> answer 503 loading ─> engine process up ─> warm-up ─> ready ──first signal──> draining ─> exit 0
     │5                            │3 4 2 1                        │ engine ended: restart, or 6     └ second signal: 130
    (exit codes: L6)

`Life` is what the routes see of it (host.py). Every wait here has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phloem.runtime.engine import wire
from phloem.runtime.engine.process import DEFAULT_FACTORY, ProcessClient, tokenizer_of
from phloem.runtime.errors import ConfigError, EngineClosedError, EngineDeadError, ModelLoadError, PhloemError
from phloem.runtime.request import OutputDelta, Request, SamplingParams
from phloem.runtime.serve.host import Host, Phase, Served

if TYPE_CHECKING:
    from phloem.runtime.config import EngineConfig
    from phloem.runtime.serve.config import ServerConfig
    from phloem.runtime.serve.observe import Monitor

__all__ = ["Exit", "Lifecycle", "Said", "bind", "exit_code", "is_loopback"]

STALL_SECONDS, STALL_STEPS = 5.0, 3.0
"""L3: an engine is stalled that was not heard for so long, or for so many times its longest finished step, if that is more."""
RESTART_WINDOW = 600.0
"""--restart-engine counts the deaths of so many seconds."""
LAST_WORDS_SECONDS = 0.5
"""After an engine's death: for the replies that say so (exit within 1 s, L5)."""
GIVE_UP_SECONDS = 2.0
"""After everything was aborted: for the last bytes to be taken by readers that may be gone."""


class Exit:
    """L6."""

    OK, FAILURE, USAGE, MODEL, MEMORY, PORT, ENGINE, SIGNAL = 0, 1, 2, 3, 4, 5, 6, 130


class PortError(PhloemError):
    code = "port_in_use"


@dataclass(frozen=True, slots=True)
class Said:
    """Where words for people go. progress: a stage of loading; lines: the banner; ready: the line that scripts wait for."""

    progress: Callable[[str, float | None], None]
    lines: Callable[[list[str]], None]
    ready: Callable[[str], None]
    error: Callable[[str], None]


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before any weight is read (L1). Raises PortError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise PortError(f"--host {host}: {error.strerror or error}. Give an address of this machine.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        why = "another process listens there" if taken else str(error.strerror).lower()
        raise PortError(f"port {port} of {host} cannot be had: {why}. Stop it, or choose another with --port.") from None
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def exit_code(error: PhloemError) -> int:
    """What the process ends with, when this is why."""
    if isinstance(error, PortError):
        return Exit.PORT
    if isinstance(error, ModelLoadError):
        return Exit.MODEL
    if error.code == "out_of_memory":
        return Exit.MEMORY
    if isinstance(error, ConfigError):
        return Exit.USAGE
    if isinstance(error, EngineDeadError):
        return Exit.ENGINE
    return Exit.FAILURE


def raise_file_limit() -> None:
    """L8: a connection is a descriptor; the soft limit is for shells."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(slots=True)
class _Loading:
    """One engine process, from its start to its end."""

    client: ProcessClient
    started: float = field(default_factory=time.monotonic)


class Lifecycle:
    """Follows host.Life. `run` is the whole life; it returns the exit code.

    engine: options of the engine process, checked.   factory: what makes it (tests: a scripted one).
    began: time.monotonic() at which the program started.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineConfig,
        listener: socket.socket,
        said: Said,
        *,
        began: float | None = None,
        factory: str = DEFAULT_FACTORY,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.engine = config, engine
        self.asleep = False
        self.progress = "starting"
        self.phase: Phase = "loading"
        self._listener, self._said = listener, said
        self._began = time.monotonic() if began is None else began
        self._factory = factory
        self._options = asdict(engine) if options is None else options
        self._deaths: deque[float] = deque()
        self._done = asyncio.Event()
        self._code = Exit.OK
        self._signals = 0
        self._was_ready = False
        self._drain: asyncio.Task[None] | None = None
        self._shares: dict[str, float] = {}  # seconds of the start, by what took them
        self._current: ProcessClient | None = None
        self._monitor: Monitor | None = None

    # ---- Life -----------------------------------------------------------------------------------------------------------

    def stalled(self) -> float | None:
        client = self._current
        if client is None or self.phase in ("loading", "dead"):
            return None
        silent = time.monotonic() - client.last_heard
        return silent if silent > max(STALL_SECONDS, STALL_STEPS * client.longest_step) else None

    # ---- the whole ------------------------------------------------------------------------------------------------------

    def start_engine(self) -> None:
        """Before the event loop is there, so that two processes import at once."""
        self._current = ProcessClient(self._options, factory=self._factory, watcher=self)

    def stop_engine(self) -> None:
        """Whatever happened: no engine process stays behind."""
        if self._current is not None:
            self._current.close(0.5)

    async def run(self, host: Host, app: Any, monitor: Monitor) -> int:
        """Serve `app` until a signal or the engine's end."""
        import uvicorn

        from phloem.runtime.serve.connection import Connection, Web

        self._loop = asyncio.get_running_loop()
        self._host, self._monitor = host, monitor
        if self._current is None:
            self.start_engine()
        self._shares["import"] = time.monotonic() - self._began
        web = Web(
            uvicorn.Config(
                app, loop="none", http=Connection, ws="none", lifespan="on", log_config=None, access_log=False,
                server_header=False, date_header=False, timeout_keep_alive=75, timeout_graceful_shutdown=2, backlog=2048,
            )
        )  # fmt: skip
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._signalled)
        serving = asyncio.ensure_future(web.serve(sockets=[self._listener]))
        starting = asyncio.ensure_future(self._start())
        ticking = asyncio.ensure_future(self._tick())
        waiting = asyncio.ensure_future(self._done.wait())
        try:
            await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not self._done.is_set():
                self._code = Exit.FAILURE
                serving.result()
        finally:
            for task in (starting, ticking, waiting):
                task.cancel()
            web.should_exit = True
            web.force_exit = self._signals > 1
            with contextlib.suppress(Exception):
                await asyncio.wait_for(serving, GIVE_UP_SECONDS + 3)
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.remove_signal_handler(number)
            if self._current is not None:
                await asyncio.to_thread(self._current.close, 0.0 if self._signals > 1 else 2.0)
            monitor.close()
        return self._code

    def _finish(self, code: int) -> None:
        if not self._done.is_set():
            self._code = code
            self._done.set()

    # ---- start ----------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Wait for the engine process, make it ready for requests."""
        client = self._current
        assert client is not None
        try:
            opened = await asyncio.wrap_future(client.opened)
            tokenizer = await asyncio.to_thread(tokenizer_of, opened)
            hello = await asyncio.wrap_future(client.hello)
            begun = time.monotonic()
            self.progress = "warming up"
            await self._warm_up(client)
        except EngineClosedError:
            return
        except PhloemError as error:
            if not isinstance(error, EngineDeadError):  # else `ended` tells
                self._failed(error)
            return
        model = Served.of(
            tokenizer,
            hello.resolved,
            model_type=opened.model_type,
            architectures=tuple(opened.architectures),
            vocab_size=hello.vocab_size,
            fingerprint=hello.fingerprint,
            sampling_defaults={
                name: value for name, value in opened.generation.items() if name in ("temperature", "top_p", "top_k", "repetition_penalty")
            },
        )  # fmt: skip
        if self.phase != "loading":
            return  # a signal came first
        first, self._was_ready = not self._was_ready, True
        self._host.ready(client, model)
        self.phase, self.progress = "ready", ""
        assert self._monitor is not None
        now = time.monotonic()
        self._shares |= {"weights": hello.seconds.get("weights", 0.0), "warmup": now - begun, "total": now - self._began}
        self._monitor.ready(model, hello, self._shares, again=not first)
        if first:
            self._announce(model, hello, now - self._began)

    async def _warm_up(self, client: ProcessClient) -> None:
        """One token: buffers are touched and code paths imported before a client waits for them."""
        sink = _Once(self._loop)
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs="model")
        client.submit([(Request(id="warm-up", token_ids=(0,), sampling=sampling, namespace="warm-up"), sink)], atomic=True)
        await sink.over
        with contextlib.suppress(PhloemError):
            await asyncio.wrap_future(client.call("flush"))

    def _announce(self, model: Served, hello: wire.Hello, seconds: float) -> None:
        url = self.url
        self._said.lines(banner(self.config, model, hello, url))
        shares = " ".join(f"{name}={self._shares[name]:.1f}" for name in ("import", "weights", "warmup"))
        line = f"ready url={url} seconds={seconds:.1f} {shares}"
        if self.config.ready_file is not None:
            path = Path(self.config.ready_file)
            try:
                partial = path.with_name(path.name + ".partial")
                partial.write_text(line + "\n")
                partial.replace(path)  # whoever waits for it sees the whole line
            except OSError as error:
                self._failed(ConfigError(f"--ready-file {path} cannot be written: {error.strerror}.", param="ready_file"))
                return
        self._said.ready(line)

    @property
    def url(self) -> str:
        name, port = self._listener.getsockname()[:2]
        shown = "127.0.0.1" if name == "0.0.0.0" else "[::1]" if name == "::" else f"[{name}]" if ":" in name else name
        return f"http://{shown}:{port}"

    async def _tick(self) -> None:
        """What ages while nothing happens: the age of the last beat, as a metric."""
        while True:
            await asyncio.sleep(1.0)
            if self._monitor is not None and self._current is not None and self.phase in ("ready", "draining"):
                self._monitor.age(time.monotonic() - self._current.last_heard)

    # ---- the engine's words (its reader thread) -------------------------------------------------------------------------

    def heard(self, word: wire.Loading | wire.Opened | wire.Hello | wire.Outputs) -> None:
        if isinstance(word, wire.Loading):
            self.progress = word.stage.removeprefix("the ")
            self._said.progress(self.progress, word.done)
        elif isinstance(word, wire.Outputs) and self._monitor is not None:
            self._monitor.outputs(word)

    def ended(self, error: PhloemError) -> None:
        if isinstance(error, EngineClosedError):
            return
        loop = getattr(self, "_loop", None)
        while loop is None:  # it died before the event loop began
            time.sleep(0.01)
            loop = getattr(self, "_loop", None)
        with contextlib.suppress(RuntimeError):  # the loop is closed: we are gone as well
            loop.call_soon_threadsafe(self._died, error)

    # ---- the end --------------------------------------------------------------------------------------------------------

    def _died(self, error: PhloemError) -> None:
        if self._done.is_set():
            return
        assert self._monitor is not None
        self._monitor.died()
        if self.phase == "draining":
            self._finish_soon(Exit.ENGINE, error)
            return
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > RESTART_WINDOW:
            self._deaths.popleft()
        if self._was_ready and len(self._deaths) < self.config.restart_engine:
            self._deaths.append(now)
            self._said.error(f"{error.message} It is started anew ({len(self._deaths)} of {self.config.restart_engine}).")
            self.phase, self.progress = "loading", "restarting"
            self._monitor.restarted()
            self.start_engine()
            self._restarting = asyncio.ensure_future(self._start())
            return
        if self._was_ready or isinstance(error, EngineDeadError):
            self._finish_soon(Exit.ENGINE, error)
        else:
            self._failed(error)

    def _finish_soon(self, code: int, error: PhloemError) -> None:
        """The requests under way have been told; let them tell their clients."""
        self.phase = "dead"
        self._said.error(error.message)

        async def wait() -> None:
            await self._until_quiet(LAST_WORDS_SECONDS)
            self._finish(code)

        self._drain = asyncio.ensure_future(wait())

    def _failed(self, error: PhloemError) -> None:
        if self._done.is_set():
            return
        self.phase = "dead"
        self._said.error(error.message)
        self._finish(exit_code(error))

    async def _until_quiet(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._host.num_open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._host.num_open

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals == 1:
            self._drain = asyncio.ensure_future(self._draining())
        else:
            self._host.abort_all()
            if self._current is not None:
                self._current.kill()
            self._finish(Exit.SIGNAL)

    async def _draining(self) -> None:
        """L4: what runs may end; what does not in time is aborted, and told so."""
        if self.phase == "dead":
            return
        self.phase = "draining"
        if not await self._until_quiet(self.config.shutdown_timeout):
            self._host.abort_all()
            await self._until_quiet(GIVE_UP_SECONDS)
        self._finish(Exit.OK)


class _Once:
    """A sink that only tells when it is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.over: asyncio.Future[None] = loop.create_future()

    def push(self, delta: OutputDelta) -> int | None:
        if delta.finish_reason is not None:
            self._loop.call_soon_threadsafe(self._end, None)
        return None

    def fail(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


def banner(config: ServerConfig, model: Served, hello: wire.Hello, url: str) -> list[str]:
    """At most 8 lines (L2)."""
    from importlib.metadata import version

    resolved = hello.resolved
    keys = "keys on" if config.api_key or config.api_key_file else "no key"
    admin = "admin routes on" if config.admin_key else "admin routes off"
    device = f"{resolved.device} x{resolved.threads}" + (f" ({hello.device_name})" if hello.device_name else "")
    lines = [
        f"phloem {version('phloem')} · {model.name} · dtype {model.engine.dtype} · {device}",
        *resolved.arithmetic,
        f"{keys}, {admin} · {url}",
    ]
    if not is_loopback(config.host) and keys == "no key":
        lines.append(f"WARNING: {config.host} can be reached from other machines, and no --api-key is set (G4).")
    body = '{"messages":[{"role":"user","content":"Hello!"}]}'
    lines.append(f"try: curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'")
    return lines


def process_age() -> float:
    """Seconds since this process was started: the interpreter's own start counts."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        import os

        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def stderr_said(progress: Callable[[str, float | None], None]) -> Said:
    """Words to stderr, but for the ready line, which is stdout's."""

    def ready(line: str) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            print(line, flush=True)

    return Said(
        progress,
        lambda lines: print("\n".join(lines), file=sys.stderr, flush=True),
        ready,
        lambda text: print(f"phloem: {' '.join(text.split())}", file=sys.stderr, flush=True),
    )
