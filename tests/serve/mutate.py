"""Bodies that nobody meant: good ones, changed at random by a seed. For the fuzz test, and for scripts."""

from __future__ import annotations

import json
import random
from typing import Any

from phloem.runtime.serve.fields import FIELDS

__all__ = ["mutated"]

CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("c", "/v1/chat/completions", {"messages": [{"role": "user", "content": "[[hi]]"}], "max_completion_tokens": 3}),
    ("t", "/v1/completions", {"prompt": "[[hi]]", "max_tokens": 3}),
    ("t", "/v1/completions", {"prompt": [[65, 66], [67]], "max_tokens": 2, "echo": True, "logprobs": 1}),
    ("g", "/generate", {"text": "[[hi]]", "sampling_params": {"max_new_tokens": 3}}),
    ("k", "/tokenize", {"prompt": "hi"}), ("k", "/tokenize", {"messages": [{"role": "user", "content": "x"}]}), ("d", "/detokenize", {"tokens": [65, 66]}),
    ("", "/abort_request", {"rid": "x"}),
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, "", "x", "\x00", "é" * 50, "\u2028", "a\r\nb", [], [None], [[]], {}, {"": None},
    [1, "a", None], {"type": "function"}, {"type": "json_schema"}, {"a": {"b": {"c": []}}}, "[[" * 40, "default", [0] * 70, ["a"] * 40, "x" * 2000, [True], {"5": 1},
]  # fmt: skip


def mutated(seed: int) -> tuple[str, bytes]:
    """(path, body). Half of them are still good requests; all of them are small."""
    rng = random.Random(seed)
    route, path, base = rng.choice(CALLS)
    body: Any = json.loads(json.dumps(base))
    rows = [f for f in FIELDS if route and (route in f.routes or (route == "g" and "s" in f.routes)) and "." not in f.name]
    for _ in range(rng.randrange(4)):
        target = body
        if rows and rng.random() < 0.7:
            field = rng.choice(rows)
            if route == "g" and route not in field.routes:
                target = body.get("sampling_params")
            name = field.name.replace("*", "x")
            value = (
                json.loads(rng.choice([t for t in (field.good, field.bad) if t] or ["null"]))
                if rng.random() < 0.6
                else rng.choice(ODD)
            )
        else:
            name, value = rng.choice(["foo", "", "\u0000", "stream", "n", *body]), rng.choice(ODD)
        if isinstance(target, dict):
            target[name] = value
    if rng.random() < 0.3:
        body = _deep(body, rng)
    if isinstance(body, dict) and isinstance(body.get("n"), int) and body["n"] > 8:
        body["n"] = 3  # many samples are not what this is about
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens"):
            if path.startswith("/v1") and name not in body:
                body[name] = 3
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return path, _scrambled(text, rng) if rng.random() < 0.15 else text


def _deep(value: Any, rng: random.Random) -> Any:
    """One place inside, replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(4):
            case 0:
                return {**value, key: rng.choice(ODD)}
            case 1:
                return {k: v for k, v in value.items() if k != key}
            case _:
                return {**value, key: _deep(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], rng.choice([_deep(value[at], rng), rng.choice(ODD)]), *value[at + (rng.random() < 0.5) :]]
    return rng.choice(ODD)


def _scrambled(text: bytes, rng: random.Random) -> bytes:
    """Bytes cut, doubled or replaced: mostly no JSON any more."""
    data = bytearray(text)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                del data[at : at + rng.randrange(1, 9)]
            case 1:
                data[at:at] = rng.choice(
                    [b"\xff", b"\\ud800", b"NaN", b"[" * 70, b'"', b"{", b"}", b",", b"1e999", b"\x00", b"null"]
                )
            case 2:
                data[at:at] = data[max(0, at - 9) : at]
            case _:
                data[at : at + 1] = bytes([rng.randrange(256)])
    return bytes(data)
