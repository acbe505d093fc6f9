"""POST /v1/chat/completions: messages in, a turn of the assistant out, whole or as a stream.

    body ─ Prompts ─> ids ─┐
         ─ lower ───> sampling, grammar ─┴─> Job ─> Turn a choice (text, thoughts, calls) ─> ChatReply | chunks

A Turn reads one choice's text as it comes; the whole reply is made by the same reading, so both agree (W5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from phloem.runtime.engine.collect import Collector
from phloem.runtime.request import Output, Request, TokenLogprob
from phloem.runtime.serve import flow, wire
from phloem.runtime.serve.body import names_of, read
from phloem.runtime.serve.context import Context
from phloem.runtime.serve.errors import ApiError
from phloem.runtime.serve.jobs import Job, Piece, Sample
from phloem.runtime.serve.logprobs import Spelling
from phloem.runtime.serve.lower import Lowered, agreed, lower, namespace_of
from phloem.runtime.serve.sse import DONE, Envelope, encode
from phloem.runtime.serve.turns import Calls, Spoken, Thoughts, Turn, behind_thoughts, turn_reader

__all__ = ["chat"]


async def chat(context: Context, raw_body: bytes) -> Response:
    """The handler. Raises PhloemError for everything that is refused before the first byte."""
    notes, strict = context.notes, context.strict
    body, raw = read("c", raw_body, wire.Chat, notes, strict=strict)
    names_of(raw["messages"], wire.MESSAGE_NAMES, "messages.", notes, strict=strict)
    if "stream_options" in raw:
        flow.note_stream_options(context, raw["stream_options"], "c", body.stream)
    name = flow.model_name(context, body.model)
    num_top = body.top_logprobs or 0
    if num_top and not body.logprobs:
        raise ApiError(
            400,
            "invalid_value",
            f"top_logprobs is {num_top}, and logprobs is not true; set logprobs too.",
            param="top_logprobs",
        )
    flow.num_top_allowed(context, num_top, "top_logprobs")
    lowered = lower(
        body,
        context.model,
        notes,
        default_max=None,
        prompt_name="messages",
        logprobs="model" if body.logprobs else None,
        top_logprobs=num_top,
    )
    turns = context.prompts.turns(body, body.messages, notes)
    reader, lowered = turn_reader(context.prompts, body, turns, lowered, notes)
    handle = flow.take_handle(context, agreed(body, "request_id"))
    ids = await context.prompts.encode_turns(turns, bool(body.add_special_tokens))
    if agreed(body, "separate_reasoning") is not False:
        reader.think(context.prompts, ids)
    grammar = behind_thoughts(lowered.grammar, context.prompts, ids)
    sampling = lowered.fit(context.model, len(ids), notes)

    job = context.job()
    job.on_error = lowered.rename
    flow.describe(context, lowered, sampling, model=name, stream=bool(body.stream), handle=handle)
    group = context.name if lowered.n > 1 else None
    for index in range(lowered.n):
        request = Request(
            id=f"{context.name}.{index}", token_ids=ids, sampling=sampling, grammar=grammar, group=group, sample=index,
            namespace=namespace_of(context.key, body.cache_salt, body.extra_key), priority=flow.priority_of(context, body.priority),
        )  # fmt: skip
        job.add(request, Collector(request, context.model.tokenizer), index, 0)
    shape = _Shape(context, body, name, reader, lowered, ids)
    flow.submit(context, job)
    if body.stream:
        return await flow.stream_reply(context, job, _ChatStream(shape, job, body))
    return await flow.reply_whole(context, job, shape.whole)


class _Shape:
    """What the chunks and the whole reply of one request have in common."""

    def __init__(self, context: Context, body: wire.Chat, name: str, reader: Any, lowered: Lowered, ids: Sequence[int]) -> None:
        self.context, self.body, self.name, self.reader, self.lowered, self.ids = context, body, name, reader, lowered, ids
        self.num_top = body.top_logprobs or 0
        self.spelling = Spelling(context.model.tokenizer, bool(body.return_tokens_as_token_ids))
        self.id = f"chatcmpl-{context.name}"

    def logprobs(self, entries: Sequence[TokenLogprob]) -> wire.ChatLogprobs:
        return self.spelling.chat(entries, self.num_top)

    def finish(self, turn: Turn, output: Output) -> str:
        word = flow.finish_word(output)
        return "tool_calls" if word == "stop" and turn.num_calls else word

    def whole(self, job: Job) -> bytes:
        choices, thoughts = [], 0
        for sample in job.samples:
            output = sample.output
            assert output is not None
            turn = self.reader()
            turn.push(output.text)
            turn.end()
            message = turn.message()
            thoughts += turn.num_thought_tokens(output)
            word = self.finish(turn, output)
            choices.append(
                wire.ChatChoice(
                    index=sample.index, message=message, finish_reason=word, stop_reason=output.stop_reason, matched_stop=output.stop_reason,  # type: ignore[arg-type]
                    logprobs=self.logprobs(output.logprobs) if output.logprobs is not None else None,
                    token_ids=output.token_ids if self.body.return_token_ids else UNSET,
                )
            )  # fmt: skip
            self.context.finishes[sample.index] = word
        reply = wire.ChatReply(
            id=self.id, created=self.context.created, model=self.name, system_fingerprint=flow.fingerprint(self.context), choices=choices,
            usage=flow.usage_of(job.samples, thoughts), prompt_token_ids=list(self.ids) if self.body.return_token_ids else UNSET,
            dropped_keywords=flow.dropped_keywords(self.context, job.samples, self.reader.dropped),
        )  # fmt: skip
        return msgspec.json.encode(reply)


class _ChatStream:
    """A Writer (sse.py)."""

    def __init__(self, shape: _Shape, job: Job, body: wire.Chat) -> None:
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._shape, self._job = shape, job
        self._envelope = Envelope(
            id=shape.id, object="chat.completion.chunk", created=shape.context.created, model=shape.name,
            fingerprint=flow.fingerprint(shape.context), usage=self._usage,
        )  # fmt: skip
        self._turns: dict[int, Turn] = {}
        self._thoughts = 0

    def write(self, sample: Sample, piece: Piece) -> bytes:
        index, output, parts = sample.index, piece.output, list[bytes]()
        turn = self._turns.get(index)
        if turn is None:
            turn = self._turns[index] = self._shape.reader()
            beside = (
                b',"prompt_token_ids":' + encode(list(self._shape.ids))
                if self._shape.body.return_token_ids and index == 0
                else b""
            )
            parts.append(self._chunk(sample, b'"delta":{"role":"assistant","content":""}', b"null", beside))
        said = turn.push(piece.text) if piece.text else []
        if output is not None:
            said = [*said, *turn.end()]
        logprobs = b"null"
        if piece.logprobs:
            logprobs = encode(self._shape.logprobs(piece.logprobs))
        ids = b',"token_ids":' + encode(piece.ids) if self._shape.body.return_token_ids and piece.ids else b""
        for event in said:
            parts.append(self._event(sample, event, logprobs, ids))
            logprobs, ids = b"null", b""  # they belong to the piece, and go with its first chunk
        if output is not None and output.finish_reason not in ("abort", "error"):
            parts.append(self._last(sample, turn, output, logprobs, ids))
        elif logprobs != b"null" or ids:  # tokens whose text is not there yet
            parts.append(self._chunk(sample, b'"delta":{}', logprobs, b"", ids))
        return b"".join(parts)

    def _event(self, sample: Sample, event: Any, logprobs: bytes, ids: bytes) -> bytes:
        if isinstance(event, Spoken):
            if logprobs == b"null" and not ids and not self._continuous:  # the hot path
                return (
                    self._envelope.prefix(sample.index, b'"delta":{"content":')
                    + encode(event.text)
                    + _PLAIN_END
                    + self._envelope.tail
                )
            return self._chunk(sample, b'"delta":{"content":' + encode(event.text) + b"}", logprobs, b"", ids)
        if isinstance(event, Thoughts):
            text = encode(event.text)
            return self._chunk(
                sample, b'"delta":{"reasoning_content":' + text + b',"reasoning":' + text + b"}", logprobs, b"", ids
            )
        assert isinstance(event, Calls)
        return self._chunk(sample, b'"delta":{"tool_calls":[' + encode(event.delta) + b"]}", logprobs, b"", ids)

    def _chunk(self, sample: Sample, delta: bytes, logprobs: bytes, beside: bytes = b"", ids: bytes = b"") -> bytes:
        tail = self._envelope.tail_with(flow.usage_bytes(sample) if self._continuous else None)
        body = delta + b',"logprobs":' + logprobs + b',"finish_reason":null' + ids
        return self._envelope.prefix(sample.index, b"", beside) + body + tail

    def _last(self, sample: Sample, turn: Turn, output: Output, logprobs: bytes, ids: bytes) -> bytes:
        word = self._shape.finish(turn, output)
        self._shape.context.finishes[sample.index] = word
        self._thoughts += turn.num_thought_tokens(output)
        stop = encode(output.stop_reason)
        body = (
            b'"delta":{},"logprobs":' + logprobs + b',"finish_reason":' + encode(word) + b',"stop_reason":' + stop + b',"matched_stop":' + stop + ids
        )  # fmt: skip
        tail = self._envelope.tail_with(flow.usage_bytes(sample) if self._continuous else None)
        dropped = flow.dropped_keywords(self._shape.context, [sample], self._shape.reader.dropped)
        beside = b"" if dropped is UNSET else b',"dropped_keywords":' + encode(dropped)
        return self._envelope.prefix(sample.index, b"", beside) + body + tail

    def end(self) -> bytes:
        if self._usage:
            return self._envelope.last(encode(flow.usage_of(self._job.samples, self._thoughts))) + DONE
        return DONE


_PLAIN_END = b'},"logprobs":null,"finish_reason":null'
