"""What stands on one path, from text to tokens (K1, X, H): immutable segments, the text not yet tokenised, the messages.

    head ◄─ markup ◄─ drawn ◄─ literal        segments: a child points at its parent's, a fork copies nothing
    held: ["\\nQ: ", "why?"]                   text and control tokens not yet committed; joined and encoded once, before a draw (X1, X3)
    messages, opened, shown                   the conversation, the message under way, and what of the rendering is on the path (H1, H2)

Ids are the truth. No engine, no variables, no waiting: that is path.py's. Templates and tokenizers are runtime/text's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.text.markup import Before, Drawn, Markup, Message, Piece, Rendered

__all__ = ["Line", "Segment", "kept_ids"]

Origin = Literal["markup", "literal", "drawn", "forced", "tool"]


class Segment:
    """ids, and the text they stand for. length: of the whole path up to its end.   name, at: of the gen that drew it."""

    __slots__ = ("at", "ids", "length", "name", "origin", "parent", "text")

    def __init__(
        self, parent: Segment | None, ids: tuple[int, ...], origin: Origin, text: str, name: str | None = None, at: str | None = None
    ) -> None:  # fmt: skip
        self.parent, self.ids, self.origin, self.text, self.name, self.at = parent, ids, origin, text, name, at
        self.length: int = len(ids) + (parent.length if parent is not None else 0)

    def path(self) -> list[Segment]:
        """From the root to this one."""
        found, at = list[Segment](), self
        while True:
            found.append(at)
            if at.parent is None:
                return found[::-1]
            at = at.parent


class Opened:
    """A message under way. started: its opening is on the path, since something is drawn in it.   inherited: it was opened before the fork."""

    __slots__ = ("at", "extra", "inherited", "parts", "role", "started")

    def __init__(self, role: str, at: str, extra: Mapping[str, Any]) -> None:
        self.role, self.at, self.extra = role, at, extra
        self.parts: tuple[str | Drawn, ...] = ()
        self.started = self.inherited = False

    def copy(self) -> Opened:
        made = Opened(self.role, self.at, self.extra)
        made.inherited = self.inherited
        made.parts, made.started = self.parts, self.started
        return made

    def add(self, part: str | Drawn) -> None:
        if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
            self.parts = (*self.parts[:-1], self.parts[-1] + part)  # a control token may be spelled across two literals
        else:
            self.parts = (*self.parts, part)

    def message(self) -> Message:
        return Message(self.role, self.parts, self.extra)


class Line:
    """history: "template" follows a template that rewrites the past, "append" keeps the path (H5).

    rewinds: (tokens kept, tokens dropped) of each time the past was rewritten.
    """

    __slots__ = (
        "_base", "_before", "_chat_root", "_chat_start", "_held", "_ids", "_marks", "_places", "_raw", "_raw_in_chat", "_shown", "_stale", "head", "history", "journal",
        "markup", "messages", "offered", "opened", "rewinds", "tools",
    )  # fmt: skip

    def __init__(self, markup: Markup, history: Literal["template", "append"] = "template") -> None:
        self.markup, self.history = markup, history
        self.head: Segment | None = None
        self.messages: tuple[Message, ...] = ()
        self._places: tuple[str, ...] = ()  # the line of each message, for errors
        self.opened: Opened | None = None
        self.tools: Any = None
        self.offered: tuple[Any, ...] = ()  # what lang/tools.py has told the model of
        self.rewinds: tuple[tuple[int, int], ...] = ()
        self._held: list[Piece] = []
        self._before: Before = "start"
        self._raw = True  # what is held has no template
        self._shown = ""  # of the rendering: on the path or held
        self._stale = False  # messages are ahead of `_shown`
        self._marks: Any = None
        self._base = 0
        self._chat_root: Segment | None = None  # where the conversation began
        self._chat_start: Before | None = None
        self._raw_in_chat = False
        self._ids: tuple[int, ...] | None = None
        # What was appended since the fork, for a join that appends it elsewhere (F5); None where there was no fork.
        self.journal: list[str | int | Drawn | Message] | None = None

    def copy(self) -> Line:
        """O(1): a fork."""
        made: Line = Line.__new__(Line)
        made.markup, made.history, made.head = self.markup, self.history, self.head
        made.messages, made._places, made.tools, made.rewinds = self.messages, self._places, self.tools, self.rewinds
        made.offered = self.offered
        made.opened = None if self.opened is None else self.opened.copy()
        made._held, made._before, made._raw = self._held.copy(), self._before, self._raw
        made._shown, made._stale, made._marks, made._base = self._shown, self._stale, self._marks, self._base
        made._chat_root, made._chat_start, made._raw_in_chat = self._chat_root, self._chat_start, self._raw_in_chat
        made._ids = self._ids
        made.journal = None if self.journal is None else self.journal.copy()
        return made

    # ---- what is appended -----------------------------------------------------------------------------------------------

    def literal(self, text: str) -> None:
        opened = self.opened
        self._note(text)
        if opened is None:
            self._free(text)
            return
        opened.add(text)
        if opened.started:
            self._held.append(text)
            self._shown += self._marks.mark(text)

    def control(self, text: str) -> None:
        """Text whose spellings of control tokens are control tokens (X7a)."""
        pieces = self.markup.control_pieces(text)
        opened = self.opened
        if opened is None:
            for piece in pieces:
                self._note(piece)
                self._free(piece)
            return
        for piece in pieces:
            if not isinstance(piece, int):
                self.literal(piece if isinstance(piece, str) else piece.text)
                continue
            self._note(piece)
            opened.add(Drawn((piece,), self.markup.spelling(piece)))
            if opened.started:
                self._held.append(piece)
                self._shown += self._placeholder(-1)

    def _note(self, entry: str | int | Drawn) -> None:
        if self.journal is not None and (self.opened is None or self.opened.inherited):
            self.journal.append(entry)

    def replay(self, journal: Sequence[str | int | Drawn | Message], at: str) -> None:
        """Append what another branch appended: text as text, drawn ids as ids (F5)."""
        for entry in journal:
            if isinstance(entry, str):
                self.literal(entry)
            elif isinstance(entry, int):
                self.control(self.markup.spelling(entry))
            elif isinstance(entry, Drawn):
                self.ready()
                self.draw(entry.ids, entry.text, "", None, at)
            else:
                self.add_message(entry, at)

    def _free(self, piece: Piece) -> None:
        if self._stale:
            self.settle()
        if self._chat_start is not None:
            self._raw_in_chat = True
        self._held.append(piece)

    def open(self, role: str, at: str, extra: Mapping[str, Any] | None = None) -> None:
        if self.opened is not None:
            raise InvalidRequestError(
                f"a {role!r} message is opened inside a {self.opened.role!r} message; close that one first.", param="role"
            )
        if not self.markup.has_template:
            raise InvalidRequestError(
                "this model has no chat template, so roles mean nothing to it. Append plain text.", param="role"
            )
        if self._chat_start is None:
            self.commit()
            self._chat_root, self._chat_start, self._raw = self.head, self._before, False
        self.opened = Opened(role, at, extra or {})

    def close(self, role: str) -> None:
        opened = self.opened
        if opened is None or opened.role != role:
            have = "no message is open" if opened is None else f"a {opened.role!r} message is open"
            raise InvalidRequestError(f"a {role!r} message is closed, but {have}.", param="role")
        self.messages += (opened.message(),)
        if self.journal is not None and not opened.inherited:
            self.journal.append(opened.message())
        self._places += (opened.at,)
        self.opened, self._stale = None, True

    def add_message(self, message: Message, at: str) -> None:
        self.open(message.role, at, message.extra)
        assert self.opened is not None
        self.opened.parts = message.content
        self.close(message.role)

    def set_tools(self, tools: Any) -> None:
        """The template's `tools` from here on."""
        self.tools, self._stale = tools, True

    def set_preamble(self, text: str, before: str, at: str) -> None:
        """What the system message says of tools, for templates that read none.   before: what it said so far."""
        if self.opened is None and self._chat_start is None:
            raise InvalidRequestError("a gen with tools stands in no message; put it into assistant(…).", param="tools")
        first = self.messages[0] if self.messages and self.messages[0].role in ("system", "developer") else None
        if first is None:
            self.messages, self._places = (Message("system", (text,)), *self.messages), (at, *self._places)
        else:
            parts = first.content
            own = bool(parts) and bool(before) and isinstance(parts[-1], str) and parts[-1].endswith(before)
            if own:
                said = str(parts[-1]).removesuffix(before)
                parts = (*parts[:-1], said + text)
            else:
                parts = (*parts, f"\n\n{text}" if first.text else text)
            self.messages = (Message(first.role, parts, first.extra), *self.messages[1:])
        self._stale = True

    # ---- from text to tokens --------------------------------------------------------------------------------------------

    def ready(self) -> tuple[int, ...]:
        """Everything committed, for a draw behind it: the ids of the path (X3)."""
        opened = self.opened
        if opened is not None and not opened.started:
            opened.started = self._stale = True
        self.commit()
        return self.ids()

    def commit(self) -> None:
        if self._stale:
            self.settle()
        if self._held:
            self._append(self._held)
            self._held = []

    def cut(self) -> None:
        """Before a fork: what can be committed is, the tail stays text (X2)."""
        if self._stale:
            self.settle()
        if self._held:
            done, self._held = self.markup.cut(self._held)
            if done:
                self._append(done)

    def ids(self) -> tuple[int, ...]:
        """Of the committed path."""
        if self._ids is None:
            self._ids = () if self.head is None else _ids_of(self.head)
        return self._ids

    def joint(self, text: str) -> list[int]:
        """Ids of the held text together with `text`, behind the committed path; commits nothing (Q2)."""
        return [i for _, ids in self.markup.encode([*self._held, text], self._before, raw=self._raw) for i in ids]

    def held_ids(self) -> list[int]:
        return [i for _, ids in self.markup.encode(self._held, self._before, raw=self._raw) for i in ids]

    def prepare_choice(self) -> None:
        """As `ready`, without committing the text that is held."""
        opened = self.opened
        if opened is not None and not opened.started:
            opened.started = self._stale = True
        if self._stale:
            self.settle()

    def _append(self, pieces: Sequence[Piece]) -> None:
        origin: Origin = "literal" if self._raw else "markup"
        for piece, ids in self.markup.encode(pieces, self._before, raw=self._raw):
            text = piece if isinstance(piece, str) else self.markup.spelling(piece) if isinstance(piece, int) else piece.text
            self._push(Segment(self.head, ids, origin, text))
            self._before = "text" if isinstance(piece, str) else "control" if isinstance(piece, int) else "drawn"

    def _push(self, segment: Segment) -> None:
        if self._ids is not None:
            self._ids += segment.ids
        self.head = segment

    def draw(self, ids: tuple[int, ...], text: str, rest: str, name: str | None, at: str) -> None:
        """A gen ended: ids that stay, their text, and text behind them that becomes held (X5)."""
        if ids:
            self._push(Segment(self.head, ids, "drawn", text, name, at))
            self._before = "drawn"
        opened = self.opened
        if ids:
            self._note(Drawn(ids, text))
        if opened is not None and ids:
            opened.add(Drawn(ids, text))
            self._shown += self._placeholder(-1)
        if rest:
            self.literal(rest)

    def _placeholder(self, back: int) -> str:
        assert self.opened is not None
        parts = [p for m in self.messages for p in m.content if isinstance(p, Drawn)]
        number = len(parts) + sum(isinstance(p, Drawn) for p in self.opened.parts) + back
        return chr(self._base + number)

    # ---- markup ---------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Render what the path does not show yet (H1, H2), and notice a past that changed (H5)."""
        opened = self.opened if self.opened is not None and self.opened.started else None
        rendered = self._render(opened)
        self._stale = False
        self._marks, self._base = rendered.marks, rendered.base
        text, shown = rendered.text, self._shown
        self._shown = text
        if text.startswith(shown):
            self._held += self.markup.pieces(text[len(shown) :], rendered)
        elif self.history == "template" and not self._raw_in_chat:
            self._rewrite(rendered)
        else:
            self._held += self.markup.pieces(_behind_content(text, rendered, self.messages), rendered)

    def _render(self, opened: Opened | None) -> Rendered:
        try:
            return self.markup.render(self.messages, opened=None if opened is None else opened.message(), tools=self.tools)
        except InvalidRequestError as error:
            error.at = self._refused(opened)
            raise

    def _refused(self, opened: Opened | None) -> str:
        """The line of the first message that the template refuses (H6)."""
        for n in range(1, len(self.messages) + 1):
            try:
                self.markup.render(self.messages[:n], tools=self.tools)
            except InvalidRequestError:
                return self._places[n - 1]
        return opened.at if opened is not None else self._places[-1]

    def _rewrite(self, rendered: Rendered) -> None:
        assert self._chat_start is not None
        root = self._chat_root
        pieces = self.markup.pieces(rendered.text, rendered)
        tail = list[Piece]()
        while pieces and isinstance(pieces[-1], str):  # it goes on with what is appended next (X1)
            tail.insert(0, pieces.pop())
        start = 0 if root is None else root.length
        old = self.ids()[start:]
        named = {id(s.ids): s for s in ([] if self.head is None else self.head.path()) if s.origin == "drawn"}
        self.head, self._before, self._ids = root, self._chat_start, None
        for piece, ids in self.markup.encode(pieces, self._before):
            text = piece if isinstance(piece, str) else self.markup.spelling(piece) if isinstance(piece, int) else piece.text
            origin: Origin = "drawn" if isinstance(piece, Drawn) else "markup"
            before = named.get(id(ids))
            self.head = Segment(self.head, ids, origin, text, before.name if before else None, before.at if before else None)
            self._before = "text" if isinstance(piece, str) else "control" if isinstance(piece, int) else "drawn"
        self._held = tail
        new = self.ids()[start:]
        common = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
        if common < len(old):
            self.rewinds += ((start + common, len(old) - common),)

    # ---- reading --------------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Everything on the path and held, markup included; of a message not yet rendered, nothing but its content."""
        if self._stale:
            self.settle()
        parts = [] if self.head is None else [s.text for s in self.head.path()]
        parts += [p if isinstance(p, str) else self.markup.spelling(p) if isinstance(p, int) else p.text for p in self._held]
        if self.opened is not None and not self.opened.started:
            parts += [p if isinstance(p, str) else p.text for p in self.opened.parts]
        return "".join(parts)

    def all_ids(self) -> list[int]:
        """The committed ids and those that the held text would become."""
        if self._stale:
            self.settle()
        return [*self.ids(), *self.held_ids()]

    def segments(self) -> list[Segment]:
        return [] if self.head is None else self.head.path()


def _ids_of(head: Segment) -> tuple[int, ...]:
    found: list[int] = []
    for segment in head.path():
        found += segment.ids
    return tuple(found)


def _behind_content(text: str, rendered: Rendered, messages: Sequence[Message]) -> str:
    """history="append": of the last message only what the template writes behind its content."""
    last = messages[-1].content[-1] if messages and messages[-1].content else ""
    for name, part in rendered.drawn.items():
        if part is last:
            return text[text.index(name) + 1 :]
    spelled = rendered.marks.mark(last) if isinstance(last, str) else last.text
    at = text.rfind(spelled) if spelled else -1
    stripped = spelled.strip()
    if at < 0 and stripped:
        at, spelled = text.rfind(stripped), stripped
    return text[at + len(spelled) :] if at >= 0 else ""


def kept_ids(markup: Markup, ids: Sequence[int], text: str, *, hidden: bool = True, continues: bool = True) -> tuple[int, str]:
    """X5: how many leading ids lie wholly within `text`, which a stop string cut, and the text of it that they do not cover."""
    detokenizer = markup.tokenizer.detokenizer(hidden, continuation=continues)
    count, length, seen = 0, 0, 0
    for n, token in enumerate(ids, start=1):
        seen += len(detokenizer.push((token,)))
        if seen > len(text):
            break
        if not detokenizer.is_open:
            count, length = n, seen
    return count, text[length:]
