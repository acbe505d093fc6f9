"""Streams as bytes: a chunk is prefix + encoded text + suffix, the ends made once a choice; and the response that sends them.

    data: {"id":…,"object":…,"choices":[{"index":0,"delta":{"content":   "Hel"   },"logprobs":null,"finish_reason":null}]}⏎⏎
    └──────────────── once a choice ──────────────────────────────────┘ text └──────────── once a stream ─────────────┘

One write a stream and step. Headers leave with the first token, so that a failure before it keeps its real status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phloem.runtime.serve.context import Context, watched
from phloem.runtime.serve.errors import failure_of
from phloem.runtime.serve.jobs import Job, Piece, Sample

__all__ = ["DONE", "Envelope", "EventStream", "Writer", "encode", "error_event"]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode


def error_event(error: BaseException, retry_after: int = 1) -> bytes:
    return b"data: " + failure_of(error, retry_after=retry_after).body + b"\n\n"


class Envelope:
    """What every chunk of one stream repeats.   usage: chunks say "usage":null until the last one."""

    def __init__(self, *, id: str, object: str, created: int, model: str, fingerprint: str, usage: bool) -> None:
        known = {"id": id, "object": object, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._head = b"data: " + encode(known)[:-1]
        self._usage = b',"usage":null' if usage else b""
        self._prefixes: dict[tuple[int, bytes], bytes] = {}
        self.tail = b"}]" + self._usage + b"}\n\n"

    def prefix(self, index: int, opening: bytes, beside: bytes = b"") -> bytes:
        """Everything before the text of a choice.   opening: what stands between the index and the text.
        beside: members of the chunk beside `choices`."""
        if beside:
            return self._head + beside + b',"choices":[{"index":%d,' % index + opening
        found = self._prefixes.get((index, opening))
        if found is None:
            found = self._prefixes[index, opening] = self._head + b',"choices":[{"index":%d,' % index + opening
        return found

    def tail_with(self, usage: bytes | None) -> bytes:
        return self.tail if usage is None else b'}],"usage":' + usage + b"}\n\n"

    def last(self, usage: bytes, beside: bytes = b"") -> bytes:
        """The chunk that is only usage."""
        return self._head + beside + b',"choices":[],"usage":' + usage + b"}\n\n"


class Writer(Protocol):
    """Makes the bytes of one stream. Called in order, on the event loop."""

    def write(self, sample: Sample, piece: Piece) -> bytes:
        """Its chunks; empty where nothing is to be shown yet. The piece with `output` is its last."""

    def end(self) -> bytes:
        """What comes when all have ended well, [DONE] included."""


class EventStream(Response):
    """Sends what `job` says, as `writer` writes it, until all samples have ended, one has failed, or the client is gone."""

    def __init__(self, context: Context, job: Job, writer: Writer, *, ping: float = 0.0, pinged: bool = False) -> None:
        """ping: seconds of silence before a comment is sent; 0 is off.   pinged: the first silence is over already."""
        self._context, self._job, self._writer, self._ping, self._pinged = context, job, writer, ping, pinged
        self.status_code = 200
        headers = {"cache-control": "no-store", "x-accel-buffering": "no", **context.reply_headers()}
        self.background = None
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            *((k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, context = self._job, self._context
        gone: list[bool] = []

        def left() -> None:
            gone.append(True)
            job.abort()

        try:
            await watched(receive, left, self._send_all(send))
        finally:
            job.close()
            context.count(job)
            failure = job.failure()
            code = None if failure is None else failure_of(failure).code
            context.complete(499 if gone else 200, "client_disconnected" if gone else code)

    async def _send_all(self, send: Send) -> None:
        job, writer = self._job, self._writer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if self._pinged:
            await send({"type": "http.response.body", "body": PING, "more_body": True})
            await self._news(send)
        while True:
            ended, failure = job.done, job.failure()  # before taking: what comes later is taken next time
            data = self._take(job.samples)
            if failure is not None:
                if isinstance(failure, Exception) and failure_of(failure).code == "internal_error":
                    self._context.host.observer.failed(self._context.record.id, failure)
                data += error_event(failure, self._context.host.retry_after()) + DONE
            elif ended:
                data += writer.end()
            if failure is not None or ended:
                await send({"type": "http.response.body", "body": data, "more_body": False})
                return
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await self._news(send)

    async def _news(self, send: Send) -> None:
        if not self._ping:
            await self._job.news()
            return
        while not self._job.has_news():
            try:
                async with asyncio.timeout(self._ping):
                    await self._job.news()
            except TimeoutError:
                await send({"type": "http.response.body", "body": PING, "more_body": True})

    def _take(self, samples: Iterable[Sample]) -> bytes:
        parts = []
        for sample in samples:
            piece = sample.take()
            if piece is not None:
                parts.append(self._writer.write(sample, piece))
        return b"".join(parts)
