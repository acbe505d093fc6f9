"""What a connection may do before it has a request, and what becomes of those that have none when the server ends.

uvicorn bounds the head of a request neither in bytes nor in seconds, so that a client which sends one header byte a minute would hold a
socket for ever, and one that never ends its headers would hold memory. The body has its own bounds (guard.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phloem.runtime.serve.errors import ApiError, failure_of

__all__ = ["HEAD_BYTES", "HEAD_SECONDS", "Connection", "Web"]

HEAD_BYTES = 64 << 10  # of the request line and all headers: what nginx, h11 and most balancers allow at most
HEAD_SECONDS = 30.0  # from the connection, or from a later request's first byte, to the end of its headers

LINGER_SECONDS = 0.25
"""At the server's end: for the requests of connections that were accepted already. They get a 503 instead of nothing."""

_STATUS = {400: b"400 Bad Request", 408: b"408 Request Timeout", 431: b"431 Request Header Fields Too Large"}


class Connection(HttpToolsProtocol):
    """One client's connection."""

    head_seconds = HEAD_SECONDS

    @property
    def unheard(self) -> bool:
        """Whether no request of it has arrived."""
        return self.cycle is None and not self.transport.is_closing()

    _timer: asyncio.TimerHandle | None = None
    _in_head, _head_bytes = True, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        # What of `data` belonged to a body before this head is counted with it: at most one read's worth, on the strict side.
        self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES:
            self._refuse(431, "request_too_large", f"the request line and headers are over {HEAD_BYTES} bytes; send less.")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._timer is None:
            self._arm()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_value", "this is not an HTTP/1.1 request.")

    # ---- inside -----------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._head_bytes:
            self._refuse(408, "body_timeout", f"the headers did not end within {self.head_seconds:g} s.")
        else:
            self.transport.close()  # nobody asked anything

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer in the shape of all errors (E1) and close. Behind an answer that is under way nothing can be said: only close."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            failure = failure_of(ApiError(status, code, message))
            head = [b"HTTP/1.1 " + _STATUS[status], b"content-type: application/json", b"connection: close"]
            head += [f"{name}: {value}".encode() for name, value in failure.headers.items()]
            head += [b"content-length: %d" % len(failure.body), b"", failure.body]
            self.transport.write(b"\r\n".join(head))
        self.transport.close()


class Web(uvicorn.Server):
    """uvicorn's server, which leaves signals alone (Lifecycle has them), and hears out whom it let in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for each in sockets or []:
            each.close()
        deadline = time.monotonic() + LINGER_SECONDS
        while not self.force_exit and time.monotonic() < deadline:
            if not any(isinstance(c, Connection) and c.unheard for c in self.server_state.connections):
                break
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)
