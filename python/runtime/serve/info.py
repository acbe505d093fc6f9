"""Routes that only tell: health, models, the tokenizer, the configuration. None of them waits for the engine, but /health_generate.

/health answers from the last beat (L3) and never queues; busy, draining and asleep are alive.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from phloem.runtime.engine.collect import Collector
from phloem.runtime.errors import EngineDeadError
from phloem.runtime.request import Request, SamplingParams
from phloem.runtime.serve import flow, wire
from phloem.runtime.serve.body import names_of, read
from phloem.runtime.serve.config import redacted
from phloem.runtime.serve.context import JSON, Context, Reply, check_life
from phloem.runtime.serve.errors import ApiError
from phloem.runtime.serve.wire import VERSION

__all__ = [
    "detokenize", "health", "health_generate", "metrics", "model", "model_info", "models", "ready", "server_info", "tokenize", "tokenizer_info", "version",
]  # fmt: skip

HEALTH_SECONDS = 10.0
MANY_IDS = 16_384
"""More are decoded off the loop."""
encode = msgspec.json.Encoder().encode


def _answer(context: Context, status: int, body: dict[str, Any]) -> Response:
    return Response(encode(body), status, context.reply_headers(), JSON)


async def health(context: Context, _: bytes) -> Response:
    """Alive: making progress, or with nothing to do."""
    life = context.host.life
    if life.phase == "loading":
        return _answer(context, 503, {"status": "loading", "progress": life.progress})
    if life.phase == "dead":
        return _answer(context, 503, {"status": "dead"})
    stalled = life.stalled()
    if stalled is not None:
        return _answer(context, 503, {"status": "stalled", "last_step_s": round(stalled, 3)})
    return _answer(context, 200, {"status": "ok"})


async def ready(context: Context, _: bytes) -> Response:
    """Would a request be served now?"""
    life = context.host.life
    if life.phase == "draining":
        return _answer(context, 503, {"status": "draining"})
    if life.phase == "ready" and life.asleep:
        return _answer(context, 503, {"status": "sleeping"})
    return await health(context, b"")


async def health_generate(context: Context, _: bytes) -> Response:
    """One real token, within ten seconds. Not for probes: it queues like any request."""
    model = context.model
    check_life(context.host)
    token = model.tokenizer.bos_id if model.tokenizer.bos_id is not None else 0
    request = Request(
        id=f"{context.name}.0", token_ids=(token,), sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    )
    job = context.job()
    job.add(request, Collector(request, model.tokenizer), 0, 0)
    flow.submit(context, job)
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            await job.finished()
        failure = job.failure()
        if failure is not None:
            raise failure
    except TimeoutError:
        raise ApiError(503, "engine_dead", f"the engine made no token within {HEALTH_SECONDS:g} seconds.") from None
    finally:
        job.close()
    return _answer(context, 200, {"status": "ok"})


async def models(context: Context, _: bytes) -> Response:
    entries = [_card(context, name) for name in flow.model_names(context)]
    return _answer(context, 200, {"object": "list", "data": entries})


async def model(context: Context, _: bytes) -> Response:
    name = context.request.path_params["id"].rstrip("/")
    return _answer(context, 200, _card(context, flow.model_name(context, name)))


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": context.host.started, "owned_by": "phloem", "max_model_len": context.model.max_context,
        "root": context.model.name, "parent": None,
    }  # fmt: skip


async def version(context: Context, _: bytes) -> Response:
    return _answer(context, 200, {"version": VERSION})


async def metrics(context: Context, _: bytes) -> Response:
    body = context.host.observer.metrics()
    return Response(body, 200, context.reply_headers(), "text/plain; version=0.0.4; charset=utf-8")


async def model_info(context: Context, _: bytes) -> Response:
    m = context.model
    return _answer(context, 200, {
        "model_path": m.path, "served_model_name": flow.model_names(context)[0], "tokenizer_path": m.path, "is_generation": True,
        "weight_version": context.host.weight_version or m.weight_version, "model_type": m.model_type, "architectures": list(m.architectures), "max_model_len": m.max_context,
        "tool_parser": context.prompts.tool_format.name, "has_chat_template": context.prompts.template is not None,
    })  # fmt: skip


async def server_info(context: Context, _: bytes) -> Response:
    """The configuration as it came out, without anything secret (C-OPS-06), and what the engine holds."""
    m, client = context.model, context.host.client
    assert client is not None
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            stats = await asyncio.wrap_future(client.call("stats"))
    except TimeoutError:
        raise EngineDeadError("the engine did not answer in time; see /health.") from None
    state = msgspec.to_builtins(stats)
    shown = redacted(context.host.config, m.engine)
    return _answer(context, 200, {
        **shown, "version": VERSION, "page_size": m.resolved.config.page_size, "max_total_num_tokens": m.pool_tokens,
        "device": m.resolved.device, "kv_dtype": m.resolved.kv_dtype, "threads": m.resolved.threads, "max_context": m.max_context,
        "internal_states": [state],
    })  # fmt: skip


async def tokenizer_info(context: Context, _: bytes) -> Response:
    t = context.model.tokenizer
    named = t.named_tokens

    def spelled(name: str, token: int | None) -> str | None:
        return named.get(name) or (t.id_to_token(token) if token is not None else None)

    return _answer(context, 200, {
        "tokenizer_class": "PhloemTokenizer", "bos_token": spelled("bos_token", t.bos_id), "eos_token": spelled("eos_token", t.eos_id),
        "pad_token": spelled("pad_token", t.pad_id), "unk_token": spelled("unk_token", t.unk_id), "chat_template": context.prompts.template,
        "vocab_size": t.vocab_size, "model_max_length": context.model.max_context,
    })  # fmt: skip


async def tokenize(context: Context, raw_body: bytes) -> Response:
    notes = context.notes
    body, raw = read("k", raw_body, wire.Tokenize, notes, strict=context.strict)
    flow.model_name(context, body.model)
    if (body.prompt is None) == (body.messages is None):
        code = "missing_required_parameter" if body.prompt is None else "conflicting_parameters"
        raise ApiError(400, code, "expected one of prompt and messages.", param="prompt")
    special = body.add_special_tokens
    reply: dict[str, Any] = {}
    tokens: list[Any]
    if body.messages is not None:
        names_of(raw["messages"], wire.MESSAGE_NAMES, "messages.", notes, strict=context.strict)
        turns = context.prompts.turns(body, body.messages, notes)
        tokens = list(await context.prompts.encode_turns(turns, bool(special)))
        reply["prompt"] = await context.prompts.render_turns(turns)
        count = len(tokens)
    elif isinstance(body.prompt, list):
        if len(body.prompt) > 1024:
            raise ApiError(400, "invalid_value", f"prompt has {len(body.prompt)} texts; at most 1024.", param="prompt")
        size = sum(map(len, body.prompt))
        tokens = [list(await context.prompts.encode(text, special is not False, "prompt", size)) for text in body.prompt]
        count = sum(map(len, tokens))
    else:
        assert body.prompt is not None
        tokens = list(await context.prompts.encode(body.prompt, special is not False, "prompt"))
        count = len(tokens)
    reply |= {"tokens": tokens, "count": count, "max_model_len": context.model.max_context}
    if body.return_token_strs:
        t = context.model.tokenizer
        flat = [
            [t.id_to_token(i) or "" for i in ids] for ids in (tokens if tokens and isinstance(tokens[0], list) else [tokens])
        ]
        reply["token_strs"] = flat if tokens and isinstance(tokens[0], list) else flat[0]
    context.warn_of_ignored()
    return Reply(context, encode(reply))


async def detokenize(context: Context, raw_body: bytes) -> Response:
    body, _ = read("d", raw_body, wire.Detokenize, context.notes, strict=context.strict)
    flow.model_name(context, body.model)
    t = context.model.tokenizer
    ids = t.check_ids(body.tokens, "tokens")
    hidden = bool(body.skip_special_tokens)
    text = t.decode(ids, hidden) if len(ids) <= MANY_IDS else await asyncio.to_thread(t.decode, ids, hidden)
    context.warn_of_ignored()
    return Reply(context, encode({"prompt": text, "text": text}))
