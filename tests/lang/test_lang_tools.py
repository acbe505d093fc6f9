"""U3: typed functions become schemas, calls are validated and run, what goes wrong is said to the model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Annotated, Any, Literal

import pydantic
import pytest

from phloem.lang.ir import assistant, gen, system, user
from phloem.lang.run import function
from phloem.lang.state import AsyncState, State
from phloem.lang.testing import Scripted
from phloem.lang.tools import Reply, as_tool, react
from phloem.lang.types import IntRange
from phloem.runtime.errors import GrammarError, InvalidRequestError, ProgramError, ToolFailed


class Place(pydantic.BaseModel):
    city: str
    country: str = "FR"


def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    return a + b


def locate(place: Place, unit: Literal["km", "mi"] = "km") -> dict[str, str]:
    return {"at": f"{place.city}, {place.country}", "unit": unit}


def broken(why: str) -> str:
    raise RuntimeError(f"no {why}")


def say(*calls: tuple[str, Any], text: str = "") -> str:
    return text + "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(a)}}}\n</tool_call>' for name, a in calls
    )


def once(script: str, tools: list[Any], **options: Any) -> tuple[Reply, Any]:
    @function
    def program(s: State) -> Any:
        step = gen("step", tools=tools, max_tokens=400, **options)
        s += user("Go.") + assistant(step)
        reply = s[step]
        return reply, s.call_tools(reply) if reply.calls else None

    with Scripted({"step": script}) as backend:
        run = program.run(backend=backend)
        backend.check()
        value: tuple[Reply, Any] = run.value
        return value


def test_u3_signature_and_docstring_are_the_schema() -> None:
    def f(
        a: Annotated[int, pydantic.Field(ge=1, description="how many")], *, schema: str = "x", _b: list[Place] | None = None
    ) -> None:
        """First line.

        Second."""

    tool = as_tool(f).tool
    assert tool.name == "f" and tool.description == "First line.\n\nSecond."
    assert tool.parameters is not None
    properties = tool.parameters["properties"]
    assert properties["a"] == {"type": "integer", "minimum": 1, "description": "how many"}
    assert list(properties) == ["a", "schema", "_b"] and tool.parameters["required"] == ["a"]
    assert tool.parameters["additionalProperties"] is False
    named = as_tool(f, name="other", description="d").tool
    assert (named.name, named.description) == ("other", "d")


@pytest.mark.parametrize("bad, why", [
    (lambda x: x, "no type"), (lambda *xs: xs, "by name"), (5, "typed function"), ("f", "typed function"),
])  # fmt: skip
def test_u3_what_is_no_tool_is_refused_at_its_line(bad: Any, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        as_tool(bad, name="f")
    assert caught.value.at is not None and "test_lang_tools.py" in caught.value.at


def test_u3_calls_run_with_their_types_and_their_results_follow_in_order() -> None:
    calls = [("locate", {"place": {"city": "Paris"}, "unit": "mi"}), ("add", {"a": 3}), ("broken", {"why": "way"})]
    reply, results = once(say(*calls, text="Let me see. "), [add, locate, broken])
    assert reply.text == "Let me see. " and [c.name for c in reply.calls] == ["locate", "add", "broken"]
    assert results[0] == {"at": "Paris, FR", "unit": "mi"} and results[1] == 5
    assert isinstance(results[2], RuntimeError), "an exception is a result"


def test_u3_the_results_are_tool_messages() -> None:
    @function
    def program(s: State) -> None:
        step = gen("step", tools=[add, broken], max_tokens=400)
        s += user("Go.") + assistant(step)
        s.call_tools(s[step])
        s += assistant(gen("end"))

    with Scripted({"step": say(("add", {"a": 1}), ("broken", {"why": "luck"})), "end": "3"}) as backend:
        messages = program.run(backend=backend).messages()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert (
        messages[3]["content"]
        == "<tool_response>\n3\n</tool_response>\n<tool_response>\nerror: RuntimeError: no luck\n</tool_response>"
    )


def test_u3_errors_raise_says_which_tool_and_appends_nothing() -> None:
    @function
    def program(s: State) -> Any:
        step = gen("step", tools=[broken], max_tokens=400)
        s += user("Go.") + assistant(step)
        reply = s[step]
        before = s.tokens
        with pytest.raises(ToolFailed, match=r"broken.*no luck") as caught:
            s.call_tools(reply, errors="raise")
        assert isinstance(caught.value.__cause__, RuntimeError) and "test_lang_tools.py" in str(caught.value.at)
        return before == s.tokens

    with Scripted({"step": say(("broken", {"why": "luck"}))}) as backend:
        assert program.run(backend=backend).value


@pytest.mark.parametrize("choice", ["required", add, "add"])
def test_u3_tool_choice(choice: Any) -> None:
    reply, _ = once(say(("add", {"a": 3})), [add, locate], tool_choice=choice)
    assert reply.calls[0].arguments == '{"a": 3}'
    with pytest.raises(ProgramError, match="breaks its constraint"):
        once("No.", [add, locate], tool_choice=choice)


def test_u3_a_function_of_the_wrong_shape_never_runs() -> None:
    with pytest.raises(ProgramError, match="breaks its constraint"):
        once(say(("add", {"a": "three"})), [add])


def test_u3_a_call_that_was_cut_off_is_answered() -> None:
    @function
    def program(s: State) -> Any:
        step = gen("step", tools=[locate], max_tokens=60)
        s += user("Go.") + assistant(step)
        return s.call_tools(s[step])

    with Scripted({"step": say(("locate", {"place": {"city": "x" * 40}}))}) as backend:
        (result,) = program.run(backend=backend).value
    assert isinstance(result, ValueError) and "cut off" in str(result)


def test_u3_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="two tools"):
        once("", [add, as_tool(broken, name="add")])


def test_u3_strict_refuses_what_no_grammar_enforces() -> None:
    def f(xs: Annotated[list[int], pydantic.Field(json_schema_extra={"uniqueItems": True})]) -> None: ...

    with pytest.raises(GrammarError, match="uniqueItems"):
        once("", [as_tool(f, strict=True)])
    once(say(("f", {"xs": [1, 1]})), [f])


# ------------------------------------------------------------------------------------------------- slow, blocking, async tools


async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "rested"


def hang(seconds: float) -> str:
    time.sleep(seconds)
    return "woke"


@pytest.mark.parametrize("tool", [as_tool(hang, timeout=0.05), as_tool(nap, timeout=0.05)])
def test_u3_a_timeout_is_a_result(tool: Any) -> None:
    _, results = once(say((tool.name, {"seconds": 5})), [tool])
    assert isinstance(results[0], TimeoutError) and "0.05" in str(results[0])


def test_u3_async_tools_in_an_async_program_run_together() -> None:
    gate = asyncio.Barrier(3)

    async def meet(who: str) -> str:
        await asyncio.wait_for(gate.wait(), 10)
        return who

    @function
    async def program(s: AsyncState) -> Any:
        step = gen("step", tools=[meet], max_tokens=600)
        s += user("Go.") + assistant(step)
        return await s.call_tools(await s[step])

    with Scripted({"step": say(*(("meet", {"who": w}) for w in "abc"))}) as backend:
        assert program.run(backend=backend).value == ["a", "b", "c"]


def test_u3_a_blocking_tool_lets_the_other_programs_of_a_batch_go_on() -> None:
    seen: list[str] = []
    go_on = threading.Event()

    def wait(who: str) -> str:
        if who == "first":
            assert go_on.wait(20), "the second program never ran"
        else:
            go_on.set()
        seen.append(who)
        return who

    @function
    def program(s: State, who: str) -> Any:
        step = gen("step", tools=[as_tool(wait, blocking=True)], max_tokens=200)
        s += user(who) + assistant(step)
        return s.call_tools(s[step])

    script = {"step": [say(("wait", {"who": "first"})), say(("wait", {"who": "second"}))]}
    with Scripted(script) as backend:
        runs = program.run_batch([{"who": "first"}, {"who": "second"}], backend=backend)
        assert [run.value for run in runs] == [["first"], ["second"]] and seen == ["second", "first"]


# ------------------------------------------------------------------------------------------------------------------------ react


def test_u3_react_goes_on_until_a_reply_without_a_call() -> None:
    @function
    def program(s: State, question: str) -> str:
        s += system("Be brief.") + user(question)
        return react(s, [add, broken], max_tokens=300)

    script = {"step": [say(("add", {"a": 1})), say(("broken", {"why": "luck"}), text="Again: "), "It is 3."]}
    with Scripted(script) as backend:
        run = program.run(question="1+2?", backend=backend)
        assert run.value == "It is 3." and run["step"].text == "It is 3."
        assert "error: RuntimeError: no luck" in run.text()
        assert run.usage.recomputed == 0, "each step computes observation and markup only"
        backend.check()


@pytest.mark.parametrize("until, answer, value", [
    (Place, '{"city": "Oslo", "country": "NO"}', Place(city="Oslo", country="NO")), (int, '{"answer": 7}', 7),
    (IntRange(0, 9), '{"answer": 7}', 7), (Literal["a", "b"], '{"answer": "b"}', "b"), (list[int], '{"answer": [1, 2]}', [1, 2]),
])  # fmt: skip
def test_u3_react_until_a_type(until: Any, answer: str, value: Any) -> None:
    @function
    def program(s: State) -> Any:
        s += user("Go.")
        return react(s, [add], until=until, max_tokens=300)

    with Scripted({"step": [say(("add", {"a": 1})), answer]}) as backend:
        assert program.run(backend=backend).value == value


def test_u3_at_the_last_step_there_is_no_call() -> None:
    @function
    async def program(s: AsyncState, until: Any) -> Any:
        s += user("Go.")
        return await react(s, [add], until=until, max_steps=2, max_tokens=300)

    with Scripted({"step": [say(("add", {"a": 1})), say(("add", {"a": 1}))]}) as backend:
        assert program.run(until=None, backend=backend).value.startswith("<tool_call>"), "then it is text"
    with Scripted({"step": [say(("add", {"a": 1})), '{"answer": 4}']}) as backend:
        assert program.run(until=int, backend=backend).value == 4
    with (
        Scripted({"step": [say(("add", {"a": 1})), say(("add", {"a": 1}))]}) as backend,
        pytest.raises(ProgramError, match="constraint"),
    ):
        program.run(until=int, backend=backend)


def test_tools_once_offered_stay_in_the_prompt() -> None:
    """T5: a gen with fewer tools narrows its grammar; one with more tells the model of them, and rewrites what it said before."""

    @function
    def program(s: State) -> None:
        one, two, three = (gen(f"g{i}", tools=t, max_tokens=300) for i, t in enumerate(([add, broken], [add], [add, locate])))
        s += system("Hi.") + user("a") + assistant(one) + user("b") + assistant(two)
        s.sync()
        s += user("c") + assistant(three)

    with Scripted({"g0": "x", "g1": "y", "g2": "z"}) as backend:
        run = program.run(backend=backend)
    first, second, third = (r.request.token_ids for r in run.records if r.kind == "gen")
    assert second[: len(first)] == first and third[: len(first)] != first
    system_text = run.messages()[0]["content"]
    assert system_text.startswith("Hi.\n\nYou can call") and system_text.count("You can call") == 1
    assert all(f'"name": "{name}"' in system_text for name in ("add", "broken", "locate"))
