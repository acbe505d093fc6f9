"""What crosses the border between callers and the engine: requests in, outputs back. Plain data, no torch, no behaviour.

    caller --Request--> EngineCore --OutputDelta--> Collector --Delta / Output--> caller

A `Request` is already tokens: messages and text were turned into ids above the engine (text/). `n` samples of a prompt
are n Requests that share a `group`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from phloem.runtime.errors import InvalidRequestError

__all__ = [
    "Delta",
    "FinishReason",
    "GrammarSpec",
    "LogprobMode",
    "Output",
    "OutputDelta",
    "Request",
    "SamplingParams",
    "Support",
    "TokenLogprob",
    "Usage",
    "WireError",
]

FinishReason = Literal["eos", "stop_token", "stop_string", "length", "grammar", "abort", "error"]
LogprobMode = Literal["model", "sampled", "both"]

MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_BIASES, MAX_TOP_LOGPROBS = 32, 16_384, 64, 1024, 20
MAX_INT64 = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of one request are drawn and when they end (engine.md §4, §9). Checked when made.

    max_tokens: at most so many tokens; 0 computes the prompt only; None means min(128, room left).
    min_tokens: no stop, of any kind but the grammar's own end, before so many.
    temperature: 0 is argmax, lowest id on ties.   top_k: 0 or -1 off.   top_p: (0, 1].   min_p: [0, 1].
    frequency_penalty, presence_penalty: [-2, 2], over output tokens.   repetition_penalty: (0, 10], over prompt and output.
    seed: the draw depends on (seed, sample, position) and the logits alone; None draws one, reported in the Output.
    stop: strings that end the output, found in its text.   keep_stop: leave the stop string in the text.
    stop_token_ids: join the model's own end tokens.   ignore_eos: the model's own do not end the request.
    logit_bias: {id: -100..100}.   allowed_token_ids: everything else is masked.
    logprobs: None or False off; True or "model" log-softmax of the raw logits; "sampled" of what was drawn from; "both", with
        the support drawn from and its mass.
    top_logprobs: so many alternatives a token, 0..20.   prompt_logprobs: prompt logprobs from this position on.

    Raises InvalidRequestError, with the field's name in `param`.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: LogprobMode | None = None
    top_logprobs: int = 0
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        force = msgspec.structs.force_setattr
        stop: Any = self.stop
        if stop is None:
            stop = ()
        elif isinstance(stop, str):
            stop = (stop,)
        elif not isinstance(stop, (list, tuple)):
            raise InvalidRequestError(f"stop is {stop!r}; expected a string or a list of strings.", param="stop")
        force(self, "stop", tuple(stop))
        logprobs: Any = self.logprobs
        if logprobs is True:
            force(self, "logprobs", "model")
        elif logprobs is False:
            force(self, "logprobs", None)
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids: Any = getattr(self, name)
            if ids is None and name == "stop_token_ids":
                ids = ()
            if ids is not None:
                if not isinstance(ids, (list, tuple, set, frozenset, range)):
                    raise InvalidRequestError(f"{name} is {ids!r}; expected a list of token ids.", param=name)
                force(self, name, tuple(ids))
        bias: Any = self.logit_bias
        if bias is None:
            force(self, "logit_bias", {})
        elif not isinstance(bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias is {bias!r}; expected a mapping of token id to a number.", param="logit_bias"
            )
        _check_sampling(self)


def _check_sampling(s: SamplingParams) -> None:
    def integer(name: str, low: int, high: int, allow_none: bool = False) -> None:
        value = getattr(s, name)
        if value is None and allow_none:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequestError(f"{name} is {value!r}; expected an integer from {low} to {high}.", param=name)

    def number(name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(s, name)
        good = not isinstance(value, bool) and isinstance(value, (int, float)) and low <= value <= high
        if not good or (open_low and value == low):
            bracket = "(" if open_low else "["
            raise InvalidRequestError(f"{name} is {value!r}; expected a number in {bracket}{low:g}, {high:g}].", param=name)
        msgspec.structs.force_setattr(s, name, float(value))

    def flag(name: str) -> None:
        if not isinstance(getattr(s, name), bool):
            raise InvalidRequestError(f"{name} is {getattr(s, name)!r}; expected True or False.", param=name)

    integer("max_tokens", 0, MAX_INT64, allow_none=True)
    integer("min_tokens", 0, MAX_INT64)
    if s.max_tokens is not None and s.min_tokens > s.max_tokens:
        raise InvalidRequestError(f"min_tokens is {s.min_tokens}, above max_tokens {s.max_tokens}.", param="min_tokens")
    number("temperature", 0.0, 100.0)
    number("top_p", 0.0, 1.0, open_low=True)
    integer("top_k", -1, MAX_INT64)
    number("min_p", 0.0, 1.0)
    number("frequency_penalty", -2.0, 2.0)
    number("presence_penalty", -2.0, 2.0)
    number("repetition_penalty", 0.0, 10.0, open_low=True)
    integer("seed", -(2**63), MAX_INT64, allow_none=True)
    if len(s.stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(s.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop")
    for text in s.stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            shown = repr(text) if not isinstance(text, str) or len(text) < 40 else f"a string of {len(text)} characters"
            raise InvalidRequestError(
                f"stop holds {shown}; expected strings of 1 to {MAX_STOP_CHARS} characters.", param="stop"
            )
    for flag_name in ("keep_stop", "ignore_eos", "skip_special_tokens"):
        flag(flag_name)
    if len(s.stop_token_ids) > MAX_STOP_IDS:
        raise InvalidRequestError(
            f"stop_token_ids has {len(s.stop_token_ids)} ids; at most {MAX_STOP_IDS}.", param="stop_token_ids"
        )
    if s.allowed_token_ids is not None and not s.allowed_token_ids:
        raise InvalidRequestError(
            "allowed_token_ids is empty: no token could be drawn. Leave it out or name ids.", param="allowed_token_ids"
        )
    for name, ids in (("stop_token_ids", s.stop_token_ids), ("allowed_token_ids", s.allowed_token_ids or ())):
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise InvalidRequestError(f"{name} holds {token!r}; expected token ids of the model's vocabulary.", param=name)
    if len(s.logit_bias) > MAX_BIASES:
        raise InvalidRequestError(f"logit_bias has {len(s.logit_bias)} entries; at most {MAX_BIASES}.", param="logit_bias")
    for token, value in s.logit_bias.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidRequestError(
                f"logit_bias names {token!r}; expected token ids of the model's vocabulary.", param="logit_bias"
            )
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -100.0 <= value <= 100.0:
            raise InvalidRequestError(
                f"logit_bias of token {token} is {value!r}; expected a number in [-100, 100].", param="logit_bias"
            )
    if s.logprobs not in (None, "model", "sampled", "both"):
        raise InvalidRequestError(
            f"logprobs is {s.logprobs!r}; expected True, False, 'model', 'sampled' or 'both'.", param="logprobs"
        )
    integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if s.top_logprobs and s.logprobs is None:
        raise InvalidRequestError("top_logprobs needs logprobs: ask for logprobs=True too.", param="top_logprobs")
    integer("prompt_logprobs", 0, MAX_INT64, allow_none=True)


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint as the caller wrote it (structured.md). Compiled off the loop by grammar/.

    open_end: a complete value also ends with any text token whose first byte cannot continue it. That token is dropped: it is in
    no output, Usage.dropped_tokens counts it, finish_reason is "grammar", and no end token is put in its place.
    thoughts_close: id of the token that closes a model's thoughts: up to it text is free but for its end, from behind it on the
    constraint holds. thoughts_open: id of the token that opens them, if the model may do so; None: the prompt has.
    """

    kind: Literal["json_schema", "json_object", "regex", "choices", "ebnf", "lark", "structural_tag"]
    source: str
    strict: bool = True
    json_whitespace: Literal["flexible", "spaced", "compact"] = "flexible"
    jump_forward: Literal["canonical", "permissive", "off"] = "canonical"
    open_end: bool = False
    trusted: bool = False
    thoughts_close: int | None = None
    thoughts_open: int | None = None


class Support(msgspec.Struct, frozen=True):
    """Which tokens one draw could have given (rl L4); where there is none, all of them.

    kind "bits": data is little-endian words of 32 bits, bit t is token t.   "ids": little-endian int32, ascending.
    """

    kind: Literal["bits", "ids"]
    data: bytes


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate.

    id: unique among live requests.   namespace: roots the tree (R8): adapter or cache salt; "" is the common one.
    group: samples of one prompt share it (S4), None is alone.   sample: index in the group, part of the draw (M2).
    num_output: so many of the last token_ids are output already: the request goes on where another was cut (rl L9).
    supports: under logprobs="both", what could be drawn at each position from max(1, sampling.prompt_logprobs) on, () everything;
        then prompt logprobs have `sampled` and `logmass` too (rl §6). None: the model's alone.
    parent: the request whose tokens this one continues, a scheduling hint.   hold: pin what is cached at the end (R7).
    priority: higher is sooner, under policy="priority" only.   Ids are checked by the core: every value of a request that
    indexes something is range-checked in EngineCore.add, and nowhere else needs to be.
    """

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    grammar: GrammarSpec | None = None
    namespace: str = ""
    group: str | None = None
    sample: int = 0
    parent: str | None = None
    hold: bool = False
    priority: int = 0
    num_output: int = 0
    supports: tuple[Support | None, ...] | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Logprobs of one token. `logprob` is of the kind asked for ("both": the model's, and `sampled` beside it).

    top: the most likely alternatives (token_id, logprob), best first; never holds -inf.
    support, logmass ("both" alone): what could be drawn, and the log of the mass that it had at the temperature drawn with, so
        that sampled + logmass is log-softmax(raw logits / temperature); exactly 0 if nothing was cut, and at temperature 0.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    sampled: float | None = None
    logmass: float | None = None
    support: Support | None = None


class Usage(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens not computed for this request when it was first admitted; resuming counts nothing.

    completion_tokens: of the output, forced_tokens among them.   dropped_tokens: drawn and not in the output: 1 where what the
    model drew behind an open-ended value ended it (GrammarSpec.open_end).
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    dropped_tokens: int = 0


class WireError(msgspec.Struct, frozen=True):
    """An error as data: `errors.from_wire(**)` rebuilds it."""

    name: str
    message: str
    param: str | None = None
    code: str | None = None


class OutputDelta(msgspec.Struct):
    """What the core says of one request in one step. The one with `finish_reason` is the last, and there is always one.

    token_ids, logprobs: new since the last delta (logprobs empty, or one a token).
    prompt_logprobs: new prompt entries, in order; the first is of position max(1, sampling.prompt_logprobs).
    dropped_keywords: (JSON pointer, keyword) that strict=False left out; in the last one.
    kv_mixed: it went on from keys and values of older weights (rl W6, "continue"); in the last one.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    seed: int = 0
    weights_version: int = 0
    error: WireError | None = None
    dropped_keywords: tuple[tuple[str, str], ...] = ()
    kv_mixed: bool = False


class Delta(msgspec.Struct, frozen=True):
    """What a stream yields: new text and the tokens behind it. Held-back text (a partial stop string) comes with a later one."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    index: int = 0
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """The whole result of one request (engine.md §9)."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    usage: Usage = Usage()
    seed: int = 0
    weights_version: int = 0
    stop_reason: str | int | None = None
    dropped_keywords: tuple[tuple[str, str], ...] = ()
    error: Exception | None = None
