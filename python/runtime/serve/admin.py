"""Routes that change something: aborting requests, emptying the cache."""

from __future__ import annotations

import asyncio
import time

from starlette.responses import Response

from phloem.runtime.errors import EngineBusyError
from phloem.runtime.serve import wire
from phloem.runtime.serve.body import read
from phloem.runtime.serve.context import JSON, Context
from phloem.runtime.serve.errors import ApiError, shown
from phloem.runtime.serve.info import encode

__all__ = ["abort_request", "flush_cache"]

MAX_TIMEOUT = 600.0


async def abort_request(context: Context, raw_body: bytes) -> Response:
    """{rid}: one's own request, by the name that one gave it or by its id. {abort_all: true}: everybody's, for the administrator."""
    body, _ = read("", raw_body, wire.AbortRequest, context.notes, strict=False)
    context.notes.ignored.clear()
    host = context.host
    if body.abort_all:
        context.keys.admit("admin", context.request.headers)
        count = host.abort_all()
    elif not body.rid:
        raise ApiError(400, "missing_required_parameter", "rid is missing; name the request to abort.", param="rid")
    else:
        count = host.abort(None if context.key == "admin" else context.key, body.rid)
    return Response(encode({"aborted": count}), 200, context.reply_headers(), JSON)


async def flush_cache(context: Context, _: bytes) -> Response:
    """Forget every cached prefix. Waits at most `timeout` seconds for an idle engine; busy after that: 409, and nothing changed."""
    client = context.host.client
    context.model  # noqa: B018  refuses while loading
    assert client is not None
    deadline = time.monotonic() + _timeout(context.request.query_params.get("timeout"))
    while True:
        try:
            pages = await asyncio.wrap_future(client.call("flush"))
        except EngineBusyError:
            if time.monotonic() >= deadline:
                raise ApiError(
                    409, "busy", "requests are under way, and the cache is as it was. Wait for them, or give a longer timeout."
                ) from None
            await asyncio.sleep(0.02)
        else:
            return Response(encode({"success": True, "freed_pages": pages}), 200, context.reply_headers(), JSON)


def _timeout(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_TIMEOUT:
        raise ApiError(
            400, "invalid_value", f"timeout is {shown(text)}; expected seconds from 0 to {MAX_TIMEOUT:g}.", param="timeout"
        )
    return seconds
