"""token_fsm on the embedded model's vocabulary: compile, fill, accept, canonical runs; and what its masks are worth in steps.

    python -m benchmarks.token_fsm [--quick]

Fills and accepts are timed one by one along random legal paths, timer included (about 0.1 us), so p99 and max are of single calls.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.common import interleaved, median, record, time_of
from phloem.runtime.grammar.base import CompiledGrammar, Limits
from phloem.runtime.grammar.forced import canonical_run
from phloem.runtime.grammar.token_fsm import TokenFsm
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.models.embedded import find_embedded
from phloem.runtime.models.gguf import GgufFile
from phloem.runtime.request import GrammarSpec
from phloem.runtime.text.tokenizer import Tokenizer

REGEXES = {
    "date": r"\d{4}-\d{2}-\d{2}",
    "integer": r"-?(0|[1-9]\d*)",
    "three words": "(yes|no|maybe)",
    "string of 16": r'"[^"\\]{1,16}"',
    "line of 32": r"[^\n\r]{1,32}",
    "record": r'\{"name": "[^"\\]{1,12}", "age": (0|[1-9][0-9]{0,2}), "member": (true|false), "since": "[0-9]{4}-[0-9]{2}"\}',
}
SCHEMAS = {
    "integer range": {"type": "integer", "minimum": -17, "maximum": 12345},
    "number range": {"type": "number", "minimum": 0.5, "exclusiveMaximum": 99.25},
    "boolean": {"type": "boolean"},
    "exact date": {"type": "string", "format": "date"},
}


def vocabulary() -> Vocabulary:
    t = Tokenizer.from_gguf_metadata(GgufFile(find_embedded()).metadata)
    assert t.eos_id is not None
    stops = [t.eos_id, *sorted(set(t.eos_ids) - {t.eos_id})]
    pieces = [t.token_bytes(i) for i in range(t.vocab_size)]
    return Vocabulary(pieces, stop_ids=stops, special_ids=t.control_ids, width=t.vocab_size, encode=t.encode_continuation)


def specs() -> dict[str, GrammarSpec]:
    made = {name: GrammarSpec(kind="regex", source=pattern) for name, pattern in REGEXES.items()}
    made |= {name: GrammarSpec(kind="json_schema", source=json.dumps(schema)) for name, schema in SCHEMAS.items()}
    words = json.dumps([f"choice {i} of {i * 7919 % 1000}" for i in range(1000)])
    made["1000 choices"] = GrammarSpec(kind="choices", source=words)
    made["1000 choices, permissive"] = GrammarSpec(kind="choices", source=words, jump_forward="permissive")
    return made


def walk(
    grammar: CompiledGrammar, v: Vocabulary, rng: random.Random, fills: list[float], accepts: list[float]
) -> tuple[int, int]:
    """One random legal output: its tokens, and those that were forced."""
    row, cursor, tokens, forced = np.zeros(v.num_words, np.int32), grammar.cursor(), 0, 0
    while not cursor.done and tokens < 64:
        forced += bool(cursor.forced())
        start = time.perf_counter()
        cursor.fill(row)
        fills.append(time.perf_counter() - start)
        legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        token = int(legal[rng.randrange(len(legal))])
        start = time.perf_counter()
        cursor.accept(token)
        accepts.append(time.perf_counter() - start)
        tokens += 1
    return tokens, forced


def spread(name: str, values: Sequence[float], workload: str) -> None:
    ordered = sorted(values)
    p99 = ordered[int(len(ordered) * 0.99)] * 1e6
    record(name, sum(ordered) / len(ordered) * 1e6, "us", workload, p99=round(p99, 2), max=round(ordered[-1] * 1e6, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    repeat = 3 if parser.parse_args().quick else 15
    v = vocabulary()
    for table in ("trie", "extends", "starts"):
        record(f"vocabulary_{table}", time_of(lambda table=table: getattr(v, table)) * 1e3, "ms", "once a model")
    backend, named = TokenFsm(), specs()

    def compile_time(spec: GrammarSpec) -> Callable[[int], float]:
        return lambda rep: time_of(lambda: backend.compile(spec, v, Limits()))

    times = interleaved(repeat, **{name: compile_time(spec) for name, spec in named.items()})
    fills: list[float] = []
    accepts: list[float] = []
    for name, spec in named.items():
        grammar, rng = backend.compile(spec, v, Limits()), random.Random(1)
        record("fsm_compile", median(times[name]) * 1e3, "ms", name, kib=grammar.nbytes // 1024)
        walk(grammar, v, rng, [], [])
        paths = [walk(grammar, v, rng, fills, accepts) for _ in range(10 * repeat)]
        record("fsm_forced", sum(f for _, f in paths) / sum(n for n, _ in paths), "share of tokens", name)
    spread("fsm_fill", fills, "random legal paths")
    spread("fsm_accept", accepts, "random legal paths, fresh runs included")

    tail, forced = v.tail(v.encode('{"name": "Ann", "age": 12')), b', "member": '
    runs = [time_of(lambda: canonical_run(tail, forced, lambda b: b in b"tf", v)) for _ in range(200 * repeat)]
    spread("canonical_run", runs, "fresh, 12 bytes behind 4 tokens")


if __name__ == "__main__":
    main()
