"""Log lines: one event each, as key=value or JSON, that no client's words can forge or flood (G7). Written by a thread of its own.

put(...) ── line ──> queue (bounded) ──> writer thread ──> stderr         a reader that stops reading stops no request
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

__all__ = ["LEVELS", "Log", "escaped"]

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
LONGEST = 128
"""Characters of one value that came from a client."""
QUEUED = 10_000
"""Lines that wait for a slow reader of the log; more are counted, and dropped."""
_UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f"\\\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]')
_BARE = re.compile(r"[A-Za-z0-9_.,:/+@#%-]+")


def escaped(value: str, longest: int = LONGEST) -> str:
    """A value as it may stand in a line: no control characters, ANSI sequences, line or paragraph separators, bidi marks; cut."""
    cut = value if len(value) <= longest else value[:longest] + "…"
    return _UNSAFE.sub(lambda m: _code(m[0]), cut)


def _code(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}"


class Log:
    """level: the least that is written.   stream: default stderr, looked up at each line."""

    def __init__(self, level: str = "info", format: Literal["text", "json"] = "text", stream: TextIO | None = None) -> None:
        self._level, self._json, self._stream = LEVELS[level], format == "json", stream
        self._lines: deque[str] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="phloem-log", daemon=True)
        self._thread.start()

    def put(self, level: str, event: str, fields: Mapping[str, Any], longest: int = LONGEST) -> None:
        """None and "" are left out. Values are escaped; `event` and names are ours."""
        if LEVELS[level] < self._level:
            return
        line = self._line(level, event, fields, longest)
        with self._wake:
            if len(self._lines) >= QUEUED:
                self.dropped += 1
                return
            self._lines.append(line)
            self._wake.notify()

    def close(self, timeout: float = 1.0) -> None:
        """Write what is queued, for at most so many seconds."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout)

    def _line(self, level: str, event: str, fields: Mapping[str, Any], longest: int) -> str:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        kept = {name: value for name, value in fields.items() if value is not None and value != ""}
        if self._json:
            record: dict[str, Any] = {"ts": now, "level": level, "event": event}
            for name, value in kept.items():
                record[name] = value if isinstance(value, (bool, int, float)) else escaped(str(value), longest)
            return json.dumps(record, ensure_ascii=True, allow_nan=False)
        words = [now, level, f"event={event}"]
        words += [f"{name}={_word(value, longest)}" for name, value in kept.items()]
        return " ".join(words)

    def _write(self) -> None:
        while True:
            with self._wake:
                while not self._lines and not self._closed:
                    self._wake.wait()
                if not self._lines:
                    return
                lines, self._lines = self._lines, deque()
                dropped, self.dropped = self.dropped, 0
            if dropped:
                lines.append(self._line("warning", "log_dropped", {"lines": dropped}, LONGEST))
            try:
                stream = self._stream if self._stream is not None else sys.stderr
                stream.write("\n".join(lines) + "\n")
                stream.flush()
            except (OSError, ValueError):
                continue  # nobody reads the log: that is no reason to stop serving


def _word(value: Any, longest: int) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return str(value)
    text = escaped(str(value), longest)
    return text if _BARE.fullmatch(text) else f'"{text}"'
