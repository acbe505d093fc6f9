r"""What xgrammar 0.2.9 makes of a JSON Schema, corrected in its own EBNF before it is compiled.

    schema --from_json_schema--> rules --text--> repaired --from_ebnf--> compiled          text and rules say the same: tested

* `\ud800` alone is no character: an escape is one, or a whole surrogate pair.
* Strings with a length may hold raw control characters there, which JSON forbids. (And no escapes: with those, masks of such a string
  take 16 to 150 ms rather than 20 us. The audit leaves them to llguidance.)
* Nor are the three bytes that would spell a surrogate UTF-8: every class that says what it is not takes them in there.
* Blanks inside structural tags are unbounded there (W1).
"""

from __future__ import annotations

import re
from typing import Literal

from phloem.runtime.grammar.whitespace import MAX_BLANKS

__all__ = ["of_whole_characters", "repaired"]

_RULE = re.compile(r"^(basic_escape(?:_\d+)?) ::= (.*)$", re.MULTILINE)
_ESCAPE = r'(([\"\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))'
_HEX = "[A-Fa-f0-9]"
_WHOLE_CHARACTERS = (
    r"(([\"\\/bfnrt])"
    rf' | ("u" [A-CE-Fa-ce-f0-9] {_HEX} {_HEX} {_HEX}) | ("u" [Dd] [0-7] {_HEX} {_HEX})'
    rf' | ("u" [Dd] [89ABab] {_HEX} {_HEX} "\\u" [Dd] [C-Fc-f] {_HEX} {_HEX}))'
)
_SIZED = r"[^\"\\\r\n]"  # of strings with a length
_PLAIN = r"[^\0-\x1f\"\\]"
_SURROGATES = r"\uD800-\uDFFF"
_BLANKS = r"[ \n\r\t]*"
_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]\*?|[^"\[]+')
"""A literal, a character class with its star, or what stands between."""


def repaired(grammar: str, whitespace: Literal["flexible", "spaced", "compact"] | None = None) -> str:
    """whitespace: also bound the blanks inside tags so. Raises AssertionError for text that xgrammar 0.2.9 does not write."""
    assert all(body == _ESCAPE for _, body in _RULE.findall(grammar)), "not the grammar that xgrammar 0.2.9 writes"
    grammar = _RULE.sub(lambda rule: f"{rule[1]} ::= {_WHOLE_CHARACTERS}", grammar)  # one a schema: a tag each may have its own
    parts = _PART.findall(grammar)
    assert whitespace is None or "".join(parts) == grammar
    parts = [_without_surrogates(_PLAIN if part == _SIZED else part) for part in parts]
    return "".join(parts if whitespace is None else _spaced(parts, whitespace))


def of_whole_characters(grammar: str) -> str:
    """Somebody's own grammar, as xgrammar prints it: what its classes leave out, they leave out; but a surrogate is no character."""
    return "".join(_without_surrogates(part) for part in _PART.findall(grammar))


def _without_surrogates(part: str) -> str:
    if not part.startswith("[^"):
        return part
    end = part.rindex("]")
    return part[:end] + _SURROGATES + part[end:]


def _spaced(parts: list[str], whitespace: Literal["flexible", "spaced", "compact"]) -> list[str]:
    bounded = f"{_BLANKS[:-1]}{{0, {MAX_BLANKS}}}"
    made: list[str] = []
    for i, part in enumerate(parts):
        if part == _BLANKS:
            looks_ahead = made and made[-1].rstrip().endswith("(=(")  # a hint of the engine's own, no part of the text
            made.append(bounded if whitespace == "flexible" or looks_ahead else '""')
        elif whitespace == "spaced" and part in ('","', '":"') and parts[i - 2 : i - 1] == [_BLANKS]:
            made.append(f'{part[:2]} "')
        else:
            made.append(part)
    return made
