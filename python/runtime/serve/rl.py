"""Training against a server: pause, new weights, memory, in SGLang's names, behind the admin key. Sends Control and nothing else.

    pause ─► begin ─► update … update ─► end ─► continue        an update call without begin and end is one of its own
Tensors come as safetensors, from a local path or in the body; no pickle, ever. Replies: {"success", "message"} beside what is named.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from phloem.runtime.serve.context import JSON, Context
from phloem.runtime.serve.errors import ApiError
from phloem.runtime.serve.info import encode

__all__ = [
    "begin_weight_update", "continue_generation", "end_weight_update", "get_weights_by_name", "pause_generation", "release_memory_occupation",
    "resume_memory_occupation", "update_weight_version", "update_weights_from_disk", "update_weights_from_tensor", "weights_checker",
]  # fmt: skip

POLICIES = {"abort": "abort", "retract": "recompute", "in_place": "continue", "finish": "finish"}
WAIT_SECONDS = 0.01
WITHOUT_EFFECT = (
    "selector",
    "torch_empty_cache",
    "recapture_cuda_graph",
    "flush_cache",
    "load_format",
    "token_step",
    "keep_pause",
    "is_async",
)
T = TypeVar("T")


class Pause(msgspec.Struct, kw_only=True):
    mode: str = "abort"


class EndUpdate(msgspec.Struct, kw_only=True):
    weight_version: str | None = None


class FromDisk(msgspec.Struct, kw_only=True):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None


class FromTensor(msgspec.Struct, kw_only=True):
    serialized_named_tensors: list[str]
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None


class Version(msgspec.Struct, kw_only=True):
    new_version: str
    abort_all_requests: bool = False


class Tags(msgspec.Struct, kw_only=True):
    tags: list[str] | None = None


class Checker(msgspec.Struct, kw_only=True):
    action: str = "checksum"


class Nothing(msgspec.Struct, kw_only=True):
    pass


async def pause_generation(context: Context, body: bytes) -> Response:
    """{mode}: what becomes of requests under way. Returns once nothing runs; what is sent meanwhile waits."""
    mode = _body(context, body, Pause).mode
    if mode not in POLICIES:
        raise ApiError(400, "invalid_value", f"mode is {mode!r}; expected one of {', '.join(POLICIES)}.", param="mode")
    await _stand_still(context, POLICIES[mode])
    return _reply(context, "paused")


async def continue_generation(context: Context, body: bytes) -> Response:
    _body(context, body, Nothing)
    await _control(context, "unpause")
    return _reply(context, "continued")


async def begin_weight_update(context: Context, body: bytes) -> Response:
    _body(context, body, Nothing)
    await _control(context, "begin_update")
    context.host.updating = True
    return _reply(context, "an update has begun; what is served stays until it ends")


async def end_weight_update(context: Context, body: bytes) -> Response:
    asked = _body(context, body, EndUpdate)
    if not context.host.updating:
        raise ApiError(409, "no_update", "no update has begun; POST /begin_weight_update first.")
    return await _end(context, asked.weight_version, "finish")


async def update_weights_from_disk(context: Context, body: bytes) -> Response:
    """{model_path}: a local folder or file of safetensors. Within begin and end some of the tensors; alone, all of them."""
    asked = _body(context, body, FromDisk)
    return await _update(context, "load_path", asked.model_path, asked.weight_version, asked.abort_all_requests)


async def update_weights_from_tensor(context: Context, body: bytes) -> Response:
    """{serialized_named_tensors: [base64 of safetensors], load_format: "safetensors"}."""
    asked = _body(context, body, FromTensor)
    if asked.load_format != "safetensors":
        raise ApiError(
            400, "unsupported_value",
            'load_format must be "safetensors": base64 of safetensors.torch.save({name: tensor}). Pickled tensors are never read.', param="load_format",
        )  # fmt: skip
    try:
        blobs = [base64.b64decode(text, validate=True) for text in asked.serialized_named_tensors]
    except binascii.Error as error:
        raise ApiError(400, "invalid_value", f"an entry is no base64: {error}.", param="serialized_named_tensors") from None
    return await _update(context, "load_bytes", blobs, asked.weight_version, asked.abort_all_requests)


async def update_weight_version(context: Context, body: bytes) -> Response:
    """{new_version}: a label beside the engine's own number. Aborts nothing unless it is asked to (SGLang does by default)."""
    asked = _body(context, body, Version)
    if asked.abort_all_requests:
        context.host.abort_all()
    context.host.weight_version = asked.new_version
    return _reply(context, "labelled", new_version=asked.new_version)


async def release_memory_occupation(context: Context, body: bytes) -> Response:
    """{tags}: null is all; "kv_cache", "weights". Requests under way are kept and go on after the resume."""
    tags = _tags(_body(context, body, Tags).tags)
    standing = await _control(context, "standing")
    if standing["suspended"]:
        return _reply(context, "asleep already", freed_bytes=0)
    await _stand_still(context, "recompute")
    freed = await _control(context, "suspend", "weights" in tags)
    return _reply(context, "asleep", freed_bytes=freed)


async def resume_memory_occupation(context: Context, body: bytes) -> Response:
    tags = _tags(_body(context, body, Tags).tags)
    if "kv_cache" in tags:
        await _control(context, "resume")
    return _reply(context, "awake" if "kv_cache" in tags else "weights have their memory again; load them")


async def weights_checker(context: Context, body: bytes) -> Response:
    asked = _body(context, body, Checker)
    if asked.action != "checksum":
        raise ApiError(400, "invalid_value", f'action is {asked.action!r}; expected "checksum".', param="action")
    return _reply(context, "", checksum=await _control(context, "digest"))


async def get_weights_by_name(context: Context, body: bytes) -> Response:
    query = context.request.query_params
    name, size = query.get("name"), query.get("truncate_size", "100")
    if name is None or not size.isdigit():
        raise ApiError(400, "invalid_value", "give ?name= of a tensor, and truncate_size as a number.", param="name")
    return _reply(context, "", values=await _control(context, "weight_values", name, int(size)))


# ---- inside --------------------------------------------------------------------------------------------------------------------


async def _update(context: Context, verb: str, what: Any, label: str | None, abort: bool) -> Response:
    alone = not context.host.updating
    if alone:
        await _control(context, "begin_update")
    try:
        await _control(context, verb, what)
    except BaseException:
        context.host.updating = False
        await _control(context, "forget_update")
        raise
    if not alone:
        return _reply(context, "loaded; served once the update ends", num_paused_requests=0)
    return await _end(context, label, "abort" if abort else "finish")


async def _end(context: Context, label: str | None, policy: str) -> Response:
    context.host.updating = False
    was_still = (await _control(context, "standing"))["still"]
    try:
        if not was_still:
            await _stand_still(context, policy)
        version = await _control(context, "finish_update")
    except BaseException:
        await _control(context, "forget_update")
        if not was_still:
            await _control(context, "unpause")
        raise
    if was_still:
        await _control(context, "pause", "recompute")  # paused by the caller: it is the caller who goes on
    if label is not None:
        context.host.weight_version = label
    return _reply(context, f"the weights are at version {version}", num_paused_requests=0, version=version)


async def _stand_still(context: Context, policy: str) -> None:
    if await _control(context, "pause", policy):
        return
    while not (await _control(context, "standing"))["still"]:
        await asyncio.sleep(WAIT_SECONDS)


async def _control(context: Context, verb: str, *args: Any) -> Any:
    client = context.host.client
    context.model  # noqa: B018  refuses while loading
    assert client is not None
    value = await asyncio.wrap_future(client.call("control", verb, *args))
    return msgspec.to_builtins(value) if not isinstance(value, (int, str, type(None))) else value


def _body(context: Context, raw: bytes, kind: type[T]) -> T:
    """Unknown names are refused; SGLang's own without effect are listed in the reply's header."""
    try:
        given = msgspec.json.decode(raw or b"{}", type=dict[str, msgspec.Raw])
        known = set(kind.__struct_fields__)  # type: ignore[attr-defined]
        for name in given:
            if name in WITHOUT_EFFECT and name not in known:
                context.notes.ignored.add(name)
            elif name not in known:
                raise ApiError(
                    400, "unknown_parameter", f"there is no field {name!r} here; known: {', '.join(sorted(known))}.", param=name
                )
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError(400, "invalid_value", f"the body does not fit: {error}.") from None


def _tags(tags: list[str] | None) -> set[str]:
    wanted = {"kv_cache", "weights"} if tags is None else set(tags)
    if not wanted or not wanted <= {"kv_cache", "weights"}:
        raise ApiError(400, "invalid_value", f'tags are {sorted(wanted)}; expected "kv_cache" and "weights".', param="tags")
    return wanted


def _reply(context: Context, message: str, **fields: Any) -> Response:
    return Response(encode({"success": True, "message": message, **fields}), 200, context.reply_headers(), JSON)
