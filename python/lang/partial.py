"""What a prefix of JSON says for certain (U4). The grammar has made the prefix valid, so nothing is repaired and nothing guessed.

{"name": "An      ->  {"name": "An"}          a string grows by whole characters
{"age": 1         ->  {}                      a number is there when it is over
{"tags": ["a", tr ->  {"tags": ["a"]}         so is a literal
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["PartialJson"]

_MISSING = object()


class PartialJson:
    """push text; `value` is what there is, later ones extending earlier ones."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> bool:
        """True if there is new text."""
        self._text += text
        return bool(text)

    def value(self) -> Any:
        """None while nothing is certain."""
        value, _ = _value(self._text, _blank(self._text, 0), False)
        return None if value is _MISSING else value


def _blank(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _value(text: str, at: int, closed: bool) -> tuple[Any, int]:
    """(value or _MISSING, where it ends; len(text) where it does not)."""
    if at >= len(text):
        return _MISSING, at
    first = text[at]
    if first == "{":
        return _object(text, at + 1)
    if first == "[":
        return _array(text, at + 1)
    if first == '"':
        return _string(text, at + 1)
    end = at
    while end < len(text) and text[end] not in ",]} \t\r\n":
        end += 1
    if end == len(text):
        return _MISSING, end
    return json.loads(text[at:end]), end


def _string(text: str, at: int) -> tuple[Any, int]:
    end = at
    while end < len(text):
        if text[end] == '"':
            return json.loads(text[at - 1 : end + 1]), end + 1
        if text[end] == "\\":
            size = 6 if text[end + 1 : end + 2] == "u" else 2
            if end + size > len(text):
                break
            if size == 6 and text[end + 2 : end + 4].lower() in ("d8", "d9", "da", "db"):  # half of a pair: both, or none yet
                if end + 12 > len(text):
                    break
                size = 12
            end += size
        else:
            end += 1
    return json.loads(f'"{text[at:end]}"'), len(text)


def _array(text: str, at: int) -> tuple[Any, int]:
    found: list[Any] = []
    while True:
        at = _blank(text, at)
        if at >= len(text):
            return found, at
        if text[at] == "]":
            return found, at + 1
        if text[at] == ",":
            at += 1
            continue
        value, at = _value(text, at, False)
        if value is _MISSING:
            return found, len(text)
        found.append(value)


def _object(text: str, at: int) -> tuple[Any, int]:
    found: dict[str, Any] = {}
    while True:
        at = _blank(text, at)
        if at >= len(text):
            return found, at
        if text[at] == "}":
            return found, at + 1
        if text[at] == ",":
            at += 1
            continue
        key, end = _string(text, at + 1)
        if end >= len(text) and not (text[end - 1 : end] == '"' and end - 1 > at):
            return found, len(text)
        end = _blank(text, end)
        if end >= len(text) or text[end] != ":":
            return found, len(text)
        value, at = _value(text, _blank(text, end + 1), False)
        if value is _MISSING:
            return found, len(text)
        found[key] = value
