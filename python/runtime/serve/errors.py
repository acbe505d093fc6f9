"""Errors on the wire (E1–E3): always {"error": {message, type, param, code}}, with the status that the exception itself names.

    ApiError(400, "invalid_value", "…", param="temperature")  ──┐
    InvalidRequestError, GrammarError, EngineDeadError, …      ──┼─> Failure(status, body, headers)
    anything else: 500 internal_error, its trace in the log    ──┘

A message says what was wrong, what was expected, what to do; it shows no path, no trace, and of a client's value at most
80 characters, escaped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from phloem.runtime.errors import PhloemError, RequestError

__all__ = ["ApiError", "Failure", "escaped", "failure_of", "shown"]

MAX_MESSAGE, MAX_SHOWN = 500, 80

_TYPES = {403: "permission_error", 429: "rate_limit_error"}
RETRYABLE = frozenset({"engine_overloaded", "loading", "draining", "sleeping", "engine_dead"})
_STATUS_THAT_SDKS_RETRY = (408, 409)
_CODES = {
    "invalid_request": "invalid_value", "chat_template_missing": "chat_template_error", "timeout": "body_timeout",
    "engine_busy": "busy", "engine_closed": "draining",
}  # fmt: skip
"""Codes of the engine's own errors that the wire calls otherwise."""
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PATHS = re.compile(r"(?:(?<=[\s'\"(`])|^)/(?:[\w.@+-]+/)+[\w.@+-]*")


class ApiError(PhloemError):
    """An error of the HTTP surface itself. `status` is per instance here."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuilt, (self.status, self.code, self.message, self.param))


def _rebuilt(status: int, code: str, message: str, param: str | None) -> ApiError:
    return ApiError(status, code, message, param=param)


@dataclass(frozen=True, slots=True)
class Failure:
    """What goes back to the client. body: the JSON object, also an event of a stream."""

    status: int
    code: str
    body: bytes
    headers: dict[str, str]


def failure_of(error: BaseException, *, retry_after: int = 1) -> Failure:
    """retry_after: seconds that a client who may try again should wait."""
    if isinstance(error, PhloemError):
        status, code, message, param = error.status, _CODES.get(error.code, error.code), error.message, error.param
    else:
        status, code, param = 500, "internal_error", None
        message = "the server failed to handle this request; that is a bug. Its log has the details under the request's id."
    if status == 500 and not isinstance(error, (RequestError, ApiError)):
        message = _PATHS.sub("…", message)
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    body = msgspec.json.encode({"error": {"message": _cut(escaped(message)), "type": kind, "param": param, "code": code}})
    headers: dict[str, str] = {}
    if code in RETRYABLE:
        seconds = max(1, min(60, retry_after))
        headers = {"retry-after": str(seconds), "retry-after-ms": str(seconds * 1000)}
    elif status >= 500 or status in _STATUS_THAT_SDKS_RETRY:
        headers = {"x-should-retry": "false"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Failure(status, code, body, headers)


def escaped(text: str) -> str:
    """Without anything that could move a cursor, forge a line or hide: those characters as \\xNN or \\uNNNN (G7)."""
    return _UNSEEN.sub(lambda m: f"\\u{ord(m[0]):04x}" if ord(m[0]) > 255 else f"\\x{ord(m[0]):02x}", text)


def shown(value: object) -> str:
    """A client's value, as a message may quote it."""
    text = escaped(value if isinstance(value, str) else repr(value))
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _cut(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
