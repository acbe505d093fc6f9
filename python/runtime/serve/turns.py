"""One choice's text read as an assistant's turn: what it says, what it thinks, what it calls. Fed as text comes, or all at once.

    "<think>hm</think>hello"        ─> Thoughts("hm"), Spoken("hello")           if the template knows thoughts
    '<tool_call>\\n{"name": "f", …'  ─> Calls({index, id, function}), Calls({index, function})

The tool format both makes the grammar and reads the text (T9), so that reading cannot fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from phloem.runtime.request import GrammarSpec, Output
from phloem.runtime.serve import wire
from phloem.runtime.serve.body import Notes, truth_of
from phloem.runtime.serve.lower import Constraint, Lowered
from phloem.runtime.serve.prompts import Prompts, Turns
from phloem.runtime.text.tools.base import ArgumentsDelta, CallParser, CallPlan, CallStart, ContentDelta, choice_of

__all__ = ["Calls", "Spoken", "Thoughts", "Turn", "TurnReader", "behind_thoughts", "turn_reader"]


@dataclass(frozen=True, slots=True)
class Spoken:
    text: str


@dataclass(frozen=True, slots=True)
class Thoughts:
    text: str


@dataclass(frozen=True, slots=True)
class Calls:
    """delta: an entry of `tool_calls` in a chunk: id, type and name stand in the first of a call only."""

    delta: dict[str, Any]


Said = Spoken | Thoughts | Calls


class Turn(Protocol):
    @property
    def num_calls(self) -> int: ...
    def push(self, text: str) -> list[Said]: ...
    def end(self) -> list[Said]: ...
    def message(self) -> wire.ReplyMessage: ...
    def num_thought_tokens(self, output: Output) -> int: ...


class PlainTurn:
    """Text and nothing else."""

    num_calls = 0

    def __init__(self) -> None:
        self._parts: list[str] = []

    def push(self, text: str) -> list[Said]:
        self._parts.append(text)
        return [Spoken(text)] if text else []

    def end(self) -> list[Said]:
        return []

    def message(self) -> wire.ReplyMessage:
        return wire.ReplyMessage(content="".join(self._parts))

    def num_thought_tokens(self, output: Output) -> int:
        return 0


class CallingTurn(PlainTurn):
    """Text that may hold calls."""

    def __init__(self, parser: CallParser) -> None:
        super().__init__()
        self._parser = parser

    def push(self, text: str) -> list[Said]:
        return [self._said(event) for event in self._parser.push(text)]

    def end(self) -> list[Said]:
        return [self._said(event) for event in self._parser.finish()]

    def _said(self, event: Any) -> Said:
        if isinstance(event, ContentDelta):
            return Spoken(event.text)
        if isinstance(event, CallStart):
            self.num_calls = max(self.num_calls, event.index + 1)
            function = {"name": event.name, "arguments": ""}
            return Calls({"index": event.index, "id": event.id, "type": "function", "function": function})
        assert isinstance(event, ArgumentsDelta)
        return Calls({"index": event.index, "function": {"arguments": event.text}})

    def message(self) -> wire.ReplyMessage:
        reply = self._parser.reply()
        calls = [wire.ToolCall(id=call.id, function=wire.ToolFunction(call.name, call.arguments)) for call in reply.calls]
        return wire.ReplyMessage(content=reply.content if reply.content or not calls else None, tool_calls=calls or UNSET)


class ThinkingTurn:
    """A turn that may think first: `<think>…</think>`, then another turn.

    opened: the prompt has the opening mark already.   Blanks around the thoughts belong to the marks, and are shown in neither.
    """

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, inner: PlainTurn, opened: bool, close_id: int | None) -> None:
        self._inner, self._close_id = inner, close_id
        self._state = "thinking" if opened else "start"
        self._held = ""
        self._fresh = opened  # blanks behind the mark are still to be dropped
        self._thoughts: list[str] = []

    @property
    def num_calls(self) -> int:
        return self._inner.num_calls

    def push(self, text: str) -> list[Said]:
        if self._state == "speaking" and not self._fresh:
            return self._inner.push(text)
        self._held += text
        return self._read(last=False)

    def end(self) -> list[Said]:
        return [*self._read(last=True), *self._inner.end()]

    def _read(self, last: bool) -> list[Said]:
        said: list[Said] = []
        if self._state == "start":
            text = self._held.lstrip()
            if text.startswith(self.OPEN):
                self._state, self._fresh, self._held = "thinking", True, text[len(self.OPEN) :]
            elif not last and self.OPEN.startswith(text):
                return said
            else:
                self._state = "speaking"
        if self._state == "thinking":
            said += self._think(last)
        if self._state == "speaking":
            if self._fresh:
                self._held = self._held.lstrip("\n")
                self._fresh = not self._held and not last
            text, self._held = self._held, ""
            said += self._inner.push(text) if text else []
        return said

    def _think(self, last: bool) -> list[Said]:
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held
        thought, mark, rest = self._held.partition(self.CLOSE)
        if mark:
            self._state, self._fresh, self._held = "speaking", True, rest
            thought = thought.rstrip("\n")
        elif last:
            self._held = ""
        else:
            keep = next((n for n in range(len(self.CLOSE) - 1, 0, -1) if thought.endswith(self.CLOSE[:n])), 0)
            certain = thought[: len(thought) - keep].rstrip("\n")
            self._held, thought = thought[len(certain) :], certain
        if not thought:
            return []
        self._thoughts.append(thought)
        return [Thoughts(thought)]

    def message(self) -> wire.ReplyMessage:
        message = self._inner.message()
        if self._thoughts:
            message.reasoning_content = message.reasoning = "".join(self._thoughts)
        return message

    def num_thought_tokens(self, output: Output) -> int:
        """Up to the closing mark, where that is a token; all of them while it has not come."""
        if not self._thoughts:
            return 0
        if self._close_id in output.token_ids:
            return output.token_ids.index(self._close_id) + 1
        return len(output.token_ids) if self._state == "thinking" else 0


class TurnReader:
    """Makes a Turn for each choice.   dropped: (where, keyword) of tools' schemas that are not enforced.   thinks: None where
    thoughts are not told apart; else whether the prompt has opened them."""

    def __init__(self, make: Callable[[], PlainTurn], dropped: tuple[tuple[str, str], ...] = ()) -> None:
        self._make, self.dropped = make, dropped
        self.thinks: bool | None = None
        self.close_id: int | None = None

    def __call__(self) -> Turn:
        inner = self._make()
        return inner if self.thinks is None else ThinkingTurn(inner, self.thinks, self.close_id)

    def think(self, prompts: Prompts, ids: Sequence[int]) -> None:
        """The model's template knows thoughts: tell them apart, from where this prompt ends."""
        if prompts.thinks:
            self.thinks = _tail(prompts, ids).endswith(ThinkingTurn.OPEN)
            self.close_id = prompts.tokenizer.token_to_id(ThinkingTurn.CLOSE)


def behind_thoughts(grammar: GrammarSpec | None, prompts: Prompts, ids: Sequence[int]) -> GrammarSpec | None:
    """The constraint, from behind the thoughts on that this prompt has opened or lets the model open. As it is where the prompt has
    closed them, or where the template or the vocabulary knows none: they are matched as ids."""
    if grammar is None or not prompts.thinks:
        return grammar
    opener, close = (prompts.tokenizer.token_to_id(mark) for mark in (ThinkingTurn.OPEN, ThinkingTurn.CLOSE))
    tail = _tail(prompts, ids)
    opened = tail.endswith(ThinkingTurn.OPEN)
    if close is None or (opener is None and not opened) or tail.endswith(ThinkingTurn.CLOSE):
        return grammar
    return msgspec.structs.replace(grammar, thoughts_close=close, thoughts_open=None if opened else opener)


def _tail(prompts: Prompts, ids: Sequence[int]) -> str:
    return prompts.tokenizer.decode(ids[-8:], skip_special_tokens=False).rstrip()


def turn_reader(prompts: Prompts, body: wire.Chat, turns: Turns, lowered: Lowered, notes: Notes) -> tuple[TurnReader, Lowered]:
    """How this request's turns are read, and its sampling with what the tools demand (T4–T7).

    Raises InvalidRequestError or GrammarError, 400.
    """
    raw = bytes(body.tool_choice)
    choice = choice_of(truth_of(body.tool_choice, "tool_choice") if raw else None, turns.tools)
    plan: CallPlan | None = None
    if turns.tools and choice.mode != "none":
        options: dict[str, Any] = {}
        if body.json_whitespace is not None:
            options["json_whitespace"] = body.json_whitespace
            notes.ignored.discard("json_whitespace")
        if body.jump_forward is not None:
            options["jump_forward"] = body.jump_forward
            notes.ignored.discard("jump_forward")
        content = lowered.grammar if choice.mode == "auto" else None
        if choice.mode == "required" and lowered.constraint is not None:
            notes.ignored.add(lowered.constraint.source.partition(".")[0])
        plan = prompts.tool_format.plan(choice, parallel=body.parallel_tool_calls is not False, content=content, **options)
    if plan is None:
        return TurnReader(PlainTurn), lowered
    for where, keyword in plan.dropped:
        notes.warnings[f"dropped.{where}"] = keyword
    sampling = lowered.sampling
    if choice.mode == "required" and sampling.stop:  # T3: never inside JSON
        sampling = msgspec.structs.replace(sampling, stop=())
        notes.ignored.add("stop")
    if not plan.skip_special_tokens:
        sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
    constrained = Lowered(
        sampling,
        lowered.wanted,
        lowered.default,
        lowered.min_tokens,
        lowered.n,
        Constraint(plan.grammar, "tools"),
        lowered.prompt_name,
    )
    found = plan

    def make() -> PlainTurn:
        return CallingTurn(found.parser())

    return TurnReader(make, plan.dropped), constrained
