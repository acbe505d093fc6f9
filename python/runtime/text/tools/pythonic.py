"""pythonic: [f(a=1, b="x"), g()] as the whole reply, as Llama 3.2 and 4, OLMo 3 and others write calls.

A value is JSON, but for True, False and None where the value itself is one of them. A reply that begins with `[name(` is a call.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phloem.runtime.errors import GrammarError, InvalidRequestError
from phloem.runtime.request import GrammarSpec
from phloem.runtime.text.tools.base import CallPlan, Choice, Message, Tool
from phloem.runtime.text.tools.lark import arguments_of, content_json, embed, literal
from phloem.runtime.text.tools.reader import Reader, Steps
from phloem.runtime.text.tools.template_use import TemplateUse

__all__ = ["Pythonic"]

_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON = {True: "True", False: "False", None: "None"}


class Pythonic:
    """Follows base.ToolFormat."""

    name = "pythonic"

    def __init__(self, use: TemplateUse) -> None:
        self._use = use

    @staticmethod
    def writes(template: str) -> bool:
        return re.search(r"\[\w+\(\w+\s*=", template) is not None

    def prepare(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], list[dict[str, Any]] | None]:
        return self._use.prepare(messages, tools, self.spell)

    def spell(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls (name, JSON of the arguments) as this format writes them."""
        return "[" + ", ".join(f"{name}({_keywords(arguments)})" for name, arguments in calls) + "]"

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
        rules: list[str] = []
        dropped: list[tuple[str, str]] = []
        for n, tool in enumerate(choice.tools):
            found = arguments_of(tool)
            rules += _argument_rules(n, tool, found.schema, json_whitespace)
            dropped += found.dropped
        names = [tool.name for tool in choice.tools]
        starts = f"\\[({'|'.join(names)})\\("
        more = ' (", " call)*' if parallel and not choice.once else ""
        # The opener is one lexeme: cut at "[", the longer lexeme would win, and that is TEXT.
        calls = f'first{more} "]"'
        if choice.mode == "required":
            start = [f"start: {calls}"]
        elif content is not None:  # an object: no `[` begins it
            start = [f"start: content | {calls}", f"content: {content_json(content, json_whitespace)}"]
        else:
            start = [f"start: TEXT | {calls}", f"TEXT: /(?s:.*)/ & ~/{starts}(?s:.*)/"]
        first, call = (
            " | ".join(f'{literal(f"{mark}{name}(")} first_{n}_0 ")"' for n, name in enumerate(names)) for mark in ("[", "")
        )
        return CallPlan(
            grammar=GrammarSpec(
                kind="lark",
                source="\n".join([*start, f"first: {first}", f"call: {call}", *rules]),
                jump_forward=jump_forward,
                trusted=trusted,
            ),
            new_parser=lambda new_id: PythonicReader(tuple(f"[{name}(" for name in names), new_id),
            dropped=tuple(dropped),
        )


def _argument_rules(n: int, tool: Tool, schema: Mapping[str, Any], whitespace: Any) -> list[str]:
    """`first_n_0`: the properties in their order, those that are not required or not.

    rest_i is what follows once something was written, first_i while nothing was.
    """
    properties, required = _properties(tool, schema)
    defs = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    rules = []
    for i, (key, value) in enumerate(properties.items()):
        rules.append(f"value_{n}_{i}: {_value(value, defs, whitespace)}")
        rest = f"value_{n}_{i} rest_{n}_{i + 1}"
        head, next_one = literal(f"{key}="), literal(f", {key}=")
        skip_first, skip_rest = ("", "") if key in required else (f" | first_{n}_{i + 1}", f" | rest_{n}_{i + 1}")
        rules += [f"first_{n}_{i}: {head} {rest}{skip_first}", f"rest_{n}_{i}: {next_one} {rest}{skip_rest}"]
    last = len(properties)
    return [*rules, f'first_{n}_{last}: ""', f'rest_{n}_{last}: ""']


def _properties(tool: Tool, schema: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    where = f"tools.{tool.number}.function.parameters"
    other = set(schema) - {"type", "properties", "required", "additionalProperties", "$defs"}
    if schema.get("type") != "object" or other:
        raise GrammarError(
            f"the parameters of tool {tool.name!r} cannot be written as keywords: expected an object with properties"
            + (f", without {', '.join(sorted(other))}." if other else "."),
            param=where,
            code="invalid_json_schema",
        )
    properties, required = dict(schema.get("properties", {})), set(schema.get("required", ()))
    bad = [key for key in [*properties, *required] if not key.isidentifier() or keyword.iskeyword(key)]
    if bad or not required <= set(properties):
        key = bad[0] if bad else next(iter(required - set(properties)))
        raise InvalidRequestError(
            f"the pythonic form cannot write the argument {key!r} of tool {tool.name!r}: expected properties whose names are Python's.",
            param=f"{where}/properties/{key}",
        )
    return {key: value for key, value in properties.items() if value is not False}, required


def _value(schema: Any, defs: Mapping[str, Any], whitespace: Any) -> str:
    if not isinstance(schema, dict):
        return embed(dict(defs), whitespace)
    if set(schema) == {"anyOf"}:
        return " | ".join(f"({_value(option, defs, whitespace)})" for option in schema["anyOf"])
    if "enum" in schema and all(value is None or isinstance(value, (bool, str)) for value in schema["enum"]):
        return " | ".join(literal(_python(value)) for value in schema["enum"])
    if schema == {"type": "boolean"}:
        return '"True" | "False"'
    if schema == {"type": "null"}:
        return '"None"'
    return embed({**schema, **defs}, whitespace)


def _python(value: Any) -> str:
    return _PYTHON[value] if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _keywords(arguments: str) -> str:
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments  # a cut-off call: the text is all there is
    return ", ".join(f"{key}={_python(item)}" for key, item in value.items()) if isinstance(value, dict) else arguments


class PythonicReader(Reader):
    """openers: `[name(` of every tool."""

    def __init__(self, openers: tuple[str, ...], new_id: Callable[[], str]) -> None:
        self._openers = openers
        super().__init__(new_id)

    def _read(self) -> Steps:
        while not self.over and any(o.startswith(self.text) and o != self.text for o in self._openers):
            yield
        if not self.text.startswith(self._openers):
            return (yield from self.rest())
        yield from self.expect("[", unnamed=True)
        while True:
            self.begin((yield from self.upto("(")))
            yield from self._keywords()
            self.close()
            while not self.text:
                yield from self.more()
            if self.text[0] == "]":
                self.take(1)
                return
            yield from self.expect(", ", unnamed=True)

    def _keywords(self) -> Steps:
        before = "{"
        while True:
            while not self.text:
                yield from self.more()
            if self.text[0] == ")":
                self.take(1)
                return self.argue("{}" if before == "{" else "}")
            if before == ", ":
                yield from self.expect(", ")
            key = yield from self.upto("=")
            self.argue(f'{before}"{key}": ')
            before = ", "
            while not self.text:
                yield from self.more()
            if self.text[0] in "TFN":
                word = next(w for w in _WORDS if w[0] == self.text[0])
                yield from self.expect(word)
                self.argue(_WORDS[word])
            else:
                yield from self.value()
