"""JSON separators and blanks: what `json_whitespace` means to each engine (W1, W2). Pure data."""

from __future__ import annotations

from typing import Any, Literal

__all__ = ["MAX_BLANKS", "llguidance_options", "xgrammar_options"]

MAX_BLANKS = 8
"""Of space, tab, CR and LF in a row, wherever JSON allows blanks: unbounded blanks are the classic endless generation."""

Whitespace = Literal["flexible", "spaced", "compact"]


def xgrammar_options(whitespace: Whitespace) -> dict[str, Any]:
    """Keyword arguments of compile_json_schema."""
    if whitespace == "flexible":
        return {"any_whitespace": True, "max_whitespace_cnt": MAX_BLANKS}
    return {"any_whitespace": False, "separators": (", ", ": ") if whitespace == "spaced" else (",", ":")}


def llguidance_options(whitespace: Whitespace) -> dict[str, Any]:
    """Fields of JsonCompileOptions."""
    if whitespace == "flexible":
        return {"whitespace_pattern": rf"[\x20\n\r\t]{{0,{MAX_BLANKS}}}"}
    item, key = (", ", ": ") if whitespace == "spaced" else (",", ":")
    return {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
