"""POST /generate: SGLang's body and reply."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.serve.serving import Server, events

META = {
    "id",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "forced_tokens",
    "seed",
    "weight_version",
    "e2e_latency",
}


def test_one_prompt_is_one_object(server: Server) -> None:
    body = server.generate("hello").json()
    assert set(body) == {"text", "output_ids", "meta_info"} and set(body["meta_info"]) == META
    assert body["text"] == "hello" and len(body["output_ids"]) == 6
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": server.model.tokenizer.eos_id}
    assert (meta["completion_tokens"], meta["weight_version"]) == (6, "0") and meta["e2e_latency"] > 0
    cut = server.generate("hello", sampling={"max_new_tokens": 3}).json()
    assert (cut["text"], cut["meta_info"]["finish_reason"]) == ("hel", {"type": "length", "length": 3})
    assert (
        server.request("PUT", "/generate", json={"text": "[[a]]", "sampling_params": {"temperature": 0}}).json()["text"] == "a"
    )


def test_lists_and_n_answer_with_lists(server: Server) -> None:
    assert [e["text"] for e in server.generate(text=["[[a]]", "[[bc]]"]).json()] == ["a", "bc"]
    assert [e["text"] for e in server.generate(text=["[[a]]"]).json()] == ["a"]
    assert [e["text"] for e in server.generate("a", sampling={"n": 2}).json()] == ["a", "a"]
    ids = server.post("/tokenize", prompt="[[hey]]").json()["tokens"]
    assert server.generate(input_ids=ids).json()["text"] == "hey"
    assert [e["text"] for e in server.generate(input_ids=[ids, ids]).json()] == ["hey", "hey"]
    each = server.post(
        "/generate",
        text=["[[hello]]", "[[hello]]"],
        sampling_params=[{"max_new_tokens": 2, "temperature": 0}, {"max_new_tokens": 4, "temperature": 0}],
    )
    assert [e["text"] for e in each.json()] == ["he", "hell"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({}, "text"), ({"text": "a", "input_ids": [1]}, "text"), ({"text": []}, "text"), ({"text": "a", "sampling_params": []}, "sampling_params"),
     ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params"), ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
     ({"text": "a", "logprob_start_len": 5, "return_logprob": True}, "logprob_start_len"), ({"input_ids": [[1], []]}, "input_ids"), ({"input_ids": "a"}, "input_ids"),
     ({"text": "a", "sampling_params": {"regex": "("}}, "sampling_params.regex"), ({"text": "a", "sampling_params": [5]}, "sampling_params")],
)  # fmt: skip
def test_what_is_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    reply = server.post("/generate", fields)
    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["param"] or "").startswith(param), reply.text


def test_logprobs_of_prompt_and_output(server: Server) -> None:
    ids = server.post("/tokenize", prompt="some noise").json()["tokens"]
    for start in (-1, 0, 1, 4, len(ids)):
        meta = server.generate(
            text="some noise", sampling={"max_new_tokens": 3}, return_logprob=True, logprob_start_len=start, top_logprobs_num=2
        ).json()["meta_info"]
        told = meta["input_token_logprobs"]
        first = start if start >= 0 else len(ids)
        assert [t for _, t, _ in told] == ids[first:], "entry i belongs to token logprob_start_len + i"
        assert [v is None for v, _, _ in told] == [i == 0 for i in range(first, len(ids))]
        assert len(meta["output_token_logprobs"]) == 3 == len(meta["output_top_logprobs"]) and len(
            meta["input_top_logprobs"]
        ) == len(told)
        for (value, token, text), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"]):
            assert [value, token, text] in top and text is None
    echoed = server.complete(prompt="some noise", echo=True, logprobs=0, max_tokens=0).json()["choices"][0]["logprobs"][
        "token_logprobs"
    ]
    whole = server.generate(text="some noise", sampling={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0).json()
    assert [v for v, _, _ in whole["meta_info"]["input_token_logprobs"]] == echoed and whole["output_ids"] == []
    spelled = server.generate("ab", return_logprob=True, return_text_in_logprobs=True).json()["meta_info"][
        "output_token_logprobs"
    ]
    assert [text for _, _, text in spelled] == ["a", "b", "<|im_end|>"]


@pytest.mark.parametrize("fields", [{}, {"return_logprob": True, "top_logprobs_num": 1}])
def test_a_stream_carries_the_text_so_far(server: Server, fields: dict[str, Any]) -> None:
    whole = server.generate("hello", **fields).json()
    told = events(server.generate("hello", stream=True, **fields).text)
    assert told[-1] == "[DONE]" and "index" not in told[0]
    texts = [e["text"] for e in told[:-1]]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts)) and texts[-1] == "hello"
    counts = [e["meta_info"]["completion_tokens"] for e in told[:-1]]
    assert counts == sorted(counts) and counts[-1] == 6
    assert [e["meta_info"]["finish_reason"] for e in told[:-2]] == [None] * (len(told) - 2)
    last = told[-2]
    for key in (
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        *(("output_token_logprobs", "output_top_logprobs") if fields else ()),
    ):
        assert last["meta_info"][key] == whole["meta_info"][key]
    assert last["output_ids"] == whole["output_ids"]


def test_streams_of_several_say_whose(server: Server) -> None:
    told = events(server.generate(text=["[[ab]]", "[[cd]]"], stream=True).text)[:-1]
    last = {e["index"]: e["text"] for e in told}
    assert last == {0: "ab", 1: "cd"}
    assert {e["index"] for e in events(server.generate("ab", sampling={"n": 3}, stream=True).text)[:-1]} == {0, 1, 2}


def test_errors_are_nested_here_too(server: Server) -> None:
    reply = server.generate("a", sampling={"temperature": 1000}, stream=True)
    assert reply.status_code == 400 and set(reply.json()["error"]) == {"message", "type", "param", "code"}
