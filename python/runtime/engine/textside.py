"""What the facades need of a model beside its core: the text side, and what was configured. No torch: an engine may be elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from phloem.runtime.config import EngineConfig, Resolved
from phloem.runtime.engine.calls import TextSide
from phloem.runtime.engine.collect import Collector
from phloem.runtime.request import Request
from phloem.runtime.text.chat import encode_chat
from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Side", "Text"]


class Side(Protocol):
    """What a facade keeps beside its client."""

    @property
    def text(self) -> TextSide: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def config(self) -> EngineConfig: ...
    @property
    def resolved(self) -> Resolved: ...


class Text:
    """The model's text side, as the verbs want it (calls.TextSide)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return encode_chat(self._tokenizer, messages, **options)

    def collector(self, request: Request) -> Collector:
        return Collector(request, self._tokenizer)
