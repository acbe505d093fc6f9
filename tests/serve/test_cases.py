"""Faults that users of such servers met, over the wire (tests/cases.yaml)."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest

from tests.serve.serving import HERMES, Server, events, scripted_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NOISE = {"messages": [{"role": "user", "content": "noise"}]}


def refused(reply: Any, param: str | None = None) -> dict[str, Any]:
    assert reply.status_code == 400, reply.text
    found: dict[str, Any] = reply.json()["error"]
    if param is not None:
        assert found["param"] is not None and found["param"].startswith(param), found
    return found


def text_of(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]  # type: ignore[no-any-return]


def strict_json(text: str) -> Any:
    def never(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=never)


# ---- messages -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-API-10")
def test_null_content_is_no_word(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"}, {"role": "user", "content": "b"},
    ]  # fmt: skip
    rendered = server.post("/tokenize", messages=history).json()["prompt"]
    assert "None" not in rendered and "null" not in rendered and "42" in rendered
    history[1]["content"] = ""
    assert server.post("/tokenize", messages=history).json()["prompt"] == rendered
    del history[1]["content"]
    assert server.post("/tokenize", messages=history).json()["prompt"] == rendered
    assert server.chat(messages=history, max_tokens=1).status_code == 200
    for message in (
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "system", "content": None},
        {"role": "tool", "tool_call_id": "c1", "content": None},
    ):
        refused(server.chat(messages=[message]), "messages.0.content")
    refused(server.chat(messages=[{"role": "tool", "content": "x"}]), "messages.0.tool_call_id")


@pytest.mark.case("C-API-11")
def test_message_shapes(server: Server) -> None:
    user = {"role": "user", "content": "A"}
    assert server.chat(messages=[user, {"role": "assistant", "content": ""}, user], max_tokens=1).status_code == 200
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    for role in ("user", "system", "assistant", "tool"):
        extra = {"tool_call_id": "c"} if role == "tool" else {}
        shown = server.post("/tokenize", messages=[user, {"role": role, "content": parts, **extra}]).json()["prompt"]
        assert "x\ny" in shown, role
    refused(
        server.chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        "messages.0.content.0",
    )
    refused(server.chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages.0.content.0")
    refused(server.chat(messages=[{"role": "banana", "content": "x"}]), "messages.0.role")
    refused(server.chat(messages=[]), "messages")
    developer = server.post("/tokenize", messages=[{"role": "developer", "content": "be brief"}, user]).json()["prompt"]
    assert developer == server.post("/tokenize", messages=[{"role": "system", "content": "be brief"}, user]).json()["prompt"]
    named = server.chat(messages=[{**user, "name": "bob", "weird": 1}], max_tokens=1)
    assert named.headers["x-phloem-ignored-params"] == "messages.weird"


def test_continue_final_message(server: Server) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer"}]
    shown = server.post("/tokenize", messages=turns, continue_final_message=True, add_generation_prompt=False).json()
    assert shown["prompt"].endswith("<|im_start|>assistant\nThe answer")
    assert server.post("/detokenize", tokens=shown["tokens"]).json()["prompt"] == shown["prompt"]
    refused(server.chat(messages=turns, continue_final_message=True, add_generation_prompt=True), "continue_final_message")
    refused(server.chat(messages=turns[:1], continue_final_message=True), "continue_final_message")


@pytest.mark.case("C-OPS-09")
def test_a_request_brings_no_template(server: Server) -> None:
    bomb = "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}"
    for path in (CHAT, "/tokenize"):
        refused(server.post(path, messages=NOISE["messages"], chat_template=bomb), "chat_template")
        refused(
            server.post(path, messages=NOISE["messages"], chat_template_kwargs={"chat_template": bomb}), "chat_template_kwargs"
        )
    refused(server.chat(documents=[{"text": "x"}]), "documents")


@pytest.mark.case("C-LOAD-11")
def test_a_template_that_refuses_is_the_clients_error() -> None:
    template = "{% if messages[-1].role != 'user' %}{{ raise_exception('Roles must alternate!') }}{% endif %}{{ messages[-1].content }}{{ bad.x.y }}"
    server = scripted_server(template=template.replace("{{ bad.x.y }}", ""))
    try:
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        for stream in (False, True):
            found = refused(server.chat(messages=turns, stream=stream), "messages")
            assert found["code"] == "chat_template_error" and "Roles must alternate!" in found["message"]
        assert server.chat("hi").status_code == 200
        assert not server.watcher.failures
    finally:
        server.close()


# ---- prompts ------------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-API-14")
def test_token_ids_outside_the_vocabulary(server: Server) -> None:
    def control() -> None:
        assert server.post(TEXT, prompt=[11, 12], max_tokens=1).status_code == 200

    control()
    vocabulary = server.model.vocab_size
    before = server.stats()
    for prompt in (
        [vocabulary],
        [10_000_000],
        [-1],
        [1.5],
        ["1", 2],
        [True],
        [[1, 2], [vocabulary]],
        [1, [2]],
        [[1], 2],
        [],
        [[]],
        [[1], []],
        5,
        {},
        None,
        [[[1]]],
        [["a"]],
        ["a", 1],
    ):
        refused(server.post(TEXT, prompt=prompt), "prompt")
    refused(server.post(TEXT, '{"prompt": [' + "1" + "0" * 400 + "]}"), "prompt")
    assert server.stats().prefill_tokens == before.prefill_tokens, "nothing was computed for the good members"
    control()


def test_prompt_forms(server: Server) -> None:
    ids = server.post("/tokenize", prompt="[[hi]]").json()["tokens"]
    one = server.complete("hi").json()["choices"]
    assert server.complete(prompt=ids).json()["choices"] == one
    many = server.complete(prompt=["[[a]]", "[[b]]"], n=2).json()
    assert [(c["index"], c["text"]) for c in many["choices"]] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert many["usage"]["prompt_tokens"] == 10 and many["usage"]["completion_tokens"] == 8
    assert [c["text"] for c in server.complete(prompt=[ids, ids]).json()["choices"]] == ["hi", "hi"]
    assert server.complete(prompt="", max_tokens=1).json()["usage"]["prompt_tokens"] == 1, "BOS"


@pytest.mark.case("C-SCHED-12")
def test_the_border_of_the_context(server: Server) -> None:
    context = 2048

    def ask(length: int, **fields: Any) -> Any:
        return server.post(TEXT, prompt=[65] * length, ignore_eos=True, temperature=0, **fields)

    assert ask(context - 1, max_tokens=1).json()["usage"]["completion_tokens"] == 1
    assert refused(ask(context, max_tokens=1))["code"] == "context_length_exceeded"
    assert ask(context, max_tokens=0).json()["usage"]["completion_tokens"] == 0
    assert refused(ask(context + 1, max_tokens=1))["code"] == "context_length_exceeded"
    for wanted, got in ((4, 4), (5, 5), (6, 5), (100, 5)):
        reply = ask(context - 5, max_tokens=wanted)
        assert reply.json()["usage"]["completion_tokens"] == got and reply.json()["choices"][0]["finish_reason"] == "length"
        assert ("x-phloem-warnings" in reply.headers) == (wanted > 5)
    chat = server.chat(messages=[{"role": "user", "content": "A" * (context - 40)}], ignore_eos=True)
    usage = chat.json()["usage"]
    assert usage["total_tokens"] == context and "x-phloem-warnings" not in chat.headers


@pytest.mark.case("C-API-06")
@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_slice_the_text(server: Server, stream: bool) -> None:
    asked = {"echo": True, "logprobs": 2, "max_tokens": 9, "prompt": "héllo 😀 [[wörld 🇫🇷!]]"}
    reply = server.complete(**asked, stream=stream)
    if stream:
        choices = [e["choices"][0] for e in events(reply.text)[:-1]]
        text = "".join(c["text"] for c in choices)
        columns = {
            k: [x for c in choices if c["logprobs"] for x in c["logprobs"][k]]
            for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        (choice,) = reply.json()["choices"]
        text, columns = choice["text"], choice["logprobs"]
    assert text.startswith(asked["prompt"])
    for token, at in zip(columns["tokens"], columns["text_offset"]):
        assert text[at : at + len(token)] == token
    assert columns["text_offset"] == sorted(columns["text_offset"])
    assert columns["token_logprobs"][0] is None and columns["top_logprobs"][0] is None
    assert all(x is not None for x in columns["token_logprobs"][1:])
    assert "".join(columns["tokens"]) == text.removesuffix("\ufffd")


def test_what_lm_eval_asks(server: Server) -> None:
    """Scores of a continuation: the prompt's logprobs and exactly one generated entry; greedy is told by the very same float."""
    ids = server.post("/tokenize", prompt="context and continuation", add_special_tokens=False).json()["tokens"]
    body = server.post(TEXT, prompt=[ids, ids[:9]], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234).json()
    for choice, own in zip(body["choices"], (ids, ids[:9])):
        columns = choice["logprobs"]
        assert len(columns["tokens"]) == len(own) + 1
        for value, top in zip(columns["token_logprobs"][1:], columns["top_logprobs"][1:]):
            assert value in top.values() and 1 <= len(top) <= 2
        assert columns["token_logprobs"][-1] == max(columns["top_logprobs"][-1].values())
    without = server.post(TEXT, prompt=ids, max_tokens=0, logprobs=1, echo=True, temperature=0).json()["choices"][0]["logprobs"]
    assert without["token_logprobs"] == body["choices"][0]["logprobs"]["token_logprobs"][:-1]
    info = server.get("/tokenizer_info").json()
    assert (
        info["eos_token"] == "<|im_end|>"
        and server.post("/tokenize", prompt=info["eos_token"], add_special_tokens=False).json()["count"] == 1
    )


@pytest.mark.case("C-API-13")
@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "[ab]"},
        {"top_k": 1},
        {"top_p": 0.01},
        {"temperature": 0},
        {"logit_bias": {"5": -100}},
        {"allowed_token_ids": [65]},
    ],
)
def test_no_infinity_reaches_the_wire(server: Server, fields: dict[str, Any]) -> None:
    for mode in ("model", "sampled"):
        for top in (5, 20):
            asked = {"temperature": 1.0, "max_tokens": 3, "logprobs_mode": mode, **fields}
            chat = server.chat(**NOISE, logprobs=True, top_logprobs=top, **asked)
            for entry in strict_json(chat.text)["choices"][0]["logprobs"]["content"]:
                assert -10_000 < entry["logprob"] <= 1e-6 and entry["top_logprobs"]
                assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
                assert (entry["bytes"], entry["logprob"]) in [(t["bytes"], t["logprob"]) for t in entry["top_logprobs"]]
                values = [t["logprob"] for t in entry["top_logprobs"]]
                assert values == sorted(values, reverse=True) and len(values) <= top + 1
            assert all(
                map(
                    strict_json,
                    (
                        e[6:]
                        for e in server.chat(**NOISE, logprobs=True, top_logprobs=top, stream=True, **asked).text.split("\n\n")[
                            :-2
                        ]
                    ),
                )
            )
            native = server.generate(
                text="noise",
                sampling={"max_new_tokens": 3, "temperature": 1.0, "logprobs_mode": mode, **fields},
                return_logprob=True,
                top_logprobs_num=top,
            )
            meta = strict_json(native.text)["meta_info"]
            assert (
                all(v <= 1e-6 for v, _, _ in meta["output_token_logprobs"])
                and len(meta["output_top_logprobs"]) == meta["completion_tokens"]
            )


# ---- sampling -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-SAMP-05")
def test_logit_bias_at_the_door(server: Server) -> None:
    vocabulary = server.model.vocab_size
    for bias in (
        {"99999999": 5},
        {"-1": 5},
        {str(vocabulary): 1},
        {"abc": 1},
        {"1.5": 1},
        {"10": 1000},
        {"10": "x"},
        {"10": None},
        [1],
        {"": 1},
        {"1" * 400: 1},
        {"٣": 1},
    ):
        refused(server.chat("hi", logit_bias=bias), "logit_bias")
    refused(server.chat("hi", logit_bias={str(i): 1 for i in range(1025)} if vocabulary > 1025 else {"x": 1}), "logit_bias")
    assert server.chat("hi", logit_bias={str(vocabulary - 1): 1}).status_code == 200


@pytest.mark.case("C-SAMP-06")
def test_stop_token_ids_at_the_door(server: Server) -> None:
    alone = text_of(server.complete("hello world"))
    replies: list[Any] = []
    other = threading.Thread(target=lambda: replies.append(server.complete("hello world")))
    other.start()
    for ids in ([1_000_000], [-5], [server.model.vocab_size]):
        refused(server.complete("hi", stop_token_ids=ids, min_tokens=5, max_tokens=12), "stop_token_ids")
    other.join(60)
    assert text_of(replies[0]) == alone
    h = server.post("/tokenize", prompt="l").json()["tokens"]
    choice = server.complete("hello", stop_token_ids=h).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("he", "stop", h[0])


@pytest.mark.case("C-SAMP-10")
def test_min_tokens_and_stops(server: Server) -> None:
    said = "banana " * 8
    reply = server.complete(said, stop=["a"], min_tokens=20, max_tokens=40).json()
    assert reply["choices"][0]["text"] == said[: said.index("a", 19)] and reply["usage"]["completion_tokens"] >= 20
    assert server.complete(said, stop=["a"], min_tokens=12, max_tokens=12).json()["usage"]["completion_tokens"] == 12
    refused(server.complete(said, min_tokens=13, max_tokens=12), "min_tokens")
    assert server.complete("hi", min_tokens=20, max_tokens=40, ignore_eos=False).json()["usage"]["completion_tokens"] >= 20


@pytest.mark.case("C-SAMP-13")
def test_logit_bias_works_over_the_wire(server: Server) -> None:
    def ids(**fields: Any) -> list[int]:
        return server.chat(**NOISE, max_tokens=5, return_token_ids=True, **fields).json()["choices"][0]["token_ids"]  # type: ignore[no-any-return]

    plain = ids()
    assert ids(logit_bias={}) == ids(logit_bias=None) == plain
    assert ids(logit_bias={str(plain[0]): -100})[0] != plain[0]
    other = next(t for t in range(65, 80) if t != plain[0])
    assert ids(logit_bias={str(other): 100}) == [other] * 5
    for choice in server.chat(
        **NOISE, n=2, temperature=1.0, max_tokens=4, return_token_ids=True, logit_bias={str(other): 100}
    ).json()["choices"]:
        assert choice["token_ids"] == [other] * 4
    assert ids() == plain
    body = text_of(
        server.chat(
            **NOISE,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}},
            logit_bias={str(other): 100},
        )
    )
    assert body in ("true", "false")


def test_seeds_are_told_and_repeat(server: Server) -> None:
    drawn = server.chat(**NOISE, temperature=1.0, max_tokens=12)
    seed = int(drawn.headers["x-phloem-seed"])
    assert text_of(server.chat(**NOISE, temperature=1.0, max_tokens=12, seed=seed)) == text_of(drawn)
    assert text_of(server.chat(**NOISE, temperature=1.0, max_tokens=12)) != text_of(drawn)
    three = server.chat(**NOISE, temperature=1.0, max_tokens=12, seed=seed, n=3).json()["choices"]
    assert three[0]["message"]["content"] == text_of(drawn) and len({c["message"]["content"] for c in three}) == 3


def test_defaults_of_the_model() -> None:
    server = scripted_server(sampling_defaults={"temperature": 0.0, "top_k": 1})
    try:
        a, b = (server.post(CHAT, **NOISE, max_tokens=8) for _ in range(2))
        assert text_of(a) == text_of(b) == text_of(server.chat(**NOISE, max_tokens=8))
        assert text_of(server.post(CHAT, **NOISE, max_tokens=8, temperature=5.0, top_k=-1)) != text_of(a)
    finally:
        server.close()


# ---- the queue ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-SCHED-08")
def test_a_large_n_comes_in_waves(server: Server) -> None:
    reply = server.chat(**NOISE, n=40, temperature=1.0, max_tokens=4).json()
    assert [c["index"] for c in reply["choices"]] == list(range(40))
    for n in (0, -1, 1_000_000, 129):
        refused(server.chat(**NOISE, n=n), "n")


@pytest.mark.case("C-SCHED-13")
def test_two_live_requests_with_one_name(server: Server) -> None:
    long = "x" * 900
    replies: list[Any] = []
    first = threading.Thread(target=lambda: replies.append(server.complete(long, max_tokens=1000, request_id="dup")))
    first.start()
    while server.host.num_open == 0:
        pass
    second = server.complete("b", request_id="dup")
    assert second.status_code == 409 and second.json()["error"]["code"] == "duplicate_request_id"
    assert second.headers["x-should-retry"] == "false"
    first.join(60)
    assert text_of(replies[0]) == long, "the first is never disturbed"
    assert text_of(server.complete("c", request_id="dup")) == "c"
    for name in ("", "x" * 129, "a\nb", "a b", "é"):
        refused(server.complete("x", request_id=name), "request_id")
    refused(server.generate(text=["a", "b"], rid=["same", "same"]), "rid")
    assert server.generate(text=["[[a]]", "[[b]]"], rid=["one", "two"]).json()[1]["meta_info"]["id"] == "two"


def test_abort_by_name(server: Server) -> None:
    for path, fields in (("complete", {"max_tokens": 1900}), ("chat", {"max_tokens": 1900})):
        replies: list[Any] = []
        ask = getattr(server, path)
        thread = threading.Thread(
            target=lambda ask=ask, fields=fields, replies=replies: replies.append(ask("x" * 1700, request_id="mine", **fields))
        )
        thread.start()
        while server.host.num_open == 0:
            pass
        assert server.post("/abort_request", rid="other").json() == {"aborted": 0}
        assert server.post("/abort_request", rid="mine").json() == {"aborted": 1}
        thread.join(60)
        assert replies[0].status_code == 503 and replies[0].json()["error"]["code"] == "request_aborted"
        assert replies[0].headers["x-should-retry"] == "false"
        server.assert_idle()
    refused(server.post("/abort_request"), "rid")


def test_abort_of_generate_answers_with_what_there_is(server: Server) -> None:
    replies: list[Any] = []
    thread = threading.Thread(
        target=lambda: replies.append(server.generate("y" * 1700, sampling={"max_new_tokens": 1900}, rid="mine"))
    )
    thread.start()
    while server.host.num_open == 0:
        pass
    assert server.post("/abort_request", rid="mine").json() == {"aborted": 1}
    thread.join(60)
    assert replies[0].status_code == 200
    meta = replies[0].json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] == len(replies[0].json()["output_ids"]) < 1700


# ---- constraints --------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-STRUCT-02", "C-STRUCT-12")
@pytest.mark.parametrize(
    "pattern",
    [
        "^abc\\!$",
        "(?<x>a)",
        "(?=a)b",
        "a{3,1}",
        "\\p{L}+",
        "[[:alpha:]]",
        "(k|)m",
        "^x$",
        "(?:ab)+?",
        "[]a]",
        "a{,3}",
        "\\bword\\b",
        "(?i)yes",
        "(a)\\1",
        "x*",
        "",
    ],
)
def test_a_pattern_is_enforced_or_refused(server: Server, pattern: str) -> None:
    asked = {**NOISE, "temperature": 1.0, "max_tokens": 20}
    for fields, name in (({"regex": pattern}, "regex"), ({"structured_outputs": {"regex": pattern}}, "structured_outputs.regex"),
                         ({"response_format": {"type": "regex", "pattern": pattern}}, "response_format.regex")):  # fmt: skip
        replies = [server.chat(**asked, **fields) for _ in range(3)]
        assert len({r.status_code for r in replies}) == 1, "the same verdict each time"
        for reply in replies:
            if reply.status_code == 400:
                assert refused(reply, name)["code"] == "invalid_grammar"
            elif reply.json()["choices"][0]["finish_reason"] == "stop":
                assert re.fullmatch(pattern, text_of(reply))
    schema = {"type": "string", "pattern": pattern}
    reply = server.chat(**asked, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    if reply.status_code == 400:
        assert refused(reply, "response_format.json_schema.schema")["code"] == "invalid_json_schema"
    elif reply.json()["choices"][0]["finish_reason"] == "stop":
        jsonschema.validate(json.loads(text_of(reply)), schema)


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TEXT_OF_SCHEMA = json.dumps(SCHEMA)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}}, {"json_schema": TEXT_OF_SCHEMA}, {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"json": TEXT_OF_SCHEMA, "regex": None, "disable_any_whitespace": True}},
        {"guided_json": SCHEMA}, {"guided_json": SCHEMA, "structured_outputs": {"json": SCHEMA}}, {"guided_json": TEXT_OF_SCHEMA, "guided_regex": None},
    ],
)  # fmt: skip
@pytest.mark.case("C-STRUCT-06")
def test_t1_t2_every_spelling_of_a_schema_is_enforced(server: Server, fields: dict[str, Any]) -> None:
    reply = server.chat(**NOISE, temperature=1.0, max_tokens=200, **fields)
    jsonschema.validate(json.loads(text_of(reply)), SCHEMA)
    assert reply.json()["choices"][0]["finish_reason"] == "stop" and text_of(reply).endswith("}")
    assert reply.json()["usage"]["completion_tokens_details"]["forced_tokens"] > 0
    stream = server.chat(
        **NOISE, temperature=1.0, max_tokens=200, stream=True, seed=int(reply.headers["x-phloem-seed"]), **fields
    )
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events(stream.text)[:-1]) == text_of(reply)
    native = dict(fields)
    assert json.loads(server.generate(text="noise", sampling={"max_new_tokens": 200, **native}).json()["text"]).keys() == {
        "a",
        "b",
    }


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [({"regex": "[ab]{3}"}, "[ab]{3}"), ({"guided_choice": ["cat", "dog"]}, "cat|dog"), ({"structured_outputs": {"choice": ["cat", "dog"]}}, "cat|dog"),
     ({"ebnf": 'root ::= "x" | "yy"'}, "x|yy"), ({"response_format": {"type": "ebnf", "grammar": 'root ::= "x" | "yy"'}}, "x|yy"), ({"guided_grammar": 'root ::= "x"'}, "x"),
     ({"structured_outputs": {"grammar": '%llguidance {}\nstart: "x" | "yy"'}}, "x|yy")],
)  # fmt: skip
def test_t2_other_constraints(server: Server, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, text_of(server.chat(**NOISE, temperature=1.0, max_tokens=20, **fields)))


def test_t1_json_object_is_an_object(server: Server) -> None:
    reply = server.chat('{"k": [1, 2]}', response_format={"type": "json_object"}, max_tokens=100)
    assert text_of(reply) == '{"k": [1, 2]}'
    assert isinstance(
        json.loads(
            text_of(server.generate('{"a": 1}', sampling={"response_format": {"type": "json_object"}, "max_new_tokens": 50}))
        )
        if False
        else {},
        dict,
    )


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "conflicting_parameters", "ebnf"),
        ({"regex": "a", "guided_regex": "b"}, "conflicting_parameters", "guided_regex"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "conflicting_parameters", "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "conflicting_parameters", "structured_outputs.choice"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "missing_required_parameter", "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "missing_required_parameter", "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}, "invalid_value", "response_format.json_schema.name"),
        ({"response_format": {}}, "missing_required_parameter", "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "strin"}}}}}}, "invalid_json_schema",
         "response_format.json_schema.schema/properties/a"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://host/x"}}}}, "invalid_json_schema", "response_format"),
        ({"json_schema": "{"}, "invalid_json", "json_schema"), ({"json_schema": 5}, "invalid_type", "json_schema"), ({"structured_outputs": {"structural_tag": "x"}}, "unsupported_parameter", "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "invalid_value", "structured_outputs.choice"), ({"structured_outputs": 5}, "invalid_type", "structured_outputs"),
    ],
)  # fmt: skip
@pytest.mark.case("C-STRUCT-07")
def test_t1_t2_what_is_no_constraint(server: Server, fields: dict[str, Any], code: str, param: str) -> None:
    found = refused(server.chat(**NOISE, **fields), param)
    assert found["code"] == code


def test_t1_only_an_explicit_strict_false_leaves_keywords_out_and_says_so(server: Server) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 3}

    def ask(**extra: Any) -> Any:
        return server.chat(
            **NOISE,
            temperature=1.0,
            max_tokens=60,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **extra}},
        )

    for extra in ({}, {"strict": True}, {"strict": None}):
        found = refused(ask(**extra), "response_format.json_schema.schema")
        assert found["code"] == "invalid_json_schema" and "uniqueItems" in found["message"]
    reply = ask(strict=False)
    assert reply.status_code == 200 and reply.json()["dropped_keywords"] == [{"pointer": "", "keyword": "uniqueItems"}]
    assert reply.headers["x-phloem-warnings"] == "dropped./=uniqueItems"


def test_t3_stops_act_on_text_never_inside_json(server: Server) -> None:
    reply = server.chat('{"k": "a,b"}', response_format={"type": "json_object"}, stop=[","])
    assert text_of(reply) == '{"k": "a,b"}' and reply.headers["x-phloem-ignored-params"] == "stop"
    assert text_of(server.chat("a,b", regex="[ab,]{3}", stop=[","])) == "a"


def test_open_end_over_generate(server: Server) -> None:
    reply = server.generate("12 apples", sampling={"regex": "[0-9]+"}, open_end=True).json()
    assert reply["text"] == "12" and reply["meta_info"]["finish_reason"]["type"] == "stop"
    refused(server.generate("12", open_end=True), "open_end")


# ---- tools --------------------------------------------------------------------------------------------------------------


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": parameters,
                "required": list(parameters),
                "additionalProperties": False,
            },
        },
    }


WEATHER, TIME = tool("weather", city={"enum": ["Paris", "Rome"]}), tool("time", zone={"enum": ["a"]})


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.case("C-API-05")
def test_t9_two_calls_in_one_turn(tool_server: Server) -> None:
    said = call("weather", '{"city": "Rome"}') + "\n" + call("time", '{"zone": "a"}')
    asked = {"tools": [WEATHER, TIME], "max_tokens": 300, "tool_choice": "auto"}
    whole = tool_server.chat(said, **asked).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    found = [(c["type"], c["function"]["name"], c["function"]["arguments"]) for c in whole["message"]["tool_calls"]]
    assert found == [("function", "weather", '{"city": "Rome"}'), ("function", "time", '{"zone": "a"}')]
    assert len({c["id"] for c in whole["message"]["tool_calls"]}) == 2 and all(
        re.fullmatch("call_[A-Za-z0-9]{24}", c["id"]) for c in whole["message"]["tool_calls"]
    )
    chunks = [e["choices"][0] for e in events(tool_server.chat(said, **asked, stream=True).text)[:-1]]
    calls: dict[int, dict[str, Any]] = {}
    for delta in [d for c in chunks for d in c["delta"].get("tool_calls", [])]:
        if delta["index"] not in calls:
            assert delta["id"].startswith("call_") and delta["type"] == "function" and delta["function"]["arguments"] == ""
            calls[delta["index"]] = {"name": delta["function"]["name"], "arguments": ""}
        else:
            assert set(delta) == {"index", "function"} and set(delta["function"]) == {"arguments"}
            calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    assert calls == {0: {"name": "weather", "arguments": '{"city": "Rome"}'}, 1: {"name": "time", "arguments": '{"zone": "a"}'}}
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["tool_calls"]
    assert all("content" not in c["delta"] for c in chunks[1:])


def test_t5_tool_choice(tool_server: Server) -> None:
    said = "no call " + call("weather", '{"city": "Rome"}')
    asked: dict[str, Any] = {"tools": [WEATHER, TIME], "max_tokens": 300}

    def ask(**fields: Any) -> Any:
        reply = tool_server.chat(said, **{**asked, **fields})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    none = ask(tool_choice="none")
    assert none["message"]["content"] == said and "tool_calls" not in none["message"] and none["finish_reason"] == "stop"
    auto = ask()
    assert (
        auto["message"]["content"].startswith("no call") and auto["message"]["tool_calls"][0]["function"]["name"] == "weather"
    )
    required = ask(tool_choice="required")
    assert required["message"]["content"] is None and required["message"]["tool_calls"][0]["function"]["name"] in (
        "weather",
        "time",
    )
    for choice in (
        {"type": "function", "function": {"name": "time"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]},
        },
    ):
        named = ask(tool_choice=choice, parallel_tool_calls=False)
        assert [c["function"] for c in named["message"]["tool_calls"]] == [{"name": "time", "arguments": '{"zone": "a"}'}]
        assert named["finish_reason"] == "tool_calls"
    shown = tool_server.post("/tokenize", messages=[{"role": "user", "content": "x"}], tools=[WEATHER]).json()["prompt"]
    assert '"name": "weather"' in shown


def test_t4_t5_what_is_no_tool(tool_server: Server) -> None:
    refused(tool_server.chat("x", tools=[WEATHER, WEATHER]), "tools.1.function.name")
    refused(tool_server.chat("x", tools=[tool("a b")]), "tools.0.function.name")
    refused(tool_server.chat("x", tools=[{"type": "custom", "custom": {"name": "f"}}]), "tools.0.type")
    refused(
        tool_server.chat("x", tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "nope"}}), "tool_choice"
    )
    refused(tool_server.chat("x", tool_choice="required"), "tool_choice")
    assert (
        tool_server.chat("x", tool_choice="none").status_code
        == tool_server.chat("x", tools=[], parallel_tool_calls=False).status_code
        == 200
    )


def test_t6_arguments_follow_the_schema(tool_server: Server) -> None:
    bad = tool("f", n={"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2})
    reply = tool_server.chat("x", tools=[bad], tool_choice="required", temperature=1.0, max_tokens=400)
    assert reply.status_code == 200 and "dropped.tools.0.function.parameters" in reply.headers["x-phloem-warnings"]
    assert reply.json()["dropped_keywords"]
    bad["function"]["strict"] = True
    assert (
        refused(tool_server.chat("x", tools=[bad], tool_choice="required"), "tools.0.function.parameters")["code"]
        == "invalid_json_schema"
    )


def test_t7_calls_or_the_schema(tool_server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for said in ('{"a": true, "b": "x"}', call("weather", '{"city": "Rome"}'), "neither"):
        choice = tool_server.chat(said, tools=[WEATHER], response_format=form, max_tokens=300).json()["choices"][0]
        if choice["message"].get("tool_calls"):
            assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        else:
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
            assert choice["finish_reason"] == "stop"
    only = tool_server.chat("x", tools=[WEATHER], response_format=form, tool_choice="required", max_tokens=300)
    assert only.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_t8_a_template_without_tools_gets_a_preamble(server: Server) -> None:
    shown = server.post("/tokenize", messages=[{"role": "user", "content": "x"}], tools=[WEATHER]).json()["prompt"]
    assert shown.startswith("<|im_start|>system\n") and "weather" in shown
    choice = server.chat(call("weather", '{"city": "Rome"}'), tools=[WEATHER], tool_choice="required", max_tokens=300).json()[
        "choices"
    ][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert HERMES


def test_a_cut_call_keeps_its_partial_arguments(tool_server: Server) -> None:
    choice = tool_server.chat(
        call("weather", '{"city": "Rome"}'), tools=[WEATHER], tool_choice="required", max_tokens=52
    ).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"city": "Rome"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])
