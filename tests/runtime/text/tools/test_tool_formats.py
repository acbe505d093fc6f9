"""T4 to T9: one object writes the grammar and reads the text, so what the grammar lets through is always read."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from phloem.runtime.errors import ConfigError, GrammarError, InvalidRequestError
from phloem.runtime.grammar.audit import route
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.compile import Served, serve
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec
from phloem.runtime.text.chat import render_chat
from phloem.runtime.text.tokenizer import Tokenizer
from phloem.runtime.text.tools import FORMATS, detect
from phloem.runtime.text.tools.base import (
    ArgumentsDelta,
    CallPlan,
    CallReply,
    CallStart,
    ContentDelta,
    Tool,
    ToolCall,
    choice_of,
    tools_of,
)
from tests.runtime.grammar.schemas import takes
from tests.runtime.text.tools.conftest import LLAMA, QWEN, TEMPLATES, TEXT_ARGUMENTS, MakeTokenizer, vocabulary_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "units": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
}
TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3}, "more": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"], "additionalProperties": False}]}},
    "required": ["tags", "more"],
}  # fmt: skip
RAW = [
    {"type": "function", "function": {"name": "weather", "description": "The forecast.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "tag", "parameters": TAGS}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "tag": TAGS, "now": {"type": "object", "maxProperties": 0}}
TOOLS = tools_of(RAW)
FORMS = sorted(FORMATS)


def form(name: str, tokenizer: Tokenizer) -> Any:
    return detect(tokenizer, name)


def compiled(plan: CallPlan | None, vocabulary: Vocabulary) -> Served:
    assert plan is not None
    return serve(route(plan.grammar, Limits()), vocabulary, Limits())


def spelled(name: str, *calls: tuple[str, str]) -> str:
    if name == "hermes":
        return "\n".join(f'<tool_call>\n{{"name": "{f}", "arguments": {a}}}\n</tool_call>' for f, a in calls)
    if name == "llama3":
        return "; ".join(f'{{"name": "{f}", "parameters": {a}}}' for f, a in calls)
    python = {"true": "True", "false": "False", "null": "None"}
    shown = [
        f + "(" + ", ".join(f"{k}={python.get(json.dumps(v), json.dumps(v))}" for k, v in json.loads(a).items()) + ")"
        for f, a in calls
    ]
    return "[" + ", ".join(shown) + "]"


PARIS, TAGGED, NOW = ("weather", '{"city": "Paris", "exact": true}'), ("tag", '{"tags": ["b"], "more": null}'), ("now", "{}")

# ------------------------------------------------------------------------------------------------------------- what is allowed


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("choice, once, many, text", [
    ("auto", True, True, True),
    ("required", True, True, False),
    ({"type": "function", "function": {"name": "weather"}}, True, False, False),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [RAW[0], RAW[1]]}}, True, True, True),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [RAW[0], RAW[1]]}}, True, True, False),
])  # fmt: skip
def test_t5_tool_choice(
    name: str, choice: Any, once: bool, many: bool, text: bool, plain: Tokenizer, vocabulary: Vocabulary
) -> None:
    grammar = compiled(form(name, plain).plan(choice_of(choice, TOOLS)), vocabulary)
    narrow = choice not in ("auto", "required")
    assert takes(grammar, vocabulary, spelled(name, PARIS)) == once
    assert takes(grammar, vocabulary, spelled(name, PARIS, TAGGED)) == many
    # `[other(` opens no pythonic call, so where text may stand, it is text.
    is_text = name == "pythonic" and text
    assert takes(grammar, vocabulary, spelled(name, NOW)) == (not narrow or is_text), "narrowed to the tools that were named"
    assert takes(grammar, vocabulary, "It is sunny [1], and {warm}.") == text
    assert not takes(grammar, vocabulary, spelled(name, ("weather", '{"exact": true}'))), "city is required"
    assert not takes(grammar, vocabulary, spelled(name, ("weather", '{"city": "P", "days": 9}')))
    assert takes(grammar, vocabulary, spelled(name, PARIS).replace("weather", "wether")) == is_text
    assert not takes(grammar, vocabulary, spelled(name, PARIS) + " Done."), "behind the calls nothing follows"


@pytest.mark.parametrize("name", FORMS)
def test_t4_without_parallel_calls_one_call_ends_the_reply(name: str, plain: Tokenizer, vocabulary: Vocabulary) -> None:
    grammar = compiled(form(name, plain).plan(choice_of("auto", TOOLS), parallel=False), vocabulary)
    assert takes(grammar, vocabulary, spelled(name, PARIS))
    assert not takes(grammar, vocabulary, spelled(name, PARIS, NOW))


def test_t5_none_parses_nothing(plain: Tokenizer) -> None:
    assert detect(plain).plan(choice_of("none", TOOLS)) is None
    assert choice_of(None, TOOLS).mode == "auto" and choice_of(None, ()).mode == "none" == choice_of("auto", ()).mode


def test_a_call_may_follow_text_where_the_form_has_an_opener(plain: Tokenizer, vocabulary: Vocabulary) -> None:
    plan = detect(plain).plan(choice_of("auto", TOOLS))
    text = "Let me look. <tool_cal, <tool_call>" + spelled("hermes", PARIS).removeprefix("<tool_call>")
    assert takes(compiled(plan, vocabulary), vocabulary, text)
    assert plan is not None and plan.parse(text).content == "Let me look. <tool_cal, "
    assert not takes(compiled(plan, vocabulary), vocabulary, "I write <tool_call> here.")


@pytest.mark.parametrize("name", ["hermes", "pythonic"])
def test_t7_calls_or_the_schema(name: str, plain: Tokenizer, vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": False}
    content = GrammarSpec(kind="json_schema", source=json.dumps(schema))
    plan = form(name, plain).plan(choice_of("auto", TOOLS), content=content)
    grammar = compiled(plan, vocabulary)
    for text, good in {'{"name": "x"}': True, '{"name": 1}': False, "Hello": False, spelled(name, PARIS): True}.items():
        assert takes(grammar, vocabulary, text) == good
    assert plan.parse('{"name": "x"}') == CallReply(content='{"name": "x"}')
    assert [c.name for c in plan.parse(spelled(name, PARIS)).calls] == ["weather"]
    with pytest.raises(InvalidRequestError, match="object"):
        form(name, plain).plan(choice_of("auto", TOOLS), content=GrammarSpec(kind="json_schema", source='{"type": "array"}'))
    with pytest.raises(InvalidRequestError, match="regex"):
        form(name, plain).plan(choice_of("auto", TOOLS), content=GrammarSpec(kind="regex", source="a"))


def test_t7_is_refused_where_the_start_does_not_tell(plain: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="told apart"):
        form("llama3", plain).plan(choice_of("auto", TOOLS), content=GrammarSpec(kind="json_object", source=""))


# -------------------------------------------------------------------------------------------------------------------- schemas

UNENFORCEABLE = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}, "required": ["a"], "additionalProperties": False}  # fmt: skip


def tool_with(parameters: Any, strict: bool | None) -> tuple[Tool, ...]:
    return tools_of([{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}])


@pytest.mark.parametrize("name", FORMS)
def test_t6_an_unenforceable_keyword(name: str, plain: Tokenizer, vocabulary: Vocabulary) -> None:
    with pytest.raises(GrammarError) as caught:
        form(name, plain).plan(choice_of("required", tool_with(UNENFORCEABLE, True)))
    assert caught.value.status == 400 and caught.value.code == "invalid_json_schema"
    assert caught.value.param == "tools.0.function.parameters/properties/a" or "uniqueItems" in (caught.value.param or "")
    for strict in (False, None):
        plan = form(name, plain).plan(choice_of("required", tool_with(UNENFORCEABLE, strict)))
        assert plan.dropped == (("tools.0.function.parameters/properties/a", "uniqueItems"),)
        grammar = compiled(plan, vocabulary)
        assert takes(grammar, vocabulary, spelled(name, ("f", '{"a": [1, 1]}')))
        assert not takes(grammar, vocabulary, spelled(name, ("f", '{"a": ["1"]}'))), "the rest still holds"


def test_t6_what_a5_never_drops_leaves_json_syntax(plain: Tokenizer, vocabulary: Vocabulary) -> None:
    remote = {"type": "object", "properties": {"a": {"$ref": "https://example.com/s.json"}}}
    with pytest.raises(GrammarError):
        detect(plain).plan(choice_of("required", tool_with(remote, True)))
    plan = detect(plain).plan(choice_of("required", tool_with(remote, None)))
    assert plan is not None and plan.dropped == (("tools.0.function.parameters", "*"),)
    grammar = compiled(plan, vocabulary)
    assert takes(grammar, vocabulary, spelled("hermes", ("f", '{"a": {"b": [1, null]}}')))
    assert not takes(grammar, vocabulary, spelled("hermes", ("f", '{"a": }')))


def test_arguments_that_a_function_does_not_list_are_not_offered(plain: Tokenizer, vocabulary: Vocabulary) -> None:
    grammar = compiled(detect(plain).plan(choice_of("required", TOOLS)), vocabulary)
    assert not takes(grammar, vocabulary, spelled("hermes", ("weather", '{"city": "P", "mood": 1}')))
    open_object = tool_with({"type": "object"}, None)
    assert takes(
        compiled(detect(plain).plan(choice_of("required", open_object)), vocabulary),
        vocabulary,
        spelled("hermes", ("f", '{"x": 1}')),
    )


def test_pythonic_takes_python_names_only(plain: Tokenizer) -> None:
    for key in ("a-b", "class", "1"):
        with pytest.raises(InvalidRequestError, match="pythonic"):
            form("pythonic", plain).plan(
                choice_of("required", tool_with({"type": "object", "properties": {key: {"type": "null"}}}, None))
            )
    with pytest.raises(GrammarError, match="keywords"):
        form("pythonic", plain).plan(
            choice_of(
                "required",
                tool_with({"anyOf": [{"type": "object", "maxProperties": 0}, {"type": "object", "minProperties": 1}]}, None),
            )
        )


# ------------------------------------------------------------------------------------------------------------------ T9: parsing


def random_reply(grammar: Served, vocabulary: Vocabulary, rng: random.Random, start: str) -> tuple[str, bool]:
    """A random walk through the masks behind `start`, with a weakness for what closes. (text, whether it came to an end)"""
    cursor, row, out = grammar.cursor(), np.empty(vocabulary.num_words, np.int32), start.encode()
    assert all(cursor.accept(token) for token in vocabulary.encode(start))
    closers = {vocabulary.encode(c)[0] for c in ('"', "}", "]", ")", ",", "<", "{", "[", "\n")}
    for _ in range(80):
        if cursor.done:
            return out.decode(errors="replace"), True
        cursor.fill(row)
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[: vocabulary.width])
        closing = [t for t in legal if t in closers or t in vocabulary.stop_ids]
        pick = int(rng.choice(closing) if closing and rng.random() < 0.6 else rng.choice(legal))
        if pick in vocabulary.stop_ids:
            return out.decode(errors="replace"), True
        assert cursor.accept(pick)
        out += vocabulary.tokens[pick]
    return out.decode(errors="ignore"), False


def in_pieces(plan: CallPlan, text: str, rng: random.Random) -> tuple[CallReply, list[Any]]:
    numbers = iter(range(1000))
    parser, events, at = plan.parser(lambda: f"call_{next(numbers)}"), [], 0
    while at < len(text):
        size = rng.choice((1, 1, 2, 5, 30))
        events += parser.push(text[at : at + size])
        at += size
    events += parser.finish()
    return parser.reply(), events


def assembled(events: list[Any]) -> CallReply:
    """As clients put deltas together, by index."""
    content = "".join(e.text for e in events if isinstance(e, ContentDelta))
    starts = [e for e in events if isinstance(e, CallStart)]
    assert [s.index for s in starts] == list(range(len(starts)))
    arguments = ["".join(e.text for e in events if isinstance(e, ArgumentsDelta) and e.index == s.index) for s in starts]
    return CallReply(
        content=content,
        calls=tuple(ToolCall(id=s.id, name=s.name, arguments=a) for s, a in zip(starts, arguments, strict=True)),
    )


@pytest.mark.case("C-API-05")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_t9_what_the_grammar_lets_through_is_read(name: str, choice: str, plain: Tokenizer, vocabulary: Vocabulary) -> None:
    rng = random.Random(f"{name}{choice}")
    plan = form(name, plain).plan(choice_of(choice, TOOLS))
    grammar = compiled(plan, vocabulary)
    calls = ended = 0
    opener = {"hermes": "Well. <tool_call>", "llama3": '{"name": "', "pythonic": "[weather("}[name]
    for number in range(24):
        text, over = random_reply(grammar, vocabulary, rng, opener if choice == "auto" and number % 2 else "")
        reply, events = in_pieces(plan, text, rng)
        assert [(c.name, c.arguments) for c in reply.calls] == [(c.name, c.arguments) for c in plan.parse(text).calls]
        assert assembled(events).content == reply.content
        assert [(c.id, c.name, c.arguments) for c in assembled(events).calls] == [
            (c.id, c.name, c.arguments) for c in reply.calls
        ]
        assert len({c.id for c in reply.calls}) == len(reply.calls)
        for call in reply.calls if over else reply.calls[:-1]:
            assert call.complete
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            calls += 1
        ended += over
        if over and choice == "required":
            assert reply.calls and not reply.content
    assert calls >= 5 and ended >= 5


@pytest.mark.case("C-API-05")
@pytest.mark.parametrize("name", FORMS)
def test_t9_two_calls_with_escapes_in_any_pieces(name: str, plain: Tokenizer) -> None:
    tools = tool_with(
        {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "number"}}, "required": ["s"]}, None
    )
    plan = form(name, plain).plan(choice_of("auto", tools))
    hard = r'{"s": "}\\\"]), \"é☀\\u2028 <tool_call>", "n": -1.5e3}'
    text = spelled(name, ("f", json.dumps(json.loads(hard), ensure_ascii=False)), ("f", '{"s": ""}'))
    for seed in range(20):
        reply, events = in_pieces(plan, text, random.Random(seed))
        assert [json.loads(c.arguments) for c in reply.calls] == [json.loads(hard), {"s": ""}]
        assert [e.index for e in events if isinstance(e, CallStart)] == [0, 1]
        assert assembled(events).calls[0].arguments == reply.calls[0].arguments


@pytest.mark.parametrize("name", FORMS)
def test_a_reply_cut_anywhere_keeps_what_there_is(name: str, plain: Tokenizer) -> None:
    plan = form(name, plain).plan(choice_of("auto", TOOLS))
    whole = spelled(name, PARIS, TAGGED)
    first = plan.parse(whole).calls[0]
    for cut in range(len(whole)):
        reply = plan.parse(whole[:cut])
        if not reply.calls:
            assert reply.content == whole[:cut], "a call without a name stays text"
        else:
            assert not reply.content and first.arguments.startswith(reply.calls[0].arguments)
            assert reply.calls[0].complete == (reply.calls[0].arguments == first.arguments)
    assert all(c.complete for c in plan.parse(whole).calls)


def test_text_against_the_grammar_is_refused(plain: Tokenizer) -> None:
    for name in FORMS:
        plan = form(name, plain).plan(choice_of("auto", TOOLS))
        with pytest.raises(ValueError, match="grammar"):
            plan.parse(spelled(name, PARIS) + " and more")


# ----------------------------------------------------------------------------------------------------------------- T8: detection


@pytest.mark.parametrize("name", FORMS)
def test_t8_the_form_is_read_off_the_template(name: str, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name])
    found = detect(tokenizer)
    assert found.name == name
    messages, tools = found.prepare([{"role": "user", "content": "hi"}], TOOLS)
    assert messages == [{"role": "user", "content": "hi"}] and tools == [t.as_json() for t in TOOLS]


def test_t8_a_model_without_tools_gets_a_preamble_and_hermes(plain: Tokenizer) -> None:
    found = detect(plain)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "P"}'}}
    messages, tools = found.prepare(
        [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "c", "content": "sun"},
            {"role": "tool", "tool_call_id": "c", "content": "rain"},
        ],
        TOOLS,
    )
    assert found.name == "hermes" and tools is None
    assert messages[0]["content"].startswith("Be brief.\n\nYou can call functions.") and '"city"' in messages[0]["content"]
    assert messages[2]["content"] == spelled("hermes", ("weather", '{"city": "P"}'), ("weather", '{"city": "P"}'))
    assert messages[3:] == [
        {"role": "user", "content": "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"}
    ]
    without, _ = found.prepare([{"role": "user", "content": "hi"}], ())
    assert without == [{"role": "user", "content": "hi"}], "no tools, no preamble"


def test_t8_an_unknown_form_gets_the_preamble(make_tokenizer: MakeTokenizer) -> None:
    found = detect(
        make_tokenizer("{% for t in tools or [] %}{{ t }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}")
    )
    messages, tools = found.prepare([{"role": "user", "content": "hi"}], TOOLS)
    assert found.name == "hermes" and tools is None and len(messages) == 2


def test_an_unknown_parser_is_refused(plain: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="hermes"):
        detect(plain, "hermis")


@pytest.mark.parametrize("template, expected", [(QWEN, dict), (LLAMA, dict), (TEXT_ARGUMENTS, str)])
def test_arguments_go_to_the_template_as_it_wants_them(template: str, expected: type, make_tokenizer: MakeTokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages, _ = detect(make_tokenizer(template)).prepare([{"role": "assistant", "tool_calls": [call]}], TOOLS)
    assert isinstance(messages[0]["tool_calls"][0]["function"]["arguments"], expected)


def test_earlier_calls_are_rendered_as_they_were_drawn(make_tokenizer: MakeTokenizer) -> None:
    """So a next turn finds its prefix (spaced JSON is what templates write)."""
    tokenizer = make_tokenizer(QWEN)
    found, drawn = detect(tokenizer), spelled("hermes", PARIS, TAGGED)
    plan = found.plan(choice_of("required", TOOLS))
    assert plan is not None
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in plan.parse(drawn).calls
    ]
    messages, tools = found.prepare(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}], TOOLS
    )
    assert drawn + "<|im_end|>" in render_chat(tokenizer, messages, tools=tools)


@pytest.mark.parametrize("special", [False, True])
def test_an_opener_that_is_a_token_is_that_token(special: bool, make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(QWEN, **{"special" if special else "tokens": ["<tool_call>", "</tool_call>"]})
    opener = tokenizer.token_to_id("<tool_call>")
    plan = detect(tokenizer).plan(choice_of("auto", TOOLS))
    assert plan is not None and opener is not None and plan.skip_special_tokens == (not special)
    vocabulary = vocabulary_of(tokenizer)
    cursor = compiled(plan, vocabulary).cursor()
    ids = [*vocabulary.encode("Well, "), opener]
    assert all(cursor.accept(i) for i in ids)
    while run := cursor.forced():
        ids += run
        assert all(cursor.accept(i) for i in run)
        if b"city" in vocabulary.tokens[run[-1]] or len(ids) > 60:
            break
    text = tokenizer.decode(ids, skip_special_tokens=plan.skip_special_tokens)
    assert text.startswith("Well, <tool_call>\n{")
    parser = plan.parser()
    parser.push(text)
    assert parser.reply().content == "Well, "


def test_an_end_token_that_is_shown_is_no_content(make_tokenizer: MakeTokenizer) -> None:
    plan = detect(make_tokenizer(QWEN, special=["<tool_call>"])).plan(choice_of("auto", TOOLS))
    assert plan is not None
    reply, _ = in_pieces(plan, "Hello<|im_end|>", random.Random(1))
    assert reply.content == "Hello"
    assert plan.parse("Hello<|im_e").content == "Hello<|im_e"


def test_llama3_makes_one_call_where_its_template_takes_one(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(LLAMA)
    grammar = compiled(detect(tokenizer).plan(choice_of("auto", TOOLS)), vocabulary_of(tokenizer))
    assert takes(grammar, vocabulary_of(tokenizer), spelled("llama3", PARIS))
    assert not takes(grammar, vocabulary_of(tokenizer), spelled("llama3", PARIS, NOW))


# --------------------------------------------------------------------------------------------------------------- bad arguments


def test_t4_tools_are_checked() -> None:
    good = {"name": "f"}
    bad: dict[str, Any] = {
        "tools.0.type": [{"function": good}], "tools.0.function": [{"type": "function"}],
        "tools.0.function.name": [{"type": "function", "function": {"name": "a b"}}],
        "tools.0.function.parameters": [{"type": "function", "function": {**good, "parameters": "x"}}],
        "tools.0.function.strict": [{"type": "function", "function": {**good, "strict": "yes"}}],
        "tools.1.function.name": [{"type": "function", "function": good}] * 2,
        "tools": {"a": 1}, "tools.0": [5],
    }  # fmt: skip
    for param, raw in bad.items():
        with pytest.raises(InvalidRequestError) as caught:
            tools_of(raw)
        assert caught.value.param == param
    with pytest.raises(InvalidRequestError, match="128"):
        tools_of([{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)])
    assert tools_of(None) == () == tools_of([])


def test_t5_choices_are_checked() -> None:
    for raw in (
        "always",
        5,
        {"type": "custom"},
        {"type": "function", "function": {"name": "unknown"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [RAW[0]]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    ):
        with pytest.raises(InvalidRequestError) as caught:
            choice_of(raw, TOOLS)
        assert (caught.value.param or "").startswith("tool_choice")
    with pytest.raises(InvalidRequestError, match="there are no tools"):
        choice_of("required", ())
