"""Streams: their bytes, and that they say what the whole reply says (W5, W6)."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from tests.serve.serving import Server, events

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def parts(text: str) -> tuple[list[Any], dict[int, list[Any]]]:
    """(chunks, choices by index)."""
    chunks = events(text)
    assert chunks[-1] == "[DONE]"
    by_index: dict[int, list[Any]] = defaultdict(list)
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            by_index[choice["index"]].append(choice)
    return chunks[:-1], by_index


def test_the_bytes_of_a_chat_stream(server: Server) -> None:
    reply = server.chat("Hé", **USAGE)
    name = reply.headers["x-request-id"][4:]
    text = reply.text
    created = json.loads(text.split("\n\n")[0][6:])["created"]
    head = (
        f'data: {{"id":"chatcmpl-{name}","object":"chat.completion.chunk","created":{created},"model":"scripted",'
        f'"system_fingerprint":"{json.loads(text.split(chr(10))[0][6:])["system_fingerprint"]}","choices":['
    )
    usage = (
        '{"prompt_tokens":26,"completion_tokens":4,"total_tokens":30,"prompt_tokens_details":{"cached_tokens":%d,"cache_write_tokens":%d},'
        '"completion_tokens_details":{"reasoning_tokens":0,"forced_tokens":0,"accepted_prediction_tokens":0,"rejected_prediction_tokens":0}}'
    )
    cached = json.loads(text.split("\n\n")[-3][6:])["usage"]["prompt_tokens_details"]["cached_tokens"]
    expected = [
        '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}',
        '{"index":0,"delta":{"content":"H"},"logprobs":null,"finish_reason":null}],"usage":null}',
        '{"index":0,"delta":{"content":"é"},"logprobs":null,"finish_reason":null}],"usage":null}',
        '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null,"matched_stop":null}],"usage":null}',
        '],"usage":' + usage % (cached, 26 - cached) + "}",
    ]
    if '{"content":"Hé"}' in text:  # a slow reader gets both letters as one
        expected[1:3] = [expected[1].replace('"H"', '"Hé"')]
    assert text == "".join(f"{head}{e}\n\n" for e in expected) + "data: [DONE]\n\n"
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-store", "no")


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 9},
        {"max_tokens": 40, "stop": ["e"]},
        {"max_tokens": 1},
        {"max_tokens": 20, "logprobs": 2},
        {"max_tokens": 0},
    ],
)
@pytest.mark.case("C-API-02", "C-API-03")
def test_w5_a_stream_joined_is_the_whole_reply(server: Server, path: str, n: int, fields: dict[str, Any]) -> None:
    ask = getattr(server, path)
    if path == "chat":
        fields = {**fields, "logprobs": True, "top_logprobs": 2} if "logprobs" in fields else fields
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "noise"}]}
    else:
        prompt = {"prompt": "noise"}
    asked = {**prompt, "temperature": 1.0, "seed": 5, "n": n, "return_token_ids": True, **fields}
    whole = ask(**asked).json()
    reply = ask(**asked, **USAGE)
    chunks, choices = parts(reply.text)
    assert set(choices) == set(range(n)) == {c["index"] for c in whole["choices"]}
    for choice in whole["choices"]:
        mine = choices[choice["index"]]
        assert all("finish_reason" in c for c in mine), "C-API-03"
        assert [c["finish_reason"] is not None for c in mine] == [False] * (len(mine) - 1) + [True]
        assert (
            mine[-1]["finish_reason"] == choice["finish_reason"]
            and mine[-1]["stop_reason"] == choice["stop_reason"] == mine[-1]["matched_stop"]
        )
        assert [i for c in mine for i in c.get("token_ids", [])] == choice["token_ids"]
        if path == "chat":
            assert mine[0]["delta"] == {"role": "assistant", "content": ""} and all("role" not in c["delta"] for c in mine[1:])
            assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
            logprobs = [e for c in mine if c["logprobs"] for e in c["logprobs"]["content"]]
            assert logprobs == (choice["logprobs"]["content"] if "logprobs" in fields else [])
        else:
            assert "".join(c["text"] for c in mine) == choice["text"]
            columns = [c["logprobs"] for c in mine if c["logprobs"]]
            if "logprobs" in fields:
                for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    assert [x for c in columns for x in c[key]] == choice["logprobs"][key], key
            else:
                assert not columns
    assert [bool(c["choices"]) for c in chunks] == [True] * (len(chunks) - 1) + [False], (
        "C-API-02: one chunk with usage, the last"
    )
    assert all(c["usage"] is None for c in chunks[:-1])
    usage, expected = chunks[-1]["usage"], whole["usage"]
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[key] == expected[key], key
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert reply.headers["x-phloem-seed"] == "5"


def test_w6_every_token_has_its_id_and_its_logprob(server: Server) -> None:
    for fields in ({}, {"stop": ["l"]}, {"stop": ["l"], "include_stop_str_in_output": True}, {"max_tokens": 2}):
        body = server.chat("hello", logprobs=True, top_logprobs=1, return_token_ids=True, **fields).json()
        choice, usage = body["choices"][0], body["usage"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == usage["completion_tokens"]
        text = server.complete("hello", logprobs=1, return_token_ids=True, **fields).json()
        assert (
            len(text["choices"][0]["token_ids"])
            == len(text["choices"][0]["logprobs"]["tokens"])
            == text["usage"]["completion_tokens"]
        )
        assert body["prompt_token_ids"] and text["choices"][0]["prompt_token_ids"]


@pytest.mark.case("C-STOP-08")
def test_no_chunk_of_a_chat_is_empty(server: Server) -> None:
    for stop in ([], ["ABCDEFGHIJ"], ["xyz", "helloX"]):
        _, choices = parts(server.chat("hello world", stream=True, stop=stop).text)
        contents = [c["delta"]["content"] for c in choices[0][1:-1]]
        assert all(contents) and "".join(contents) == "hello world"


def test_without_usage_asked_no_chunk_speaks_of_it(server: Server) -> None:
    for options in ({}, {"stream_options": {}}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        chunks, _ = parts(server.chat("hi", stream=True, **options).text)
        assert all("usage" not in c and c["choices"] for c in chunks)


def test_stream_options_without_stream(server: Server) -> None:
    for fields in ({"stream_options": {}}, {"stream_options": {"include_usage": True}, "stream": False}):
        reply = server.chat("hi", **fields)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "stream_options"


def test_continuous_usage(server: Server) -> None:
    chunks, _ = parts(
        server.chat("hello", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).text
    )
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 6
    assert all(c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + c["usage"]["completion_tokens"] for c in chunks)


def test_what_never_changes_in_a_stream(server: Server) -> None:
    chunks, _ = parts(server.complete("hello", stream=True, n=2).text)
    assert len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks}) == 1


@pytest.mark.case("C-STOP-02")
def test_text_that_looks_like_a_stop_is_not_lost(server: Server) -> None:
    said = "a\nb\n\n\nc\n\nZZ\n\n\n\n@! ab!\n\n"
    for stop in ([], ["\nZZZ", "\n\n\n\n@@"], ["a!", "ab!!"]):
        for limit in (200, 9):
            whole = server.chat(said, stop=stop, max_tokens=limit).json()["choices"][0]
            _, choices = parts(server.chat(said, stop=stop, max_tokens=limit, stream=True).text)
            assert whole["message"]["content"] == said[:limit] == "".join(c["delta"].get("content", "") for c in choices[0])
            assert whole["finish_reason"] == ("length" if limit == 9 else "stop")


@pytest.mark.case("C-STOP-06")
@pytest.mark.parametrize("said", ["👩\u200d👩\u200d👧\u200d👦", "🇫🇷", "가나다라", "नमस्ते", "e\u0301", "a😀b"])
def test_characters_are_never_broken(server: Server, said: str) -> None:
    _, choices = parts(server.chat(said, stream=True).text)
    pieces = [c["delta"].get("content", "") for c in choices[0]]
    assert "".join(pieces) == said and "\ufffd" not in "".join(pieces)
    assert server.chat(said, regex=".*").json()["choices"][0]["message"]["content"] == said


@pytest.mark.case("C-STOP-03")
def test_stop_strings_at_the_door(server: Server) -> None:
    for stop in ("", [""], ["", "X"], [None], [5], "x" * 16_385, ["x"] * 33):
        reply = server.chat("hello", stop=stop)
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("stop"), stop
    for stop in ([], None, ["1", "2", "3", "4", "5"], "x" * 10_000, ["\u0000"]):
        assert server.chat("hello", stop=stop, stop_token_ids=[]).json()["choices"][0]["message"]["content"] == "hello"


@pytest.mark.case("C-STOP-05", "C-STOP-12", "C-STOP-13")
@pytest.mark.parametrize(
    ("said", "stop", "text", "matched"),
    [
        ("hello <<<END>>>\nrest", ["<<<END>>>", "<<<END>>>\n"], "hello ", "<<<END>>>"),
        ("hello <<<END>>>\nrest", ["<<<END>>>\n", "<<<END>>>"], "hello ", "<<<END>>>"),
        ("hello <<<END>>>\nrest", ["END", "<<<END"], "hello ", "<<<END"),
        ("hello <<<END>>>\nrest", ["<<<END", "END"], "hello ", "<<<END"),
        ("9 8 7 6 5 4 3 2 1 0 9 8 7", ["7 6 5 4 3 2 1 0 9"], "9 8 ", "7 6 5 4 3 2 1 0 9"),
        ("9 8 7 6 5 4", ["]]9", "4"], "9 8 7 6 5 ", "4"),
        ("xW tail", ["W"], "x", "W"), ("x W tail", ["W"], "x ", "W"), ("(W tail", ["W"], "(", "W"), ("x\nW tail", ["W"], "x\n", "W"),
    ],
)  # fmt: skip
def test_a_stop_ends_the_output_and_is_told(server: Server, said: str, stop: list[str], text: str, matched: str) -> None:
    whole = server.complete(said, stop=stop).json()["choices"][0]
    _, choices = parts(server.complete(said, stop=stop, stream=True).text)
    assert whole["text"] == text == "".join(c["text"] for c in choices[0])
    assert (whole["finish_reason"], whole["stop_reason"], whole["matched_stop"]) == ("stop", matched, matched)
    assert choices[0][-1]["stop_reason"] == matched
    native = server.generate(said, sampling={"stop": stop}).json()
    assert (native["text"], native["meta_info"]["finish_reason"]) == (text, {"type": "stop", "matched": matched})
    echoed = server.complete(said, stop=stop, echo=True).json()["choices"][0]["text"]
    assert echoed == f"[[{said}]]{text}", "C-STOP-13: the prompt never stops it"


def test_a_failure_in_mid_stream_is_an_event_and_an_orderly_end(server: Server) -> None:
    device = server.client._core.executor  # type: ignore[attr-defined]
    script, count = device.f, 0

    def breaks(history: Any, width: int) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise RuntimeError("the device broke")
        return script(history, width)

    device.f = breaks
    try:
        reply = server.chat("hello", stream=True)
    finally:
        device.f = script
    found = events(reply.text)
    assert found[-1] == "[DONE]"
    if "error" in found[-2]:
        assert set(found[-2]["error"]) == {"message", "type", "param", "code"}
    else:
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in found[:-1]) == "hello", (
            "the engine recovered: all is there"
        )
    assert server.chat("hello").json()["choices"][0]["message"]["content"] == "hello"


def test_sampled_rows_that_fail_end_with_an_error_event(server: Server) -> None:
    from phloem.runtime.errors import NumericalError

    device = server.client._core.executor  # type: ignore[attr-defined]
    original = device._draw

    def draw(ticket: Any, spec: Any, row: Any) -> None:
        if row.position > last[0]:
            device.row_errors[row.request_id] = NumericalError("the logits are not finite.")
        original(ticket, spec, row)

    last = [40]
    device._draw = draw
    try:
        stream, whole = server.chat("hello " * 9, stream=True), server.chat("hello " * 9)
        last[0] = -1
        early = server.chat("x" * 60, stream=True)
    finally:
        del device._draw
    found = events(stream.text)
    if stream.status_code == 200:
        assert found[-1] == "[DONE]" and found[-2]["error"]["code"] == "non_finite_logits"
    assert whole.status_code == 500 and whole.json()["error"]["code"] == "non_finite_logits"
    assert whole.headers["x-should-retry"] == "false"
    assert early.status_code == 500 and early.json() == whole.json(), "before the first word a stream has its real status"
