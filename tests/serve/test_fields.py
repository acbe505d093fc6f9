"""Every row of serve/fields.py on each of its routes, with a legal, a neutral and an illegal value (W2): none silently dropped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.runtime.serve import wire
from phloem.runtime.serve.fields import CONDITIONAL, FIELDS, SPELLINGS, Field, classify, is_neutral
from tests.serve.serving import Server

STRUCTS = {
    "c": wire.Chat,
    "t": wire.Completion,
    "s": wire.Generation,
    "g": wire.Generate,
    "k": wire.Tokenize,
    "d": wire.Detokenize,
}
PATHS = {
    "c": "/v1/chat/completions",
    "t": "/v1/completions",
    "s": "/generate",
    "g": "/generate",
    "k": "/tokenize",
    "d": "/detokenize",
}
HI = [{"role": "user", "content": "[[hi]]"}]
BASE: dict[str, dict[str, Any]] = {
    "c": {"messages": HI, "max_completion_tokens": 4}, "t": {"prompt": "[[hi]]", "max_tokens": 4}, "g": {"text": "[[hi]]", "sampling_params": {"max_new_tokens": 4}},
    "s": {}, "k": {"prompt": "hi"}, "d": {"tokens": [5]},
}  # fmt: skip
CONVERSATION = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
)
LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens")
ROWS = [(route, field) for field in FIELDS for route in field.routes if "." not in field.name]


def ids(row: tuple[str, Field]) -> str:
    return f"{row[0]}-{row[1].name}"


def named(field: Field) -> str:
    """A real name for a pattern."""
    return field.name.replace("*", "x")


def body(route: str, field: Field, value: str, *, beside: bool = False) -> dict[str, Any]:
    base = dict(BASE[route])
    if route == "k" and field.name in CONVERSATION:
        base = {"messages": HI}
    extra = json.loads("{" + field.beside + "}") if beside and field.beside else {}
    given = {**extra, named(field): json.loads(value)}
    if field.name in ("min_tokens", "min_new_tokens") and route != "s":
        base["max_tokens"] = 4
    if field.name in LENGTHS:
        base = {k: v for k, v in base.items() if k not in LENGTHS}
    if route == "g" and field.name == "input_ids":
        del base["text"]
    if route == "s":
        params = {"max_new_tokens": 4} | given
        if field.name in LENGTHS:
            params = given
        return {"text": "[[hi]]", "sampling_params": params}
    return base | given


def prefixed(route: str, name: str) -> str:
    return f"sampling_params.{name}" if route == "s" else name


@pytest.mark.parametrize("row", [r for r in ROWS if r[1].how == "honoured" and r[1].good], ids=ids)
def test_w2_a_legal_value_is_honoured_and_not_listed(server: Server, row: tuple[str, Field]) -> None:
    route, field = row
    reply = server.post(PATHS[route], body(route, field, field.good, beside=True))
    assert reply.status_code == 200, reply.text
    listed = reply.headers.get("x-phloem-ignored-params", "")
    if field not in CONDITIONAL and field.name != "priority":
        assert listed == "", listed


@pytest.mark.parametrize("row", [r for r in ROWS if r[1].how == "honoured" and r[1].bad], ids=ids)
def test_w2_an_illegal_value_is_refused_by_name(server: Server, row: tuple[str, Field]) -> None:
    route, field = row
    reply = server.post(PATHS[route], body(route, field, field.bad))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None and error["param"].startswith(prefixed(route, named(field))), error


@pytest.mark.parametrize("row", [r for r in ROWS if r[1].how in ("honoured", "refused")], ids=ids)
def test_w1_w2_null_and_neutral_values_ask_for_nothing(server: Server, row: tuple[str, Field]) -> None:
    route, field = row
    neutral = ["null", *map(json.dumps, field.neutral)]
    if field.how == "refused":
        neutral += ["false", '""', "[]", "{}"]
    required = field.name in ("messages", "prompt", "text", "input_ids", "tokens")
    for value in neutral:
        if required:
            continue
        reply = server.post(PATHS[route], body(route, field, value))
        assert reply.status_code == 200, (value, reply.text)
        assert "x-phloem-ignored-params" not in reply.headers, value


@pytest.mark.parametrize("row", [r for r in ROWS if r[1].how == "refused"], ids=ids)
def test_w2_what_would_change_the_answer_is_refused(server: Server, row: tuple[str, Field]) -> None:
    route, field = row
    reply = server.post(PATHS[route], body(route, field, field.bad))
    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == (
        "unsupported_parameter",
        prefixed(route, named(field)),
    )


@pytest.mark.parametrize("row", [r for r in ROWS if r[1].how == "without_effect"], ids=ids)
def test_w2_w3_what_has_no_effect_is_listed(server: Server, row: tuple[str, Field]) -> None:
    route, field = row
    with_it = server.post(PATHS[route], body(route, field, field.good))
    assert with_it.status_code == 200, with_it.text
    assert with_it.headers["x-phloem-ignored-params"] == prefixed(route, field.name)
    without = server.post(PATHS[route], body(route, field, "null"))
    assert "x-phloem-ignored-params" not in without.headers


def test_the_table_and_the_structs_agree() -> None:
    for route, struct in STRUCTS.items():
        table = {f.name for f in FIELDS if route in f.routes and f.how == "honoured"}
        assert table - {"messages"} == set(struct.__struct_fields__) - {"messages"}, route


def test_no_name_stands_twice_for_a_route() -> None:
    for route in STRUCTS:
        names = [f.name for f in FIELDS if route in f.routes]
        assert len(names) == len(set(names)), route


def test_spellings_are_fields() -> None:
    for meaning, names in SPELLINGS.items():
        assert names[0] == meaning
        for name in names:
            assert any(f.name == name and f.how == "honoured" for f in FIELDS)


def test_classify_knows_patterns() -> None:
    found = dict(classify("c", ["messages", "watermark_ratio", "prompt_embeds", "nonsense", "user"]))
    assert set(found) == {"watermark_ratio", "prompt_embeds", "nonsense", "user"}
    assert found["nonsense"] is None and found["user"] is not None and found["user"].how == "without_effect"
    assert found["watermark_ratio"] is not None and found["watermark_ratio"].how == "refused"


def test_true_is_not_the_neutral_one() -> None:
    best_of = next(f for f in FIELDS if f.name == "best_of")
    assert is_neutral(best_of, 1) and not is_neutral(best_of, True) and not is_neutral(best_of, 2)


def test_w2_best_of_equal_to_n_is_fine(server: Server) -> None:
    assert server.complete("hi", n=2, best_of=2).status_code == 200
    assert server.complete("hi", n=2, best_of=3).status_code == 400


def test_w2_unknown_names_are_listed_nested_ones_dotted_and_sorted(server: Server) -> None:
    messages = [{"role": "user", "content": "[[hi]]", "foo": 1, "bar": None}]
    reply = server.chat(
        messages=messages,
        zebra=1,
        **{"ä b": 2},
        stream=True,
        stream_options={"other": 1, "include_obfuscation": False},
        nothing=None,
    )
    assert reply.status_code == 200
    assert (
        reply.headers["x-phloem-ignored-params"]
        == "messages.bar, messages.foo, stream_options.include_obfuscation, stream_options.other, zebra, %C3%A4%20b"
    )
