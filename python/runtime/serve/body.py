"""From the bytes of a body to a struct of wire.py and notes on what was left out (W1, W2, W3, W9). Knows no field by name.

bytes --depth, UTF-8--> names and raw values --classify--> notes.ignored, or 400 unsupported_parameter
      --msgspec-------> struct               --on error--> 400 with a dotted path
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, cast
from urllib.parse import quote

import msgspec

from phloem.runtime.serve.errors import ApiError, shown
from phloem.runtime.serve.fields import classify, is_neutral

__all__ = ["Notes", "RawFields", "decode_raw", "names_of", "notice", "read", "truth_of"]

T = TypeVar("T")
RawFields = dict[str, msgspec.Raw]
MAX_DEPTH = 64
MAX_LISTED, MAX_NAME = 32, 128
_STRINGS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NAMES_OF_LIST = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "true or false", "array": "a list", "object": "an object", "null": "null",
}  # fmt: skip


@dataclass(slots=True)
class Notes:
    """What a reply must say about its request beside the answer.

    ignored: dotted names of fields without effect.   warnings: what was served otherwise than asked.
    """

    ignored: set[str] = field(default_factory=set)
    warnings: dict[str, str] = field(default_factory=dict)

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.ignored:
            listed = sorted(self.ignored)[:MAX_LISTED]
            headers["x-phloem-ignored-params"] = ", ".join(quote(name[:MAX_NAME], safe="*.") for name in listed)
        if self.warnings:
            told = [f"{name}={value}" for name, value in sorted(self.warnings.items())][:MAX_LISTED]
            headers["x-phloem-warnings"] = ", ".join(quote(text[:MAX_NAME], safe="=./#$*") for text in told)
        return headers


def read(route: str, body: bytes, kind: type[T], notes: Notes, *, strict: bool, under: str = "") -> tuple[T, RawFields]:
    """route: a letter of fields.py.   strict: unknown names are errors.   under: where in the whole body this object stands.

    Raises ApiError 400.
    """
    raw = decode_raw(body, under)
    for name, row in classify(route, raw):
        if row is not None and row.equals in raw and bytes(raw[row.equals]) == bytes(raw[name]):
            continue
        notice(notes, under + name, row, raw[name], strict=strict)
    return decode(body, kind, under, raw), raw


def decode_raw(body: bytes, under: str = "") -> RawFields:
    """The names of a JSON object, each with its text. Raises ApiError 400: no JSON, no object, too deep."""
    try:
        raw = _RAW_FIELDS.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError as error:
        raise _invalid(error, under, {}) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, "invalid_json", f"the body is no JSON: {error}. Send one JSON object in UTF-8.") from None
    if not under:
        _check_depth(body)
    return raw


def decode(body: bytes, kind: type[T], under: str = "", raw: Mapping[str, msgspec.Raw] | None = None) -> T:
    try:
        return cast(T, _decoder(cast(Any, kind)).decode(body))
    except RecursionError:
        raise _too_deep() from None
    except msgspec.ValidationError as error:
        raise _invalid(error, under, raw or {}) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        what = f"the body is no JSON: {error}" if not under else f"{under.rstrip('.')} is no JSON: {error}"
        raise ApiError(
            400, "invalid_json", f"{what}. Send one JSON object in UTF-8.", param=under.rstrip(".") or None
        ) from None


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def notice(notes: Notes, name: str, row: Any, value: msgspec.Raw, *, strict: bool) -> None:
    """One name that is not honoured: refuse it, or note it. A null or neutral value asks for nothing and is not listed."""
    if row is not None and row.how == "refused":
        if not is_neutral(row, truth_of(value, name)):
            hint = f" Instead: {row.note}." if row.note else ""
            raise ApiError(
                400, "unsupported_parameter", f"{shown(name)} is not supported here; leave it out.{hint}", param=name
            )
        return
    if row is None and strict:
        raise ApiError(
            400, "unsupported_parameter", f"there is no parameter {shown(name)}; this server takes known ones only. Leave it out.", param=name
        )  # fmt: skip
    if bytes(value) != b"null":
        notes.ignored.add(name)


def names_of(objects: msgspec.Raw, known: Iterable[str], under: str, notes: Notes, *, strict: bool) -> None:
    """Notes the unknown names of a list of objects, once each: `messages.foo`."""
    seen = set[str]()
    for entry in _NAMES_OF_LIST.decode(objects):
        seen |= entry.keys()
    for name in seen.difference(known):
        if strict:
            raise ApiError(
                400, "unsupported_parameter", f"there is no parameter {shown(under + name)}; leave it out.", param=under + name
            )
        notes.ignored.add(under + name)


def truth_of(value: msgspec.Raw, name: str) -> Any:
    """The value itself. Raises ApiError 400 for what is no JSON after all (half a surrogate, a number without end)."""
    return decode(bytes(value), Any, f"{name}.") if bytes(value) else None


def _check_depth(body: bytes) -> None:
    """Every level of brackets is taken off once, by C code: no recursion, and no loop over bytes in Python."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    brackets = _STRINGS.sub(b"", body).translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, "invalid_json", f"the body nests deeper than {MAX_DEPTH} levels; send flatter JSON.")


def _invalid(error: msgspec.ValidationError, under: str, raw: Mapping[str, msgspec.Raw]) -> ApiError:
    """msgspec says: Expected `int | null`, got `str` - at `$.messages[0].role`."""
    text, _, path = str(error).partition(" - at `")
    dotted = _dotted(path.rstrip("`"))
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        name = under + (f"{dotted}." if dotted else "") + missing[1]
        return ApiError(400, "missing_required_parameter", f"{name} is missing; it is required.", param=name)
    where = (under + dotted).rstrip(".") or None
    got = re.match(r"Expected `([^`]*)`, got `(\w+)`", text)
    value = f" is {shown(bytes(raw[dotted]).decode('utf-8', 'replace'))}" if dotted in raw else ""
    if got:
        wanted = " or ".join(_WORDS.get(w, w) for w in got[1].split(" | ") if w != "null")
        is_what = value or f" is {_WORDS.get(got[2], got[2])}"
        return ApiError(400, "invalid_type", f"{where or 'the body'}{is_what}; expected {wanted}.", param=where)
    expected = re.sub(r"`(\w+)`", lambda m: _WORDS.get(m[1], m[1]), text)
    return ApiError(400, "invalid_value", f"{where or 'the body'}{value}: {expected[0].lower()}{expected[1:]}.", param=where)


def _dotted(path: str) -> str:
    """`$.messages[0].role` -> messages.0.role; a key of an object, which msgspec does not name, is left out."""
    path = re.sub(r"\[\.\.\.\]|^key in ", "", path.removeprefix("key in ").removeprefix("$"))
    return re.sub(r"\[(\d+)\]", r".\1", path).strip(".")
