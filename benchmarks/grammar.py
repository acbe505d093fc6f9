"""What constraints cost and what forced runs save. One JSON line a metric.

    python -m benchmarks.grammar [--quick] [first] [fill] [jump] [free]        all of it unless parts are named

first mask   audit, lowering, compiling and the first mask of each of the real schemas of tests/data/schemas: in this process, and
             as a stranger's through the worker
fill         each mask along the valid instances of these schemas, by engine
steps        sampled tokens among all tokens of tool arguments, in the schemas' own valid instances
jump         tokens a second of JSON output, forced runs taken at once against one by one, in turn
free         a constrained string against plain decoding, batch 1 and 16, in turn
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import phloem
from benchmarks.common import ROOT, interleaved, median, note, record
from phloem.runtime.engine.grammars import Grammars, vocabulary_of
from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.audit import route
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.compile import Served, serve
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec, Request, SamplingParams

SCHEMAS = ROOT / "tests" / "data" / "schemas" / "schemas.jsonl"
TOOLS = ("BFCL", "Glaiveai2K")
LIMITS = Limits()


def schemas() -> list[dict[str, Any]]:
    return [json.loads(line) for line in SCHEMAS.read_text().splitlines()]


def spec_of(schema: Any, whitespace: Any = "spaced", jump: Any = "canonical", trusted: bool = True) -> GrammarSpec:
    source = json.dumps(schema, ensure_ascii=False)
    return GrammarSpec(kind="json_schema", source=source, json_whitespace=whitespace, jump_forward=jump, trusted=trusted)


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * q))]


def summary(metric: str, seconds: list[float], unit: str, scale: float, workload: str, **extra: Any) -> None:
    spread = {"p50": quantile(seconds, 0.5) * scale, "p99": quantile(seconds, 0.99) * scale, "max": max(seconds) * scale}
    record(
        metric,
        statistics.mean(seconds) * scale,
        unit,
        workload,
        n=len(seconds),
        **{k: round(v, 3) for k, v in spread.items()},
        **extra,
    )


def first_masks(vocabulary: Vocabulary, rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Served]]:
    serve(route(spec_of({"type": "object"}), LIMITS), vocabulary, LIMITS)  # the engines are loaded before the clock runs
    serve(route(spec_of({"type": "object", "additionalProperties": False}), LIMITS), vocabulary, LIMITS)
    seconds, served, refused = [], [], 0
    for row in rows:
        start = time.perf_counter()
        try:
            grammar = serve(route(spec_of(row["schema"]), LIMITS), vocabulary, LIMITS)
        except GrammarError:
            refused += 1
            continue
        seconds.append(time.perf_counter() - start)
        served.append((row, grammar))
    summary("first mask", seconds, "ms", 1e3, f"{len(seconds)} real schemas in process", refused=refused)
    return served


def strangers(vocabulary: Vocabulary, eos: int, rows: list[dict[str, Any]]) -> None:
    service = Grammars(lambda: vocabulary, eos)
    try:
        seconds = []
        for i, row in enumerate([{"schema": {"type": "boolean"}}, *rows]):
            request = Request(id=f"r{i}", token_ids=(1,), grammar=spec_of(row["schema"], trusted=False))
            start = time.perf_counter()
            pending = service.begin(request)
            pending.wait(60)
            if i:
                seconds.append(time.perf_counter() - start)
        summary("first mask, worker", seconds, "ms", 1e3, f"{len(seconds)} real schemas of strangers, refusals too")
    finally:
        service.close()


def walk(grammar: Served, vocabulary: Vocabulary, text: str, seconds: list[float]) -> tuple[int, int]:
    """(tokens, sampled tokens) of a valid text; each mask's time, decision and all, goes to `seconds`."""
    row, cursor = np.empty(vocabulary.num_words, np.int32), grammar.cursor()
    ids, sampled, pending = vocabulary.encode(text), 0, 0
    for token in ids:
        if not pending:
            start = time.perf_counter()
            done = cursor.done
            pending = len(cursor.forced())
            if not pending and not done:
                cursor.fill(row)
            seconds.append(time.perf_counter() - start)
            sampled += not pending
        if not cursor.accept(token):
            return 0, 0  # its keys come in another order than the schema declares
        pending = max(0, pending - 1)
    return len(ids) + 1, sampled


def fills(vocabulary: Vocabulary, served: list[tuple[dict[str, Any], Served]]) -> None:
    by_engine: dict[str, list[float]] = {}
    for row, grammar in served:
        for test in row["tests"]:
            if test["valid"]:
                walk(
                    grammar,
                    vocabulary,
                    json.dumps(test["data"], ensure_ascii=False),
                    by_engine.setdefault(grammar.report.backend, []),
                )
    for engine, seconds in sorted(by_engine.items()):
        summary("fill", seconds, "us", 1e6, f"valid instances of real schemas, {engine}")
    summary(
        "fill",
        [s for seconds in by_engine.values() for s in seconds],
        "us",
        1e6,
        "valid instances of real schemas, all engines",
    )
    fsm = serve(route(GrammarSpec(kind="regex", source=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"), LIMITS), vocabulary, LIMITS)
    cursor, row_of_mask = fsm.cursor(), np.empty(vocabulary.num_words, np.int32)
    start = time.perf_counter()
    for _ in range(10_000):
        cursor.fill(row_of_mask)
    record("fill", (time.perf_counter() - start) * 100, "us", "token_fsm, a branching state")


def steps(vocabulary: Vocabulary, rows: list[dict[str, Any]]) -> None:
    for whitespace in ("spaced", "flexible"):
        total = sampled = 0
        for row in rows:
            if row["split"] not in TOOLS:
                continue
            try:
                grammar = serve(route(spec_of(row["schema"], whitespace), LIMITS), vocabulary, LIMITS)
            except GrammarError:
                continue
            for test in row["tests"]:
                if test["valid"]:
                    tokens, drawn = walk(grammar, vocabulary, json.dumps(test["data"], ensure_ascii=False), [])
                    total, sampled = total + tokens, sampled + drawn
        record("sampled share", sampled / total, "of the tokens", f"tool arguments, {whitespace}", tokens=total)


MAILS = (
    "The lid of my thermos broke on the first day. I want my money back. Ruth",
    "Hi, the lamp flickers since yesterday. No hurry. Best, Tom",
    "My whole order of twelve mugs arrived in pieces! Call me today! Olga",
    "The kettle is fine, but the manual is in Finnish. Can you send another? Jun",
)
TICKET = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "maxLength": 24}, "severity": {"enum": ["low", "medium", "high"]},
        "refund": {"type": "boolean"}, "items": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["product", "severity", "refund", "items"],
}  # fmt: skip
SYSTEM = "You turn mails to a shop into tickets: product, severity, whether a refund is wanted, number of items."


def jump(engine: phloem.Engine, rows: list[dict[str, Any]], repeat: int) -> None:
    """Extraction: short values, as a program asks for. Tools: a small model left to itself, whose strings ramble up to the limit."""
    tools = [row["schema"] for row in rows if row["split"] in TOOLS][:12]
    extraction: list[tuple[Any, Any]] = [
        ([{"role": "system", "content": SYSTEM}, {"role": "user", "content": mail}], TICKET) for mail in MAILS
    ]
    calls = [(f"Call the function for an example.\nSchema: {json.dumps(schema)}\nArguments: ", schema) for schema in tools]
    sampling, share = SamplingParams(temperature=0, max_tokens=96), 0.0

    def run(jobs: list[tuple[Any, Any]], mode: Any) -> Callable[[int], float]:
        def once(_: int) -> float:
            nonlocal share
            tokens, forced, seconds = 0, 0, 0.0
            for prompt, schema in jobs:
                verb: Any = engine.generate if isinstance(prompt, str) else engine.chat
                options = {"json_schema": schema, "json_whitespace": "spaced", "jump_forward": mode, "trusted": True}
                start = time.perf_counter()
                usage = verb(prompt, sampling, **options).usage
                seconds += time.perf_counter() - start
                tokens, forced = tokens + usage.completion_tokens, forced + usage.forced_tokens
            share = 1 - forced / tokens
            return tokens / seconds

        return once

    for name, jobs in (("JSON extraction", extraction), (f"{len(tools)} tool schemas, rambling", calls)):
        modes = {"on": run(jobs, "canonical"), "off": run(jobs, "off")}
        for once in modes.values():
            once(0)  # prompts are in the tree, grammars in the cache
        found = interleaved(repeat, **modes)
        on, off = median(found["on"]), median(found["off"])
        workload = f"{name}, spaced, batch 1, prompts cached"
        record("tokens/s, jump on", on, "tok/s", workload, ratio=round(on / off, 3), sampled_share=round(share, 3))
        record("tokens/s, jump off", off, "tok/s", workload)


FREE: dict[str, Any] = {
    "xgrammar": {"type": "string", "minLength": 100_000},
    "llguidance": {"type": "object", "properties": {"text": {"type": "string", "minLength": 100_000}}, "required": ["text"]},
}
"""A string that never ends, by the engine that its schema goes to."""


def free(engine: phloem.Engine, repeat: int, tokens: int) -> None:
    for batch in (1, 16):
        prompts = [f"Story {i}: once upon a time there was " for i in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

        def run(constraint: dict[str, Any]) -> Callable[[int], float]:
            def once(_: int) -> float:
                before, start = engine.stats().steps, time.perf_counter()
                outputs = engine.generate(prompts, sampling, **constraint)  # noqa: B023
                seconds = time.perf_counter() - start
                assert all(len(o.token_ids) == tokens for o in outputs)
                return seconds / (engine.stats().steps - before)  # by step: what is forced at the start costs none

            return once

        bound = {name: {"json_schema": schema, "trusted": True, "json_whitespace": "spaced"} for name, schema in FREE.items()}
        runs = {"plain": run({}), **{name: run(constraint) for name, constraint in bound.items()}}
        for each in runs.values():
            each(0)
        found = interleaved(2 * repeat, **runs)
        plain = median(found["plain"])
        for name in FREE:
            constrained = median(found[name])
            workload = f"batch {batch}, {name}"
            record("step, constrained string", constrained * 1e3, "ms", workload, over_plain=round(constrained / plain, 4))


def main() -> None:
    quick, parts = "--quick" in sys.argv, [a for a in sys.argv[1:] if not a.startswith("-")]
    repeat, rows = (1 if quick else 5), schemas()[:: 4 if quick else 1]

    def wants(part: str) -> bool:
        return not parts or part in parts

    with phloem.Engine(kv_tokens=16_384) as engine:
        t = engine.tokenizer
        assert t.eos_id is not None
        vocabulary = vocabulary_of(t, t.eos_ids, t.vocab_size)
        if wants("first") or wants("fill"):
            note("first masks")
            served = first_masks(vocabulary, rows)
        if wants("first"):
            strangers(vocabulary, t.eos_id, rows)
        if wants("fill"):
            note("fills")
            fills(vocabulary, served)
            steps(vocabulary, rows)
        note("the model")
        if wants("jump"):
            jump(engine, rows, repeat)
        if wants("free"):
            free(engine, repeat, 16 if quick else 48)


if __name__ == "__main__":
    main()
