"""What constraints cost and what forced runs save. One JSON line a metric.

    python -m benchmarks.grammar [--quick] [first] [fill] [jump] [free]        all of it unless parts are named

first mask   audit, lowering, compiling and the first mask of each of the real schemas of tests/data/schemas: in this process, and
             as a stranger's through the worker
fill         each mask along the valid instances of these schemas, by engine
steps        sampled tokens among all tokens of tool arguments, in the schemas' own valid instances
jump         tokens a second of JSON output, forced runs taken at once against one by one, in turn
free         a constrained string against plain decoding, batch 1 and 16: pairs in random order, decode steps alone; its share of
             the host by CPU time on one thread, which a busy machine changes little
"""

from __future__ import annotations

import json
import random
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
        service.warm()  # as a server does at its start
        seconds = []
        for i, row in enumerate([{"schema": {"type": "boolean"}}, {"schema": TICKET}, *rows]):
            request = Request(id=f"r{i}", token_ids=(1,), grammar=spec_of(row["schema"], trusted=False))
            start = time.perf_counter()
            pending = service.begin(request)
            pending.wait(60)
            if i > 1:
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
    "xgrammar": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    },
    "llguidance": {"type": "object", "properties": {"text": {"type": "string", "minLength": 100_000}}, "required": ["text"]},
}
"""A string, by the engine that its schema goes to. It never ends: plain and constrained, no quote is drawn."""


def free(engine: phloem.Engine, pairs: int, tokens: int, only_cpu: bool = False) -> None:
    """The first step is taken off each run, by a run of one drawn token beside it: there a prompt's end, a forced start and a
    cursor are computed, which are not decoding. A pair is a plain and a constrained run next to each other, either one first.
    """
    rng, tokenizer = random.Random(0), engine.tokenizer
    no_quotes = {i: -100.0 for i in range(tokenizer.vocab_size) if b'"' in tokenizer.token_bytes(i)}
    for batch in (1, 16):
        prompts = [f"Story {i}: once upon a time there was " for i in range(batch)]

        def timed(constraint: dict[str, Any], count: int) -> tuple[float, float, int]:
            """(wall seconds, CPU seconds of this thread, steps) of a run that draws `count` tokens a prompt."""
            forced = constraint.get("forced", 0)
            options = {k: v for k, v in constraint.items() if k != "forced"}
            sampling = SamplingParams(temperature=0, max_tokens=count + forced, ignore_eos=True, logit_bias=no_quotes)
            before, cpu, start = engine.stats().steps, time.thread_time(), time.perf_counter()
            outputs = engine.generate(prompts, sampling, **options)  # noqa: B023
            found = (time.perf_counter() - start, time.thread_time() - cpu, engine.stats().steps - before)
            assert all(len(o.token_ids) == count + forced and o.usage.forced_tokens == forced for o in outputs)
            return found

        def decode(constraint: dict[str, Any]) -> tuple[float, float]:
            """Seconds a decode step: wall, CPU."""
            one, many = timed(constraint, 1), timed(constraint, tokens)
            assert many[2] - one[2] == tokens - 1, "a decode step is a drawn token"
            return (many[0] - one[0]) / (tokens - 1), (many[1] - one[1]) / (tokens - 1)

        for name, schema in FREE.items():
            bound: dict[str, Any] = {"json_schema": schema, "trusted": True, "json_whitespace": "spaced"}
            bound["forced"] = engine.generate(
                prompts[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=no_quotes), **bound
            ).usage.forced_tokens
            both: list[dict[str, Any]] = [{}, bound]
            for constraint in both:
                decode(constraint)  # prompts are in the tree, the grammar in the cache
            found: list[tuple[tuple[float, float], ...]] = []
            for _ in range(pairs):
                order = [0, 1] if rng.random() < 0.5 else [1, 0]
                times = {i: decode(both[i]) for i in order}
                found.append((times[0], times[1]))
            clocks = ((1, "CPU, one thread"),) if only_cpu else ((0, "wall"),)
            for clock, what in clocks:
                ratios = [constrained[clock] / plain[clock] for plain, constrained in found]
                record(
                    "decode step, constrained string",
                    median([constrained[clock] for _, constrained in found]) * 1e3,
                    "ms",
                    f"batch {batch}, {name}, {what}",
                    over_plain=round(median(ratios), 4),
                    quartiles=[round(quantile(ratios, q), 4) for q in (0.25, 0.75)],
                    plain=round(median([plain[clock] for plain, _ in found]) * 1e3, 4),
                    pairs=pairs,
                )


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
            free(engine, 3 if quick else 15, 16 if quick else 48)
    if wants("free"):
        with phloem.Engine(kv_tokens=16_384, threads=1) as engine:
            free(engine, 3 if quick else 15, 16 if quick else 48, only_cpu=True)


if __name__ == "__main__":
    main()
