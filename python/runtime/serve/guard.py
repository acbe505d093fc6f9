"""Who may call what (G1–G4), and how much of it is read (W9): keys, Host and Origin, bodies with a cap and a deadline.

    every request ─> Host, Origin (G4) ─> its route's access ─> open | key | admin ─> the handler

Default deny: a route without an access cannot be made (app.py). Knows nothing of what bodies mean.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

from starlette.requests import ClientDisconnect, Request

from phloem.runtime.errors import ConfigError
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.errors import ApiError, shown

__all__ = ["MAX_BODY", "Access", "Keys", "check_origin", "is_loopback", "read_body"]

Access = Literal["open", "key", "admin"]
MAX_BODY = 8 << 20
BODY_SECONDS = 30.0


class Keys:
    """The keys as digests; the keys themselves are forgotten at once, so that nothing can print them (G7).

    Raises ConfigError for a key file that cannot be used.
    """

    def __init__(self, config: ServerConfig) -> None:
        named = [("", key) for key in config.api_key] + _of_file(config.api_key_file)
        if any(not key for _, key in named) or config.admin_key == "":
            raise ConfigError("a key is empty; leave it out, or give it characters.", param="api_key")
        self._keys = [(name, _digest(key)) for name, key in named]
        self._admin = _digest(config.admin_key) if config.admin_key is not None else None

    @property
    def required(self) -> bool:
        return bool(self._keys)

    def admit(self, access: Access, headers: Mapping[str, str]) -> str:
        """The name of the key that was shown ("" without one). Raises ApiError 401, 403."""
        if access == "open":
            return ""
        sent = _sent(headers)
        digest = _digest(sent) if sent is not None else b""
        is_admin = self._admin is not None and hmac.compare_digest(digest, self._admin)
        if access == "admin":
            if self._admin is None:
                raise ApiError(
                    403, "admin_disabled", "administrative routes are off: the server was started without --admin-key. Start it with one."
                )  # fmt: skip
            if not is_admin:
                raise ApiError(403, "admin_required", "this route needs the admin key. Send it as `Authorization: Bearer …`.")
            return "admin"
        if is_admin or not self._keys:
            return "admin" if is_admin and self._keys else ""
        found = None
        for name, known in self._keys:  # all of them, whichever matches: the time tells nothing
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            what = "is not one of the server's keys" if sent is not None else "is missing"
            raise ApiError(401, "invalid_api_key", f"the API key {what}. Send one as `Authorization: Bearer …` or `x-api-key`.")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _sent(headers: Mapping[str, str]) -> str | None:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value:
        return value.strip()
    return headers.get("x-api-key")


def _of_file(path: str | None) -> list[tuple[str, str]]:
    if path is None:
        return []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file cannot be read: {error}.", param="api_key_file") from None
    named: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not words[0].isascii() or len(words[0]) > 64:
            raise ConfigError(f"line {number} of the key file is not `name key`.", param="api_key_file")
        if words[0] == "admin":
            raise ConfigError(
                f"line {number} of the key file names a key admin, which is what the admin key is called.", param="api_key_file"
            )
        if words[0] in dict(named):
            raise ConfigError(f"line {number} of the key file names {words[0]!r} again; names differ.", param="api_key_file")
        named.append((words[0], words[1]))
    if not named:
        raise ConfigError("the key file holds no key; expected lines of `name key`.", param="api_key_file")
    return named


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_origin(config: ServerConfig, headers: Mapping[str, str]) -> None:
    """G4: no web page reaches a server that was not made for it, by a name of its own (DNS rebinding) or across sites.

    Raises ApiError 403.
    """
    host = headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if is_loopback(config.host) and host and not is_loopback(name):
        raise ApiError(
            403, "origin_not_allowed", f"this server listens on loopback only, and was called {shown(name)}. Use 127.0.0.1."
        )
    origin = headers.get("origin")
    if origin is None or origin in config.allow_origin or "*" in config.allow_origin:
        return
    if host and origin in (f"http://{host}", f"https://{host}"):
        return
    raise ApiError(
        403, "origin_not_allowed", f"pages of {shown(origin)} may not call this server. Start it with --allow-origin."
    )


async def read_body(request: Request) -> bytes:
    """All of it, at most MAX_BODY. Raises ApiError 408, 413; ClientDisconnect."""
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > MAX_BODY:
        raise _too_large()
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY:
                    raise _too_large()
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408, "body_timeout", f"the body was not complete after {BODY_SECONDS:g} seconds. Send it faster."
        ) from None
    return b"".join(chunks)


def _too_large() -> ApiError:
    return ApiError(
        413, "request_too_large", f"the body is larger than {MAX_BODY >> 20} MiB, the most that is read. Send less."
    )


Disconnected = ClientDisconnect
