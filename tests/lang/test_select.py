"""select on the embedded model, against plain forwards (Q), and regexes of every script (C-DSL-10)."""

from __future__ import annotations

import re
from typing import Any

import pytest

import phloem
import phloem.lang as sgl
from phloem.lang import State, function, gen, select
from phloem.runtime.errors import ContextLengthError, InvalidRequestError

METHODS: list[Any] = ["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "sum"]


def oracle(engine: phloem.Engine, prompt: str, choice: str) -> tuple[list[int], list[float], int]:
    """Ids and logprobs of prompt + choice, by one scoring of the whole; and where it parts from the prompt's own ids."""
    ids, own = engine.tokenizer.encode(prompt + choice), engine.tokenizer.encode(prompt)
    scored = engine.score(ids)
    start = next((i for i, (a, b) in enumerate(zip(ids, own)) if a != b), min(len(ids), len(own)))
    return ids, [0.0 if e is None else e.logprob for e in scored], start


@pytest.mark.case("C-DSL-04")
@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("Go to the :::", ["north", "northern"]), ("The answer is ", ["1", "10"]), ("(", [" yes", "no"]), ("In the n", ["north", "orthern"]), ("Answer: ", ["yes", "no"])],
)  # fmt: skip
def test_q2_q4_scores_are_those_of_plain_forwards(engine: phloem.Engine, prompt: str, choices: list[str]) -> None:
    @function
    def program(s: State, method: Any) -> Any:
        s += prompt + select("c", choices, choices_method=method)
        return s["c"], s.scores("c")

    parts = [oracle(engine, prompt, c) for c in choices]
    start = min(p[2] for p in parts)
    expected = [p[1][start:] for p in parts]
    for method in METHODS:
        run = program.run(method=method, backend=engine)
        chosen, scores = run.value
        for score, (ids, _, _), logprobs in zip(scores, parts, expected):
            assert score.token_ids == ids[start:]
            assert score.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert score.scores["token_length_normalized"] == pytest.approx(sum(logprobs) / len(logprobs), abs=1e-4)
        assert sum(s.probability for s in scores) == pytest.approx(1)
        own = engine.select(prompt, choices, method=method)
        assert chosen == own.choice
        assert [s.scores[method] for s in scores] == pytest.approx(own.scores, abs=1e-4)
        assert engine.tokenizer.decode([*engine.tokenizer.encode(prompt)[:start], *scores[0].token_ids]) == prompt + choices[0]


@pytest.mark.case("C-DSL-06")
def test_q4_methods_differ_where_they_should(engine: phloem.Engine) -> None:
    prompt, choices = "The opposite of hot is", [" cold", " floccinaucinihilipilification", " cold"]

    @function
    def program(s: State, method: Any) -> Any:
        s += prompt + select("c", choices, choices_method=method) + "."
        return s["c"], s.scores("c"), s.text()

    for method in METHODS:
        chosen, scores, text = program.run(method=method, backend=engine).value
        assert text == f"{prompt}{chosen}." and len(scores) == 3
        assert scores[0].scores == scores[2].scores, "duplicates are scored alike, the first wins"
        if method != "token_length_normalized":
            assert chosen == " cold"
    for bad in ([], [""], "abc", [1]):
        with pytest.raises(InvalidRequestError, match=r"test_select\.py"):
            select("c", bad)
    with pytest.raises(InvalidRequestError, match="choices_method"):
        select("c", ["a"], choices_method="best")
    one = function(lambda s: s.__iadd__("Say " + select("c", ["only"]))).run(backend=engine)
    assert one["c"] == "only"
    many = function(lambda s: s.__iadd__("Number " + select("c", [str(n) for n in range(200)], choices_method="sum"))).run(
        backend=engine
    )
    assert many["c"] in {str(n) for n in range(200)}
    with pytest.raises(ContextLengthError, match=r"test_select\.py"):
        function(lambda s: s.__iadd__("x" + select("c", ["a", "word " * (engine.resolved.max_context + 1)]))).run(
            backend=engine
        )


@pytest.mark.case("C-DSL-07")
@pytest.mark.parametrize("choices", [["a", "aa"], ["yes", "yes please"], ["1", "12", "123"], ["new", "new york", " new"]])
def test_q1_one_choice_begins_another(engine: phloem.Engine, choices: list[str]) -> None:
    @function
    def program(s: State, method: Any) -> Any:
        s += "Answer:" + select("c", choices, choices_method=method) + "; and"
        return s["c"], s.text()

    for method in METHODS:
        chosen, text = program.run(method=method, backend=engine).value
        assert chosen in choices and text == f"Answer:{chosen}; and"
    regex = function(lambda s: s.__iadd__("Answer:" + gen("r", regex="(a|aa)", max_tokens=4) + "; and")).run(
        backend=engine, temperature=0
    )
    assert regex["r"] in ("a", "aa") and regex.text() == f"Answer:{regex['r']}; and"


@pytest.mark.case("C-DSL-02")
def test_q1_select_is_the_same_in_every_mode(idle_engine: phloem.Engine) -> None:
    @function
    def program(s: State) -> Any:
        s += (
            "I like "
            + gen("a", max_tokens=3, temperature=0)
            + ". Colour: "
            + select("c", ["red", "blue"])
            + " and "
            + gen("b", max_tokens=3, temperature=0)
        )
        return s["c"]

    plain = program.run(backend=idle_engine)
    stream = program.run(backend=idle_engine, stream=True)
    assert "".join(stream.text_iter()) == plain.text()
    batch = program.run_batch([{}, {}], backend=idle_engine)
    assert {r.value for r in (plain, stream, *batch)} == {plain.value} and plain["b"] == batch[1]["b"]
    assert plain.get_meta_info("c")["normalized_prompt_logprobs"]


def test_q5_temperature_draws_by_softmax_of_sum(engine: phloem.Engine) -> None:
    @function
    def program(s: State) -> Any:
        s += "Colour: " + select("c", ["red", "blue", "green"], temperature=5.0)
        return s["c"]

    drawn = [program.run(backend=engine, seed=n).value for n in range(12)]
    assert len(set(drawn)) > 1 and drawn == [program.run(backend=engine, seed=n).value for n in range(12)]


def test_q3_the_prompt_is_computed_once(idle_engine: phloem.Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "A long prompt, of many words, that is there. " * 4 + "Colour: " + select("c", ["red", "blue", "green"])

    before = idle_engine.stats()
    run = program.run(backend=idle_engine)
    after = idle_engine.stats()
    assert run.usage.recomputed == run.usage.again
    assert after.steps - before.steps <= 2, "one for the prompt, one for the choices"


@pytest.mark.case("C-DSL-10")
def test_regexes_and_stops_of_any_script(engine: phloem.Engine) -> None:
    @function
    def program(s: State) -> Any:
        s += "评价 😀: " + gen("名", regex="(好|坏)", max_tokens=8) + "/" + gen("数", regex="[一-三]{2}", max_tokens=12) + "/"
        s += select("是", ["是", "否"]) + "/" + gen("终", stop="。", max_tokens=12)
        return [s[name] for name in ("名", "数", "是", "终")]

    run = program.run(backend=engine, temperature=0)
    good, number, yes, end = run.value
    assert re.fullmatch("好|坏", good) and re.fullmatch("[一-三]{2}", number) and yes in ("是", "否") and "。" not in end
    assert run.text() == f"评价 😀: {good}/{number}/{yes}/{end}"


def test_names_and_methods_of_sglang() -> None:
    assert sgl.token_length_normalized == "token_length_normalized" and sgl.greedy_token_selection == "greedy_token_selection"
    assert (
        re.fullmatch(sgl.ir.REGEX_INT, "-12")
        and re.fullmatch(sgl.ir.REGEX_FLOAT, "1.5")
        and re.fullmatch(sgl.ir.REGEX_STR, '"a\\n"')
    )
