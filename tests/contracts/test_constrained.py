"""Constraints on the real model: valid output, forced runs that change nothing, ends that come, stop strings that stay out of JSON."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

import phloem
from phloem.runtime.errors import GrammarError, InvalidRequestError
from tests.runtime.grammar.schemas import real_schemas

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "city": {"type": "string", "maxLength": 20}, "married": {"type": "boolean"},
    },
    "required": ["name", "age", "city", "married"],
    "additionalProperties": False,
}  # fmt: skip
OPEN = {
    "type": "object",
    "properties": {"day": {"enum": ["Monday", "Tuesday"]}, "when": {"type": "string", "format": "date"}},
    "required": ["day", "when"],
}
PROMPTS = ["Describe a person as JSON: ", "The record is ", "A sailor, forty years old, from Bergen.\nJSON: ", "{}\n"]


class Person(BaseModel):
    name: str
    age: int


def told(output: phloem.Output) -> Any:
    return (
        output.token_ids,
        output.text,
        output.finish_reason,
        output.logprobs,
        output.usage.completion_tokens,
        output.usage.forced_tokens,
    )


def check(schema: Any, output: phloem.Output) -> None:
    if output.finish_reason == "grammar":
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(output.text))
    else:
        assert output.finish_reason == "length"


def compare(engine: phloem.Engine, cases: list[tuple[str, Any, str]], drawing: dict[str, Any], max_tokens: int = 40) -> int:
    """J3 over (prompt, schema, whitespace); forced tokens in all."""
    forced = 0
    for prompt, schema, blanks in cases:
        outputs = []
        for jump in ("canonical", "off"):
            sampling = {"max_tokens": max_tokens, "logprobs": "both", "top_logprobs": 1, **drawing}
            options: Any = {"json_schema": schema, "json_whitespace": blanks, "jump_forward": jump, "trusted": True}
            outputs.append(engine.generate(prompt, sampling, **options))
        assert told(outputs[0]) == told(outputs[1]), (prompt, schema)
        check(schema, outputs[0])
        forced += outputs[0].usage.forced_tokens
    return forced


def cases(count: int) -> list[tuple[str, Any, str]]:
    schemas = [
        PERSON,
        OPEN,
        *(row["schema"] for row in real_schemas() if row["split"] in ("BFCL", "Glaiveai2K", "Github_easy")),
    ]
    served = [schema for schema in schemas if "topic" not in json.dumps(schema)]
    pairs = itertools.cycle(itertools.product(PROMPTS, served))
    blanks = itertools.cycle(("spaced", "flexible", "compact"))
    return [(prompt, schema, next(blanks)) for prompt, schema in itertools.islice(pairs, 0, count * 7, 7)]


@pytest.mark.parametrize("drawing", [{"temperature": 0}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "seeded"])
def test_j3_jump_on_is_jump_off(engine: phloem.Engine, drawing: dict[str, Any]) -> None:
    assert compare(engine, cases(6), drawing, max_tokens=20) > 12


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("overlap", [False, True])
def test_j3_over_two_hundred_prompts_and_schemas(overlap: bool) -> None:
    """Four prompts a schema at once, greedy and seeded: longer than a step's budget, which chunks them, and more than the pool holds,
    which preempts."""
    prompts = ["Once upon a time there was a form to fill in. " * n + prompt for n, prompt in zip((5, 6, 1, 7), PROMPTS)]
    schemas = list({json.dumps(schema): (schema, blanks) for _, schema, blanks in cases(400)}.values())
    seen = forced = 0
    with phloem.Engine(kv_tokens=320, max_step_tokens=48, overlap=overlap, max_context=256) as engine:
        for i, (schema, blanks) in enumerate(itertools.islice(itertools.cycle(schemas), 52)):
            drawing = {"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0}
            sampling = {"max_tokens": 40, "logprobs": "both", "top_logprobs": 1, **drawing}
            runs = {}
            for jump in ("canonical", "off"):
                runs[jump] = engine.generate(
                    [f"{i}. {prompt}" for prompt in prompts],
                    sampling,
                    json_schema=schema,
                    json_whitespace=blanks,
                    jump_forward=jump,
                    trusted=True,
                )  # type: ignore[call-overload]
            for on, off in zip(runs["canonical"], runs["off"], strict=True):
                assert told(on) == told(off), schema
                check(schema, on)
                forced += on.usage.forced_tokens
                seen += 1
        stats = engine.stats()
    assert seen >= 200 and forced > 1_000 and stats.preemptions > 10


def test_j3_in_a_batch_of_eight_samples(engine: phloem.Engine) -> None:
    found = []
    for jump in ("canonical", "off"):
        outputs = engine.generate(
            PROMPTS[0], {"temperature": 1.0, "seed": 3, "max_tokens": 40}, n=8, json_schema=PERSON, json_whitespace="spaced", jump_forward=jump, trusted=True
        )  # fmt: skip
        found.append([told(output) for output in outputs])
        for output in outputs:
            check(PERSON, output)
    assert found[0] == found[1] and len({str(one) for one in found[0]}) > 1


@pytest.mark.case("C-STRUCT-05", "C-STRUCT-06")
@pytest.mark.parametrize("temperature", [0, 1])
def test_flexible_json_ends_without_endless_blanks(engine: phloem.Engine, temperature: int) -> None:
    sampling = [{"temperature": temperature, "max_tokens": 250, "seed": i} for i in range(6)]
    outputs = engine.generate([f"{PROMPTS[i % 4]}{i} " for i in range(6)], sampling, json_schema=PERSON, trusted=True)
    for output in outputs:
        assert output.finish_reason == "grammar", output.text
        check(PERSON, output)
        assert not re.search(r"\s{9}", re.sub(r'"(\\.|[^"\\])*"', "S", output.text))
        assert output.text.rstrip() == output.text and output.text.endswith("}")
        assert output.token_ids[-1] == engine.tokenizer.eos_id


@pytest.mark.case("C-STRUCT-06")
def test_a_complete_value_ends_at_once(engine: phloem.Engine) -> None:
    sampling = {"max_tokens": 300, "temperature": 1.0, "seed": 1}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    for constraint in ({"json_schema": schema, "json_whitespace": "spaced"}, {"regex": "[a-c]{3}"}):
        output = engine.generate("hello ", sampling, trusted=True, **constraint)  # type: ignore[call-overload]
        assert output.finish_reason == "grammar" and len(output.token_ids) < 30


@pytest.mark.case("C-STRUCT-11", "C-STRUCT-12")
@pytest.mark.parametrize(
    "pattern", ["[é]{2}", "[à-ÿ]{3}", "[^a]{2}", "[一-龥]{2}", "😀+x", "(é|ü)z", ".", "(k|)m", "((1|2|)[0-9]-){2}z", "^x$", "(?:ab)+?", "x*", ""],
)  # fmt: skip
def test_regexes_match_as_a_whole(engine: phloem.Engine, pattern: str) -> None:
    for seed in range(3):
        output = engine.generate("The answer is ", {"max_tokens": 20, "seed": seed}, regex=pattern, trusted=True)
        if output.finish_reason == "grammar":
            assert re.fullmatch(pattern, output.text), output.text


@pytest.mark.case("C-STRUCT-12", "C-STRUCT-02")
@pytest.mark.parametrize(
    "pattern", ["[]a]", "a{,3}", r"\bword\b", "(?i)yes", r"(a)\1", "(?<x>a)", "(?=a)b", "a{3,1}", r"\p{L}+", "[[:alpha:]]"]
)
def test_regexes_of_no_one_meaning_are_refused(engine: phloem.Engine, pattern: str) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError) as caught:
            engine.generate("x", regex=pattern, trusted=True)
        assert caught.value.status == 400
    with pytest.raises(GrammarError):
        engine.generate("x", json_schema={"type": "string", "pattern": pattern}, trusted=True)


def test_every_way_to_say_a_schema(engine: phloem.Engine) -> None:
    sampling = {"temperature": 0, "max_tokens": 60}
    texts = [
        engine.generate(PROMPTS[0], sampling, json_schema=schema, json_whitespace="spaced").text
        for schema in (Person, Person.model_json_schema(), json.dumps(Person.model_json_schema()))
    ]
    assert texts[0] == texts[1] == texts[2] and texts[0].startswith('{"name": ')
    chat = engine.chat([{"role": "user", "content": "Who?"}], sampling, choices=["me", "you"])
    assert chat.text in ("me", "you")
    assert engine.generate("x", sampling, grammar='root ::= "a" ("b" | "c")').text in ("ab", "ac")
    assert engine.generate("x", sampling, json_object=True, json_schema=None).text.startswith("{")


def test_at_most_one_kind_and_only_known_options(engine: phloem.Engine) -> None:
    for bad, param in [
        ({"regex": "a", "choices": ["a"]}, "choices"), ({"json_schema": {}, "json_object": True}, "json_object"), ({"strict": False}, "strict"),
        ({"regex": 5}, "regex"), ({"choices": "ab"}, "choices"), ({"json_schema": 5}, "json_schema"), ({"regex": "a", "json_whitespace": "tight"}, "json_whitespace"),
        ({"regex": "a", "jump_forward": "on"}, "jump_forward"), ({"structural_tag": 5}, "structural_tag"), ({"json_schema": {"a": {1, 2}}}, "json_schema"),
    ]:  # fmt: skip
        with pytest.raises(InvalidRequestError) as caught:
            engine.generate("x", **bad)
        assert caught.value.param == param
    for empty in ([], ["a", ""]):
        with pytest.raises(GrammarError):
            engine.generate("x", choices=empty)


def test_stop_strings_stay_out_of_json(engine: phloem.Engine) -> None:
    sampling = {"temperature": 0, "max_tokens": 80, "stop": ('"', "a", "}")}
    output = engine.generate(PROMPTS[0], sampling, json_schema=PERSON, json_whitespace="spaced", trusted=True)
    assert output.finish_reason == "grammar"
    check(PERSON, output)
    assert engine.generate("x", {"temperature": 0, "stop": "b"}, regex="abc", trusted=True).finish_reason == "stop_string"


def test_a_stream_is_the_same_and_forced_runs_come_as_one_piece(engine: phloem.Engine) -> None:
    sampling = {"temperature": 0, "max_tokens": 60}
    options: Any = {"json_schema": PERSON, "json_whitespace": "spaced", "trusted": True}
    whole = engine.generate(PROMPTS[0], sampling, **options)
    stream = engine.stream(PROMPTS[0], sampling, **options)
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text and stream.output.token_ids == whole.token_ids
    assert max(len(piece.token_ids) for piece in pieces) > 2
    with pytest.raises(GrammarError):
        list(engine.stream("x", regex="(?=a)b"))


def test_dropped_keywords_are_in_the_output(engine: phloem.Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 2}},
        "required": ["a"],
    }
    with pytest.raises(GrammarError, match="'uniqueItems'"):
        engine.generate("x", json_schema=schema, trusted=True)
    output = engine.generate("x", {"max_tokens": 40}, json_schema=schema, strict=False, trusted=True)
    assert output.dropped_keywords == (("/properties/a", "uniqueItems"),)


def test_errors_of_one_prompt_among_many(engine: phloem.Engine) -> None:
    outputs = engine.generate(["a", "b"], {"max_tokens": 5}, regex="(?=a)b", on_error="return", trusted=True)
    assert all(isinstance(output.error, GrammarError) for output in outputs)


def test_the_async_engine_takes_the_same() -> None:
    async def main() -> phloem.Output:
        async with phloem.AsyncEngine(kv_tokens=1024) as engine:
            found = await asyncio.gather(*[engine.generate("x", {"temperature": 0}, choices=["ab", "cd"]) for _ in range(4)])
            assert len({output.text for output in found}) == 1
            async for piece in engine.stream("x", {"temperature": 0}, regex="abc"):
                last = piece
            assert last.finish_reason == "grammar"
            return found[0]

    assert asyncio.run(main()).text in ("ab", "cd")


@pytest.mark.parametrize("drawing", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "seeded"])
def test_an_open_end_is_the_models_own(drawing: dict[str, Any], engine: phloem.Engine) -> None:
    """G7, lang V3: a number in running text ends where the model goes on with something else; that token is in no output."""
    prompt, number = "Q: How many legs has a dog?\nA: A dog has ", "[0-9]{1,12}"
    options: Any = {"regex": number, "open_end": True, "trusted": True}
    sampling = {"max_tokens": 20, "logprobs": True, **drawing}
    output = engine.generate(prompt, sampling, **options)
    assert re.fullmatch(number, output.text) and output.finish_reason == "grammar"
    assert (
        output.usage.dropped_tokens == 1
        and len(output.logprobs or ()) == len(output.token_ids) == output.usage.completion_tokens
    )
    assert engine.tokenizer.decode(output.token_ids) == output.text
    stream = engine.stream(prompt, sampling, **options)
    assert "".join(delta.text for delta in stream) == output.text and stream.output.usage.dropped_tokens == 1
    several = engine.generate([prompt, prompt + "3"], sampling, n=3, **options)
    assert all(re.fullmatch(number, each.text) and each.finish_reason == "grammar" for group in several for each in group)
    assert several[0][0].token_ids == output.token_ids
