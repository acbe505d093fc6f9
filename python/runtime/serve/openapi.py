"""/openapi.json, made from the structs of wire.py: what msgspec accepts and what the document says are one thing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from phloem.runtime.serve import wire
from phloem.runtime.serve.wire import VERSION

__all__ = ["document"]

_STATUSES = {
    "400": "What was sent cannot be served", "401": "The API key is missing or wrong", "403": "Not allowed", "404": "No such thing", "405": "Another method",
    "408": "The body did not come in time", "409": "In use, or busy", "413": "Too large", "429": "The queue is full", "500": "A bug", "503": "Not now",
}  # fmt: skip


class Described(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def methods(self) -> tuple[str, ...]: ...
    @property
    def access(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...
    @property
    def takes(self) -> Any: ...
    @property
    def gives(self) -> Any: ...
    @property
    def summary(self) -> str: ...


@lru_cache(maxsize=4)
def document(routes: Sequence[Described]) -> bytes:
    """OpenAPI 3.1 as JSON."""
    kinds = list(dict.fromkeys([r.takes for r in routes if r.takes] + [r.gives for r in routes if r.gives] + [wire.ErrorReply]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, schemas))
    paths: dict[str, Any] = {}
    for route in routes:
        for path in (route.path, *route.aliases):
            spelled = path.replace(":path}", "}")
            paths[spelled] = {m.lower(): _operation(route, spelled, m, by_kind) for m in route.methods if m != "HEAD"}
    return msgspec.json.encode({
        "openapi": "3.1.0", "info": {"title": "Phloem", "version": VERSION}, "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
        },
    })  # fmt: skip


def _operation(route: Described, path: str, method: str, by_kind: dict[Any, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": by_kind[wire.ErrorReply]}}
    ok: dict[str, Any] = {"description": "Done"}
    if route.gives is not None:
        ok["content"] = {
            "application/json": {"schema": by_kind[route.gives]},
            "text/event-stream": {"schema": {"type": "string"}},
        }
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{method.lower()}_{path.strip('/').replace('/', '_').replace('{', '').replace('}', '').replace('.', '_')}",
        "responses": {"200": ok} | {status: {"description": text, "content": error} for status, text in _STATUSES.items()},
    }  # fmt: skip
    if route.access != "open":
        operation["security"] = [{"bearer": []}, {"header": []}] + ([{}] if route.access == "key" else [])
    parameters = list(_path_names(path))
    if parameters:
        operation["parameters"] = [
            {"name": p, "in": "path", "required": True, "schema": {"type": "string"}} for p in parameters
        ]
    if route.takes is not None and method in ("POST", "PUT"):
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": by_kind[route.takes]}}}
    return operation


def _path_names(path: str) -> Iterable[str]:
    return (part[1:-1] for part in path.split("/") if part.startswith("{"))
