"""create_app(config, host) -> FastAPI: the routes, who may call each, and what happens to what a handler raises.

    socket ─> guard (Host, Origin) ─> route ─> key ─> life ─> body ─> handler(context, body) ─> Response
                                                                          └ raises ─> errors.py ─> nested error, with the id

No globals: everything hangs on the Host. Handlers are thin files of their own; a new route is one of those and a line in ROUTES.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phloem.runtime.errors import PhloemError
from phloem.runtime.serve import admin, chat, completions, info, native, rl, wire
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.context import Context, Gone, check_life, error_response
from phloem.runtime.serve.errors import ApiError, failure_of, shown
from phloem.runtime.serve.guard import Access, Keys, check_origin, read_body
from phloem.runtime.serve.host import Host
from phloem.runtime.serve.jobs import Wakeups
from phloem.runtime.serve.openapi import document
from phloem.runtime.serve.prompts import Prompts
from phloem.runtime.serve.wire import VERSION

__all__ = ["ROUTES", "Route", "create_app"]

Handler = Callable[[Context, bytes], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Route:
    """path, methods, access; aliases: further paths.   kind: "generate" makes a RequestRecord and needs a living engine; "model"
    needs a loaded model; "free" needs neither.   body: what the document says of request and reply.
    """

    path: str
    methods: tuple[str, ...]
    access: Access
    handler: Handler
    kind: Literal["generate", "model", "free"] = "model"
    aliases: tuple[str, ...] = ()
    takes: Any = None
    gives: Any = None
    summary: str = ""


ROUTES: tuple[Route, ...] = (
    Route("/v1/chat/completions", ("POST",), "key", chat.chat, "generate", takes=wire.Chat, gives=wire.ChatReply, summary="A turn of a conversation"),
    Route("/v1/completions", ("POST",), "key", completions.completions, "generate", takes=wire.Completion, gives=wire.CompletionReply, summary="Continue prompts"),
    Route("/generate", ("POST", "PUT"), "key", native.generate, "generate", takes=wire.Generate, summary="Continue prompts, in SGLang's words"),
    Route("/v1/models", ("GET",), "key", info.models, summary="What is served"),
    Route("/v1/models/{id:path}", ("GET",), "key", info.model, summary="One model"),
    Route("/tokenize", ("POST",), "key", info.tokenize, aliases=("/v1/tokenize",), takes=wire.Tokenize, summary="Text or messages to token ids"),
    Route("/detokenize", ("POST",), "key", info.detokenize, aliases=("/v1/detokenize",), takes=wire.Detokenize, summary="Token ids to text"),
    Route("/tokenizer_info", ("GET",), "key", info.tokenizer_info, aliases=("/v1/tokenizer_info",), summary="Special tokens and the chat template"),
    Route("/health", ("GET", "HEAD"), "open", info.health, "free", aliases=("/ping",), summary="Is the engine making progress?"),
    Route("/ready", ("GET", "HEAD"), "open", info.ready, "free", summary="Would a request be served?"),
    Route("/health_generate", ("GET",), "key", info.health_generate, summary="One real token; not for probes"),
    Route("/metrics", ("GET",), "open", info.metrics, "free", summary="Prometheus text"),
    Route("/version", ("GET",), "open", info.version, "free", summary="The version of Phloem"),
    Route("/get_model_info", ("GET",), "key", info.model_info, aliases=("/model_info",), summary="The model, in SGLang's words"),
    Route("/get_server_info", ("GET",), "key", info.server_info, aliases=("/server_info",), summary="The configuration, without secrets"),
    Route("/abort_request", ("POST",), "key", admin.abort_request, "free", takes=wire.AbortRequest, summary="End requests"),
    *(
        Route(f"/{handler.__name__}", ("POST",), "admin", handler, summary=summary)
        for handler, summary in (
            (rl.pause_generation, "Stand still"), (rl.continue_generation, "Go on"), (rl.begin_weight_update, "New weights will come, in several calls"),
            (rl.update_weights_from_disk, "Weights from local safetensors"), (rl.update_weights_from_tensor, "Weights in the body, as safetensors"),
            (rl.end_weight_update, "Serve what has come"), (rl.update_weight_version, "A label for the weights"),
            (rl.release_memory_occupation, "Hand memory back"), (rl.resume_memory_occupation, "Take it again"), (rl.weights_checker, "A digest of the weights"),
        )
    ),
    Route("/get_weights_by_name", ("GET",), "admin", rl.get_weights_by_name, summary="Values of a tensor as it is served"),
    Route("/flush_cache", ("GET", "POST"), "admin", admin.flush_cache, aliases=("/reset_prefix_cache",), summary="Forget every cached prefix"),
)  # fmt: skip


@dataclass(slots=True)
class State:
    """What the handlers of one app share. prompts: of the model that is loaded; wakeups: of the loop that serves."""

    host: Host
    keys: Keys
    prompts: Prompts | None = None
    wakeups: dict[int, Wakeups] = field(default_factory=dict)

    def wakeups_of_loop(self) -> Wakeups:
        loop = asyncio.get_running_loop()
        found = self.wakeups.get(id(loop))
        if found is None or found.loop is not loop:
            self.wakeups.clear()
            found = self.wakeups[id(loop)] = Wakeups()
        return found


def create_app(config: ServerConfig, host: Host) -> FastAPI:
    """The app; nothing of it runs yet. Raises ConfigError for keys, templates or names that cannot be used (later, for those that
    need the model: in `host.ready`)."""
    state = State(host, Keys(config))

    def loaded(model: Any) -> None:
        state.prompts = Prompts(model, config)

    host.on_ready.append(loaded)
    if host.model is not None:
        loaded(host.model)
    app = FastAPI(title="Phloem", version=VERSION, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.phloem = state
    for route in ROUTES:
        for path in (route.path, *route.aliases):
            _add(app, path, route, state)
    described = Route("/openapi.json", ("GET",), "open", _describe, "free")
    _add(app, described.path, described, state)
    app.add_exception_handler(HTTPException, _no_route(state))  # type: ignore[arg-type]
    if config.allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allow_origin),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(_Origins, config=config, state=state)
    return app


def _add(app: FastAPI, path: str, route: Route, state: State) -> None:
    endpoint = _endpoint(path, route, state)
    for spelled in (path, f"{path}/") if not path.endswith(":path}") else (path,):
        app.router.add_route(spelled, endpoint, methods=list(route.methods), name=path, include_in_schema=False)
    endpoint.access = route.access  # type: ignore[attr-defined]


def _endpoint(path: str, route: Route, state: State) -> Callable[[Request], Awaitable[Response]]:
    host = state.host

    async def endpoint(request: Request) -> Response:
        started = time.perf_counter()
        context = Context(host, request, path, "", state.prompts, state.wakeups_of_loop(), state.keys)
        response: Response | None = None
        status, code = 500, None
        try:
            context.key = context.record.key = state.keys.admit(route.access, request.headers)
            if route.kind == "generate":
                check_life(host)
            if route.kind != "free":
                context.prompts  # noqa: B018  refuses while the model is loading
            if route.kind == "generate":
                check_queue(host)
            body = await read_body(request) if request.method in ("POST", "PUT") else b""
            response = await route.handler(context, body)
            status = response.status_code
        except (Gone, ClientDisconnect):
            status, code = 499, "client_disconnected"
            response = Response(status_code=499)
        except Exception as error:
            failure = failure_of(error)
            status, code = failure.status, failure.code
            if not isinstance(error, PhloemError) or code == "internal_error":
                host.observer.failed(context.record.id, error)
            response = error_response(error, host, context.reply_headers())
        finally:
            if route.kind != "generate":
                host.observer.other(path, request.method, status, time.perf_counter() - started)
            elif response is None or code is not None:
                context.complete(status, code)
        return response

    return endpoint


def check_queue(host: Host) -> None:
    """L8: before anything is read or tokenised. Raises ApiError 429."""
    config = host.config
    if host.waiting >= config.max_queue or host.waiting_tokens >= config.max_queue_tokens:
        raise ApiError(
            429, "engine_overloaded", f"{host.waiting} requests with {host.waiting_tokens} prompt tokens are waiting already. Try again later."
        )  # fmt: skip


def _no_route(state: State) -> Callable[[Request, HTTPException], Awaitable[Response]]:
    async def handle(request: Request, error: HTTPException) -> Response:
        context = Context(state.host, request, "", "", None, state.wakeups_of_loop(), state.keys)
        path = shown(request.url.path)
        if error.status_code == 405:
            problem = ApiError(
                405, "method_not_allowed", f"{path} does not take {request.method}; see /openapi.json for what it takes."
            )
        elif error.status_code == 404:
            problem = ApiError(404, "not_found", f"there is no route {path}; see /openapi.json for those that there are.")
        else:
            problem = ApiError(error.status_code, "invalid_value", str(error.detail))
        state.host.observer.other("", request.method, problem.status, 0.0)
        response = error_response(problem, state.host, context.reply_headers())
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    return handle


class _Origins:
    """The guard in front of everything (G4)."""

    def __init__(self, app: ASGIApp, config: ServerConfig, state: State) -> None:
        self._app, self._config, self._state = app, config, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                check_origin(self._config, request.headers)
            except ApiError as error:
                context = Context(self._state.host, request, "", "", None, self._state.wakeups_of_loop(), self._state.keys)
                self._state.host.observer.other("", request.method, error.status, 0.0)
                await error_response(error, self._state.host, context.reply_headers())(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _describe(context: Context, _: bytes) -> Response:
    return Response(document(ROUTES), 200, context.reply_headers(), "application/json")
