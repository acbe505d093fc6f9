"""A whole server for tests, as a user starts it: two processes, a socket, signals. Scripted, or with the embedded model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

__all__ = ["PATIENCE", "Process", "alive"]

PATIENCE = 120.0  # seconds: for hangs, not for speed
_SCRIPTED = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from phloem.cli.serve import read_options
from phloem.runtime.serve.main import run
from tests.serve.child_parts import FACTORY
options, words = json.loads(sys.argv[2]), sys.argv[3:]
sys.exit(run(read_options(words, {})[0], factory=FACTORY, options=options))
"""


class Process:
    """words: of the command line.   engine: options of the scripted engine; None: `phloem serve` itself, with the real model."""

    def __init__(self, *words: str, engine: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> None:
        self.folder = tempfile.mkdtemp(prefix="serve-test-")
        self.began = time.monotonic()
        if engine is not None:
            from tests.serve.child_parts import tokenizer_folder

            engine = {"directory": str(tokenizer_folder(Path(self.folder) / "model")), **engine}
            command = [sys.executable, "-c", _SCRIPTED, json.dumps(sys.path), json.dumps(engine), *words]
        else:
            command = [sys.executable, "-m", "phloem", "serve", *words]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PHLOEM_")}
        clean |= {"TMPDIR": self.folder, "XDG_CONFIG_HOME": self.folder, **(env or {})}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean, cwd=self.folder
        )  # fmt: skip
        self.errors: list[str] = []
        self.out: list[str] = []
        self._ready = threading.Event()
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.out), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: Any, lines: list[str]) -> None:
        for line in pipe:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready "):
                self._ready.set()
        pipe.close()

    # ---- while it lives ---------------------------------------------------------------------------------------------------

    def ready(self) -> Process:
        deadline = time.monotonic() + PATIENCE
        while not self._ready.wait(0.02):
            assert self.process.poll() is None, (self.process.returncode, self.errors[-20:])
            assert time.monotonic() < deadline, self.errors[-20:]
        return self

    @property
    def line(self) -> str:
        return next(line for line in self.out if line.startswith("ready "))

    @property
    def url(self) -> str:
        return dict(word.split("=", 1) for word in self.line.split()[1:])["url"]

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=PATIENCE, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=PATIENCE, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", json={"temperature": 0, **fields})

    def metric(self, line: str) -> float:
        """The value behind a line's name and labels, `model` left out: 'requests_total{status="200"}' matches a part."""
        name, _, labels = line.partition("{")
        wanted = [w for w in labels.rstrip("}").split(",") if w]
        found = 0.0
        for row in self.get("/metrics").text.splitlines():
            if row.startswith(f"phloem_{name}{{") and all(w in row for w in wanted):
                found += float(row.rsplit(" ", 1)[1])
        return found

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task")
        for task in children.iterdir():
            for pid in (task / "children").read_text().split():
                if b"engine.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        raise AssertionError("there is no engine process")

    def wait_for(self, what: Any) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, self.errors[-20:]
            time.sleep(0.02)

    # ---- its end ------------------------------------------------------------------------------------------------------------

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def code(self) -> int:
        """Wait for its end."""
        code = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.signal()
        return self.code()

    def left_over(self) -> list[str]:
        """What lies in its temporary directory after its end."""
        return sorted(p for p in os.listdir(self.folder) if p.startswith("phloem-"))

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.code()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
