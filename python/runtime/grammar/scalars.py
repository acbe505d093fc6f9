"""JSON Schemas that are one scalar, as an automaton or a list of texts: what token_fsm takes of JSON Schema.

    integer, number with bounds · boolean · null · const and enum of scalars · string with format date

Every keyword is either understood, exactly, or the whole schema is left to another engine: NotMine, never a keyword ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import NotMine
from phloem.runtime.grammar.byte_dfa import ByteDfa
from phloem.runtime.grammar.dates import DATE
from phloem.runtime.grammar.numbers import NumberRange, dfa_of_number
from phloem.runtime.grammar.regex_dfa import dfa_of_regex
from phloem.runtime.grammar.regex_syntax import parse_regex

__all__ = ["scalar_of_schema"]

ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
)
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})


def scalar_of_schema(source: str) -> ByteDfa | list[str]:
    """source: JSON. Raises GrammarError if it is none, NotMine for every schema but those above."""
    try:
        schema = json.loads(source, parse_float=Decimal, parse_constant=_no_json)
    except (ValueError, RecursionError):
        raise GrammarError("the schema is no JSON.", param="json_schema", code="invalid_json_schema") from None
    if not isinstance(schema, dict):
        raise NotMine("a schema that is no object")
    keywords = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    kind = keywords.pop("type", None)
    if "enum" in keywords or "const" in keywords:
        return _listed(kind, keywords)
    make = _KINDS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise NotMine("no scalar")
    return make(keywords)


def _no_json(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _only(keywords: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := set(keywords) - known:
        raise NotMine(f"keyword {min(unknown)}")


def _listed(kind: Any, keywords: Mapping[str, Any]) -> list[str]:
    _only(keywords, frozenset({"enum", "const"}))
    if len(keywords) != 1:
        raise NotMine("enum beside const")
    values = [keywords["const"]] if "const" in keywords else keywords["enum"]
    if not isinstance(values, list) or not values:
        raise NotMine("an enum that lists nothing")  # the audit refuses it with its pointer
    texts = []
    for value in values:
        if isinstance(value, (dict, list)):
            raise NotMine("an enum of more than scalars: its blanks are free")
        if kind is None or (isinstance(kind, str) and _is(kind, value)):
            texts.append(str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False))
        elif not isinstance(kind, str):
            raise NotMine("several types")
    if not texts:
        raise NotMine("an enum without a value of its type")
    return texts


def _is(kind: str, value: Any) -> bool:
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, (int, Decimal)) and not isinstance(value, bool)
    return {"string": str, "boolean": bool, "null": type(None)}.get(kind, tuple) is type(value)


def _number(keywords: Mapping[str, Any], integer: bool) -> ByteDfa:
    _only(keywords, _BOUNDS)
    values: dict[str, Decimal] = {}
    for name, value in keywords.items():
        if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
            raise NotMine(f"{name} is no number")  # draft-04's flags among them: the audit lowers them
        values[name] = _as_read(value)
    low, above = _tighter(values.get("minimum"), values.get("exclusiveMinimum"), max)
    high, below = _tighter(values.get("maximum"), values.get("exclusiveMaximum"), min)
    multiple = values.get("multipleOf", Decimal(1) if integer else None)
    if multiple is not None and (not integer or multiple != int(multiple) or not 0 < multiple < 10_000):
        raise NotMine("multipleOf other than a small integer")
    wanted = NumberRange(integer=integer, low=low, high=high, above=above, below=below, multiple=int(multiple or 1))
    return dfa_of_number(wanted)


def _as_read(value: int | Decimal) -> Decimal:
    """A bound as a checker has it that reads numbers with a point as doubles."""
    if isinstance(value, int):
        return Decimal(value)
    double = float(value)
    if not math.isfinite(double):
        raise NotMine("a bound beyond all doubles")
    # Its shortest decimal stands for it among decimals of 15 digits; integers beyond those are compared exactly.
    return Decimal(double) if abs(double) >= 1e15 else Decimal(repr(double))


def _tighter(
    closed: Decimal | None, opened: Decimal | None, pick: Callable[[Decimal, Decimal], Decimal]
) -> tuple[Decimal | None, bool]:
    """The bound that holds, and whether it is itself left out."""
    if closed is None or opened is None:
        return (closed, False) if opened is None else (opened, True)
    return (opened, True) if pick(closed, opened) == opened else (closed, False)


def _string(keywords: Mapping[str, Any]) -> ByteDfa:
    if dict(keywords) != {"format": "date"}:
        raise NotMine("a string with more than format date")
    return dfa_of_regex(parse_regex(f'"{DATE}"'))


def _fixed(*texts: str) -> Callable[[Mapping[str, Any]], list[str]]:
    def make(keywords: Mapping[str, Any]) -> list[str]:
        _only(keywords, frozenset())
        return list(texts)

    return make


_KINDS: dict[str, Callable[[Mapping[str, Any]], ByteDfa | list[str]]] = {
    "integer": lambda keywords: _number(keywords, True),
    "number": lambda keywords: _number(keywords, False),
    "boolean": _fixed("true", "false"),
    "null": _fixed("null"),
    "string": _string,
}
