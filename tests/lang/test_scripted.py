"""U10: the real engine, a model that says what it is told, and a text that breaks its grammar fails the run."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
import pytest

from phloem.lang.ir import assistant, gen, select, user
from phloem.lang.run import function
from phloem.lang.state import State
from phloem.lang.testing import Scripted, byte_tokenizer
from phloem.runtime.errors import ProgramError
from phloem.runtime.text.tokenizer import Tokenizer


class Ticket(pydantic.BaseModel):
    product: str
    severity: Literal["low", "high"]


@function
def triage(s: State, mail: str) -> Any:
    ticket, count, grade = gen("ticket", Ticket, max_tokens=200), gen("count", int), select("grade", ["a", "ab", "b"])
    s += (
        user(mail)
        + assistant(ticket)
        + user("How many?")
        + assistant("About " + count + " of them.")
        + user("Grade?")
        + assistant(grade)
    )
    return s[ticket], s[count], s["grade"]


SCRIPT = {"ticket": Ticket(product="lid", severity="high"), "count": 42, "grade": "ab"}
VALUE = (Ticket(product="lid", severity="high"), 42, "ab")


def test_u10_values_of_types_are_written_as_json() -> None:
    with Scripted(SCRIPT) as backend:
        run = triage.run(mail="It broke.", backend=backend)
        assert run.value == VALUE
        assert "About 42 of them." in run.text()
        assert backend.stats().forced_tokens == run.usage.forced > 0, "the engine's own grammar forced the keys"
        backend.check()


def test_u10_the_engines_counters_are_those_of_the_run() -> None:
    with Scripted(SCRIPT) as backend:
        first = triage.run(mail="It broke.", backend=backend).usage
        stats = backend.stats()
        assert (first.prompt, first.cached) == (stats.cached_tokens + first.computed, stats.cached_tokens)
        again = triage.run(mail="It broke.", backend=backend).usage
        assert again.cached > first.cached and again.prompt == first.prompt


def test_u10_with_a_models_own_tokenizer(smollm2_tokenizer: Tokenizer) -> None:
    with Scripted(SCRIPT, smollm2_tokenizer) as backend:
        assert triage.run(mail="It broke.", backend=backend).value == VALUE


@pytest.mark.parametrize("script, match", [
    ({"count": "many"}, "breaks its constraint"), ({"ticket": '{"product": "lid", "severity": "medium"}'}, "breaks its constraint"),
    ({"ticket": '{"severity": "low"}'}, "breaks its constraint"), ({"ticket": '{"product": "lid"'}, "wants more"),
    ({"grade": "c"}, "none of"), ({"count": []}, "time 1"),
])  # fmt: skip
def test_u10_a_text_that_breaks_its_grammar_fails_the_run(script: dict[str, Any], match: str) -> None:
    with Scripted(SCRIPT | script) as backend:
        with pytest.raises(ProgramError, match=match) as caught:
            triage.run(mail="It broke.", backend=backend)
        assert caught.value.at is not None and "test_scripted.py" in caught.value.at
        backend.check()
        assert backend.stats().pages_live == 0


def test_u10_a_gen_without_a_text_fails_the_run() -> None:
    with Scripted({"ticket": SCRIPT["ticket"]}) as backend, pytest.raises(ProgramError, match=r"'count'.*says nothing"):
        triage.run(mail="It broke.", backend=backend)


def test_u10_a_function_answers_by_the_prompt() -> None:
    @function
    def program(s: State) -> list[str]:
        names = []
        for i in range(3):
            s += f"{i}: " + gen(f"g{i}", stop="\n") + "\n"
            names.append(s[f"g{i}"])
        return names

    with Scripted(lambda record, prompt: f"{record.name} after {len(prompt)}\nmore") as backend:
        assert program.run(backend=backend).value == ["g0 after 3", "g1 after 17", "g2 after 32"]


def test_u10_lists_go_by_branch_whatever_order_the_requests_are_sent_in() -> None:
    @function
    def program(s: State) -> list[str]:
        s += "Count: "
        with s.fork(3) as branches:
            for b in branches:
                b += "n" + str(b.branch[0]) + gen("x")
        return [str(x) for x in s["x"]]

    for compile in (True, False):
        with Scripted({"x": ["a", "b", "c"]}) as backend:
            assert program.run(backend=backend, compile=compile).value == ["a", "b", "c"]


def test_byte_tokenizer_is_one_token_a_byte() -> None:
    t = byte_tokenizer()
    text = "né 東\n\x00"
    assert t.encode(text) == list(text.encode()) and t.decode(t.encode(text)) == text
    assert t.encode("<|im_end|>", parse_special=True) == [t.eos_id] and len(t.encode("<|im_end|>", parse_special=False)) == 10
