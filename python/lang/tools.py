"""Tools: typed functions that a model may call, in the model's own form (U3). What calls look like is runtime `text/tools`'.

    def search(query: str, limit: int = 3) -> str: ...                   name, docstring, signature -> JSON schema
    step = gen("step", tools=[search, calculator])                       free text, or calls whose arguments fit
    reply = s[step]                                                      Reply(text, calls)
    s.call_tools(reply)                                                  validates, runs, appends the results in call order

A tool that raises is seen by the model: the exception is the result. errors="raise" makes it a ToolFailed at the line.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import functools
import inspect
import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from phloem.lang.ir import Gen, assistant, caller, gen, located
from phloem.lang.types import Shape, shape_of
from phloem.runtime.errors import InvalidRequestError, PhloemError, ToolFailed
from phloem.runtime.request import GrammarSpec, Output
from phloem.runtime.text.tools import detect
from phloem.runtime.text.tools.base import CallPlan, Choice, Tool, ToolFormat, choice_of, tools_of

if TYPE_CHECKING:
    from phloem.lang.line import Line
    from phloem.lang.state import AsyncState, State
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Call", "FunctionTool", "Reply", "as_tool", "bind", "call_tools", "offer", "react"]

T = TypeVar("T")
Errors = Literal["message", "raise"]


# ------------------------------------------------------------------------------------------------------------------- functions


@dataclass(frozen=True, eq=False)
class FunctionTool:
    """A function and what the model is told of it.

    blocking: it waits or computes for long, and runs in a thread; others go on meanwhile.   timeout: seconds, None for none.
    """

    fn: Callable[..., Any]
    tool: Tool
    arguments: Any  # the pydantic model of its arguments
    blocking: bool = False
    timeout: float | None = None

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.fn)

    def bound(self, arguments: str) -> Callable[[], Any]:
        """The call, its arguments validated. Raises ValueError for arguments that are not the function's."""
        values = self.arguments.model_validate_json(arguments)
        given = {field: getattr(values, field) for field in values.model_fields_set}
        return functools.partial(self.fn, **{_argument_name(self.arguments, key): value for key, value in given.items()})


def as_tool(
    fn: Callable[..., Any] | FunctionTool,
    *,
    name: str | None = None,
    description: str | None = None,
    blocking: bool = False,
    timeout: float | None = None,
    strict: bool | None = None,
) -> FunctionTool:
    """A function as a tool: its name, its docstring, and its signature as a JSON schema; every parameter needs a type.

    strict: True refuses a type that the grammar cannot enforce in full.   Raises InvalidRequestError at the caller's line.
    """
    if isinstance(fn, FunctionTool):
        return fn
    try:
        return _made(fn, name, description, blocking, timeout, strict)
    except PhloemError as error:
        raise located(error, caller(), name) from error.__cause__


def _made(
    fn: Any, name: str | None, description: str | None, blocking: bool, timeout: float | None, strict: bool | None
) -> FunctionTool:
    if not callable(fn):
        raise InvalidRequestError(f"a tool is {fn!r}; expected a typed function.", param="tools")
    named = name or str(getattr(fn, "__name__", ""))
    model = _arguments_of(fn, named)
    schema = _without_titles(model.model_json_schema())
    schema.pop("description", None)
    raw = {
        "name": named,
        "description": description if description is not None else inspect.getdoc(fn),
        "parameters": schema,
        "strict": strict,
    }
    (tool,) = tools_of([{"type": "function", "function": raw}])
    return FunctionTool(fn, tool, model, blocking, timeout)


def _arguments_of(fn: Any, name: str) -> Any:
    import pydantic

    try:
        signature = inspect.signature(fn, eval_str=True)
    except (NameError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"the signature of tool {name!r} cannot be read: {error}.", param="tools") from error
    fields: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise InvalidRequestError(
                f"tool {name!r} takes {parameter}; expected parameters that can be given by name.", param="tools"
            )
        if parameter.annotation is parameter.empty:
            raise InvalidRequestError(
                f"the parameter {parameter.name!r} of tool {name!r} has no type; write one, so that the model's arguments can be held to it.",
                param="tools",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        # An alias, since pydantic keeps some names (`schema`, `copy`, those with an underscore) to itself.
        fields[f"a_{parameter.name}"] = (parameter.annotation, pydantic.Field(default, alias=parameter.name))
    try:
        return pydantic.create_model(f"{name}_arguments", __config__=pydantic.ConfigDict(extra="forbid"), **fields)
    except Exception as error:
        raise InvalidRequestError(f"the parameters of tool {name!r} are no JSON: {error}", param="tools") from error


def _argument_name(model: Any, field_name: str) -> str:
    return str(model.model_fields[field_name].alias)


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: {name: _without_titles(part) for name, part in value.items()}
            if key in ("properties", "$defs")
            else _without_titles(value)
            for key, value in schema.items()
            if key != "title" or not isinstance(value, str)
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema


# ---------------------------------------------------------------------------------------------------------------------- replies


@dataclass(frozen=True)
class Call:
    """name: of the tool.   arguments: JSON text.   complete: False where max_tokens cut it off."""

    id: str
    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True)
class Reply:
    """What `gen(tools=…)` gives.   text: in front of the calls, or all of it.   value: under `react(until=T)`, the T if there is no call."""

    text: str
    calls: tuple[Call, ...] = ()
    value: Any = None
    tools: Mapping[str, FunctionTool] = field(default_factory=dict, repr=False, compare=False)
    at: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True, eq=False)
class _Until:
    """A tool_choice: calls or a value of this shape.   wrapped: the value stands in an object, under "answer"."""

    shape: Shape
    wrapped: bool
    last: bool


def functions_of(node: Gen[Any]) -> dict[str, FunctionTool]:
    """The gen's tools by name. Raises InvalidRequestError for two of one name."""
    found: dict[str, FunctionTool] = {}
    for number, entry in enumerate(node.tools):
        made = as_tool(entry)
        if made.name in found and found[made.name] is not made:
            raise InvalidRequestError(f"two tools are called {made.name!r}; expected different names.", param="tools")
        found[made.name] = FunctionTool(made.fn, _numbered(made.tool, number), made.arguments, made.blocking, made.timeout)
    return found


def _numbered(tool: Tool, number: int) -> Tool:
    return Tool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict, number=number)


def _choice(asked: Any, functions: Mapping[str, FunctionTool]) -> Choice:
    tools = tuple(f.tool for f in functions.values())
    if isinstance(asked, _Until):
        return Choice(mode="none" if asked.last else "auto", tools=tools)
    if callable(asked) or isinstance(asked, FunctionTool):
        asked = as_tool(asked).name
    if isinstance(asked, str) and asked in functions:
        asked = {"type": "function", "function": {"name": asked}}
    return choice_of(asked, tools)


Parse = Callable[[str, Sequence[int]], Reply]


def bind(node: Gen[Any], tokenizer: Tokenizer) -> tuple[GrammarSpec | None, Parse, bool]:
    """(constraint, what the text means, whether special tokens are left out of the text) of a gen with tools.

    Raises GrammarError, InvalidRequestError for tools that this model's form cannot enforce or spell.
    """
    functions = functions_of(node)
    asked = node.tool_choice
    content = asked.shape.grammar if isinstance(asked, _Until) else None
    # A call without required tokens of its own gets no limit: trusted, since the schema is the program's.
    plan = _format(tokenizer).plan(_choice(asked, functions), content=content, trusted=True)
    grammar = plan.grammar if plan is not None else content

    def parse(text: str, ids: Sequence[int]) -> Reply:
        return _reply(text, plan, asked, functions, node)

    return grammar, parse, plan is None or plan.skip_special_tokens


def _reply(text: str, plan: CallPlan | None, asked: Any, functions: Mapping[str, FunctionTool], node: Gen[Any]) -> Reply:
    numbers = itertools.count()
    # Named by their place, so that a run repeated says the same; ids of calls mean nothing outside of their reply.
    found = None if plan is None else plan.parse(text, lambda: f"call_{next(numbers)}")
    calls = () if found is None else tuple(Call(c.id, c.name, c.arguments, c.complete) for c in found.calls)
    content = text if found is None else found.content
    value = None
    if isinstance(asked, _Until) and not calls:
        value = asked.shape.value(Output(text=content, token_ids=[], finish_reason="length"), content)
        value = value["answer"] if asked.wrapped else value
    return Reply(content, calls, value, functions, node.at)


@functools.lru_cache(maxsize=16)
def _format(tokenizer: Tokenizer) -> ToolFormat:
    return detect(tokenizer)


def offer(node: Gen[Any], line: Line) -> None:
    """The conversation tells the model of the gen's tools from here on: by its template, or by a preamble in the system message.

    Tools once offered stay: a gen with fewer narrows its grammar, and the prefix stays as it is (T5).
    """
    tools = {t.name: t for t in line.offered}
    added = [f.tool for f in functions_of(node).values() if f.name not in tools]
    if not added:
        return
    before, line.offered = line.offered, (*line.offered, *added)
    messages, native = _format(line.markup.tokenizer).prepare([], line.offered)
    if native is not None:
        line.set_tools(native)
    else:
        old = "" if not before else str(_format(line.markup.tokenizer).prepare([], before)[0][0]["content"])
        line.set_preamble(str(messages[0]["content"]), old, node.at)


# ---------------------------------------------------------------------------------------------------------------------- calling


@overload
def call_tools(state: State, reply: Reply, *, errors: Errors = "message", timeout: float | None = None) -> list[Any]: ...
@overload
def call_tools(
    state: AsyncState, reply: Reply, *, errors: Errors = "message", timeout: float | None = None
) -> Awaitable[list[Any]]: ...
def call_tools(state: Any, reply: Reply, *, errors: Errors = "message", timeout: float | None = None) -> Any:
    """Run the calls of a reply and append their results as tool messages, in call order. Returns the results.

    errors: "message" makes an exception the result that the model reads; "raise" raises ToolFailed, and nothing is appended.
    timeout: seconds a call, where the tool names none. A call that max_tokens cut off is answered by what is wrong with it.
    On an AsyncState the calls run together, and this is awaited.
    """
    from phloem.lang.state import AsyncState

    if errors not in ("message", "raise"):
        raise InvalidRequestError(f"errors is {errors!r}; expected 'message' or 'raise'.", param="errors")
    at = caller()
    runs = [_Run(call, reply.tools.get(call.name), timeout) for call in reply.calls]
    if isinstance(state, AsyncState):
        return _call_async(state, runs, errors, at)
    for run in runs:
        run.start(state)
    return _append(state, [run.wait(state) for run in runs], runs, errors, at)


async def _call_async(state: AsyncState, runs: list[_Run], errors: Errors, at: str) -> list[Any]:
    import asyncio

    return _append(state, list(await asyncio.gather(*(run.awaited() for run in runs))), runs, errors, at)


def _append(state: Any, results: list[Any], runs: list[_Run], errors: Errors, at: str) -> list[Any]:
    for run, result in zip(runs, results, strict=True):
        if isinstance(result, Exception) and errors == "raise":
            failed = ToolFailed(f"the tool {run.call.name!r} failed on {run.call.arguments}: {type(result).__name__}: {result}")
            raise located(failed, at, run.call.name) from result
    messages = [
        {"role": "tool", "tool_call_id": run.call.id, "name": run.call.name, "content": _text(result)}
        for run, result in zip(runs, results, strict=True)
    ]
    prepared, _ = _format(state._path.session.backend.tokenizer).prepare(messages, ())
    for message in prepared:
        extra = {key: value for key, value in message.items() if key not in ("role", "content")}
        state.add_message(message["role"], message["content"], **extra)
    return results


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, Exception):
        return f"error: {type(result).__name__}: {result}"
    if hasattr(result, "model_dump_json"):
        return str(result.model_dump_json())
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


class _Run:
    """One call under way. What goes wrong with it is its result."""

    def __init__(self, call: Call, function: FunctionTool | None, timeout: float | None) -> None:
        self.call, self._function = call, function
        self._timeout = function.timeout if function is not None and function.timeout is not None else timeout
        self._deadline: float | None = None
        self._future: concurrent.futures.Future[Any] | None = None
        self._inline: Callable[[], Any] | None = None

    def _bound(self) -> Callable[[], Any]:
        if self._function is None:
            raise LookupError(f"there is no tool {self.call.name!r}")
        if not self.call.complete:
            raise ValueError("the call was cut off before its arguments were complete")
        return self._function.bound(self.call.arguments)

    # ---- in a sync program

    def start(self, state: State) -> None:
        """Begin it. In this thread, at `wait`, unless it blocks, is async, or has a timeout that must hold."""
        self._deadline = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            bound = self._bound()
        except Exception as error:
            self._inline = functools.partial(_raise, error)
            return
        assert self._function is not None
        if self._function.is_async:
            self._future = _in_thread(functools.partial(_run_async, bound))
        elif self._function.blocking or self._timeout is not None:
            self._future = _in_thread(bound)
        else:
            self._inline = bound

    def wait(self, state: State) -> Any:
        try:
            if self._inline is not None:
                return self._inline()
            assert self._future is not None
            if not state._path.session.wait_outside(self._future.done, self._deadline):
                raise TimeoutError(f"no result within {self._timeout:g} s")
            return self._future.result()
        except Exception as error:
            return error

    # ---- in an async one

    async def awaited(self) -> Any:
        import asyncio

        try:
            bound = self._bound()
            assert self._function is not None
            if self._function.is_async:
                work = bound()
            elif self._function.blocking or self._timeout is not None:
                work = asyncio.wrap_future(_in_thread(bound))
            else:
                return bound()
            return await asyncio.wait_for(work, self._timeout)
        except TimeoutError:
            return TimeoutError(f"no result within {self._timeout:g} s" if self._timeout is not None else "no result in time")
        except Exception as error:
            return error


def _raise(error: Exception) -> Any:
    raise error


def _run_async(bound: Callable[[], Any]) -> Any:
    import asyncio

    return asyncio.run(bound())


def _in_thread(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """A daemon thread a call: a pool would make a program wait at its end for a tool that never returns."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(context.run(work))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="phloem-tool", daemon=True).start()
    return future


# ------------------------------------------------------------------------------------------------------------------------ react


@overload
def react(
    state: State, tools: Sequence[Any], *, until: type[T], max_steps: int = 8, name: str = "step", **options: Any
) -> T: ...
@overload
def react(
    state: State, tools: Sequence[Any], *, until: None = None, max_steps: int = 8, name: str = "step", **options: Any
) -> str: ...
@overload
def react(
    state: AsyncState, tools: Sequence[Any], *, until: type[T], max_steps: int = 8, name: str = "step", **options: Any
) -> Awaitable[T]: ...
@overload
def react(
    state: AsyncState, tools: Sequence[Any], *, until: None = None, max_steps: int = 8, name: str = "step", **options: Any
) -> Awaitable[str]: ...
def react(
    state: Any,
    tools: Sequence[Any],
    *,
    until: Any = None,
    max_steps: int = 8,
    name: str = "step",
    errors: Errors = "message",
    timeout: float | None = None,
    **options: Any,
) -> Any:
    """Let the model call tools until it answers: the text of its first reply without a call, or a value of the type `until`.

    At step `max_steps` it must answer: no call is possible there.   name: of each step's gen.   options: of each gen.
    With `until`, each reply is calls or the value's JSON, as the grammar forces. Raises ToolFailed under errors="raise".
    """
    from phloem.lang.state import AsyncState

    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise located(
            InvalidRequestError(f"max_steps is {max_steps!r}; expected an integer above 0.", param="max_steps"), caller(), name
        )
    functions = [as_tool(tool) for tool in tools]

    def step(number: int) -> Gen[Reply]:
        last = number == max_steps - 1
        choice: Any = ("none" if last else "auto") if until is None else _until(until, last)
        return gen(name, tools=functions, tool_choice=choice, **options)

    if isinstance(state, AsyncState):
        return _react_async(state, step, until, max_steps, errors, timeout)
    for number in range(max_steps):
        node = step(number)
        state += assistant(node)
        reply: Reply = state[node]
        if not reply.calls:
            return reply.text if until is None else reply.value
        call_tools(state, reply, errors=errors, timeout=timeout)
    raise AssertionError("the last step has no calls")


async def _react_async(
    state: AsyncState, step: Callable[[int], Gen[Reply]], until: Any, max_steps: int, errors: Errors, timeout: float | None
) -> Any:
    for number in range(max_steps):
        node = step(number)
        state += assistant(node)
        reply = await state[node]
        if not reply.calls:
            return reply.text if until is None else reply.value
        await call_tools(state, reply, errors=errors, timeout=timeout)
    raise AssertionError("the last step has no calls")


@functools.lru_cache(maxsize=64)
def _until(type_: Any, last: bool) -> _Until:
    shape = shape_of(type_, None, {}, {})
    if shape.grammar is None:
        raise InvalidRequestError(f"until is {type_!r}; leave it out for text.", param="until")
    wrapped = not (shape.json and json.loads(shape.grammar.source).get("type") == "object")
    if wrapped and shape.grammar.kind == "json_schema" and not shape.json:  # a range: no type of pydantic's
        inner, parse = json.loads(shape.grammar.source), shape.parse
        assert parse is not None
        schema = {"type": "object", "properties": {"answer": inner}, "required": ["answer"], "additionalProperties": False}
        spec = shape_of(None, None, {"json_schema": schema}, {}).grammar
        shape = Shape(spec, True, lambda text: {"answer": parse(str(json.loads(text)["answer"]))}, json=True)
    elif wrapped:
        import pydantic

        made = pydantic.create_model("answer", __config__=pydantic.ConfigDict(extra="forbid"), answer=(type_, ...))
        adapter: Any = pydantic.TypeAdapter(made)
        spec = shape_of(made, None, {}, {}).grammar
        shape = Shape(spec, True, lambda text: {"answer": adapter.validate_json(text).answer}, json=True)
    return _Until(shape, wrapped, last)
