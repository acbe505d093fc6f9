"""Requests to a server from one loop in one thread: a keep-alive pool, retries where nothing was drawn yet, aborts that close.

    Backend.submit ── any thread ──> Wire.send(key, coroutine) ── the loop's thread ──> httpx
    Backend.abort ─────────────────> cancels the task: the connection closes, and the server aborts what it computed

Knows HTTP and the error object of such servers; what is sent is remote.py's and openai.py's.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import httpx

from phloem.runtime.errors import (
    BackendUnavailable,
    CapacityError,
    ContextLengthError,
    GrammarError,
    InvalidRequestError,
    PhloemError,
    RequestError,
)

__all__ = ["Wire", "error_of"]

RETRIES = 4
_KINDS: dict[str, type[PhloemError]] = {
    "context_length_exceeded": ContextLengthError,
    "capacity_exceeded": CapacityError,
    "invalid_json_schema": GrammarError,
    "invalid_grammar": GrammarError,
}


def error_of(status: int, body: Any) -> PhloemError:
    """The error that a reply tells of, as the engine in this process would raise it."""
    found = body.get("error") if isinstance(body, dict) else None
    told: dict[str, Any] = found if isinstance(found, dict) else {}
    message = str(
        told.get("message") or (body.get("message") if isinstance(body, dict) else None) or f"the server answered {status}."
    )
    param, code = told.get("param"), told.get("code")
    param, code = (param if isinstance(param, str) else None), (code if isinstance(code, str) else None)
    if code in _KINDS:
        return _KINDS[code](message, param=param, code=code)
    if status in (408, 429) or status >= 500:
        return BackendUnavailable(message, param=param, code=code)
    if status in (400, 404, 409, 413, 422):
        return InvalidRequestError(message, param=param, code=code)
    return RequestError(message, param=param, code=code)


class Wire:
    """One server. `call` blocks its caller; `send` does not.

    url: its root.   timeout: seconds a single answer may take before its first byte, None for no limit.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout: float | None, connections: int = 256) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise InvalidRequestError(f"the url is {url!r}; expected one such as http://127.0.0.1:8000.", param="url")
        self.url = url.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="phloem-http", daemon=True)
        self._thread.start()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        # No limit on reading: a long generation is silent until it ends. A server that dies closes its sockets.
        patience = httpx.Timeout(timeout, connect=30.0, pool=None)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, limits=limits, timeout=patience, trust_env=False)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of the reply. Raises the error that it tells of, BackendUnavailable if there is none."""
        return asyncio.run_coroutine_threadsafe(self.ask(method, path, body), self._loop).result()

    def send(self, key: str, work: Callable[[], Coroutine[Any, Any, None]], cancelled: Callable[[], None]) -> None:
        """Start `work` on the loop. `cancel(key)` ends it, perhaps before its first step: `cancelled` is then called there."""
        if self._closed:
            raise BackendUnavailable("this endpoint was closed.")

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(key, None)
            if task.cancelled():
                cancelled()

        def begin() -> None:
            self._tasks[key] = task = self._loop.create_task(work())
            task.add_done_callback(ended)

        self._loop.call_soon_threadsafe(begin)

    def cancel(self, keys: Iterable[str]) -> None:
        wanted = list(keys)

        def end() -> None:
            for key in wanted:
                task = self._tasks.get(key)
                if task is not None:
                    task.cancel()

        if not self._closed:
            self._loop.call_soon_threadsafe(end)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """On the loop. Busy servers (429, 503) and connections that fail are tried again, a little later each time."""
        for attempt in range(RETRIES + 1):
            try:
                reply = await self._client.request(method, path, json=body)
            except httpx.TransportError as error:
                if attempt == RETRIES or not isinstance(
                    error, (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError)
                ):
                    raise BackendUnavailable(f"{self.url} cannot be reached: {type(error).__name__}: {error}") from error
            else:
                if reply.status_code < 400:
                    return reply.json() if reply.content else None
                if reply.status_code not in (429, 503) or reply.headers.get("x-should-retry") == "false" or attempt == RETRIES:
                    raise error_of(reply.status_code, _json(reply))
                await asyncio.sleep(_wait_of(reply, attempt))
                continue
            await asyncio.sleep(0.1 * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    async def events(self, path: str, body: Any) -> Any:
        """On the loop: the `data:` lines of a stream, as JSON. Errors before the first are as `ask`'s; none is retried behind it."""
        try:
            async with self._client.stream("POST", path, json=body) as reply:
                if reply.status_code >= 400:
                    await reply.aread()
                    raise error_of(reply.status_code, _json(reply))
                async for line in reply.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        event = json.loads(line[6:])
                        if isinstance(event, dict) and "error" in event:
                            raise error_of(500, event)
                        yield event
        except httpx.TransportError as error:
            raise BackendUnavailable(f"{self.url} broke off: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Abort what runs, close the connections. Idempotent."""
        if self._closed:
            return
        self.cancel(list(self._tasks))
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _shut(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return None


def _wait_of(reply: httpx.Response, attempt: int) -> float:
    try:
        return min(60.0, float(reply.headers["retry-after-ms"]) / 1000)
    except (KeyError, ValueError):
        pass
    try:
        return min(60.0, float(reply.headers["retry-after"]))
    except (KeyError, ValueError):
        return float(0.25 * 2**attempt)


def wait_until(done: Callable[[], bool], deadline: float | None) -> bool:
    """For callers that have nothing to do themselves."""
    while not done():
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(0.001)
    return True
