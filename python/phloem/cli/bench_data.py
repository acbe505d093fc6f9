"""What `phloem bench serve` sends: plans of requests, made from a seed. Knows no network.

    random         ids without a common prefix           shared-prefix  groups that share the front of their prompts
    multi-turn     conversations: each turn sends all    fork           a tree: each text is continued by several branches
    json-schema    chats whose answer follows a schema   replay         the lines of a file, as they are

A request that depends on another's answer (`after`) is sent once that is there, and its body is made from it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phloem.runtime.errors import ConfigError

__all__ = ["DATASETS", "Planned", "Shape", "plan"]


@dataclass(frozen=True, slots=True)
class Shape:
    """requests: how many in all (of replay: at most).   vocabulary: ids that a prompt may hold.

    prefix_tokens, groups: of shared-prefix.   turns: of a conversation.   branches: of each node of a fork's tree.
    """

    requests: int
    input_tokens: int
    output_tokens: int
    seed: int
    vocabulary: int
    prefix_tokens: int = 256
    groups: int = 4
    turns: int = 4
    branches: int = 3
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """One request. body: made from the text that `after` was answered with ("" without one).   at: seconds after the start, or None:
    by the rate."""

    path: str
    body: Callable[[str], dict[str, Any]]
    after: int | None = None
    at: float | None = None


def plan(dataset: str, shape: Shape) -> list[Planned]:
    """Raises ConfigError."""
    if dataset not in DATASETS:
        raise ConfigError(f"--dataset is {dataset!r}; expected one of {', '.join(DATASETS)}.", param="dataset")
    return DATASETS[dataset](shape, random.Random(shape.seed))


def _ids(draw: random.Random, count: int, shape: Shape) -> list[int]:
    return [draw.randrange(shape.vocabulary) for _ in range(count)]


def _completion(prompt: Any, shape: Shape) -> Planned:
    body = {"prompt": prompt, "max_tokens": shape.output_tokens, "ignore_eos": True, "temperature": 0}
    return Planned("/v1/completions", lambda _: body)


def _random(shape: Shape, draw: random.Random) -> list[Planned]:
    return [_completion(_ids(draw, shape.input_tokens, shape), shape) for _ in range(shape.requests)]


def _shared_prefix(shape: Shape, draw: random.Random) -> list[Planned]:
    fronts = [_ids(draw, shape.prefix_tokens, shape) for _ in range(shape.groups)]
    return [_completion(fronts[n % shape.groups] + _ids(draw, shape.input_tokens, shape), shape) for n in range(shape.requests)]


_WORDS = [
    "river",
    "stone",
    "lantern",
    "orchard",
    "copper",
    "winter",
    "signal",
    "harbor",
    "velvet",
    "engine",
    "meadow",
    "cipher",
    "falcon",
    "amber",
    "ledger",
    "thunder",
]


def _sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(max(1, words)))


def _multi_turn(shape: Shape, draw: random.Random) -> list[Planned]:
    """A turn's history holds what was really answered, so that the cache can know it."""
    planned: list[Planned] = []
    while len(planned) < shape.requests:
        history: list[dict[str, str]] = []
        for turn in range(min(shape.turns, shape.requests - len(planned))):
            question = {"role": "user", "content": _sentence(draw, shape.input_tokens // 2)}

            def body(
                answer: str, history: list[dict[str, str]] = history, question: dict[str, str] = question
            ) -> dict[str, Any]:
                if history:
                    history.append({"role": "assistant", "content": answer})
                history.append(question)
                messages = list(history)
                return {"messages": messages, "max_tokens": shape.output_tokens, "ignore_eos": True, "temperature": 0}

            planned.append(Planned("/v1/chat/completions", body, after=len(planned) - 1 if turn else None))
    return planned


def _fork(shape: Shape, draw: random.Random) -> list[Planned]:
    """A tree in breadth: request k continues the text of request (k - 1) // branches with words of its own."""
    planned: list[Planned] = []
    prompts: list[str] = []
    for number in range(shape.requests):
        parent = (number - 1) // shape.branches if number else None
        words = _sentence(draw, shape.input_tokens // 2)
        prompts.append("")

        def body(answer: str, number: int = number, parent: int | None = parent, words: str = words) -> dict[str, Any]:
            front = "" if parent is None else f"{prompts[parent]}{answer}\n"
            prompts[number] = f"{front}{words}\n"
            return {"prompt": prompts[number], "max_tokens": shape.output_tokens, "ignore_eos": True, "temperature": 0}

        planned.append(Planned("/v1/completions", body, after=parent))
    return planned


_SCHEMAS: tuple[Mapping[str, Any], ...] = (
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 24}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima", "Accra"]}, "open": {"type": "boolean"},
     "rooms": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "maxItems": 4}}, "required": ["city", "open", "rooms"],
     "additionalProperties": False},
    {"type": "object", "properties": {"verdict": {"enum": ["yes", "no", "unsure"]}, "why": {"type": "string", "maxLength": 60}},
     "required": ["verdict", "why"], "additionalProperties": False},
)  # fmt: skip


def _json_schema(shape: Shape, draw: random.Random) -> list[Planned]:
    planned = []
    for number in range(shape.requests):
        schema = {"name": f"schema_{number % len(_SCHEMAS)}", "schema": _SCHEMAS[number % len(_SCHEMAS)], "strict": True}
        body = {
            "messages": [{"role": "user", "content": f"Describe {_sentence(draw, shape.input_tokens // 2)} as JSON."}],
            "max_tokens": max(shape.output_tokens, 96),
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": schema},
        }
        planned.append(Planned("/v1/chat/completions", lambda _, body=body: body))  # type: ignore[misc]
    return planned


def _replay(shape: Shape, draw: random.Random) -> list[Planned]:
    """A line is a request's body; `messages` makes it a chat. `at`: seconds after the start; `path`: another route."""
    if shape.file is None:
        raise ConfigError("--dataset replay needs --file, a JSON object a line.", param="file")
    planned: list[Planned] = []
    try:
        lines = shape.file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {shape.file} cannot be read: {error}.", param="file") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip() or len(planned) >= shape.requests:
            continue
        try:
            body = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--file {shape.file}, line {number} is no JSON: {error}.", param="file") from None
        if not isinstance(body, dict) or not ({"prompt", "messages"} & set(body)):
            raise ConfigError(f"--file {shape.file}, line {number} has neither `prompt` nor `messages`.", param="file")
        at = body.pop("at", None)
        path = body.pop("path", "/v1/chat/completions" if "messages" in body else "/v1/completions")
        planned.append(Planned(path, lambda _, body=body: body, at=None if at is None else float(at)))  # type: ignore[misc]
    return planned


DATASETS: dict[str, Callable[[Shape, random.Random], list[Planned]]] = {
    "random": _random,
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
    "fork": _fork,
    "json-schema": _json_schema,
    "replay": _replay,
}
