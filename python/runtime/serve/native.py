"""POST /generate: SGLang's body and reply. One prompt or a list, text or ids; a list (or n > 1) answers with a list.

    {text | input_ids, sampling_params, return_logprob, …}  ─>  {text, output_ids, meta_info}
    a stream's events carry the reply so far; those of a list say whose, by `index`

Errors are nested here as everywhere. What was aborted is answered with what there is of it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response

from phloem.runtime.engine.collect import Collector
from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import Output, Request, TokenLogprob
from phloem.runtime.serve import flow, wire
from phloem.runtime.serve.body import read
from phloem.runtime.serve.completions import Asked, prompts_of
from phloem.runtime.serve.context import Context
from phloem.runtime.serve.errors import ApiError, shown
from phloem.runtime.serve.jobs import Job, Piece, Sample
from phloem.runtime.serve.logprobs import Spelling, finite, top_of
from phloem.runtime.serve.lower import Lowered, lower, namespace_of
from phloem.runtime.serve.sse import DONE, encode

__all__ = ["generate"]

DEFAULT_MAX_TOKENS = 128


async def generate(context: Context, raw_body: bytes) -> Response:
    """The handler. Raises PhloemError for everything that is refused before the first byte."""
    notes = context.notes
    body, raw = read("g", raw_body, wire.Generate, notes, strict=context.strict)
    name = flow.model_name(context, body.model)
    prompts, single = await _prompts(context, body, raw)
    flow.num_top_allowed(context, body.top_logprobs_num or 0, "top_logprobs_num")
    lowered = _lowered(context, body, prompts, single)
    handles = _handles(context, body.rid, len(prompts))
    flow.check_samples(len(prompts), max(one.n for one in lowered))
    samplings = [one.fit(context.model, len(p.ids), notes) for one, p in zip(lowered, prompts)]

    job = context.job(partial=True)
    job.on_error = lowered[0].rename
    flow.describe(context, lowered[0], samplings[0], model=name, stream=bool(body.stream), handle=handles[0])
    index = 0
    for number, (prompt, one, sampling) in enumerate(zip(prompts, lowered, samplings)):
        group = f"{context.name}.p{number}" if one.n > 1 else None
        for sample in range(one.n):
            request = Request(
                id=f"{context.name}.{index}", token_ids=prompt.ids, sampling=sampling, grammar=one.grammar, group=group, sample=sample,
                namespace=namespace_of(context.key, body.cache_salt, body.extra_key), priority=flow.priority_of(context, body.priority),
            )  # fmt: skip
            job.add(request, Collector(request, context.model.tokenizer), index, number)
            index += 1
    shape = _Shape(context, body, handles, alone=single and lowered[0].n == 1)
    flow.submit(context, job, *handles[1:])
    if body.stream:
        return await flow.stream_reply(context, job, _NativeStream(shape), ping=False)
    return await flow.reply_whole(context, job, shape.whole)


async def _prompts(context: Context, body: wire.Generate, raw: dict[str, msgspec.Raw]) -> tuple[list[Asked], bool]:
    has_ids = bytes(body.input_ids) not in (b"", b"null")
    if (body.text is None) != has_ids:
        code = "conflicting_parameters" if has_ids else "missing_required_parameter"
        raise ApiError(400, code, "expected exactly one of text and input_ids.", param="text")
    name = "input_ids" if has_ids else "text"
    value = body.input_ids if has_ids else raw["text"]
    if has_ids and bytes(value)[:1] == b'"':
        raise ApiError(
            400, "invalid_type", "input_ids is a string; expected a list of token ids, or a list of those.", param="input_ids"
        )
    single = bytes(value)[:1] == b'"' or (has_ids and bytes(value)[1:].lstrip()[:1] != b"[")
    return await prompts_of(context, value, name, True), single


def _lowered(context: Context, body: wire.Generate, prompts: Sequence[Asked], single: bool) -> list[Lowered]:
    """One sampling for all prompts, or one a prompt."""
    raw = body.sampling_params
    text = bytes(raw) if bytes(raw) not in (b"", b"null") else b"{}"
    if text[:1] == b"[":
        objects = [bytes(one) for one in msgspec.json.decode(text, type=list[msgspec.Raw])]
        if single or len(objects) != len(prompts):
            raise InvalidRequestError(
                f"sampling_params has {len(objects)} entries for {'one prompt' if single else f'{len(prompts)} prompts'}; expected one object, or one a prompt.",
                param="sampling_params",
            )
    else:
        objects = [text]
    lowered = [_lower_one(context, body, one, min(len(p.ids) for p in prompts)) for one in objects]
    return lowered if len(lowered) == len(prompts) else lowered * len(prompts)


def _lower_one(context: Context, body: wire.Generate, text: bytes, shortest: int) -> Lowered:
    sampling, _ = read("s", text, wire.Generation, context.notes, strict=context.strict, under="sampling_params.")
    start = body.logprob_start_len if body.logprob_start_len is not None else -1
    if start > shortest:
        raise InvalidRequestError(
            f"logprob_start_len is {shown(start)}; the prompt has {shortest} tokens, and -1 asks for the output only.",
            param="logprob_start_len",
        )
    wants = bool(body.return_logprob)
    return lower(
        sampling, context.model, context.notes, default_max=DEFAULT_MAX_TOKENS, prompt_name="input_ids" if body.text is None else "text",
        logprobs="model" if wants else None, top_logprobs=(body.top_logprobs_num or 0) if wants else 0,
        prompt_logprobs=start if wants and 0 <= start < shortest else None, open_end=bool(body.open_end), under="sampling_params.",
    )  # fmt: skip


def _handles(context: Context, rid: Any, count: int) -> list[str]:
    """One name a request, or one for all of it."""
    if not isinstance(rid, list):
        return [flow.take_handle(context, rid)]
    if len(rid) != count or len(set(rid)) != count:
        what = "names that repeat" if len(set(rid)) != len(rid) else f"{len(rid)} names for {count} prompts"
        raise InvalidRequestError(f"rid holds {what}; expected one name, or a different one for each prompt.", param="rid")
    return [flow.take_handle(context, one) for one in rid]


@dataclass(slots=True)
class _SoFar:
    """One sample as a stream has told it."""

    text: str = ""
    ids: list[int] | None = None
    logprobs: list[TokenLogprob] | None = None


class _Shape:
    """alone: the reply is one object, not a list."""

    def __init__(self, context: Context, body: wire.Generate, handles: Sequence[str], *, alone: bool) -> None:
        self.context, self.body, self.handles, self.alone = context, body, handles, alone
        self.spelling = Spelling(context.model.tokenizer, False)
        self.wants = bool(body.return_logprob)
        self.num_top = body.top_logprobs_num or 0
        self.start = body.logprob_start_len if body.logprob_start_len is not None else -1

    def whole(self, job: Job) -> bytes:
        entries = [
            self.entry(s, _SoFar(s.output.text, s.output.token_ids, s.output.logprobs))
            for s in job.samples
            if s.output is not None
        ]
        return encode(entries[0] if self.alone else entries)

    def entry(self, sample: Sample, so_far: _SoFar) -> dict[str, Any]:
        output, record = sample.output, self.context.record
        ids = so_far.ids or []
        usage = output.usage if output is not None else None
        name = self.handles[sample.number] if len(self.handles) > 1 else self.handles[0]
        meta: dict[str, Any] = {
            "id": name or sample.request.id, "finish_reason": None if output is None else finish_of(output), "prompt_tokens": len(sample.request.token_ids),
            "completion_tokens": len(ids) if usage is None else usage.completion_tokens, "cached_tokens": usage.cached_tokens if usage is not None else 0,
            "forced_tokens": usage.forced_tokens if usage is not None else 0, "seed": sample.seed,
            "weight_version": str(output.weights_version if output is not None else sample.weights), "e2e_latency": time.perf_counter() - record.arrived,
        }  # fmt: skip
        if output is not None and output.dropped_keywords:
            meta["dropped_keywords"] = [{"pointer": p, "keyword": k} for p, k in output.dropped_keywords]
        if self.wants:
            meta |= self._logprobs(sample, so_far.logprobs or [])
        return {"text": so_far.text, "output_ids": ids, "meta_info": meta}

    def _logprobs(self, sample: Sample, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        prompt: list[tuple[int, TokenLogprob | None]] = []
        if 0 <= self.start < len(sample.request.token_ids):
            found = sample.prompt_logprobs()
            prompt = list(zip(sample.request.token_ids, found))[self.start :]
        mine = [(e.token_id, e) for e in entries]
        meta: dict[str, Any] = {
            "input_token_logprobs": [self._one(t, e) for t, e in prompt],
            "output_token_logprobs": [self._one(t, e) for t, e in mine],
        }
        if self.num_top:
            meta["input_top_logprobs"] = [self._top(e) for _, e in prompt]
            meta["output_top_logprobs"] = [self._top(e) for _, e in mine]
        return meta

    def _text(self, token: int) -> str | None:
        return self.spelling.text(token) if self.body.return_text_in_logprobs else None

    def _one(self, token: int, entry: TokenLogprob | None) -> list[Any]:
        return [None if entry is None else finite(entry.logprob), token, self._text(token)]

    def _top(self, entry: TokenLogprob | None) -> list[list[Any]] | None:
        return None if entry is None else [[value, token, self._text(token)] for token, value in top_of(entry, self.num_top)]


def finish_of(output: Output) -> dict[str, Any]:
    reason = output.finish_reason
    if reason == "length":
        return {"type": "length", "length": output.usage.completion_tokens}
    if reason == "abort":
        return {"type": "abort", "message": "the request was aborted"}
    matched: Any = output.stop_reason
    if reason == "eos" and output.token_ids:
        matched = output.token_ids[-1]
    return {"type": "stop", "matched": matched}


class _NativeStream:
    """A Writer (sse.py)."""

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape
        self._so_far: dict[int, _SoFar] = {}

    def write(self, sample: Sample, piece: Piece) -> bytes:
        told = self._so_far.setdefault(sample.index, _SoFar(ids=[], logprobs=[]))
        told.text += piece.text
        assert told.ids is not None and told.logprobs is not None
        told.ids += piece.ids
        told.logprobs += piece.logprobs
        if piece.output is not None and piece.output.finish_reason == "error":
            return b""
        entry = self._shape.entry(sample, told)
        if not self._shape.alone:
            entry["index"] = sample.index
        if piece.output is None:
            entry["meta_info"]["finish_reason"] = None
            entry["meta_info"]["completion_tokens"] = len(told.ids)
        return b"data: " + encode(entry) + b"\n\n"

    def end(self) -> bytes:
        return DONE
