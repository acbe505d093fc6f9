"""Inside a free string of JSON nothing changes from token to token: what a schema must be like for that, and where it holds.

    {"name": "Ada, a         every plain token is legal, none is forced, and behind any of them the mask is the same
              |^^^^^^         ... as long as no minLength or maxLength comes near

An engine need not be asked there: EngineCursor gives it such tokens later, all at once. The promise is made for schemas whose text
can be read in one way only, so that no other reading of the same string (a const, a pattern, another object) ends meanwhile; and
for values, never keys, whose spelling decides what comes next.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["RECENT", "FreeStrings", "free_strings"]

RECENT = 64
"""Bytes of text behind which the place of an opening quote is looked for."""
FOREVER = 1 << 60
WIDEST = 12
"""Bytes of one character in JSON at most: a surrogate pair, escaped."""

_SCHEMA = frozenset(("items", "additionalProperties"))
_SCHEMAS_BY_NAME = frozenset(("properties", "$defs", "definitions"))
_NO_STRING = frozenset((
    "required", "minItems", "maxItems", "minProperties", "maxProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly",
))  # fmt: skip
_REF_FROM = frozenset(("", "$defs", "definitions", "properties"))


@dataclass(frozen=True, slots=True)
class FreeStrings:
    """mins, max: every minLength and the least maxLength of the schema, in characters.   longest: bytes of a token, at most."""

    mins: tuple[int, ...]
    max: int
    longest: int

    def room(self, size: int) -> int:
        """Inside a string of `size` bytes so far: up to how many bytes the mask stays as it is. Below `size`: it may change now."""
        room = self.max - self.longest
        for least in self.mins:
            if size < least * WIDEST:  # it may be open whether the string may end
                room = min(room, least - 1 - self.longest)
        return room


def inside_value(recent: bytes) -> int | None:
    """Bytes of the string in which `recent`, the end of a text, stops, if that is surely the value of a key, the first of an array,
    or the whole text. It must be known to stop inside a string.
    """
    at = recent.rfind(b'"')
    if at < 0 or recent[at - 1 : at] == b"\\":  # the last quote opened the string, or is text of it
        return None
    before = recent[:at].rstrip(b" \t\r\n")
    whole = len(recent) < RECENT
    if before[-1:] in (b":", b"[") or (not before and whole):
        return len(recent) - at - 1
    return None


def free_strings(source: str, longest: int) -> FreeStrings | None:
    """What holds for the (lowered) schema; None if its strings are not known to be free."""
    mins: set[int] = set()
    least = FOREVER

    def walk(node: Any) -> bool:
        nonlocal least
        if isinstance(node, bool):
            return True
        if not isinstance(node, dict):
            return False
        for key, value in node.items():
            if key in _SCHEMA:
                good = walk(value)
            elif key in _SCHEMAS_BY_NAME:
                good = isinstance(value, dict) and all(walk(part) for part in value.values())
            elif key == "anyOf":
                good = _alone(node, key) and _apart(value) and all(walk(part) for part in value)
            elif key in ("minLength", "maxLength"):
                good = isinstance(value, int)
                if good and key == "minLength":
                    mins.add(value)
                elif good:
                    least = min(least, value)
            elif key in ("enum", "const"):
                good = _alone(node, key)  # a finite list is never free
            elif key == "$ref":
                good = _alone(node, key) and _is_walked(value)
            else:
                good = key in _NO_STRING or (key == "type" and isinstance(value, (str, list)))
            if not good:
                return False
        return True

    if not walk(json.loads(source)):
        return None
    return FreeStrings(tuple(sorted(mins - {0})), least, longest)


def _alone(node: Mapping[str, Any], key: str) -> bool:
    """Nothing beside it says anything of strings: two readings of one place may go on together."""
    return not node.keys() - _NO_STRING - {key, "type", "$defs", "definitions"}


def _apart(options: Any) -> bool:
    """At most one option is text, one an object, one an array: the first byte tells them apart."""
    seen: set[str] = set()
    for option in options if isinstance(options, list) else [None]:
        if not isinstance(option, Mapping):
            return False
        types = option.get("type")
        if (
            types is None
            and isinstance(option.get("enum"), list)
            and not any(isinstance(v, (str, list, dict)) for v in option["enum"])
        ):
            continue
        names = {types} if isinstance(types, str) else set(types or ())
        if not names or names & seen & {"string", "object", "array"}:
            return False
        seen |= names
    return True


def _is_walked(pointer: Any) -> bool:
    """Whether `$ref` leads to a place that `walk` sees as a schema."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return False
    steps = pointer[1:].split("/")
    return steps == [""] or (steps[0] == "" and steps[1] in _REF_FROM and len(steps) == 3)
