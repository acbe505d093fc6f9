"""The bodies that SGLang's bench_serving and vLLM's bench serve send, and what each reads of the replies. Standard library alone."""

from __future__ import annotations

import itertools
import json
import sys
import urllib.request
from typing import Any

URL = sys.argv[1]


def post(path: str, body: dict[str, Any]) -> list[str]:
    """The lines of a stream that are not empty."""
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        assert answer.status == 200
        return [line.decode().strip() for line in answer if line.strip()]


def data(lines: list[str]) -> list[dict[str, Any]]:
    """As both tools read: each line is `data: …`, the last says [DONE], all others are JSON."""
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def main() -> None:
    with urllib.request.urlopen(f"{URL}/v1/models", timeout=60) as answer:
        model = json.load(answer)["data"][0]["id"]
    with urllib.request.urlopen(f"{URL}/get_server_info", timeout=60) as answer:
        assert "internal_states" in json.load(answer)

    # SGLang, native: text is cumulative, meta_info counts
    body = {"text": "Once upon a time", "sampling_params": {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}, "stream": True,
            "lora_path": None, "return_logprob": False, "logprob_start_len": -1}  # fmt: skip
    said = data(post("/generate", body))
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(said))
    assert said[-1]["meta_info"]["completion_tokens"] == 8

    # SGLang and vLLM, completions
    body = {"model": model, "prompt": "Once upon a time", "temperature": 0.0, "best_of": 1, "max_tokens": 8, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}, "repetition_penalty": 1.0, "logprobs": None}  # fmt: skip
    chunks = data(post("/v1/completions", body))
    assert chunks[-1]["usage"]["completion_tokens"] == 8 and chunks[-1]["choices"] == []
    assert all(c["choices"] for c in chunks[:-1])

    # vLLM, chat with continuous usage
    body = {"model": model, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "temperature": 0.0,
            "max_completion_tokens": 8, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
    chunks = data(post("/v1/chat/completions", body))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 8
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])

    # SGLang, ids and logprobs at once
    request = {"input_ids": [[1, 2, 3], [4, 5]], "sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True, "logprob_start_len": 0}  # fmt: skip
    raw = urllib.request.Request(f"{URL}/generate", json.dumps(request).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(raw, timeout=300) as answer:
        both = json.load(answer)
    assert [len(r["meta_info"]["input_token_logprobs"]) for r in both] == [3, 2]


main()
