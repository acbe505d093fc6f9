"""What the generating handlers share: names and handles, submitting, waiting for a whole reply or for a stream's first word, usage.

submit ─> whole: wait for the end ─> body          a failure at any time has its real status
      └─> stream: wait for the first word ─> EventStream        a failure before it, too
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import Output, SamplingParams
from phloem.runtime.serve import wire
from phloem.runtime.serve.body import notice
from phloem.runtime.serve.context import Context, Gone, Reply, watched
from phloem.runtime.serve.errors import ApiError, shown
from phloem.runtime.serve.fields import classify
from phloem.runtime.serve.jobs import Job, Sample
from phloem.runtime.serve.lower import Lowered
from phloem.runtime.serve.sse import EventStream, Writer, encode
from phloem.runtime.serve.wire import VERSION

__all__ = [
    "check_samples", "describe", "dropped_keywords", "fingerprint", "finish_word", "model_name", "model_names", "note_stream_options", "num_top_allowed", "priority_of",
    "reply_whole", "stream_reply", "submit", "take_handle", "usage_bytes", "usage_of",
]  # fmt: skip

MAX_SAMPLES = 4096
MANY_TOKENS = 32_768
"""A reply about more is made off the loop: with logprobs that is a second of work."""


# ---- names --------------------------------------------------------------------------------------------------------------


def model_names(context: Context) -> tuple[str, ...]:
    return context.host.config.served_model_name or (context.model.name,)


def model_name(context: Context, asked: str | None) -> str:
    """What the reply calls the model. Raises ApiError 404 for a name that is not served."""
    names = model_names(context)
    if asked is None or asked in ("", "default", context.model.name, context.model.path):
        return asked if asked in names else names[0]
    if asked in names:
        return asked
    raise ApiError(
        404, "model_not_found", f"there is no model {shown(asked)} here; this server has {', '.join(names)}. Use one of those, or `default`.", param="model",
    )  # fmt: skip


def fingerprint(context: Context) -> str:
    return f"phloem-{VERSION}-{context.model.fingerprint}"


def take_handle(context: Context, handle: str | None) -> str:
    """Raises ApiError 409 while a request with this handle lives under the same key."""
    if handle is None:
        return ""
    if context.host.find_handle(context.key, handle) is not None:
        raise ApiError(
            409, "duplicate_request_id", f"a request named {shown(handle)} is still running; names must differ among live requests.", param="request_id",
        )  # fmt: skip
    return handle


def priority_of(context: Context, priority: int | None) -> int:
    if priority and context.model.engine.policy != "priority":
        context.notes.ignored.add("priority")
        return 0
    return priority or 0


def num_top_allowed(context: Context, num_top: int, name: str) -> None:
    most = context.host.config.max_logprobs
    if num_top > most:
        raise InvalidRequestError(f"{name} is {num_top}; this server gives at most {most}.", param=name)


def note_stream_options(context: Context, raw: msgspec.Raw, route: str, stream: bool | None) -> None:
    """The names inside `stream_options`, like those of the body."""
    if bytes(raw) == b"null":
        return
    if not stream:
        raise ApiError(
            400, "invalid_value", "stream_options is given, and stream is not true; leave it out, or stream.", param="stream_options"
        )  # fmt: skip
    known = wire.StreamOptions.__struct_fields__
    inside = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    names = {f"stream_options.{name}": value for name, value in inside.items() if name not in known}
    for name, row in classify(route, names):
        notice(context.notes, name, row, names[name], strict=context.strict)


# ---- submitting ---------------------------------------------------------------------------------------------------------


def describe(context: Context, lowered: Lowered, sampling: SamplingParams, *, model: str, stream: bool, handle: str) -> None:
    """What the log and the spans tell of this request."""
    record = context.record
    record.model, record.stream, record.handle = model, stream, handle
    record.grammar = lowered.constraint.spec.kind if lowered.constraint is not None else ""
    record.params = {
        "max_tokens": sampling.max_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
        "frequency_penalty": sampling.frequency_penalty, "presence_penalty": sampling.presence_penalty, "seed": sampling.seed,
        "stop": len(sampling.stop), "n": lowered.n,
    }  # fmt: skip


def check_samples(num_prompts: int, n: int) -> None:
    """Before any of them is made."""
    if num_prompts * n > MAX_SAMPLES:
        raise InvalidRequestError(
            f"prompts times n are {num_prompts * n}; at most {MAX_SAMPLES} samples make a request.", param="n"
        )


def submit(context: Context, job: Job, *more_handles: str) -> None:
    """Into the engine. more_handles: further names of the same request. Raises what it refuses everybody with (it is dead, or
    closed)."""
    context.warn_of_ignored()
    if context.host.config.log_prompts:
        context.record.text = context.model.tokenizer.decode(job.samples[0].request.token_ids, skip_special_tokens=False)
    job.handle = context.record.handle
    context.host.opened(job, *more_handles)
    try:
        job.submit()
    except BaseException:
        job.close()
        raise


# ---- replies ------------------------------------------------------------------------------------------------------------


async def reply_whole(context: Context, job: Job, build: Callable[[Job], bytes]) -> Response:
    """Wait for all, then `build`. Raises what the request fails with; Gone."""
    gone: list[bool] = []

    def left() -> None:
        gone.append(True)
        job.abort()

    try:
        await watched(context.request.receive, left, job.finished())
        if gone:
            raise Gone
        failure = job.failure()
        if failure is not None:
            raise failure
        _tell_seeds(context, job)
        size = sum(len(s.request.token_ids) + s.num_tokens for s in job.samples)
        return Reply(context, build(job) if size <= MANY_TOKENS else await asyncio.to_thread(build, job))
    finally:
        job.close()
        context.count(job)


async def stream_reply(context: Context, job: Job, writer: Writer, *, ping: bool = True) -> Response:
    """Wait for the first word (or for the ping that comes before it), then the stream. Raises as `reply_whole`."""
    gone: list[bool] = []

    def left() -> None:
        gone.append(True)
        job.abort()

    seconds = context.host.config.sse_ping if ping else 0.0
    try:
        try:
            async with asyncio.timeout(seconds or None):
                await watched(context.request.receive, left, job.news())
        except TimeoutError:
            return EventStream(context, job, writer, ping=seconds, pinged=True)
        if gone:
            raise Gone
        failure = job.failure()
        if failure is not None:
            raise failure
    except BaseException:
        job.close()
        context.count(job)
        raise
    _tell_seeds(context, job)
    return EventStream(context, job, writer, ping=seconds)


def _tell_seeds(context: Context, job: Job) -> None:
    """Of each prompt: its samples share one."""
    seeds: dict[int, int] = {}
    for sample in job.samples:
        seeds.setdefault(sample.number, sample.seed)
    context.headers["x-phloem-seed"] = ", ".join(str(seed) for seed in list(seeds.values())[:32])


def finish_word(output: Output) -> str:
    return "length" if output.finish_reason == "length" else "stop"


def usage_of(samples: Sequence[Sample], thoughts: int = 0) -> wire.Usage:
    """With n the prompt counts once; prompts of a batch add up."""
    prompt = cached = completion = forced = 0
    seen = set[int]()
    for sample in samples:
        assert sample.output is not None
        usage = sample.output.usage
        completion += usage.completion_tokens
        forced += usage.forced_tokens
        if sample.number not in seen:
            seen.add(sample.number)
            prompt += usage.prompt_tokens
            cached += usage.cached_tokens
    return _usage(prompt, cached, completion, forced, thoughts)


def _usage(prompt: int, cached: int, completion: int, forced: int, thoughts: int) -> wire.Usage:
    return wire.Usage(
        prompt, completion, prompt + completion, wire.PromptDetails(cached, prompt - cached), wire.CompletionDetails(thoughts, forced, 0, 0)
    )  # fmt: skip


def usage_bytes(sample: Sample) -> bytes:
    """Of one choice so far, for continuous_usage_stats: what is cached and forced is told at its end."""
    if sample.output is not None:
        return encode(usage_of([sample]))
    return encode(_usage(len(sample.request.token_ids), 0, sample.num_tokens, 0, 0))


def dropped_keywords(
    context: Context, samples: Sequence[Sample], of_tools: tuple[tuple[str, str], ...] = ()
) -> list[wire.DroppedKeyword] | UnsetType:
    """What strict=false left out (structured A5), for the body. The header tells the same (W3)."""
    found = dict.fromkeys(of_tools)
    for sample in samples:
        if sample.output is not None:
            found.update(dict.fromkeys(sample.output.dropped_keywords))
    for pointer, keyword in found:
        context.notes.warnings[f"dropped.{pointer or '/'}"] = keyword
    return [wire.DroppedKeyword(pointer, keyword) for pointer, keyword in found] if found else UNSET
