"""A conversation that grows: what each step adds, as pieces of text and control tokens, equal to rendering the whole (H1-H3, X1-X2, X7).

    [user "hi"]                                 "<|im_start|>user\\nhi<|im_end|>\\n"
    [user "hi", assistant open]                 ... + "<|im_start|>assistant\\n"
    [user "hi", assistant "So " ⟨drawn⟩]        ... + "So " + ⟨drawn⟩ + "<|im_end|>\\n"

pieces: str (plain text, never a control token), int (a control token), Drawn (ids that a model drew, kept as they are). Parts of
contents that a model drew are rendered as a private-use placeholder and, once more, as their text: only if both renderings agree are their
ids kept. Knows templates and tokenizers; what a state holds, and what it does when the past was rewritten, is its owner's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.text.chat import Marks, _spellings, _template
from phloem.runtime.text.joint import SharedBeginnings, cut_at_blank
from phloem.runtime.text.template import ChatTemplate

if TYPE_CHECKING:
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Before", "Drawn", "Markup", "Message", "Piece", "cut_at_blank"]


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Ids that a model drew, and their text."""

    ids: tuple[int, ...]
    text: str


Piece = str | int | Drawn
Before = Literal["start", "control", "drawn", "text"]
"""What stands before a text run: nothing at all, a control token, drawn tokens, or committed text that ends where blanks begin (X2)."""

PLACEHOLDERS = (0xF0000, 0x100000)
MAX_DRAWN = 0xFF00
PROBE = "The quick  brown fox,\n\n\tjumps over 12345 lazy dogs.  It's 3.14 o'clock \n (see x_y[0]);  naïve café — 東京 is  far.\r\n    def f(a, b):\n        return a+b  "


@dataclass(frozen=True, slots=True)
class Message:
    """content: strings that the program wrote and Drawn parts, in order.   extra: further keys that templates read."""

    role: str
    content: tuple[str | Drawn, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(part if isinstance(part, str) else part.text for part in self.content)


@dataclass(frozen=True, slots=True)
class Rendered:
    """text: marked, drawn parts as placeholders.   drawn: placeholder -> part.   marks: what wraps spellings of control tokens.
    base: number of the first placeholder.
    """

    text: str
    drawn: Mapping[str, Drawn]
    marks: Marks
    base: int


class Markup:
    """Of one tokenizer and one template.

    template: a name or a source; None is the model's own.   variables: more names for it.   All methods are pure, but that one thread at a time may call them: what
    texts share is encoded once.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, template: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._wanted, self._variables = template, dict(variables or {})
        self._control = {tokenizer.token_to_id(s): token for s, token in tokenizer.control_tokens.items()}
        self.spellings = _spellings(tuple(tokenizer.control_tokens))
        run, behind = tokenizer.encode_run, tokenizer.encode_continuation
        self._encoders = {
            "start": SharedBeginnings(lambda text: run(text, True), behind),
            "control": SharedBeginnings(lambda text: run(text, False), behind),
            "behind": SharedBeginnings(behind, behind),
        }

    @property
    def has_template(self) -> bool:
        return self._wanted is not None or bool(self.tokenizer.templates)

    # ---- rendering ------------------------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], *, opened: Message | None = None, tools: Any = None) -> Rendered:
        """The conversation, and behind it a message that is not over: its opening and what there is of its content (H2).

        Raises InvalidRequestError with the template's words.
        """
        if opened is None:
            return self._rendered(messages, None, False, tools)
        if opened.role == "assistant":
            ready = self._rendered(messages, None, True, tools, also=opened)
            if not messages or ready.text != self._rendered(messages, None, False, tools, also=opened).text:
                return self._with_content(ready, messages, opened)
        return self._with_content(self._rendered(messages, opened.role, False, tools, also=opened), messages, opened)

    def _with_content(self, ready: Rendered, messages: Sequence[Message], opened: Message) -> Rendered:
        text, drawn = [ready.text], dict(ready.drawn)
        number = sum(isinstance(part, Drawn) for m in messages for part in m.content)
        for part in opened.content:
            if isinstance(part, str):
                text.append(ready.marks.mark(part))
            else:
                name = chr(ready.base + number)
                text.append(name)
                drawn[name] = part
                number += 1
        return Rendered("".join(text), drawn, ready.marks, ready.base)

    def _rendered(
        self, messages: Sequence[Message], opened: str | None, generate: bool, tools: Any, also: Message | None = None
    ) -> Rendered:
        template = _template(self.tokenizer, self._wanted, tools)
        marks, base = self._marks([*messages, also] if also is not None else messages, tools)
        end = chr(base + MAX_DRAWN)
        parts = [part for m in messages for part in m.content if isinstance(part, Drawn)]

        def contents(kept: set[int], lenient: bool) -> list[dict[str, Any]]:
            made, number = [], 0
            for m in messages:
                texts = []
                for part in m.content:
                    if isinstance(part, str):
                        texts.append(marks.mark_special(part) if lenient and m.role == "assistant" else marks.mark(part))
                    else:
                        texts.append(chr(base + number) if number in kept else part.text)
                        number += 1
                made.append({"role": m.role, "content": "".join(texts), **_marked(m.extra, marks)})
            if opened is not None:
                made.append({"role": opened, "content": end})
            return made

        def rendered(kept: set[int], lenient: bool) -> str:
            text = self._call(template, contents(kept, lenient), generate, _marked(tools, marks))
            if opened is None:
                return text
            if text.count(end) != 1:
                raise InvalidRequestError(
                    f"the chat template does not write the content of a {opened!r} message once, so nothing can be generated in it.",
                    param="messages",
                    code="chat_template_error",
                )
            return text[: text.index(end)]

        lenient = self._looks_into(template, messages, marks, generate, tools)
        real = rendered(set(), lenient)
        if not parts:
            return Rendered(real, {}, marks, base)
        stripped = {i for i, part in enumerate(parts) if part.text == part.text.strip()}
        for kept in (set(range(len(parts))), stripped):
            if not kept or len(parts) >= MAX_DRAWN:
                continue
            text = rendered(kept, lenient)
            names = {chr(base + i): parts[i] for i in kept}
            if all(text.count(name) == 1 for name in names) and _substituted(text, names) == real:
                return Rendered(text, names, marks, base)
        return Rendered(real, {}, marks, base)

    def _call(self, template: ChatTemplate, messages: list[dict[str, Any]], generate: bool, tools: Any) -> str:
        if "developer" not in template.source:
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        return template.render(
            {
                **self.tokenizer.named_tokens,
                "documents": None,
                **self._variables,
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": generate,
            }
        )

    def _looks_into(
        self, template: ChatTemplate, messages: Sequence[Message], marks: Marks, generate: bool, tools: Any
    ) -> bool:
        """The template reads markup that an assistant's content spells (cuts reasoning at </think>, say), so marks change its work."""
        if not any(self.spellings.search(p) for m in messages for p in m.content if isinstance(p, str)):
            return False
        bare = [{"role": m.role, "content": m.text, **m.extra} for m in messages]
        marked = [{**b, "content": marks.mark(b["content"]), **_marked(m.extra, marks)} for b, m in zip(bare, messages)]
        return marks.unmark(self._call(template, marked, generate, _marked(tools, marks))) != self._call(
            template, bare, generate, tools
        )

    def _marks(self, messages: Sequence[Message], tools: Any) -> tuple[Marks, int]:
        """Two private-use characters, and where placeholders begin: nothing of the conversation holds any of them."""
        used = set().union(*(_characters((m.text, m.extra)) for m in messages), _characters(tools))
        free = [c for c in map(chr, range(0xE000, 0xF900)) if c not in used][:2]
        base = next((b for b in PLACEHOLDERS if not any(b <= ord(c) <= b + MAX_DRAWN for c in used)), None)
        if len(free) < 2 or base is None:
            raise InvalidRequestError(
                "the messages use every private-use character; none is left to mark contents with.", param="messages"
            )
        return Marks(self.tokenizer, *free), base

    # ---- pieces ---------------------------------------------------------------------------------------------------------

    def pieces(self, text: str, rendered: Rendered) -> list[Piece]:
        """A stretch of a rendering, split at the markup's own control tokens and at placeholders; marks are gone."""
        marks, control = rendered.marks, self.tokenizer.control_tokens
        names = "".join(map(re.escape, rendered.drawn))
        pattern = re.compile(
            f"{marks.opening}(?:{self.spellings.pattern}){marks.closing}|{marks.opening}|{marks.closing}|(?P<own>{self.spellings.pattern})"
            + (f"|(?P<drawn>[{names}])" if names else "")
        )
        found, start = list[Piece](), 0

        def run(upto: int) -> None:
            plain = marks.unmark(text[start:upto])
            if plain:
                found.append(plain)

        for match in pattern.finditer(text):
            groups = match.groupdict()
            if groups.get("own") is not None:
                run(match.start())
                own = self.tokenizer.token_to_id(control[groups["own"]].content)
                assert own is not None
                found.append(own)
            elif groups.get("drawn") is not None:
                run(match.start())
                found.append(rendered.drawn[groups["drawn"]])
            else:
                continue
            start = match.end()
        run(len(text))
        return found

    def control_pieces(self, text: str) -> list[Piece]:
        """Text whose spellings of control tokens are control tokens (X7a)."""
        found, start = list[Piece](), 0
        for match in self.spellings.finditer(text):
            if match.start() > start:
                found.append(text[start : match.start()])
            own = self.tokenizer.token_to_id(match[0])
            assert own is not None
            found.append(own)
            start = match.end()
        if start < len(text):
            found.append(text[start:])
        return found

    def encode(self, pieces: Iterable[Piece], before: Before, *, raw: bool = False) -> list[tuple[Piece, tuple[int, ...]]]:
        """Ids of each piece, neighbouring strings as one text (X1).

        raw: no template writes these pieces, so that a BOS which the tokenizer puts at the start of a text stands at position 0 (X8).
        """
        joined = list[Piece]()
        for piece in pieces:
            if isinstance(piece, str) and joined and isinstance(joined[-1], str):
                joined[-1] += piece
            elif piece != "":
                joined.append(piece)
        found = list[tuple[Piece, tuple[int, ...]]]()
        if before == "start" and raw and joined:
            bos = self.tokenizer.bos_id
            if self._adds_bos and bos is not None and joined[0] != bos:
                found.append((bos, (bos,)))
                # What a tokenizer does to the first text of all, it does behind its own BOS too.
        strip_left = False
        for i, piece in enumerate(joined):
            if isinstance(piece, int):
                found.append((piece, (piece,)))
                before, strip_left = "control", bool(self._control[piece].rstrip) if piece in self._control else False
                continue
            if isinstance(piece, Drawn):
                found.append((piece, piece.ids))
                before, strip_left = "drawn", False
                continue
            after = joined[i + 1] if i + 1 < len(joined) else None
            text = piece.lstrip() if strip_left else piece
            if isinstance(after, int) and after in self._control and self._control[after].lstrip:
                text = text.rstrip()
            strip_left = False
            if not text:
                continue
            found.append((text, tuple(self._ids(text, before))))
            before = "text"
        return found

    @cached_property
    def _adds_bos(self) -> bool:
        bos = self.tokenizer.bos_id
        return bos is not None and self.tokenizer.encode("", True, False)[:1] == [bos]

    def _ids(self, text: str, before: Before) -> list[int]:
        if self.cuts_at_blanks:
            return self._encoders[before if before in ("start", "control") else "behind"].encode(text)
        if before in ("drawn", "text"):
            return self.tokenizer.encode_continuation(text)
        return self.tokenizer.encode_run(text, before == "start")

    def spelling(self, token_id: int) -> str:
        return self.tokenizer.id_to_token(token_id) or ""

    # ---- the held tail --------------------------------------------------------------------------------------------------

    def cut(self, pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece]]:
        """What can be committed before the text is complete, and the held tail (X2)."""
        done = list(pieces)
        tail = list[Piece]()
        while done and isinstance(done[-1], str):
            tail.insert(0, done.pop())
        if not tail:
            return done, tail
        text = "".join(p for p in tail if isinstance(p, str))
        at = cut_at_blank(text) if self.cuts_at_blanks else 0
        if at:
            done.append(text[:at])
        return done, [text[at:]] if at < len(text) else []

    @property
    def cuts_at_blanks(self) -> bool:
        """Whether this tokenizer gives the same ids for a text and for its two halves, cut where a run of blanks begins. Probed once."""
        return _cuts_at_blanks(self.tokenizer)


@lru_cache(maxsize=8)
def _cuts_at_blanks(tokenizer: Tokenizer) -> bool:
    if any(re.search(r"\S\s", content) for content in tokenizer.plain_added):
        return False  # an added token would be cut in two
    whole = tokenizer.encode_run(PROBE, True)
    for match in re.finditer(r"(?<!\s)\s", PROBE):
        at = match.start()
        if at and tokenizer.encode_run(PROBE[:at], True) + tokenizer.encode_continuation(PROBE[at:]) != whole:
            return False
    return True


def _substituted(text: str, names: Mapping[str, Drawn]) -> str:
    for name, part in names.items():
        text = text.replace(name, part.text)
    return text


def _characters(value: Any) -> set[str]:
    if isinstance(value, str):
        return set(value)
    if isinstance(value, Mapping):
        return set().union(*(_characters(k) | _characters(v) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(_characters, value))
    return set()


def _marked(value: Any, marks: Marks) -> Any:
    return marks.mark(value) if value else value
