"""The head of a request is bounded, in bytes and in seconds, and its refusal has the shape of all errors (server.E1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from phloem.runtime.serve.connection import HEAD_BYTES, Connection

OK = b"GET /x HTTP/1.1\r\nhost: 127.0.0.1\r\n"


class Hasty(Connection):
    head_seconds = 0.2


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def talk(kind: type[Connection], say: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]) -> bytes:
    async def both() -> bytes:
        config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, date_header=False)
        config.load()
        server = await asyncio.get_running_loop().create_server(
            lambda: kind(config=config, server_state=ServerState(), app_state={}), "127.0.0.1", 0
        )
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await asyncio.wait_for(say(reader, writer), 60)
            finally:
                writer.close()

    return asyncio.run(both())


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, body = answer.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"\r\nconnection: close" in head
    assert b"content-length: %d" % len(body) in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_head_that_never_ends_is_not_kept() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(OK + b"x-long: ")
        for _ in range(9):  # no more than the server reads before it refuses: what it leaves unread would reset the connection
            writer.write(b"a" * (HEAD_BYTES // 8))
            await writer.drain()
            await asyncio.sleep(0.01)
        return await reader.read()

    assert error_of(talk(Connection, say), 431)["code"] == "request_too_large"


def test_a_head_that_comes_a_byte_at_a_time_has_its_time() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        answer = asyncio.ensure_future(reader.read())
        for byte in OK:
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        return await answer

    assert error_of(talk(Hasty, say), 408)["code"] == "body_timeout"


def test_a_client_that_says_nothing_is_closed_in_silence() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        return await reader.read()

    assert talk(Hasty, say) == b""


def test_what_is_not_http_is_told_so() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"\x16\x03\x01\x02\x00\r\n\r\n")
        return await reader.read()

    assert error_of(talk(Connection, say), 400)["code"] == "invalid_value"


def test_a_kept_connection_may_rest_longer_than_a_head_may_take_and_its_next_head_is_bounded_too() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for _ in range(2):
            writer.write(OK + b"\r\n")
            answer = await reader.readuntil(b"ok")
            assert answer.startswith(b"HTTP/1.1 200")
            await asyncio.sleep(2 * Hasty.head_seconds)
        writer.write(OK)
        return await reader.read()

    assert error_of(talk(Hasty, say), 408)["code"] == "body_timeout"


def test_pipelined_requests_are_each_answered() -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write((OK + b"\r\n") * 2 + OK + b"connection: close\r\n\r\n")
        return await reader.read()

    assert talk(Connection, say).count(b"HTTP/1.1 200") == 3
