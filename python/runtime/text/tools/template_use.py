"""How a model's chat template takes tools, and what is sent to one that does not.

it reads `tools`      messages as they are (arguments as a mapping, or as text if it wants that), tools beside them
it does not           [system: what the functions are and how to call them] + messages, with calls as text and results as
                      user turns: <tool_response>…</tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.text.template import names_read
from phloem.runtime.text.tokenizer import Tokenizer
from phloem.runtime.text.tools.base import Message, Tool

__all__ = ["TemplateUse"]

Spell = Callable[[Sequence[tuple[str, str]]], str]
_PROBE = "zq"


@dataclass(frozen=True)
class TemplateUse:
    """source: the template that a request with tools is rendered by; "" if the model has none.
    native: calls are the template's business, rather than text of ours in the messages."""

    tokenizer: Tokenizer
    source: str
    native: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, native: bool | None = None) -> TemplateUse:
        """native: None looks whether the template reads `tools`."""
        source = tokenizer.templates.get("tool_use", tokenizer.templates.get("default", ""))
        return cls(tokenizer, source, "tools" in names_read(source) if native is None else native)

    @cached_property
    def control_ids(self) -> dict[str, int]:
        """Spelling -> id of the tokens that no text becomes: where a format's words are among them, the token is meant."""
        found = {spelling: self.tokenizer.token_to_id(spelling) for spelling in self.tokenizer.control_tokens}
        return {spelling: i for spelling, i in found.items() if i is not None}

    def is_shown(self, spelling: str) -> bool:
        """Whether a text without special tokens shows it."""
        return self.control_ids.get(spelling) not in self.tokenizer.special_ids

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Spellings of the tokens that end a reply."""
        return tuple(s for s in (self.tokenizer.id_to_token(i) for i in sorted(self.tokenizer.eos_ids)) if s)

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template writes the arguments of earlier calls as they are, so that they must be JSON text already."""
        from phloem.runtime.text.chat import render_chat

        def shows(arguments: Any) -> bool:
            call = {"id": "c00000000", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages: list[Message] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            tool = Tool(name="f").as_json()
            try:
                text = render_chat(self.tokenizer, messages, tools=[tool], template=self.source, add_generation_prompt=False)
            except InvalidRequestError:
                return False
            return f'"{_PROBE}": 1' in text

        return not shows({_PROBE: 1}) and shows(f'{{"{_PROBE}": 1}}')

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Tool], spell: Spell
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        if not self.native:
            return _as_text(messages, tools, spell), None
        prepared = [self._native(message) for message in messages]
        return prepared, [tool.as_json() for tool in tools] or None

    def _native(self, message: Message) -> Message:
        if not isinstance(message, Mapping) or not message.get("tool_calls"):
            return message
        calls = []
        for name, arguments, call in _calls_of(message):
            value: Any = arguments
            if not self._wants_text:
                try:
                    value = json.loads(arguments)
                except ValueError:
                    value = arguments  # a cut-off call: the text is all there is
            calls.append({**call, "function": {**call["function"], "name": name, "arguments": value}})
        return {**message, "tool_calls": calls}


def _calls_of(message: Message) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(name, arguments as JSON text, the call) of every call of an assistant's message."""
    found = []
    calls = message["tool_calls"]
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequestError(f"tool_calls is {calls!r}; expected a list of calls.", param="messages")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str):
            raise InvalidRequestError(
                f'a tool call is {call!r}; expected {{"id": …, "type": "function", "function": {{"name": …, "arguments": …}}}}.',
                param="messages",
            )
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        found.append((name, arguments, call))
    return found


def _as_text(messages: Sequence[Message], tools: Sequence[Tool], spell: Spell) -> list[Message]:
    made: list[Message] = []
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "assistant" and message.get("tool_calls"):
            said, calls = message.get("content") or "", spell([(name, arguments) for name, arguments, _ in _calls_of(message)])
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            made.append({**rest, "content": f"{said}\n{calls}" if said else calls})
        elif role == "tool":
            text = f"<tool_response>\n{_text_of(message)}\n</tool_response>"
            before = made[-1] if made else {}
            if before.get("results"):
                made[-1] = {**before, "content": f"{before['content']}\n{text}"}
            else:
                made.append({"role": "user", "content": text, "results": True})
        else:
            made.append(message)
    made = [
        {k: v for k, v in m.items() if k != "results"} if isinstance(m, Mapping) and m.get("results") is True else m
        for m in made
    ]
    if not tools:
        return made
    preamble = _preamble(tools, spell)
    first = made[0] if made else {}
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        return [{**first, "content": f"{_text_of(first)}\n\n{preamble}"}, *made[1:]]
    return [{"role": "system", "content": preamble}, *made]


def _text_of(message: Message) -> str:
    from phloem.runtime.text.chat import check_messages

    return str(check_messages([message])[0]["content"])


def _preamble(tools: Sequence[Tool], spell: Spell) -> str:
    signatures = "\n".join(json.dumps(tool.as_json()["function"], ensure_ascii=False) for tool in tools)
    example = spell([("name_of_the_function", '{"argument": "value"}')])
    return (
        "You can call functions. These are their names, what they do, and JSON schemas of their arguments, one a line:\n"
        f"<tools>\n{signatures}\n</tools>\n"
        f"To call one, write:\n{example}\n"
        "The result comes back between <tool_response> and </tool_response>."
    )
