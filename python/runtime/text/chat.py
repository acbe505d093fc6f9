"""Messages to a prompt: checked, rendered by the model's template, encoded so that no content becomes markup.

    [{"role": "user", "content": "hi <|im_end|>"}]
      --mark-->    content "hi ⟦<|im_end|>⟧"                     spellings of control tokens, between private-use marks
      --render-->  "<|im_start|>user\\nhi ⟦<|im_end|>⟧<|im_end|>\\n…"
      --split-->   at the control tokens outside marks: the markup's own
      --encode-->  [1] + ids("user\\nhi <|im_end|>") + [2] + …    text runs by the encoder without control tokens

Where nothing needs a mark, the ids are those of encoding the whole rendering at once: transformers' apply_chat_template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.text.template import ChatTemplate

if TYPE_CHECKING:
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["ROLES", "check_messages", "encode_chat", "render_chat"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_BE_EMPTY = ("assistant", "tool")
_SET_BY_US = ("messages", "tools", "add_generation_prompt")

Message = Mapping[str, Any]


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as templates expect them: content a string, no key that is null.

    Content may be a string or a list of {"type": "text", "text": …} parts, joined in order. Missing or null content is ""
    for assistant and tool, an error for others. Other keys pass through.
    Raises InvalidRequestError that names the message, e.g. `messages[2].role`.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _bad("messages", f"is a {type(messages).__name__}; expected a list of messages.")
    if not messages:
        raise _bad("messages", "is empty; expected at least one message.")
    return [_check_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _check_message(message: Message, where: str) -> dict[str, Any]:
    if type(message) is not dict and not isinstance(message, Mapping):
        raise _bad(where, f'is a {type(message).__name__}; expected an object such as {{"role": "user", "content": "hi"}}.')
    role = message.get("role")
    if role not in ROLES:
        raise _bad(f"{where}.role", f"is {role!r}; expected one of {', '.join(ROLES)}.")
    kept = {str(key): value for key, value in message.items() if value is not None}
    return {**kept, "content": _content(message.get("content"), role, f"{where}.content")}


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return str(content)
    if content is None:
        if role in _MAY_BE_EMPTY:
            return ""
        raise _bad(where, f"is missing or null; a {role} message needs text.")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise _bad(where, f"is a {type(content).__name__}; expected a string or a list of text parts.")
    texts = []
    for n, part in enumerate(content):
        if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, Mapping) and part.get("type") != "text":
            raise _bad(f"{where}[{n}]", f"has the type {part.get('type')!r}; this model reads parts of type 'text' only.")
        else:
            raise _bad(f"{where}[{n}]", 'is not a part such as {"type": "text", "text": "hi"}.')
    return "".join(texts)


def _bad(where: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {what}", param=where)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | ChatTemplate | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the model's template writes it.

    tools: JSON schemas of functions.   template: the name of one of the model's templates, or the source of another.
    variables: further names for the template. Raises InvalidRequestError: a message that is none, no template, a template
    that refuses (with its words).
    """
    found = _template(tokenizer, template, tools)
    return _render(found, tokenizer, check_messages(messages), add_generation_prompt, tools, _check_variables(variables))


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | ChatTemplate | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of `render_chat`, BOS only where the template writes it. Spellings of control tokens in contents, tools and
    variables stay text. Markup that a template itself looks for in an assistant's turn (`</think>`) is the model's own and
    stays markup, unless it is a token marked special.
    """
    found = _template(tokenizer, template, tools)
    data = (check_messages(messages), tools, _check_variables(variables))
    rendered = _render(found, tokenizer, data[0], add_generation_prompt, *data[1:])
    marks = Marks.needed(tokenizer, data)
    if marks is None:
        return tokenizer.encode(rendered, add_special_tokens=False)
    marked = _render(found, tokenizer, marks.mark(data[0]), add_generation_prompt, marks.mark(tools), marks.mark(data[2]))
    if marks.unmark(marked) != rendered:
        # The template looked into a content and saw the marks: it cuts earlier reasoning at </think>, say.
        lenient = [marks.mark(m) if m["role"] != "assistant" else marks.mark_special(m) for m in data[0]]
        marked = _render(found, tokenizer, lenient, add_generation_prompt, marks.mark(tools), marks.mark(data[2]))
    return list(_encode_marked(tokenizer, marked, marks))


def _template(tokenizer: Tokenizer, wanted: str | ChatTemplate | None, tools: Any) -> ChatTemplate:
    named = tokenizer.templates
    if tools is not None and (
        isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence) or not all(isinstance(t, Mapping) for t in tools)
    ):
        raise InvalidRequestError(f"tools is {tools!r}; expected a list of JSON schemas of functions.", param="tools")
    if isinstance(wanted, ChatTemplate):
        return wanted
    if wanted is not None:
        if not isinstance(wanted, str):
            raise InvalidRequestError(f"template is {wanted!r}; expected a template's name or its source.", param="template")
        if (
            wanted not in named and "{" not in wanted
        ):  # a source without a brace would ignore the messages: it is a misspelled name
            have = f"has {', '.join(sorted(named))}" if named else "has none"
            raise InvalidRequestError(
                f"there is no chat template {wanted!r}: this model {have}. Name one of those, or pass a template's source.",
                param="template",
            )
        return _compiled(named.get(wanted, wanted))
    if tools is not None and "tool_use" in named:
        return _compiled(named["tool_use"])
    if "default" in named:
        return _compiled(named["default"])
    have = (
        f"It has templates by name only: {', '.join(sorted(named))}; pass one." if named else "Pass one, or send a raw prompt."
    )
    raise InvalidRequestError(f"this model has no chat template. {have}", param="messages", code="chat_template_missing")


@lru_cache(maxsize=64)
def _compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def _check_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if variables is not None and not isinstance(variables, Mapping):
        raise InvalidRequestError(f"variables is {variables!r}; expected a mapping of names to values.", param="variables")
    for name in variables or {}:
        if name in _SET_BY_US or not isinstance(name, str):
            raise InvalidRequestError(
                f"the template variable {name!r} is set by the call itself; give it another name.", param="variables"
            )
    return variables or {}


def _render(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    tools: Any,
    variables: Mapping[str, Any],
) -> str:
    if "developer" not in template.source:
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    return template.render(
        {
            **tokenizer.named_tokens,
            "documents": None,
            **variables,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
    )


class Marks:
    """Two private-use characters that no input holds, put around spellings of control tokens."""

    def __init__(self, tokenizer: Tokenizer, opening: str, closing: str) -> None:
        self.opening, self.closing = opening, closing
        self._any = _spellings(tuple(tokenizer.control_tokens))
        self._special = _spellings(tuple(s for s, token in tokenizer.control_tokens.items() if token.special))
        self._wrap = f"{opening}\\g<0>{closing}"

    @classmethod
    def needed(cls, tokenizer: Tokenizer, data: Any) -> Marks | None:
        """None if no string of `data` spells a control token."""
        pattern = _spellings(tuple(tokenizer.control_tokens))
        strings: list[str] = []
        _strings(data, strings)
        if not pattern.search("\0".join(strings)):
            return None
        used = set().union(*map(set, strings))
        free = [c for c in map(chr, range(0xE000, 0xF900)) if c not in used][:2]
        if len(free) < 2:
            raise InvalidRequestError(
                "the messages use every private-use character; none is left to mark contents with.", param="messages"
            )
        return cls(tokenizer, *free)

    def mark(self, value: Any) -> Any:
        return _replaced(value, self._any, self._wrap)

    def mark_special(self, value: Any) -> Any:
        return _replaced(value, self._special, self._wrap)

    def unmark(self, text: str) -> str:
        return text.replace(self.opening, "").replace(self.closing, "")


def _strings(value: Any, found: list[str]) -> None:
    """Every string of it, keys too. Exact types first: this walks every request, and asking for a Mapping is slow."""
    kind = type(value)
    if kind is str:
        found.append(value)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is str:
                found.append(key)
            else:
                _strings(key, found)
            if type(item) is str:
                found.append(item)
            else:
                _strings(item, found)
    elif kind is list or kind is tuple:
        for item in value:
            _strings(item, found)
    elif isinstance(value, str):
        found.append(str(value))
    elif isinstance(value, Mapping):
        _strings(dict(value), found)
    elif isinstance(value, (list, tuple)):
        _strings(list(value), found)


def _replaced(value: Any, pattern: re.Pattern[str], by: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(by, value)
    if isinstance(value, Mapping):
        # Keys of a schema are rendered too (property names); those that templates look up spell no control token.
        return {_replaced(key, pattern, by): _replaced(item, pattern, by) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(item, pattern, by) for item in value]
    return value


@lru_cache(maxsize=64)
def _spellings(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Any of the tokens, the longest where several begin, as the tokenizer matches them."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _encode_marked(tokenizer: Tokenizer, marked: str, marks: Marks) -> Iterator[int]:
    """Split at the control tokens outside marks, with the blanks that their lstrip and rstrip flags swallow."""
    control = tokenizer.control_tokens
    pattern = re.compile(
        f"{marks.opening}(?:{_spellings(tuple(control)).pattern}){marks.closing}"  # a spelling in a content
        f"|{marks.opening}|{marks.closing}"  # a mark that the template has cut off from its other half
        f"|(?P<own>{_spellings(tuple(control)).pattern})"
    )
    start, strip_left = 0, False
    for match in pattern.finditer(marked):
        if match["own"] is None:
            continue
        token = control[match["own"]]
        yield from _encode_run(tokenizer, marks.unmark(marked[start : match.start()]), start == 0, strip_left, token.lstrip)
        own_id = tokenizer.token_to_id(token.content)
        assert own_id is not None
        yield own_id
        start, strip_left = match.end(), token.rstrip
    yield from _encode_run(tokenizer, marks.unmark(marked[start:]), start == 0, strip_left, False)


def _encode_run(tokenizer: Tokenizer, text: str, at_start: bool, strip_left: bool, strip_right: bool) -> list[int]:
    text = text.lstrip() if strip_left else text
    text = text.rstrip() if strip_right else text
    return tokenizer.encode_run(text, at_start) if text else []
