"""Prompts: text and conversations to token ids, off the loop where they are long, refused where they cannot fit (C-OPS-14).

    text ≤ 64 KiB   on the loop: microseconds to a few milliseconds
    text  > 64 KiB   in a thread
    bytes > context x the longest token's bytes      refused before anything is templated or tokenised

One a model. Knows the template, the tokenizer and the tool format; no HTTP but the words of its errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from phloem.runtime.errors import ConfigError, ContextLengthError, InvalidRequestError
from phloem.runtime.serve import wire
from phloem.runtime.serve.body import Notes, truth_of
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.errors import ApiError, shown
from phloem.runtime.serve.host import Served
from phloem.runtime.serve.sandbox import KillableTemplate
from phloem.runtime.text.chat import ROLES, encode_chat, render_chat
from phloem.runtime.text.template import ChatTemplate, names_read
from phloem.runtime.text.tools import detect
from phloem.runtime.text.tools.base import Tool, ToolFormat, tools_of

__all__ = ["Prompts", "Turns"]

T = TypeVar("T")
BIG = 64 << 10
MAX_MESSAGES = 8192
_SET_BY_US = ("messages", "tools", "add_generation_prompt", "continue_final_message", "documents", "chat_template")


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation, checked, as templates read it. tools: what the request offers, parsed."""

    messages: list[dict[str, Any]]
    tools: tuple[Tool, ...]
    variables: Mapping[str, Any]
    add_generation_prompt: bool
    continues: bool
    size: int
    template: str | None = None
    """The request's own."""


class Prompts:
    """Raises ConfigError for a chat template or a tool parser that cannot be used."""

    def __init__(self, model: Served, config: ServerConfig) -> None:
        self.model, self.tokenizer = model, model.tokenizer
        self._template = _template_of(config.chat_template, model)
        self._request_templates = config.request_templates
        self.tool_format: ToolFormat = detect(model.tokenizer, None if config.tool_parser == "auto" else config.tool_parser)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max((len(self.tokenizer.token_bytes(i)) for i in range(self.tokenizer.vocab_size)), default=1) or 1

    @property
    def template(self) -> str | None:
        """Source of the template that conversations are rendered by; None: the model has none."""
        templates = self.tokenizer.templates
        if self._template is not None:
            return templates.get(self._template, self._template)
        return templates.get("default")

    @cached_property
    def _names_read(self) -> frozenset[str]:
        return frozenset(names_read(self.template)) if self.template is not None else frozenset()

    @cached_property
    def thinks(self) -> bool:
        """Whether the template knows thoughts."""
        return "</think>" in (self.template or "")

    # ---- raw text -------------------------------------------------------------------------------------------------------

    async def encode(self, text: str, add_special_tokens: bool, param: str, beside: int = 0) -> tuple[int, ...]:
        """beside: characters of the request's other texts. Raises ContextLengthError without encoding what is too long for any tokenizer to make fit."""
        size = _utf8_size(text)
        self._check_size(size, param)
        return tuple(await _off_loop(size + beside, lambda: self.tokenizer.encode(text, add_special_tokens)))

    def _check_size(self, size: int, param: str) -> None:
        context = self.model.max_context
        if size > 4 * context and size > self.longest * context:
            raise ContextLengthError(
                f"{param} has {size} bytes, which are at least {-(-size // self.longest)} tokens; this model's context is {context} tokens. "
                "Shorten it.",
                param=param,
            )

    # ---- conversations --------------------------------------------------------------------------------------------------

    def turns(self, body: wire.Conversation, messages: Sequence[wire.Message], notes: Notes) -> Turns:
        """Checks the messages and all that a template is given. Raises ApiError or InvalidRequestError, 400."""
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise ApiError(
                400, "invalid_value", f"messages has {len(messages)} entries; expected 1 to {MAX_MESSAGES}.", param="messages"
            )  # fmt: skip
        if body.chat_template is not None and not self._request_templates:
            raise ApiError(
                400, "unsupported_parameter", "chat_template is not allowed here: this server renders the model's own template. Leave it out.", param="chat_template",
            )  # fmt: skip
        checked = [_message(message, n) for n, message in enumerate(messages)]
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise ApiError(
                400, "conflicting_parameters", "continue_final_message and add_generation_prompt exclude each other; set one of them.", param="continue_final_message",
            )  # fmt: skip
        if continues and checked[-1]["role"] != "assistant":
            raise ApiError(
                400, "invalid_value", f"continue_final_message needs a final assistant message; the last one's role is {checked[-1]['role']}.", param="continue_final_message",
            )  # fmt: skip
        tools = tools_of([truth_of(raw, f"tools.{n}") for n, raw in enumerate(body.tools)]) if body.tools else ()
        size = sum(_utf8_size(m["content"]) for m in checked) + sum(len(bytes(raw)) for raw in body.tools or ())
        self._check_size(size, "messages")
        generation = body.add_generation_prompt is not False and not continues
        return Turns(checked, tools, self._variables(body, notes), generation, continues, size, body.chat_template)

    def _variables(self, body: wire.Conversation, notes: Notes) -> dict[str, Any]:
        variables = dict(body.chat_template_kwargs or {})
        for name in variables:
            if name in _SET_BY_US or name in self.tokenizer.named_tokens:
                raise ApiError(
                    400, "invalid_value", f"chat_template_kwargs sets {shown(name)}, which the server sets itself; use the field of that name.", param=f"chat_template_kwargs.{name}"[:128],
                )  # fmt: skip
        if body.documents:
            if "documents" not in self._names_read:
                raise ApiError(
                    400,
                    "unsupported_parameter",
                    "documents: this model's template does not read them. Leave them out.",
                    param="documents",
                )
            variables["documents"] = body.documents
        if body.reasoning_effort is not None:
            reads = self._names_read & {"reasoning_effort", "enable_thinking"}
            if "reasoning_effort" in reads:
                variables.setdefault("reasoning_effort", body.reasoning_effort)
            if "enable_thinking" in reads:
                variables.setdefault("enable_thinking", body.reasoning_effort != "none")
            if not reads:
                notes.ignored.add("reasoning_effort")
        return variables

    async def encode_turns(self, turns: Turns, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Raises InvalidRequestError with the template's own words where it refuses."""
        ids = await self._with_template(turns, self._encode_turns)
        if add_special_tokens and self.tokenizer.bos_id is not None and ids[:1] != [self.tokenizer.bos_id]:
            ids = [self.tokenizer.bos_id, *ids]
        if not ids:
            raise InvalidRequestError(
                "the chat template made an empty prompt of these messages; expected some text.", param="messages"
            )
        return tuple(ids)

    async def render_turns(self, turns: Turns) -> str:
        return await self._with_template(turns, self._render_turns)

    async def _with_template(self, turns: Turns, work: Callable[[Turns, str | ChatTemplate | None], T]) -> T:
        """On the loop if it is short; a template of the request's own in a thread, which waits for a process that can be killed."""
        if turns.template is None:
            return await _off_loop(turns.size, lambda: work(turns, self._template))
        own = KillableTemplate(turns.template)
        try:
            return await asyncio.to_thread(work, turns, own)
        finally:
            own.close()

    def _options(self, turns: Turns, template: str | ChatTemplate | None) -> tuple[list[Any], dict[str, Any]]:
        messages: list[Any] = turns.messages
        tools: list[dict[str, Any]] | None = None
        if turns.tools or any(m["role"] == "tool" or "tool_calls" in m for m in messages):
            messages, tools = self.tool_format.prepare(messages, turns.tools)
        return messages, {"tools": tools, "variables": dict(turns.variables), "template": template}

    def _encode_turns(self, turns: Turns, template: str | ChatTemplate | None) -> list[int]:
        messages, options = self._options(turns, template)
        if not turns.continues:
            return encode_chat(self.tokenizer, messages, add_generation_prompt=turns.add_generation_prompt, **options)
        opened = self._opened(messages, options)
        return [*opened, *self.tokenizer.encode_continuation(messages[-1]["content"])]

    def _opened(self, messages: list[Any], options: dict[str, Any]) -> list[int]:
        """The conversation up to where the last turn, the assistant's, begins."""
        if len(messages) == 1:
            raise InvalidRequestError("continue_final_message needs a message before the one to continue.", param="messages")
        return encode_chat(self.tokenizer, messages[:-1], add_generation_prompt=True, **options)

    def _render_turns(self, turns: Turns, template: str | ChatTemplate | None) -> str:
        messages, options = self._options(turns, template)
        if not turns.continues:
            return render_chat(self.tokenizer, messages, add_generation_prompt=turns.add_generation_prompt, **options)
        opened = render_chat(self.tokenizer, messages[:-1], add_generation_prompt=True, **options)
        return opened + str(messages[-1]["content"])


def _message(message: wire.Message, n: int) -> dict[str, Any]:
    where, role = f"messages.{n}", message.role
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role is {shown(role)}; expected one of {', '.join(ROLES)}.", param=f"{where}.role")
    checked: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        checked["name"] = message.name
    if message.reasoning_content is not None:
        checked["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        if role != "assistant":
            raise InvalidRequestError(
                f"{where}.tool_calls stands in a {role} message; only an assistant calls tools.", param=f"{where}.tool_calls"
            )
        checked["tool_calls"] = [
            {
                "id": c.id or "",
                "type": "function",
                "function": {"name": c.function.name, "arguments": c.function.arguments or "{}"},
            }
            for c in message.tool_calls
        ]
    if role == "tool":
        if not message.tool_call_id:
            raise ApiError(
                400, "missing_required_parameter", f"{where}.tool_call_id is missing; a tool message says which call it answers.", param=f"{where}.tool_call_id",
            )  # fmt: skip
        checked["tool_call_id"] = message.tool_call_id
    return checked


def _content(message: wire.Message, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise InvalidRequestError(
            f"{where}.content is missing or null; a {message.role} message needs text.", param=f"{where}.content"
        )
    texts = []
    for n, part in enumerate(content):
        if part.type == "text" and part.text is not None:
            texts.append(part.text)
        elif part.type in ("text", "refusal"):
            raise InvalidRequestError(
                f'{where}.content.{n} has no text; expected a part such as {{"type": "text", "text": "hi"}}.',
                param=f"{where}.content.{n}",
            )
        else:
            raise ApiError(
                400, "unsupported_parameter", f"{where}.content.{n} is of the type {shown(part.type)}; this model reads text parts only.", param=f"{where}.content.{n}.type",
            )  # fmt: skip
    return "\n".join(texts)


def _template_of(wanted: str | None, model: Served) -> str | None:
    """--chat-template: one of the model's by name, or a file."""
    if wanted is None or wanted in model.tokenizer.templates:
        return wanted
    try:
        return Path(wanted).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        have = ", ".join(sorted(model.tokenizer.templates)) or "none"
        raise ConfigError(
            f"the chat template is no file that can be read ({error}), nor one of the model's ({have}).", param="chat_template"
        ) from None


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    return work() if size <= BIG else await asyncio.to_thread(work)


def _utf8_size(text: str) -> int:
    """Bytes of it in UTF-8: what is small is not worth encoding to be counted."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
