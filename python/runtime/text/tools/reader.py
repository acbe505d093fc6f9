"""Reads text as it comes: what every format's parser is made of. A parser is a generator that reads on as if all the text were there.

    push("<tool_c") -> []            not yet sure
    push("all>\\n{…") -> [CallStart]  the generator goes on where it waited

Knows JSON as far as where a value ends; what stands around the values is a format's own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

import msgspec

from phloem.runtime.text.tools.base import ArgumentsDelta, CallReply, CallStart, ContentDelta, Event, ToolCall

__all__ = ["Reader", "Steps"]

Steps = Generator[None, None, None]
_PAIRS = {"{": 1, "[": 1, "}": -1, "]": -1}


class _Cut(Exception):
    """The text ended in the middle."""


class Reader(ABC):
    """Follows base.CallParser.

    ends: spellings of end tokens that the text may end with; they are no part of the reply.
    """

    def __init__(self, new_id: Callable[[], str], ends: Sequence[str] = ()) -> None:
        self._new_id, self._ends = new_id, tuple(ends)
        self._held = ""  # may become one of `ends`
        self._text = ""  # to be read
        self._unnamed = ""  # read since the call began, while its name is not known
        self._over = False
        self._events: list[Event] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[str] = []
        self._steps: Steps | None = self._read()

    @abstractmethod
    def _read(self) -> Steps:
        """The whole reply, from its start."""

    def push(self, text: str) -> list[Event]:
        assert not self._over, "a reply goes on behind its end"
        if self._ends:
            text = self._held + text
            keep = max((n for end in self._ends for n in range(1, len(end) + 1) if text.endswith(end[:n])), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._text += text
        return self._go_on()

    def finish(self) -> list[Event]:
        if self._held and self._held not in self._ends:
            self._text += self._held
        self._over = True
        return self._go_on()

    def reply(self) -> CallReply:
        calls = tuple(self._calls)
        if self._arguments:
            calls = (*calls[:-1], msgspec.structs.replace(calls[-1], arguments="".join(self._arguments)))
        return CallReply(content="".join(self._content), calls=calls)

    def _go_on(self) -> list[Event]:
        try:
            if self._steps is not None:
                next(self._steps)
            elif self._text:
                self._refuse("the end")
        except StopIteration:
            self._steps = None
            if self._text:
                self._refuse("the end")
        except _Cut:
            self._steps = None
            if not self._calls:
                self.say(self._unnamed + self._text)
            self._text = ""
        events, self._events = self._events, []
        return events

    # ---- what a format reads with ---------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """What is there and not read yet."""
        return self._text

    @property
    def over(self) -> bool:
        """Nothing will come behind `text`."""
        return self._over

    def take(self, n: int) -> str:
        taken, self._text = self._text[:n], self._text[n:]
        return taken

    def more(self) -> Steps:
        """Wait for more text. Ends the reply where there is none."""
        if self._over:
            raise _Cut
        yield

    def expect(self, literal: str, unnamed: bool = False) -> Steps:
        """Read exactly this.   unnamed: it belongs to a call whose name is not known."""
        while len(self._text) < len(literal):
            if not literal.startswith(self._text):
                self._refuse(repr(literal))
            yield from self.more()
        if not self._text.startswith(literal):
            self._refuse(repr(literal))
        self._unnamed += self.take(len(literal)) if unnamed else ""
        if not unnamed:
            self.take(len(literal))

    def upto(self, mark: str) -> Generator[None, None, str]:
        """Read as far as `mark`, and over it."""
        while mark not in self._text:
            yield from self.more()
        found = self.take(self._text.index(mark))
        self.take(len(mark))
        return found

    def say(self, text: str) -> None:
        """This is content."""
        if text:
            self._content.append(text)
            self._events.append(ContentDelta(text))

    def rest(self) -> Steps:
        """All that is left is content."""
        while True:
            self.say(self.take(len(self._text)))
            if self._over:
                return
            yield

    def begin(self, name: str) -> None:
        """A call of this name begins."""
        call = ToolCall(id=self._new_id(), name=name, arguments="", complete=False)
        self._unnamed, self._arguments = "", []
        self._calls.append(call)
        self._events.append(CallStart(len(self._calls) - 1, call.id, name))

    def argue(self, text: str) -> None:
        """More of the arguments."""
        if text:
            self._arguments.append(text)
            last = self._events[-1] if self._events else None
            if isinstance(last, ArgumentsDelta):
                self._events[-1] = ArgumentsDelta(last.index, last.text + text)
            else:
                self._events.append(ArgumentsDelta(len(self._calls) - 1, text))

    def close(self) -> None:
        """The arguments are complete."""
        self._calls[-1] = msgspec.structs.replace(self._calls[-1], arguments="".join(self._arguments), complete=True)
        self._arguments = []

    def value(self) -> Steps:
        """One JSON value, to the arguments as it comes. A number or word ends in front of what cannot go on with it."""
        depth, quoted, escaped, started = 0, False, False, False
        while True:
            for at, c in enumerate(self._text):
                if quoted:
                    if escaped:
                        escaped = False
                    elif c == "\\":
                        escaped = True
                    elif c == '"':
                        quoted = False
                        if not depth:
                            return self.argue(self.take(at + 1))
                elif c == '"':
                    quoted = started = True
                elif c in _PAIRS and (c in "{[" or depth):
                    started = True
                    depth += _PAIRS[c]
                    if not depth:
                        return self.argue(self.take(at + 1))
                elif not depth and c in ",)]} \n":
                    if not started:
                        self._refuse("a JSON value")
                    return self.argue(self.take(at))
                else:
                    started = True
            self.argue(self.take(len(self._text)))
            yield from self.more()

    def _refuse(self, expected: str) -> None:
        raise ValueError(f"the reply goes on with {self._text[:40]!r} where its grammar has {expected}")
