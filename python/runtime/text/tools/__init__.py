"""Tool calls in each model family's own form: the registry of forms, and which one a chat template means (T8).

detect(tokenizer)                   the form that its template writes; hermes, with a preamble, where it writes none
detect(tokenizer, "pythonic")       this one
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phloem.runtime.errors import ConfigError
from phloem.runtime.text.tokenizer import Tokenizer
from phloem.runtime.text.tools.base import ToolFormat
from phloem.runtime.text.tools.hermes import Hermes
from phloem.runtime.text.tools.llama3 import Llama3
from phloem.runtime.text.tools.pythonic import Pythonic
from phloem.runtime.text.tools.template_use import TemplateUse

__all__ = ["FORMATS", "detect"]

FORMATS: dict[str, Callable[[TemplateUse], ToolFormat]] = {"pythonic": Pythonic, "hermes": Hermes, "llama3": Llama3}
"""Name -> format, in the order in which templates are asked. A new form is a new file and one line here."""
_WRITES: dict[str, Any] = {"pythonic": Pythonic.writes, "hermes": Hermes.writes, "llama3": Llama3.writes}


def detect(tokenizer: Tokenizer, parser: str | None = None) -> ToolFormat:
    """parser: a name of FORMATS. Raises ConfigError for another.

    A template that reads tools and writes calls in a form unknown here gets the preamble too: its own form could not be parsed.
    """
    if parser is not None and parser not in FORMATS:
        raise ConfigError(f"there is no tool parser {parser!r}; expected one of {', '.join(FORMATS)}.", param="tool_parser")
    use = TemplateUse.of(tokenizer)
    written = next((name for name in FORMATS if use.native and _WRITES[name](use.source)), None)
    if written is None:
        use = TemplateUse.of(tokenizer, native=False)
    return FORMATS[parser or written or "hermes"](use)
