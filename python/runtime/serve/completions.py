"""POST /v1/completions: prompts as text or token ids in, their continuations out; with `echo` and `logprobs` a scorer (lm-eval).

"text" | [ids] | ["text", …] | [[ids], …]    x n    ─> choices, index = prompt * n + sample
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from phloem.runtime.engine.collect import Collector
from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import Output, Request, TokenLogprob
from phloem.runtime.serve import flow, wire
from phloem.runtime.serve.body import decode, read
from phloem.runtime.serve.context import Context
from phloem.runtime.serve.errors import ApiError, shown
from phloem.runtime.serve.host import Served
from phloem.runtime.serve.jobs import Job, Piece, Sample
from phloem.runtime.serve.logprobs import Spelling, TextColumns
from phloem.runtime.serve.lower import agreed, lower, namespace_of
from phloem.runtime.serve.sse import DONE, Envelope, encode

__all__ = ["completions", "prompts_of"]

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt. text: as it was written; None for ids."""

    ids: tuple[int, ...]
    text: str | None


async def completions(context: Context, raw_body: bytes) -> Response:
    """The handler. Raises PhloemError for everything that is refused before the first byte."""
    notes = context.notes
    body, raw = read("t", raw_body, wire.Completion, notes, strict=context.strict)
    if "stream_options" in raw:
        flow.note_stream_options(context, raw["stream_options"], "t", body.stream)
    name = flow.model_name(context, body.model)
    wants = body.logprobs is not None
    flow.num_top_allowed(context, body.logprobs or 0, "logprobs")
    lowered = lower(
        body, context.model, notes, default_max=DEFAULT_MAX_TOKENS, prompt_name="prompt", logprobs="model" if wants else None,
        top_logprobs=body.logprobs or 0, prompt_logprobs=0 if wants and body.echo else None,
    )  # fmt: skip
    prompts = await prompts_of(context, body.prompt, "prompt", body.add_special_tokens is not False)
    handle = flow.take_handle(context, agreed(body, "request_id"))
    flow.check_samples(len(prompts), lowered.n)
    samplings = [lowered.fit(context.model, len(p.ids), notes) for p in prompts]

    job = context.job()
    job.on_error = lowered.rename
    flow.describe(context, lowered, samplings[0], model=name, stream=bool(body.stream), handle=handle)
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings)):
        group = f"{context.name}.{number}" if lowered.n > 1 else None
        for sample in range(lowered.n):
            index = number * lowered.n + sample
            request = Request(
                id=f"{context.name}.{index}", token_ids=prompt.ids, sampling=sampling, grammar=lowered.grammar, group=group, sample=sample,
                namespace=namespace_of(context.key, body.cache_salt, body.extra_key), priority=flow.priority_of(context, body.priority),
            )  # fmt: skip
            job.add(request, Collector(request, context.model.tokenizer), index, number)
    shape = _Shape(context, body, name, prompts)
    flow.submit(context, job)
    if body.stream:
        return await flow.stream_reply(context, job, _CompletionStream(shape, job, body))
    return await flow.reply_whole(context, job, shape.whole)


async def prompts_of(context: Context, raw: msgspec.Raw, where: str, add_special_tokens: bool) -> list[Asked]:
    """Every prompt as ids. One bad member refuses all of them (C-API-14). Raises ApiError or InvalidRequestError, 400."""
    text = bytes(raw)
    kind: Any = (
        str
        if text[:1] == b'"'
        else list[str]
        if _first(text) == b'"'
        else list[list[_Id]]
        if _first(text) == b"["
        else list[_Id]
    )
    if text[:1] not in (b'"', b"["):
        raise ApiError(
            400, "invalid_type", f"{where} is {shown(text.decode('utf-8', 'replace'))}; expected a string, a list of token ids, or a list of those.", param=where,
        )  # fmt: skip
    try:
        value = decode(text, kind, f"{where}.")
    except ApiError as error:
        if error.code in ("invalid_type", "invalid_value"):  # whichever member it was, the field is `prompt`
            error.param = where
        raise
    if isinstance(value, str):
        given: list[Any] = [value]
    elif kind == list[_Id]:
        given = [value]
    else:
        given = value
    if not 1 <= len(given) <= MAX_PROMPTS or (not value and not isinstance(value, str)):
        what = "is empty" if not value else f"holds {len(given)} prompts"
        raise InvalidRequestError(
            f"{where} {what}; expected 1 to {MAX_PROMPTS} prompts, each with at least one token.", param=where
        )
    size = sum(len(entry) for entry in given if isinstance(entry, str))
    return [await _prompt(context, entry, where, add_special_tokens, size) for entry in given]


_Id = int


def _first(text: bytes) -> bytes:
    """The first character inside a list."""
    return text[1:].lstrip(b" \t\r\n")[:1]


async def _prompt(context: Context, entry: Any, where: str, add_special_tokens: bool, size: int) -> Asked:
    model = context.model
    if isinstance(entry, str):
        ids = await context.prompts.encode(entry, add_special_tokens, where, size)
        if not ids:
            if model.tokenizer.bos_id is None:
                raise InvalidRequestError(
                    f"{where} is empty, and this model has no token that begins a text; give some text.", param=where
                )
            ids = (model.tokenizer.bos_id,)
        return Asked(ids, entry)
    if not entry:
        raise InvalidRequestError(f"{where} holds an empty list of token ids; each prompt needs at least one.", param=where)
    low, high = min(entry), max(entry)
    if low < 0 or high >= model.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequestError(
            f"{where} holds the token id {shown(bad)}; expected ids from 0 to {model.vocab_size - 1}.", param=where
        )
    return Asked(tuple(entry), None)


class _Shape:
    """What the chunks and the whole reply of one request have in common."""

    def __init__(self, context: Context, body: wire.Completion, name: str, prompts: Sequence[Asked]) -> None:
        self.context, self.body, self.name, self.prompts = context, body, name, prompts
        self.num_top = body.logprobs or 0
        self.wants = body.logprobs is not None
        self.spelling = Spelling(context.model.tokenizer, bool(body.return_tokens_as_token_ids))
        self.id = f"cmpl-{context.name}"
        self._echoes: dict[int, tuple[str, list[str]]] = {}

    def echo(self, number: int) -> tuple[str, list[str]]:
        """The prompt as text, and cut at its tokens."""
        found = self._echoes.get(number)
        if found is None:
            found = self._echoes[number] = _spelled(self.prompts[number], self.context.model)
        return found

    def columns(self, number: int, sampling: Any) -> TextColumns:
        model = self.context.model
        ids = self.prompts[number].ids
        return TextColumns(
            self.spelling, self.num_top, start=len(self.echo(number)[0]) if self.body.echo else 0, skip_special=sampling.skip_special_tokens,
            continuation=any(i not in model.tokenizer.special_ids for i in ids),
        )  # fmt: skip

    def prompt_columns(self, number: int, entries: Sequence[TokenLogprob | None]) -> wire.CompletionLogprobs:
        """Of an echoed prompt: its first position has no logprob, and no other is without."""
        _, pieces = self.echo(number)
        found, at = wire.CompletionLogprobs([], [], [], []), 0
        for token, piece, entry in zip(self.prompts[number].ids, pieces, entries):
            found.tokens.append(self.spelling.text(token) if self.spelling.as_ids else piece)
            found.token_logprobs.append(None if entry is None else entry.logprob)
            found.top_logprobs.append(None if entry is None else self.spelling.by_text(entry, self.num_top))
            found.text_offset.append(at)
            at += len(piece)
        return found

    def whole(self, job: Job) -> bytes:
        choices = []
        for sample in job.samples:
            output = sample.output
            assert output is not None
            text, logprobs = output.text, None
            if self.wants:
                columns = self.columns(sample.number, sample.request.sampling)
                columns.push(output.token_ids, output.logprobs or [])
                logprobs = columns.take(len(text), last=True) or wire.CompletionLogprobs([], [], [], [])
            if self.body.echo:
                text = self.echo(sample.number)[0] + text
                if logprobs is not None:
                    logprobs = joined(self.prompt_columns(sample.number, output.prompt_logprobs or []), logprobs)
            word = flow.finish_word(output)
            self.context.finishes[sample.index] = word
            ids = self.body.return_token_ids
            choices.append(
                wire.CompletionChoice(
                    index=sample.index, text=text, logprobs=logprobs, finish_reason=word, stop_reason=output.stop_reason,  # type: ignore[arg-type]
                    matched_stop=output.stop_reason, token_ids=output.token_ids if ids else UNSET,
                    prompt_token_ids=list(sample.request.token_ids) if ids else UNSET,
                )
            )  # fmt: skip
        reply = wire.CompletionReply(
            id=self.id, created=self.context.created, model=self.name, system_fingerprint=flow.fingerprint(self.context), choices=choices,
            usage=flow.usage_of(job.samples), dropped_keywords=flow.dropped_keywords(self.context, job.samples),
        )  # fmt: skip
        return msgspec.json.encode(reply)


def joined(a: wire.CompletionLogprobs, b: wire.CompletionLogprobs) -> wire.CompletionLogprobs:
    return wire.CompletionLogprobs(
        a.tokens + b.tokens, a.token_logprobs + b.token_logprobs, a.top_logprobs + b.top_logprobs, a.text_offset + b.text_offset
    )


def _spelled(prompt: Asked, model: Served) -> tuple[str, list[str]]:
    """The prompt's text and each token's share of it. Special tokens are shown, as they were written; a BOS that the tokenizer put
    there is not."""
    tokenizer, ids = model.tokenizer, prompt.ids
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    pieces: list[str] = []
    if prompt.text is not None and ids[:1] == (tokenizer.bos_id,):
        spelled = tokenizer.token_bytes(ids[0]).decode("utf-8", "replace")
        if not prompt.text.startswith(spelled):
            pieces, ids = [""], ids[1:]
    pieces += [detokenizer.push((token,)) for token in ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return "".join(pieces), pieces


class _CompletionStream:
    """A Writer (sse.py)."""

    def __init__(self, shape: _Shape, job: Job, body: wire.Completion) -> None:
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._shape, self._job, self._body = shape, job, body
        self._envelope = Envelope(
            id=shape.id, object="text_completion", created=shape.context.created, model=shape.name,
            fingerprint=flow.fingerprint(shape.context), usage=self._usage,
        )  # fmt: skip
        self._columns: dict[int, TextColumns] = {}
        self._lengths: dict[int, int] = {}

    def write(self, sample: Sample, piece: Piece) -> bytes:
        index, output, parts = sample.index, piece.output, list[bytes]()
        shape, text = self._shape, piece.text
        if index not in self._lengths:
            self._lengths[index] = 0
            if shape.body.echo or shape.body.return_token_ids:
                parts.append(self._opening(sample))
        self._lengths[index] += len(text)
        logprobs = b"null"
        if shape.wants:
            columns = self._columns.get(index)
            if columns is None:
                columns = self._columns[index] = shape.columns(sample.number, sample.request.sampling)
            columns.push(piece.ids, piece.logprobs)
            taken = columns.take(self._lengths[index], last=output is not None)
            logprobs = b"null" if taken is None else encode(taken)
        ids = b',"token_ids":' + encode(piece.ids) if shape.body.return_token_ids and piece.ids else b""
        ends_well = output is not None and output.finish_reason not in ("abort", "error")
        if text or ((logprobs != b"null" or ids) and not ends_well):
            parts.append(self._chunk(sample, text, logprobs, ids))
            logprobs, ids = b"null", b""
        if ends_well and output is not None:
            parts.append(self._last(sample, output, logprobs, ids))
        return b"".join(parts)

    def _opening(self, sample: Sample) -> bytes:
        """The echoed prompt."""
        shape = self._shape
        text = shape.echo(sample.number)[0] if shape.body.echo else ""
        logprobs = b"null"
        if shape.body.echo and shape.wants:
            logprobs = encode(shape.prompt_columns(sample.number, sample.prompt_logprobs()))
        ids = b',"prompt_token_ids":' + encode(list(sample.request.token_ids)) if shape.body.return_token_ids else b""
        return self._chunk(sample, text, logprobs, ids)

    def _chunk(self, sample: Sample, text: str, logprobs: bytes, ids: bytes) -> bytes:
        tail = self._envelope.tail_with(flow.usage_bytes(sample) if self._continuous else None)
        prefix = self._envelope.prefix(sample.index, b'"text":')
        if logprobs == b"null" and not ids:
            return prefix + encode(text) + _PLAIN_END + tail
        return prefix + encode(text) + b',"logprobs":' + logprobs + b',"finish_reason":null' + ids + tail

    def _last(self, sample: Sample, output: Output, logprobs: bytes, ids: bytes) -> bytes:
        word = flow.finish_word(output)
        self._shape.context.finishes[sample.index] = word
        stop = encode(output.stop_reason)
        body = (
            b'"",\"logprobs":' + logprobs + b',"finish_reason":' + encode(word) + b',"stop_reason":' + stop + b',"matched_stop":' + stop + ids
        )  # fmt: skip
        dropped = flow.dropped_keywords(self._shape.context, [sample])
        beside = b"" if dropped is UNSET else b',"dropped_keywords":' + encode(dropped)
        tail = self._envelope.tail_with(flow.usage_bytes(sample) if self._continuous else None)
        return self._envelope.prefix(sample.index, b'"text":', beside) + body + tail

    def end(self) -> bytes:
        if self._usage:
            return self._envelope.last(encode(flow.usage_of(self._job.samples))) + DONE
        return DONE


_PLAIN_END = b',"logprobs":null,"finish_reason":null'
