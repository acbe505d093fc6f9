"""From options to an exit code: binds, starts the engine process, then imports the rest and serves. The order is the point (L1).

bind ─> engine process starts ─> FastAPI, uvicorn, uvloop are imported while it loads ─> event loop
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phloem.runtime.engine.process import DEFAULT_FACTORY
from phloem.runtime.errors import PhloemError
from phloem.runtime.serve.lifecycle import Exit, Lifecycle, Said, bind, exit_code, process_age, raise_file_limit, stderr_said

if TYPE_CHECKING:
    from phloem.runtime.serve.config import Loaded

__all__ = ["Progress", "run"]


def run(
    loaded: Loaded, *, said: Said | None = None, factory: str = DEFAULT_FACTORY, options: dict[str, Any] | None = None
) -> int:
    """Serve until a signal or the engine's end; the exit code (L6).

    factory, options: of the engine process, where it is not the usual one.
    """
    began = time.monotonic() - process_age()
    said = stderr_said(Progress()) if said is None else said
    config = loaded.server
    raise_file_limit()
    for number in (signal.SIGINT, signal.SIGTERM):  # until the event loop has its own
        signal.signal(number, _stop)
    try:
        listener = bind(config.host, config.port)
    except PhloemError as error:
        said.error(error.message)
        return exit_code(error)
    life = Lifecycle(
        config, loaded.engine, listener, said, began=began, factory=factory, options=asdict(loaded.engine) if options is None else options
    )  # fmt: skip
    try:
        life.start_engine()
        return _serve(loaded, life)
    except PhloemError as error:
        said.error(error.message)
        return Exit.USAGE if exit_code(error) == Exit.USAGE else Exit.FAILURE
    except _Stopped:
        return Exit.OK
    finally:
        life.stop_engine()
        listener.close()


class _Stopped(BaseException):
    """A signal came before there was anything to drain."""


def _stop(number: int, frame: object) -> None:
    raise _Stopped


def _serve(loaded: Loaded, life: Lifecycle) -> int:
    import asyncio

    import uvloop

    from phloem.runtime.serve.app import create_app
    from phloem.runtime.serve.host import Host
    from phloem.runtime.serve.observe import Monitor
    from phloem.runtime.serve.spans import Spans, export_to

    config, model = loaded.server, loaded.engine.model
    name = config.served_model_name[0] if config.served_model_name else "smollm2" if model is None else Path(model).name
    provider, shutdown = export_to(config.otlp_endpoint, {}) if config.otlp_endpoint is not None else (None, None)
    monitor = Monitor(config, name, spans=Spans(provider), on_close=shutdown)
    host = Host(config, life=life, observer=monitor)
    app = create_app(config, host)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(life.run(host, app, monitor))


class Progress:
    """What is being loaded, on stderr: a line that is written over on a terminal, else a line a stage and each 10 %."""

    def __init__(self, write: Callable[[str], None] | None = None, terminal: bool | None = None) -> None:
        self._write = write if write is not None else _to_stderr
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._stage, self._tenth = "", -1

    def __call__(self, stage: str, done: float | None) -> None:
        name = stage.split(" ")[0] if done is not None else stage
        tenth = -1 if done is None else int(done * 10)
        if self._terminal:
            bar = "" if done is None else "█" * (tenth * 2) + "░" * (20 - tenth * 2)
            self._write(
                f"\r\033[K{name} {bar} {'' if done is None else f'{done:.0%}'}".rstrip() + ("\r\033[K" if done == 1 else "")
            )
        elif name != self._stage or tenth != self._tenth:
            self._write(f"phloem: {name}{'' if done is None else f' {tenth * 10} %'}\n")
        self._stage, self._tenth = name, tenth


def _to_stderr(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        return  # nobody looks
