"""A Python type as a constraint, and the text that obeyed it as a value of the type (V1, V2). Knows no state and no engine.

    int            regex -?(0|[1-9]…)          open end   int(text)
    IntRange(0,10) {"type": "integer", …}      open end   int(text)
    Literal["a"]   choices                     open end   the literal
    Person         its JSON Schema                        validated by pydantic

SGLang's spellings (dtype=, regex=, json_schema=) constrain the same way and keep their value, a str, partial if it was cut.
"""

from __future__ import annotations

import enum
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, get_args, get_origin

from phloem.lang.ir import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from phloem.runtime.engine.constraint import grammar_spec
from phloem.runtime.errors import IncompleteOutput, InvalidRequestError
from phloem.runtime.request import GrammarSpec, Output

__all__ = ["FloatRange", "IntRange", "Shape", "choices_of", "shape_of"]

OPEN_ENDED = ("regex", "choices")


class _Range:
    """Made by IntRange and FloatRange."""

    __slots__ = ("high", "low", "name")

    def __init__(self, name: str, low: float | None, high: float | None) -> None:
        self.name, self.low, self.high = name, low, high

    def __repr__(self) -> str:
        return f"{self.name}({self.low}, {self.high})"


if TYPE_CHECKING:

    def IntRange(low: int | None = None, high: int | None = None) -> type[int]: ...
    def FloatRange(low: float | None = None, high: float | None = None) -> type[float]: ...
else:

    def IntRange(low=None, high=None):
        """An integer from low to high, both included: `gen("mark", IntRange(0, 10))`."""
        return _range("IntRange", low, high, int)

    def FloatRange(low=None, high=None):
        """A number from low to high, both included."""
        return _range("FloatRange", low, high, (int, float))


def _range(name: str, low: Any, high: Any, kinds: Any) -> Any:
    for bound in (low, high):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, kinds)):
            raise InvalidRequestError(f"{name} got {bound!r}; expected a number.", param="type")
    if low is not None and high is not None and low > high:
        raise InvalidRequestError(f"{name}({low}, {high}) is empty: the first bound is above the second.", param="type")
    return _Range(name, low, high)


@dataclass(frozen=True, slots=True)
class Shape:
    """grammar: None is free text.   typed: the value is of a type, and an incomplete output raises IncompleteOutput.
    parse: text of a complete output -> value; raises ValueError.   json: the text is JSON, so partial values make sense (U4).
    goes_on: whether a complete text could be the beginning of a longer one; None: never. Cut by length, it may be half a value then (V2).
    """

    grammar: GrammarSpec | None
    typed: bool
    parse: Callable[[str], Any] | None = None
    json: bool = False
    goes_on: Callable[[str], bool] | None = None

    def value(self, output: Output, text: str) -> Any:
        """Raises IncompleteOutput; a str that was asked for as SGLang does may be partial."""
        if not self.typed or self.parse is None:
            return text
        if output.finish_reason not in ("grammar", "eos", "stop_token", "stop_string", "length"):
            raise IncompleteOutput(f"the output ended by {output.finish_reason!r} before it was a value: {_tail(text)}")
        if output.finish_reason == "length" and self.goes_on is not None and self.goes_on(text):
            raise IncompleteOutput(
                f"{_tail(text)} was cut by max_tokens where it could have gone on, so it may be half a value. Raise max_tokens, or bound the type."
            )
        try:
            return self.parse(text)
        except Exception as error:
            why = "max_tokens was too small" if output.finish_reason == "length" else f"it ended by {output.finish_reason!r}"
            raise IncompleteOutput(
                f"{_tail(text)} is no complete value ({why}): {_first_line(error)}. Raise max_tokens, or bound the type."
            ) from error


def _tail(text: str) -> str:
    return repr(text if len(text) <= 60 else "…" + text[-57:])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


FREE = Shape(None, False)


def shape_of(type_: Any, dtype: Any, kinds: Mapping[str, Any], how: Mapping[str, Any]) -> Shape:
    """What `gen` was asked for. Raises InvalidRequestError, GrammarError."""
    given = {name: value for name, value in kinds.items() if value is not None and value is not False}
    asked = [*given, *(["dtype"] if dtype is not None else [])]
    if type_ is not None and asked:
        raise InvalidRequestError(f"the type and {asked[0]} were given; expected one of them.", param=asked[0])
    if type_ is not None and type_ is not str:
        return _typed(type_, tuple(sorted(how.items())))
    if len(asked) > 1:
        raise InvalidRequestError(f"{asked[0]} and {asked[1]} were given; expected one of them.", param=asked[1])
    if dtype is not None:
        given = {"regex": _regex_of_dtype(dtype)}
    if not given:
        if how:
            raise InvalidRequestError(f"{next(iter(how))} was given without a constraint.", param=next(iter(how)))
        return FREE
    ((name, value),) = given.items()
    if isinstance(value, GrammarSpec):
        return Shape(value, False)
    if name == "grammar" and isinstance(value, str) and value.lstrip().startswith("%llguidance"):
        return Shape(GrammarSpec(kind="lark", source=value, trusted=True), False)
    return Shape(_spec({name: value}, how), False, json=name in ("json_schema", "json_object"))


def _spec(kind: dict[str, Any], how: Mapping[str, Any]) -> GrammarSpec:
    options = dict(how)
    if next(iter(kind)) not in OPEN_ENDED and "open_end" not in options:
        options["open_end"] = False
    spec = grammar_spec(**kind, **{"open_end": True, "trusted": True, **options})
    assert spec is not None
    return spec


def _regex_of_dtype(dtype: Any) -> str:
    found = {int: REGEX_INT, "int": REGEX_INT, float: REGEX_FLOAT, "float": REGEX_FLOAT, bool: REGEX_BOOL, "bool": REGEX_BOOL, str: REGEX_STR, "str": REGEX_STR}  # fmt: skip
    try:
        return found[dtype]
    except (KeyError, TypeError):
        raise InvalidRequestError(f"dtype is {dtype!r}; expected int, float, bool or str.", param="dtype") from None


def _typed(type_: Any, how: tuple[tuple[str, Any], ...]) -> Shape:
    try:
        return _shape_of_type(type_, how)
    except TypeError:  # unhashable
        return _shape_of_type.__wrapped__(type_, how)


@lru_cache(maxsize=512)
def _shape_of_type(type_: Any, how_items: tuple[tuple[str, Any], ...]) -> Shape:
    how = dict(how_items)
    if type_ is bool:
        return Shape(_spec({"regex": "(true|false|True|False)"}, how), True, lambda text: text.lower() == "true")
    if type_ is int:
        return Shape(_spec({"regex": REGEX_INT}, how), True, int, goes_on=_is_open_number)
    if type_ is float:
        return Shape(_spec({"regex": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?"}, how), True, float, goes_on=_ends_in_digit)
    if isinstance(type_, _Range):
        return _range_shape(type_, how)
    if get_origin(type_) is typing.Literal or (isinstance(type_, type) and issubclass(type_, enum.Enum)):
        texts, values = choices_of(type_)
        table = dict(zip(reversed(texts), reversed(values)))
        longer = {a for a in texts for b in texts if a != b and b.startswith(a)}
        return Shape(_spec({"choices": list(dict.fromkeys(texts))}, how), True, table.__getitem__, goes_on=longer.__contains__)
    return _json_shape(type_, how)


def _range_shape(range_: _Range, how: Mapping[str, Any]) -> Shape:
    schema: dict[str, Any] = {"type": "integer" if range_.name == "IntRange" else "number"}
    if range_.low is not None:
        schema["minimum"] = range_.low
    if range_.high is not None:
        schema["maximum"] = range_.high
    spec = _spec({"json_schema": schema}, {"open_end": True, **how})
    low, high = range_.low, range_.high
    convert: Callable[[str], Any] = int if range_.name == "IntRange" else float

    def parse(text: str) -> Any:
        value = convert(text)
        if (low is not None and value < low) or (high is not None and value > high):
            raise ValueError(f"{value} is outside of {range_}")
        return value

    def goes_on(text: str) -> bool:
        if range_.name != "IntRange":
            return _ends_in_digit(text)
        if not _is_open_number(text):
            return False
        bound = high if text[:1] != "-" else None if low is None else -low
        return bound is None or abs(int(text)) * 10 <= bound

    return Shape(spec, True, parse, goes_on=goes_on)


def _ends_in_digit(text: str) -> bool:
    return text.rstrip()[-1:].isdigit()


def _is_open_number(text: str) -> bool:
    """Whether an integer of these digits could have more of them."""
    return _ends_in_digit(text) and text.lstrip("-") != "0"


def _json_shape(type_: Any, how: Mapping[str, Any]) -> Shape:
    import pydantic

    try:
        adapter: Any = pydantic.TypeAdapter(type_)
        schema = adapter.json_schema()
    except Exception as error:
        raise InvalidRequestError(
            f"{type_!r} is no type that an output can be: {_first_line(error)}. Expected int, float, bool, str, IntRange, Literal, Enum, a pydantic "
            "model, a dataclass, a TypedDict, list[T], dict or a union of those.",
            param="type",
        ) from None
    spec = _spec({"json_schema": _closed(schema)}, how)
    return Shape(
        spec, True, adapter.validate_json, json=True, goes_on=_ends_in_digit
    )  # objects, lists and strings close themselves


def _closed(schema: Any) -> Any:
    """Objects with declared properties get no others: a value of the type has none, and pydantic would drop them silently."""
    if isinstance(schema, dict):
        closed = {key: _closed(value) for key, value in schema.items()}
        if (
            closed.get("type") == "object"
            and isinstance(closed.get("properties"), dict)
            and "additionalProperties" not in closed
        ):
            closed["additionalProperties"] = False
        return closed
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    return schema


def choices_of(choices: Any) -> tuple[list[str], list[Any]]:
    """Texts, and what each stands for. Raises InvalidRequestError for none, an empty one, or what is no text."""
    if get_origin(choices) is typing.Literal:
        values = list(get_args(choices))
        texts = [v if isinstance(v, str) else json.dumps(v) if isinstance(v, (bool, type(None))) else str(v) for v in values]
    elif isinstance(choices, type) and issubclass(choices, enum.Enum):
        values = list(choices)
        texts = [str(member.value) for member in values]
    elif isinstance(choices, (list, tuple)):
        values, texts = list(choices), list(choices)
    else:
        raise InvalidRequestError(
            f"choices is {choices!r}; expected a list of strings, Literal[…] or an Enum class.", param="choices"
        )
    if not texts:
        raise InvalidRequestError("choices is empty; expected at least one.", param="choices")
    for text in texts:
        if not isinstance(text, str):
            raise InvalidRequestError(f"choices holds {text!r}; expected strings.", param="choices")
        if not text:
            raise InvalidRequestError("choices holds an empty string, which has no probability. Leave it out.", param="choices")
    return texts, values
