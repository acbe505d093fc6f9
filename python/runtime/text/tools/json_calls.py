"""Calls written as JSON objects with two keys, between fixed words: what hermes and llama3 have in common.

TEXT opener before NAME between {arguments} after  (separator opener before …)*
     <tool_call> ⏎{"name": "f", "arguments": {"a": 1} }⏎</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import GrammarSpec
from phloem.runtime.text.tools.base import CallPlan, Choice, Message, Tool
from phloem.runtime.text.tools.lark import Arguments, arguments_of, content_json, embed, literal, token
from phloem.runtime.text.tools.reader import Reader, Steps
from phloem.runtime.text.tools.template_use import TemplateUse

__all__ = ["JsonCalls", "Spelling"]


class Spelling(msgspec.Struct, frozen=True, kw_only=True):
    """opener: where it stands, a call begins.   anywhere: also behind text; else at the start of a reply only.
    separator: between one call's end and the next one's opener; None allows one call a reply."""

    opener: str
    before: str
    between: str
    after: str
    separator: str | None
    anywhere: bool


class JsonCalls:
    """Follows base.ToolFormat."""

    def __init__(self, name: str, spelling: Spelling, use: TemplateUse) -> None:
        self.name, self.spelling, self._use = name, spelling, use
        self._opener_id = use.control_ids.get(spelling.opener)

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        return self._use.prepare(messages, tools, self.spell)

    def spell(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls (name, JSON of the arguments) as this format writes them."""
        s = self.spelling
        return (s.separator or "\n").join(
            s.opener + s.before + name + s.between + arguments + s.after for name, arguments in calls
        )

    def plan(
        self,
        choice: Choice,
        *,
        parallel: bool = True,
        content: GrammarSpec | None = None,
        json_whitespace: Any = "spaced",
        jump_forward: Any = "canonical",
        trusted: bool = False,
    ) -> CallPlan | None:
        if choice.mode == "none":
            return None
        s = self.spelling
        arguments = [arguments_of(tool) for tool in choice.tools]
        is_token = self._opener_id is not None
        opener = token(self._opener_id) if self._opener_id is not None else literal(s.opener)
        many = parallel and not choice.once and s.separator is not None
        more = f" ({literal(s.separator) if s.separator else ''} {opener} body)*" if many else ""
        rules = []
        if choice.mode == "required":
            rules.append(f"start: {opener} body{more}")
        elif content is not None:
            if s.opener.startswith("{"):
                raise InvalidRequestError(
                    f"the {self.name} form writes calls as JSON objects, so calls or a JSON reply cannot be told apart from their start. "
                    "Use tool_choice 'required' or 'none', or leave the response's schema out.",
                    param="response_format",
                )
            rules += [f"start: content | {opener} body{more}", f"content: {content_json(content, json_whitespace)}"]
        elif not s.anywhere:
            rules += [f"start: TEXT | {opener} body{more}", f"TEXT: /(?s:.*)/ & ~/{_pattern(s.opener)}(?s:.*)/"]
        elif is_token:
            rules += [f"start: TEXT | TEXT {opener} body{more}", "TEXT: /(?s:.*)/"]
        else:
            rules += [f"start: TEXT | head body{more}", "TEXT: /(?s:.*)/", f"head[lazy]: TEXT {opener}"]
        rules.append(
            "body: " + " | ".join(self._body(tool, a, json_whitespace) for tool, a in zip(choice.tools, arguments, strict=True))
        )
        shown = self._use.is_shown(s.opener)
        ends = () if shown else self._use.ends
        reads_calls_only = choice.mode == "required"

        def parser(new_id: Callable[[], str]) -> JsonCallReader:
            return JsonCallReader(s, new_id, ends, anywhere=s.anywhere and content is None and not reads_calls_only)

        return CallPlan(
            grammar=GrammarSpec(kind="lark", source="\n".join(rules), jump_forward=jump_forward, trusted=trusted),
            new_parser=parser,
            dropped=tuple(pair for a in arguments for pair in a.dropped),
            skip_special_tokens=shown,
        )

    def _body(self, tool: Tool, arguments: Arguments, whitespace: Any) -> str:
        s = self.spelling
        return f"{literal(s.before + tool.name + s.between)} {embed(arguments.schema, whitespace)} {literal(s.after)}"


class JsonCallReader(Reader):
    """anywhere: the opener may stand behind text."""

    def __init__(self, spelling: Spelling, new_id: Callable[[], str], ends: Sequence[str], *, anywhere: bool) -> None:
        self._s, self._anywhere = spelling, anywhere
        super().__init__(new_id, ends)

    def _read(self) -> Steps:
        s = self._s
        yield from self._text_before()
        while self.text.startswith(s.opener):
            yield from self.expect(s.opener + s.before, unnamed=True)
            name = yield from self.upto('"')
            self.begin(name)
            yield from self.expect(s.between[1:])
            yield from self.value()
            self.close()
            yield from self.expect(s.after)
            if s.separator is None:
                return
            while not self.text and not self.over:
                yield
            if not self.text:
                return
            yield from self.expect(s.separator)
            while len(self.text) < len(s.opener):
                yield from self.more()

    def _text_before(self) -> Steps:
        """Text in front of the calls, nothing of it that may belong to one."""
        opener = self._s.opener
        if not self._anywhere:
            while len(self.text) < len(opener) and opener.startswith(self.text) and not self.over:
                yield
            if not self.text.startswith(opener):
                yield from self.rest()
            return
        while opener not in self.text:
            held = max((n for n in range(1, len(opener)) if self.text.endswith(opener[:n])), default=0)
            self.say(self.take(len(self.text) - held))
            if self.over:
                return self.say(self.take(held))
            yield
        self.say(self.take(self.text.index(opener)))


def _pattern(text: str) -> str:
    """A regex of exactly this text, as Lark writes one between slashes."""
    return re.sub(r'([\\/.+*?()\[\]{}|^$&~"])', r"\\\1", text)
