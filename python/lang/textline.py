"""A path on a backend without tokens: text and messages, as line.Line is for tokens (Z1). And what such a backend lacks of a node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phloem.lang.backend import Backend, TextPrompt
from phloem.lang.ir import Gen, Select
from phloem.runtime.errors import BackendUnsupported, InvalidRequestError
from phloem.runtime.request import SamplingParams
from phloem.runtime.text.markup import Drawn, Message

if TYPE_CHECKING:
    from phloem.lang.line import Segment

__all__ = ["TextLine", "lacking"]


class _NoMarkup:
    spellings = re.compile(r"(?!)")

    @staticmethod
    def control_pieces(text: str) -> list[Any]:
        return [text]


class TextLine:
    """The same verbs as Line. No ids, no held tail: a text backend tokenises what it gets."""

    markup = _NoMarkup()

    def __init__(self) -> None:
        self.messages: tuple[Message, ...] = ()
        self.opened: Any = None
        self.tools: Any = None
        self.rewinds: tuple[tuple[int, int], ...] = ()
        self.journal: list[Any] | None = None
        self._text: tuple[str, ...] = ()

    def copy(self) -> TextLine:
        made = TextLine()
        made.messages, made.tools, made._text = self.messages, self.tools, self._text
        made.opened = None if self.opened is None else self.opened.copy()
        made.journal = None if self.journal is None else self.journal.copy()
        return made

    def literal(self, text: str) -> None:
        if self.journal is not None and (self.opened is None or self.opened.inherited):
            self.journal.append(text)
        if self.opened is not None:
            self.opened.add(text)
        elif text:
            if self.messages and text.strip():
                raise BackendUnsupported("this backend reads messages; text outside of a role has no place behind them.")
            self._text += (text,)

    def control(self, text: str) -> None:
        raise BackendUnsupported("this backend reads text only; it has no control tokens.")

    def open(self, role: str, at: str, extra: Mapping[str, Any] | None = None) -> None:
        from phloem.lang.line import Opened

        if self.opened is not None:
            raise InvalidRequestError(f"a {role!r} message is opened inside a {self.opened.role!r} message.", param="role")
        self.opened = Opened(role, at, extra or {})

    def close(self, role: str) -> None:
        if self.opened is None or self.opened.role != role:
            raise InvalidRequestError(f"a {role!r} message is closed, but it is not open.", param="role")
        self.messages += (self.opened.message(),)
        if self.journal is not None and not self.opened.inherited:
            self.journal.append(self.opened.message())
        self.opened = None

    def add_message(self, message: Message, at: str) -> None:
        self.open(message.role, at, message.extra)
        self.opened.parts = message.content
        self.close(message.role)

    def ready(self) -> tuple[int, ...]:
        return ()

    def commit(self) -> None: ...
    def cut(self) -> None: ...
    def settle(self) -> None: ...

    def prompt(self) -> TextPrompt:
        partial = self.opened.message().text if self.opened is not None else ""
        messages = tuple({"role": m.role, "content": m.text, **m.extra} for m in self.messages)
        return TextPrompt(messages, partial, "".join(self._text))

    def draw(self, ids: tuple[int, ...], text: str, rest: str, name: str | None, at: str) -> None:
        self.literal(text + rest)

    def replay(self, journal: Sequence[Any], at: str) -> None:
        for entry in journal:
            if isinstance(entry, Message):
                self.add_message(entry, at)
            else:
                self.literal(entry.text if isinstance(entry, Drawn) else entry)

    def ids(self) -> tuple[int, ...]:
        return ()

    def all_ids(self) -> list[int]:
        raise BackendUnsupported("this backend has no tokens.")

    def segments(self) -> list[Segment]:
        return []

    def text(self) -> str:
        parts = list(self._text) + [f"{m.role}: {m.text}\n" for m in self.messages]
        if self.opened is not None:
            parts.append(f"{self.opened.role}: {self.opened.message().text}")
        return "".join(parts)


def lacking(node: Gen[Any] | Select[Any], backend: Backend, defaults: Mapping[str, Any] | None = None) -> str | None:
    """What this backend lacks of what a node needs, in words; None if nothing (Z1)."""
    can = backend.capabilities
    if isinstance(node, Select):
        if can.prompt_logprobs or "select" in can.emulate:
            return None
        return f"{backend.name} gives no logprobs of a prompt, which select needs. With emulate=True it is asked through an enum schema."
    if node.tools and not can.tools:
        return f"{backend.name} has no tools."
    spec = node.grammar
    if spec is not None and spec.kind not in can.grammars:
        return f"{backend.name} enforces no {spec.kind}."
    if spec is not None and spec.open_end and not can.open_end:
        return f"{backend.name} does not end a value by what follows it; say open_end=False to end it by the model's end token alone."
    if "logprobs" in node.sampling and not can.logprobs:
        return f"{backend.name} gives no logprobs."
    given = {**(defaults or {}), **node.sampling}
    if can.sampling is not None:
        plain = SamplingParams()
        for name, value in given.items():
            if name not in can.sampling and name not in ("seed", "logprobs", "top_logprobs") and value != getattr(plain, name):
                return f"{backend.name} does not know {name}={value!r}."
    if node.sampling.get("seed") is not None and not can.seed:
        return f"{backend.name} honours no seed."
    return None
