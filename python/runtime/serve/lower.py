"""From the fields of a request to what the engine takes: SamplingParams, one GrammarSpec, a namespace. Pure.

Generation ──spellings agree (W7)──> SamplingParams, its max_tokens still open
           ──one kind at most──────> GrammarSpec, and the name by which errors call it
Lowered.fit(prompt length) ────────> max_tokens: the default, or what was asked, or what there is room for (W3)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from phloem.runtime.engine.constraint import without_ignored_stops
from phloem.runtime.errors import ContextLengthError, InvalidRequestError, PhloemError
from phloem.runtime.request import GrammarSpec, LogprobMode, SamplingParams
from phloem.runtime.serve import wire
from phloem.runtime.serve.body import Notes, decode, truth_of
from phloem.runtime.serve.errors import ApiError, shown
from phloem.runtime.serve.fields import SPELLINGS
from phloem.runtime.serve.host import Served

__all__ = ["Constraint", "Lowered", "agreed", "constraint_of", "lower", "namespace_of", "room_for"]

_WIRE_NAMES = {"keep_stop": "include_stop_str_in_output", "token_ids": "prompt"}
_ID = re.compile(r"-?[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Constraint:
    """spec: for the engine.   source: where in the body it stands, which is what errors name.   kind: for the log."""

    spec: GrammarSpec
    source: str


@dataclass(frozen=True, slots=True)
class Lowered:
    """sampling: without max_tokens.   wanted: tokens asked for; None: `default`, and None there: the room left.
    constraint: None for free text.   prompt_name: the field that errors about the prompt name.
    """

    sampling: SamplingParams
    wanted: int | None
    default: int | None
    min_tokens: int
    n: int
    constraint: Constraint | None
    prompt_name: str

    @property
    def grammar(self) -> GrammarSpec | None:
        return self.constraint.spec if self.constraint is not None else None

    def fit(self, model: Served, num_prompt: int, notes: Notes) -> SamplingParams:
        """The sampling for a prompt of so many tokens. Raises ContextLengthError where not one token has room."""
        room = room_for(model, num_prompt)
        wanted = self.wanted if self.wanted is not None else self.default
        if room < 1 and wanted != 0:
            raise ContextLengthError(
                f"the prompt is {num_prompt} tokens and leaves no room for an answer: this model's context is {model.max_context} tokens"
                + (f", and its KV pool holds {model.pool_tokens}" if model.pool_tokens < model.max_context else "")
                + ". Shorten the prompt.",
                param=self.prompt_name,
            )
        if wanted is None:
            wanted = room
        elif wanted > room:
            if self.wanted is not None:
                notes.warnings["max_tokens.clipped"] = str(room)
            wanted = room
        if self.min_tokens > wanted:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above the {wanted} tokens that this request may get. Lower it, or raise max_tokens.",
                param="min_tokens",
            )
        return msgspec.structs.replace(self.sampling, max_tokens=wanted, min_tokens=self.min_tokens)

    def rename(self, error: Exception) -> Exception:
        """The engine's error, with the names that the client used."""
        if not isinstance(error, PhloemError) or error.param is None:
            return error
        name = error.param
        if name == "token_ids":
            name = self.prompt_name
        elif self.constraint is not None and re.match(re.escape(self.constraint.spec.kind) + r"(?![a-z_])", name):
            name = self.constraint.source + name[len(self.constraint.spec.kind) :]
        elif self.constraint is not None and name in (
            "grammar",
            "pattern",
            "regex",
            "ebnf",
            "lark",
            "choices",
            "json_schema",
            "json_object",
        ):
            name = self.constraint.source
        else:
            name = _WIRE_NAMES.get(name, name)
        error.param = name
        return error


def room_for(model: Served, num_prompt: int) -> int:
    """Tokens that may follow such a prompt: the last one drawn needs no slot of the pool."""
    return min(model.max_context - num_prompt, model.pool_tokens - num_prompt + 1)


def agreed(body: Any, meaning: str, under: str = "") -> Any:
    """The value of a field that has several names: equal values are fine, different ones are not (W7)."""
    found: list[tuple[str, Any]] = []
    for name in SPELLINGS[meaning]:
        value = getattr(body, name, None)
        if value is not None:
            found.append((name, value))
    if not found:
        return None
    (first, value), *others = found
    for name, other in others:
        if other != value:
            raise ApiError(
                400, "conflicting_parameters", f"{under}{first} is {shown(value)} and {under}{name} is {shown(other)}, which are two names of one field; send one.", param=under + name,
            )  # fmt: skip
    return value


def lower(
    body: wire.Generation,
    model: Served,
    notes: Notes,
    *,
    default_max: int | None,
    prompt_name: str,
    logprobs: LogprobMode | None = None,
    top_logprobs: int = 0,
    prompt_logprobs: int | None = None,
    open_end: bool = False,
    under: str = "",
    defaults: Mapping[str, float] | None = None,
) -> Lowered:
    """logprobs: whether any were asked for; their kind is the body's logprobs_mode.   under: where `body` stands.

    Raises ApiError or InvalidRequestError, 400.
    """
    given = defaults if defaults is not None else model.sampling_defaults
    constraint = constraint_of(body, notes, under, open_end=open_end)
    wanted = body.max_completion_tokens
    if wanted is None:
        wanted = agreed(body, "max_tokens", under)
    min_tokens = agreed(body, "min_tokens", under) or 0
    if wanted is not None and min_tokens > wanted:
        raise InvalidRequestError(
            f"min_tokens is {min_tokens}, above max_tokens {wanted}; lower it.", param=f"{under}min_tokens"
        )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    try:
        sampling = SamplingParams(
            temperature=_or(body.temperature, given.get("temperature", 1.0)),
            top_p=_or(body.top_p, given.get("top_p", 1.0)),
            top_k=_or(body.top_k, int(given.get("top_k", 0))),
            min_p=_or(body.min_p, given.get("min_p", 0.0)),
            frequency_penalty=body.frequency_penalty or 0.0,
            presence_penalty=body.presence_penalty or 0.0,
            repetition_penalty=_or(body.repetition_penalty, given.get("repetition_penalty", 1.0)),
            seed=agreed(body, "seed", under),
            stop=stops,
            stop_token_ids=_ids("stop_token_ids", body.stop_token_ids, model, under),
            keep_stop=bool(agreed(body, "include_stop_str_in_output", under)),
            ignore_eos=bool(body.ignore_eos),
            skip_special_tokens=body.skip_special_tokens is not False,
            logit_bias=_bias(body.logit_bias, model, under),
            allowed_token_ids=None
            if body.allowed_token_ids is None
            else _ids("allowed_token_ids", body.allowed_token_ids, model, under),
            logprobs=(body.logprobs_mode or "model") if logprobs is not None else None,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except InvalidRequestError as error:
        if not (error.param or "").startswith(under or "\0"):
            error.param = under + _WIRE_NAMES.get(error.param or "", error.param or "")
        raise
    spec = constraint.spec if constraint is not None else None
    without = without_ignored_stops(sampling, spec)
    if without is not sampling:
        notes.ignored.add(f"{under}stop")
    return Lowered(without, wanted, default_max, min_tokens, body.n or 1, constraint, prompt_name)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _ids(name: str, ids: list[int] | None, model: Served, under: str) -> tuple[int, ...]:
    for token in ids or ():
        if not 0 <= token < model.vocab_size:
            raise InvalidRequestError(
                f"{name} holds {token}; expected token ids from 0 to {model.vocab_size - 1}.", param=under + name
            )
    return tuple(ids or ())


def _bias(bias: dict[str, float] | None, model: Served, under: str) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not _ID.fullmatch(key) or not 0 <= int(key) < model.vocab_size:
            raise InvalidRequestError(
                f"logit_bias names {shown(key)}; expected token ids from 0 to {model.vocab_size - 1}, as strings.",
                param=f"{under}logit_bias",
            )
        found[int(key)] = value
    return found


# ---- constraints --------------------------------------------------------------------------------------------------------


def constraint_of(body: wire.Generation, notes: Notes, under: str = "", *, open_end: bool = False) -> Constraint | None:
    """The one constraint that any of their spellings asks for (T1, T2)."""
    found = list(_asked(body, notes, under))
    how = {"json_whitespace": body.json_whitespace, "jump_forward": body.jump_forward}
    if not found:
        notes.ignored.update(under + name for name, value in how.items() if value is not None)
        if open_end:
            raise InvalidRequestError("open_end needs a constraint, such as regex; add one, or leave it out.", param="open_end")
        return None
    source, spec = found[0]
    for other, another in found[1:]:
        if another != spec:
            raise ApiError(
                400, "conflicting_parameters", f"{source} and {other} both constrain the output; send one of them.", param=other
            )  # fmt: skip
    options: dict[str, Any] = {name: value for name, value in how.items() if value is not None}
    if "json_whitespace" in options and spec.kind not in ("json_schema", "json_object"):
        notes.ignored.add(f"{under}json_whitespace")
        del options["json_whitespace"]
    return Constraint(msgspec.structs.replace(spec, open_end=open_end, **options), source)


def _asked(body: wire.Generation, notes: Notes, under: str) -> Any:
    """Every (source, GrammarSpec) that the body has."""
    if _given(body.response_format):
        asked = _response_format(body.response_format, under + "response_format")
        if asked is not None:
            yield asked
    if _given(body.structured_outputs):
        asked = _structured(body.structured_outputs, under + "structured_outputs", notes)
        if asked is not None:
            yield asked
    for name in ("regex", "guided_regex"):
        if getattr(body, name) is not None:
            yield under + name, _spec("regex", getattr(body, name))
    for name in ("ebnf", "guided_grammar"):
        if getattr(body, name) is not None:
            yield under + name, _grammar(getattr(body, name))
    for name in ("json_schema", "guided_json"):
        if _given(getattr(body, name)):
            yield under + name, _spec("json_schema", _schema(getattr(body, name), under + name))
    if body.guided_choice is not None:
        yield under + "guided_choice", _choices(body.guided_choice, under + "guided_choice")


def _given(raw: msgspec.Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


def _spec(kind: Any, source: str, strict: bool = True) -> GrammarSpec:
    return GrammarSpec(kind=kind, source=source, strict=strict)


def _grammar(source: str) -> GrammarSpec:
    return _spec("lark" if source.lstrip().startswith("%llguidance") else "ebnf", source)


def _choices(choices: list[str], where: str) -> GrammarSpec:
    if not choices or "" in choices:
        what = "holds an empty text" if choices else "is empty"
        raise InvalidRequestError(f"{where} {what}; expected at least one text, each of at least one character.", param=where)
    return _spec("choices", json.dumps(choices, ensure_ascii=False))


def _schema(raw: msgspec.Raw, where: str) -> str:
    """JSON text of a schema that came as an object, as true or false, or as a string that holds one."""
    text = bytes(raw).decode()
    if text[:1] == '"':
        text = decode(bytes(raw), str, f"{where}.")
        decode(text.encode(), msgspec.Raw, f"{where}.")
    if text.lstrip()[:1] not in ("{", "t", "f"):
        raise ApiError(
            400, "invalid_type", f"{where} is {shown(text)}; expected a JSON Schema: an object, or its text.", param=where
        )
    return text


def _response_format(raw: msgspec.Raw, where: str) -> tuple[str, GrammarSpec] | None:
    asked = decode(bytes(raw), wire.ResponseFormat, f"{where}.")
    if asked.type == "text":
        return None
    if asked.type == "json_object" and not _given(asked.schema):
        return where, _spec("json_object", "")
    if asked.type in ("json_schema", "json_object"):
        inner = asked.json_schema
        schema = inner.schema if inner is not None and _given(inner.schema) else asked.schema
        path = f"{where}.json_schema.schema" if inner is not None and _given(inner.schema) else f"{where}.schema"
        if not _given(schema):
            name = f"{where}.json_schema" if inner is None else f"{where}.json_schema.schema"
            raise ApiError(400, "missing_required_parameter", f"{name} is missing; the type json_schema needs it.", param=name)
        strict = inner is None or inner.strict is not False
        return path, _spec("json_schema", _schema(schema, path), strict)
    for kind, names in (("regex", ("regex", "pattern")), ("ebnf", ("ebnf", "grammar"))):
        if asked.type == kind:
            source = next((value for name in names if (value := getattr(asked, name)) is not None), None)
            if source is None:
                raise ApiError(
                    400,
                    "missing_required_parameter",
                    f"{where}.{kind} is missing; the type {kind} needs it.",
                    param=f"{where}.{kind}",
                )
            return f"{where}.{kind}", _grammar(source) if kind == "ebnf" else _spec("regex", source)
    raise InvalidRequestError(
        f"{where}.type is {shown(asked.type)}; expected text, json_object, json_schema, regex or ebnf.", param=f"{where}.type"
    )


def _structured(raw: msgspec.Raw, where: str, notes: Notes) -> tuple[str, GrammarSpec] | None:
    known = wire.StructuredOutputs.__struct_fields__
    asked = decode(bytes(raw), wire.StructuredOutputs, f"{where}.")
    for name, value in decode(bytes(raw), dict[str, msgspec.Raw], f"{where}.").items():
        if name in known or truth_of(value, f"{where}.{name}") in (None, False, "", [], {}):
            continue
        if name in ("whitespace_pattern", "disable_additional_properties", "structural_tag"):
            raise ApiError(
                400, "unsupported_parameter", f"{where}.{name} is not supported here; leave it out.", param=f"{where}.{name}"
            )
        notes.ignored.add(f"{where}.{name}")
    found: list[tuple[str, GrammarSpec]] = []
    if _given(asked.json):
        found.append((f"{where}.json", _spec("json_schema", _schema(asked.json, f"{where}.json"))))
    if asked.regex is not None:
        found.append((f"{where}.regex", _spec("regex", asked.regex)))
    if asked.choice is not None:
        found.append((f"{where}.choice", _choices(asked.choice, f"{where}.choice")))
    if asked.grammar is not None:
        found.append((f"{where}.grammar", _grammar(asked.grammar)))
    if asked.json_object:
        found.append((f"{where}.json_object", _spec("json_object", "")))
    if len(found) > 1:
        raise ApiError(
            400, "conflicting_parameters", f"{found[0][0]} and {found[1][0]} both constrain the output; send one of them.", param=found[1][0]
        )  # fmt: skip
    if not found:
        return None
    source, spec = found[0]
    if asked.disable_any_whitespace and spec.kind in ("json_schema", "json_object"):
        spec = msgspec.structs.replace(spec, json_whitespace="compact")
    return source, spec


def namespace_of(key: str, cache_salt: str | None, extra_key: str | None) -> str:
    """A name for the tuple (G3): two different tuples never share one, whatever characters they hold."""
    parts = [key, cache_salt, extra_key]
    return json.dumps(parts) if any(part for part in parts) else ""
