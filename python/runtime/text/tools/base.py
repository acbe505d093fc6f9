"""Tool calls: what a caller may ask for, what a reply says, and the one object that writes the grammar and reads the text (T9).

    tools, tool_choice --tools_of, choice_of--> Choice --ToolFormat.plan--> CallPlan
                                                                             |  grammar: what the model may write
                                                                             `- parser(): that text, as it comes, as
                                                                                ContentDelta · CallStart · ArgumentsDelta

Knows the words of the wire (OpenAI's `tools` and `tool_choice`) and no engine. How calls are spelled is each format's own.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import GrammarSpec

__all__ = [
    "MAX_TOOLS",
    "ArgumentsDelta",
    "CallParser",
    "CallPlan",
    "CallReply",
    "CallStart",
    "Choice",
    "ContentDelta",
    "Event",
    "Tool",
    "ToolCall",
    "ToolFormat",
    "call_id",
    "choice_of",
    "tools_of",
]

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LETTERS = string.ascii_letters + string.digits
Message = Mapping[str, Any]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call.

    parameters: JSON Schema of its arguments' object; None takes none.   strict: True refuses what nobody enforces, False and
    None leave it out and say so (T6).   number: its place in the caller's list, for errors.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None
    number: int = 0

    def as_json(self) -> dict[str, Any]:
        """As chat templates read it: OpenAI's form."""
        parameters = {"type": "object", "properties": {}} if self.parameters is None else dict(self.parameters)
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What `tool_choice` came to.   tools: those that may be called.   once: exactly one call, where there is one."""

    mode: Literal["none", "auto", "required"]
    tools: tuple[Tool, ...] = ()
    once: bool = False


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """arguments: JSON text, as the model wrote it.   complete: False where the reply was cut off inside it."""

    id: str
    name: str
    arguments: str
    complete: bool = True


class CallReply(msgspec.Struct, frozen=True, kw_only=True):
    """content: the text in front of the calls, or all of it."""

    content: str
    calls: tuple[ToolCall, ...] = ()


class ContentDelta(msgspec.Struct, frozen=True):
    text: str


class CallStart(msgspec.Struct, frozen=True):
    """Call number `index` (from 0) has begun."""

    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """More of the JSON text of call `index`; joined, they are `ToolCall.arguments`."""

    index: int
    text: str


Event = ContentDelta | CallStart | ArgumentsDelta


class CallParser(Protocol):
    """Reads a reply as it comes. What it gave in pieces equals what it gives of the whole (W5)."""

    def push(self, text: str) -> list[Event]:
        """More of the reply's text. Raises ValueError for text that the plan's grammar does not allow."""

    def finish(self) -> list[Event]:
        """The reply is over, wherever it was cut. A call whose name is not there yet stays text."""

    def reply(self) -> CallReply:
        """All that was read so far."""


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one request needs.

    grammar: the constraint.   dropped: (path, keyword) of the tools' schemas that are not enforced; keyword "*": the whole
    schema, only JSON is.   skip_special_tokens: False where calls are spelled with tokens that a text would not show.
    new_parser: makes a parser of this request's replies.
    """

    grammar: GrammarSpec
    new_parser: Callable[[Callable[[], str]], CallParser]
    dropped: tuple[tuple[str, str], ...] = ()
    skip_special_tokens: bool = True

    def parser(self, new_id: Callable[[], str] | None = None) -> CallParser:
        """new_id: names the calls; None draws `call_` and 24 letters."""
        return self.new_parser(new_id or call_id)

    def parse(self, text: str, new_id: Callable[[], str] | None = None) -> CallReply:
        """A whole reply. Raises ValueError for text that the grammar does not allow."""
        parser = self.parser(new_id)
        parser.push(text)
        parser.finish()
        return parser.reply()


class ToolFormat(Protocol):
    """How one family of models spells calls."""

    @property
    def name(self) -> str: ...

    def plan(
        self,
        choice: Choice,
        *,
        parallel: bool = True,
        content: GrammarSpec | None = None,
        json_whitespace: Literal["flexible", "spaced", "compact"] = "spaced",
        jump_forward: Literal["canonical", "permissive", "off"] = "canonical",
        trusted: bool = False,
    ) -> CallPlan | None:
        """None if nothing is to be parsed (mode "none").

        parallel: more than one call in a reply.   content: with mode "auto", the JSON that the reply is if it is no call (T7).
        json_whitespace: of the arguments; "spaced" is how templates write earlier calls, so a next turn finds its prefix.
        Raises GrammarError whose `param` leads to the keyword, InvalidRequestError for what this format cannot spell.
        """

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """What the chat template gets: messages, and `tools` if it reads them (else they are in the messages)."""


def call_id() -> str:
    """`call_` and 24 random letters or digits."""
    return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(24))


def tools_of(raw: object) -> tuple[Tool, ...]:
    """OpenAI's `tools` (T4); none for null and []. Raises InvalidRequestError that names the field, as `tools.0.function.name`."""
    if raw is None:
        return ()
    if not isinstance(raw, (list, tuple)):
        raise _bad("tools", raw, "a list of tools")
    if len(raw) > MAX_TOOLS:
        raise InvalidRequestError(f"tools has {len(raw)} entries; at most {MAX_TOOLS}.", param="tools")
    found: dict[str, Tool] = {}
    for number, entry in enumerate(raw):
        tool = _tool(entry, number)
        if tool.name in found:
            raise InvalidRequestError(
                f"tools.{number}.function.name is {tool.name!r}, as is that of tool {found[tool.name].number}; expected different names.",
                param=f"tools.{number}.function.name",
            )
        found[tool.name] = tool
    return tuple(found.values())


def _tool(entry: Any, number: int) -> Tool:
    where = f"tools.{number}"
    if not isinstance(entry, Mapping):
        raise _bad(where, entry, 'an object such as {"type": "function", "function": {"name": "f"}}')
    if entry.get("type") != "function":
        raise _bad(f"{where}.type", entry.get("type"), "'function'")
    function = entry.get("function")
    if not isinstance(function, Mapping):
        raise _bad(f"{where}.function", function, "an object with a name")
    where += ".function"
    name, strict = function.get("name"), function.get("strict")
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _bad(f"{where}.name", name, "1 to 64 of A-Z, a-z, 0-9, _ and -")
    if description is not None and not isinstance(description, str):
        raise _bad(f"{where}.description", description, "a string")
    if strict is not None and not isinstance(strict, bool):
        raise _bad(f"{where}.strict", strict, "true or false")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _bad(f"{where}.parameters", parameters, "a JSON Schema of an object")
    return Tool(name=name, description=description, parameters=parameters, strict=strict, number=number)


def choice_of(raw: object, tools: Sequence[Tool]) -> Choice:
    """OpenAI's `tool_choice` (T5); null is "auto" with tools, "none" without. Raises InvalidRequestError: `tool_choice…`."""
    offered = {tool.name: tool for tool in tools}
    if raw is None:
        return Choice(mode="auto" if tools else "none", tools=tuple(tools))
    if raw in ("none", "auto"):
        return Choice(mode="none" if raw == "none" or not tools else "auto", tools=tuple(tools))
    if not tools:
        raise _bad("tool_choice", raw, "'none' or 'auto', as there are no tools")
    if raw == "required":
        return Choice(mode="required", tools=tuple(tools))
    if isinstance(raw, Mapping) and raw.get("type") == "function":
        return Choice(mode="required", tools=(_named(raw, "tool_choice", offered),), once=True)
    if isinstance(raw, Mapping) and raw.get("type") == "allowed_tools":
        allowed = raw.get("allowed_tools")
        where = "tool_choice.allowed_tools"
        if not isinstance(allowed, Mapping):
            raise _bad(where, allowed, 'an object such as {"mode": "auto", "tools": […]}')
        mode, names = allowed.get("mode"), allowed.get("tools")
        if mode not in ("auto", "required"):
            raise _bad(f"{where}.mode", mode, "'auto' or 'required'")
        if not isinstance(names, (list, tuple)) or not names:
            raise _bad(f"{where}.tools", names, "a list of at least one tool")
        chosen = {tool.name: tool for i, entry in enumerate(names) for tool in [_named(entry, f"{where}.tools.{i}", offered)]}
        return Choice(mode=mode, tools=tuple(tool for tool in tools if tool.name in chosen))
    raise _bad("tool_choice", raw, "'none', 'auto', 'required', or an object of type 'function' or 'allowed_tools'")


def _named(entry: Any, where: str, offered: Mapping[str, Tool]) -> Tool:
    function = entry.get("function") if isinstance(entry, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in offered:
        raise _bad(f"{where}.function.name", name, f"one of the tools: {', '.join(offered)}")
    return offered[name]


def _bad(where: str, value: object, expected: str) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:80] + "…"
    return InvalidRequestError(f"{where} is {shown}; expected {expected}.", param=where)
