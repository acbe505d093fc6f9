"""What a program records: text, gens, selects, roles. Frozen nodes, made by the functions below, checked when made.

    "Answer: " + gen("n", int)              ->  Expr(("Answer: ", Gen[int]))
    user("hi") + assistant(gen("reply"))    ->  Expr((RoleOpen, "hi", RoleClose, RoleOpen, Gen[str], RoleClose))

A `Gen[T]` is both the expression that is appended and the key to its value: `s[gen] -> T` (V1). Knows no state and no engine; what
a type means is types.py's. Each node knows the line that made it (U5).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from phloem.runtime.engine.select import Method
from phloem.runtime.errors import InvalidRequestError, PhloemError
from phloem.runtime.request import GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from phloem.lang.tools import Reply
    from phloem.lang.types import Shape

__all__ = [
    "REGEX_BOOL", "REGEX_FLOAT", "REGEX_INT", "REGEX_STR", "Expr", "Gen", "Node", "Part", "Plain", "Ref", "RoleClose", "RoleOpen", "Select", "Special", "assistant", "assistant_begin", "assistant_end", "caller", "checked_sampling", "gen", "gen_int", "gen_string", "plain", "ref", "role",
    "select", "special", "system", "system_begin", "system_end", "tool", "user", "user_begin", "user_end",
]  # fmt: skip

T = TypeVar("T")

REGEX_INT = r"-?(0|[1-9][0-9]{0,18})"
REGEX_FLOAT = r"-?(0|[1-9][0-9]{0,15})\.[0-9]{1,15}"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"'
"""What gen(dtype=…) and SGLang's programs use, without trailing blanks: V3's open end says when a value is over."""

SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "stop",
    "stop_token_ids", "keep_stop", "ignore_eos", "logit_bias", "allowed_token_ids", "skip_special_tokens",
)  # fmt: skip
_HOW = ("strict", "json_whitespace", "jump_forward", "open_end")
_REFUSED = {
    "stop_regex": "say it as a grammar: regex=…, or stop= with the strings themselves",
    "image": "this model reads text only",
    "video": "this model reads text only",
    "separate_reasoning": "read the text, or give the reasoning a gen of its own",
    "position_ids_offset": "positions follow from the tokens here",
    "logprob_start_len": "ask `engine.score` for logprobs of a prompt",
}


def checked_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams(**given), made once for what was asked before: programs of a batch ask the same."""
    items = tuple((word, type(value), value) for word, value in given.items())  # the types, since 4 == 4.0 and 1 == True
    return _made_sampling(items) if all(kind in _SIMPLE for _, kind, _ in items) else SamplingParams(**given)


_SIMPLE = frozenset({int, float, str, bool, type(None)})


@lru_cache(maxsize=256)
def _made_sampling(items: tuple[tuple[str, type, Any], ...]) -> SamplingParams:
    return SamplingParams(**{word: value for word, _, value in items})


def caller() -> str:
    """ "file.py:31" of the nearest frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("phloem.lang"):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def located(error: PhloemError, at: str, name: str | None = None) -> PhloemError:
    error.at, error.name = at, name
    error.args = (f"{short(at)}: {error.message}",)
    return error


def short(at: str) -> str:
    return at.rsplit("/", 1)[-1]


class Node:
    """Something to append. `at`: the line that made it."""

    __slots__ = ("at",)

    at: str

    def __add__(self, other: Part | Expr) -> Expr:
        return Expr((self,)) + other

    def __radd__(self, other: str) -> Expr:
        return Expr((other,)) + self


Part = str | Node


class Expr:
    """A chain of parts, appended in order."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts

    def __add__(self, other: Part | Expr) -> Expr:
        return Expr(self.parts + parts_of(other))

    def __radd__(self, other: Part) -> Expr:
        return Expr(parts_of(other) + self.parts)

    def __repr__(self) -> str:
        return " + ".join(repr(p) for p in self.parts)


def parts_of(value: object) -> tuple[Part, ...]:
    """Raises InvalidRequestError for what cannot be appended."""
    if isinstance(value, Expr):
        return value.parts
    if isinstance(value, (str, Node)):
        return (value,)
    if value is None:
        return ()
    raise located(
        InvalidRequestError(
            f"{str(value)[:40]!r} is of type {type(value).__name__} and cannot be appended; expected text, a gen, a select, a role, or a sum of "
            "those. Append str(value), or ref(handle) for what a gen gave."
        ),
        caller(),
    )


class Plain(Node):
    """Text in which nothing is control text, whatever the program's `control_text` says (X7a)."""

    __slots__ = ("text",)

    def __init__(self, text: str, at: str) -> None:
        self.text, self.at = text, at


class Special(Node):
    """One control token, by its spelling (X7a)."""

    __slots__ = ("text",)

    def __init__(self, text: str, at: str) -> None:
        self.text, self.at = text, at


class Ref(Node):
    """The value of a gen as text, without reading it."""

    __slots__ = ("key",)

    def __init__(self, key: str | Gen[Any] | Select[Any], at: str) -> None:
        self.key, self.at = key, at


class RoleOpen(Node):
    __slots__ = ("role",)

    def __init__(self, role: str, at: str) -> None:
        self.role, self.at = role, at

    def __repr__(self) -> str:
        return f"<{self.role}>"


class RoleClose(Node):
    __slots__ = ("role",)

    def __init__(self, role: str, at: str) -> None:
        self.role, self.at = role, at

    def __repr__(self) -> str:
        return f"</{self.role}>"


class Gen(Node, Generic[T]):
    """Generate here. See `gen`.

    sampling: the arguments given, of SamplingParams' names.   grammar: None is free text.   shape: makes the value.
    timeout: seconds.   check, retries, feedback, keep: U7.   tools, tool_choice: U3.
    """

    __slots__ = (
        "check", "feedback", "grammar", "keep", "n", "name", "priority", "retries", "sampling", "shape", "template", "timeout", "tool_choice", "tools",
    )  # fmt: skip

    name: str | None
    n: int
    sampling: dict[str, Any]
    template: SamplingParams
    grammar: GrammarSpec | None
    shape: Shape
    timeout: float | None
    check: Callable[[Any], Any] | None
    retries: int
    feedback: bool
    keep: Literal["path", "dialogue"]
    priority: int
    tools: tuple[Any, ...]
    tool_choice: Any

    def __repr__(self) -> str:
        return f"gen({self.name!r})" if self.name else "gen()"


class Select(Node, Generic[T]):
    """Choose here. See `select`.   choices: the texts.   values: what each is to the caller.   temperature, seed: Q5."""

    __slots__ = ("choices", "method", "name", "sampling", "timeout", "values")

    def __init__(
        self, name: str | None, choices: list[str], values: list[Any], method: Method, sampling: dict[str, Any], timeout: float | None, at: str
    ) -> None:  # fmt: skip
        self.name, self.choices, self.values, self.method = name, choices, values, method
        self.sampling, self.timeout, self.at = sampling, timeout, at

    def __repr__(self) -> str:
        return f"select({self.name!r}, {self.choices!r})"


@overload
def gen(
    name: str | None, type: type[T], *, n: Literal[1] | None = None, tools: None = None, choices: None = None, check: Callable[[T], Any] | None = None,
    **options: Any,
) -> Gen[T]: ...  # fmt: skip
@overload
def gen(
    name: str | None = None, type: int | None = None, *, n: Literal[1] | None = None, tools: None = None, **options: Any
) -> Gen[str]: ...
@overload
def gen(name: str | None = None, type: int | None = None, *, tools: Sequence[Any], **options: Any) -> Gen[Reply]: ...
@overload
def gen(name: str | None = None, type: int | None = None, *, n: int, **options: Any) -> Gen[list[str]]: ...
@overload
def gen(name: str | None, type: Any, **options: Any) -> Gen[Any]: ...
def gen(
    name: str | None = None,
    type: Any = None,
    *,
    max_tokens: int | None = None,
    n: int | None = None,
    choices: Any = None,
    choices_method: Any = None,
    dtype: Any = None,
    regex: str | None = None,
    json_schema: Any = None,
    json_object: bool = False,
    grammar: Any = None,
    structural_tag: Any = None,
    tools: Sequence[Any] | None = None,
    tool_choice: Any = "auto",
    return_logprob: bool | None = None,
    logprobs: Any = None,
    top_logprobs_num: int | None = None,
    top_logprobs: int | None = None,
    return_text_in_logprobs: bool | None = None,
    timeout: float | None = None,
    check: Callable[[Any], Any] | None = None,
    retries: int = 0,
    feedback: bool = False,
    keep: Literal["path", "dialogue"] = "path",
    priority: int = 0,
    **options: Any,
) -> Any:
    """Generate here; `s[name]`, or `s[handle]`, is the value.

    type: what the value is: int, float, bool, str, IntRange, Literal, Enum, a pydantic model, a dataclass, a TypedDict, list[T], dict, a
        union; the output is constrained to it. An integer here is `max_tokens`, as in SGLang.   n: so many samples, a list of values.
    choices: is `select`.   dtype, regex, json_schema, json_object, grammar (EBNF, or Lark after %llguidance), structural_tag: constrain the text.
    Sampling: max_tokens, min_tokens, temperature, top_p, top_k, min_p, frequency_penalty, presence_penalty, repetition_penalty, seed, stop,
        stop_token_ids, keep_stop, ignore_eos, logit_bias, allowed_token_ids; what is not given is the run's.
    return_logprob (logprobs), top_logprobs_num (top_logprobs): for `get_meta_info`.   strict, json_whitespace, jump_forward, open_end: see GrammarOptions.
    timeout: seconds.   check(value): False, a message, or an exception is a failure: `retries` more tries, on a fork; feedback: told why;
        keep="dialogue": the path goes on in the fork.   tools, tool_choice: gives a Reply.
    Raises InvalidRequestError, GrammarError at this line for what is out of range or cannot be.
    """
    at = caller()
    try:
        return _gen(
            at, name, type, max_tokens, n, choices, choices_method, dtype, {"regex": regex, "json_schema": json_schema, "json_object": json_object, "grammar": grammar, "structural_tag": structural_tag}, tools, tool_choice, return_logprob or logprobs, top_logprobs_num or top_logprobs,
            timeout, (check, retries, feedback, keep), priority, options,
        )  # fmt: skip
    except PhloemError as error:
        raise located(error, at, name) from error.__cause__


def _gen(
    at: str, name: str | None, type_: Any, max_tokens: int | None, n: int | None, choices: Any, method: Any, dtype: Any, kinds: dict[str, Any], tools: Any,
    tool_choice: Any, logprobs: Any, top: int | None, timeout: float | None, checked: tuple[Any, ...], priority: int, options: dict[str, Any],
) -> Any:  # fmt: skip
    from phloem.lang import types

    if isinstance(type_, int) and not isinstance(type_, bool) and not isinstance(type_, type):
        if max_tokens is not None:
            raise InvalidRequestError(f"max_tokens was given twice: {type_} and {max_tokens}.", param="max_tokens")
        type_, max_tokens = None, type_
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError(f"the name of a gen is {name!r}; expected a string.", param="name")
    for word, instead in _REFUSED.items():
        if options.pop(word, None) is not None:
            raise InvalidRequestError(f"{word} is not supported: {instead}.", param=word)
    how = {word: options.pop(word) for word in _HOW if word in options}
    sampling = {word: value for word, value in options.items() if word in SAMPLING and value is not None}
    unknown = [word for word in options if word not in SAMPLING]
    if unknown:
        raise TypeError(f"gen() has no argument {unknown[0]!r}")
    if max_tokens is not None:
        sampling["max_tokens"] = max_tokens
    if choices is not None:
        beside = {
            "type": type_,
            "dtype": dtype,
            "tools": tools,
            "check": checked[0],
            "n": None if n == 1 else n,
            **kinds,
            **how,
        }
        given = [word for word, value in beside.items() if value is not None and value is not False]
        if given:
            raise InvalidRequestError(
                f"choices leaves nothing for {given[0]} to say: it scores a list of texts. Give one of the two.", param=given[0]
            )
        return _select(at, name, choices, method or "token_length_normalized", sampling, timeout)
    if method is not None:
        raise InvalidRequestError("choices_method was given without choices.", param="choices_method")
    node: Gen[Any] = Gen.__new__(Gen)
    node.at, node.name = at, name
    node.n = _positive("n", 1 if n is None else n)
    if logprobs or top:
        sampling["logprobs"] = logprobs if isinstance(logprobs, str) else "model"
        sampling["top_logprobs"] = top or 0
    node.sampling = sampling
    node.template = checked_sampling(sampling)
    node.shape = types.shape_of(type_, dtype, kinds, how)
    node.grammar = node.shape.grammar
    node.timeout = None if timeout is None else _seconds(timeout)
    node.check, node.retries, node.feedback, node.keep = checked
    node.priority = priority
    _positive("retries", node.retries, 0)
    if node.check is not None and node.n > 1:
        raise InvalidRequestError("check goes with one sample; with n, check the list that is the value.", param="check")
    node.tools, node.tool_choice = tuple(tools or ()), tool_choice
    if node.tools and (type_ is not None or node.grammar is not None or node.n > 1):
        raise InvalidRequestError("tools goes with no type, constraint or n: its value is a Reply.", param="tools")
    return node


def _positive(name: str, value: Any, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 4096:
        raise InvalidRequestError(f"{name} is {value!r}; expected an integer from {low} to 4096.", param=name)
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidRequestError(f"timeout is {value!r}; expected seconds above 0.", param="timeout")
    return float(value)


def gen_int(name: str | None = None, **options: Any) -> Gen[str]:
    """SGLang's: the text of an integer. (`gen(name, int)` gives an int.)"""
    return gen(name, None, dtype=int, **options)


def gen_string(name: str | None = None, **options: Any) -> Gen[str]:
    """SGLang's: a JSON string, quotes included."""
    return gen(name, None, dtype=str, **options)


def select(
    name: str | None = None,
    choices: Any = None,
    temperature: float = 0.0,
    choices_method: Method | Any = "token_length_normalized",
    *,
    seed: int | None = None,
    timeout: float | None = None,
) -> Select[Any]:
    """Choose the likeliest of some texts by their log-probabilities; nothing is drawn token by token.

    choices: texts, or Literal[…], or an Enum class.   choices_method: see structured choices (Q4).   temperature: 0 takes the best; above,
    one is drawn by softmax(sum / temperature). Raises InvalidRequestError at this line for no choices or an empty one.
    """
    at = caller()
    sampling: dict[str, Any] = {"temperature": temperature}
    if seed is not None:
        sampling["seed"] = seed
    try:
        return _select(at, name, choices, choices_method, sampling, timeout)
    except PhloemError as error:
        raise located(error, at, name) from None


def _select(
    at: str, name: str | None, choices: Any, method: Any, sampling: dict[str, Any], timeout: float | None
) -> Select[Any]:
    from phloem.lang import types
    from phloem.lang.choices import check_method

    texts, values = types.choices_of(choices)
    SamplingParams(**{k: v for k, v in sampling.items() if k in ("temperature", "seed")})
    return Select(name, texts, values, check_method(method), sampling, None if timeout is None else _seconds(timeout), at)


def special(text: str) -> Special:
    """One control token of the model's, by its spelling. Appending fails unless it is exactly one (X7a)."""
    return Special(text, caller())


def plain(text: str) -> Plain:
    """Text that is text, also in a program with control_text=True."""
    return Plain(text, caller())


def ref(key: str | Gen[Any] | Select[Any]) -> Ref:
    """The value of an earlier gen, appended without reading it: the program does not wait for it."""
    return Ref(key, caller())


def role(name: str, content: Any = None) -> Expr:
    """A message of any role that the template knows."""
    at = caller()
    return Expr((RoleOpen(name, at), *parts_of(content), RoleClose(name, at)))


def system(content: Any = None) -> Expr:
    return role("system", content)


def user(content: Any = None) -> Expr:
    return role("user", content)


def assistant(content: Any = None) -> Expr:
    return role("assistant", content)


def tool(content: Any = None) -> Expr:
    return role("tool", content)


def _begin(name: str) -> Callable[[], RoleOpen]:
    def begin() -> RoleOpen:
        return RoleOpen(name, caller())

    begin.__name__ = f"{name}_begin"
    return begin


def _end(name: str) -> Callable[[], RoleClose]:
    def end() -> RoleClose:
        return RoleClose(name, caller())

    end.__name__ = f"{name}_end"
    return end


system_begin, system_end = _begin("system"), _end("system")
user_begin, user_end = _begin("user"), _end("user")
assistant_begin, assistant_end = _begin("assistant"), _end("assistant")
