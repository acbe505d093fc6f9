"""Which schemas are served, and how exactly, beside each engine alone: a table, and one JSON line a row of it.

    python -m benchmarks.coverage

Of the 120 real schemas of tests/data/schemas and their 457 instances: every instance's tokens go through the cursor that would
constrain them. accepted: the schema compiles.   right: and no instance is misjudged.   valid: instances taken, with keys as the schema
declares them or as they stand.   as they stand: the keys' order in the file counts.   invalid taken: what must never happen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import record
from phloem.runtime.engine.build import load_tokenizer
from phloem.runtime.engine.grammars import vocabulary_of
from phloem.runtime.grammar.base import Limits, backend
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.models.loader import open_model
from tests.runtime.grammar.schemas import Verdict, compiled, judge, real_schemas, spec_of

WHITESPACE = "spaced"


def line(name: str, verdicts: Sequence[Verdict], of: int) -> None:
    served = [v for v in verdicts if v.engine]

    def total(pairs: Sequence[tuple[int, int]]) -> str:
        return f"{sum(n for n, _ in pairs)} of {sum(m for _, m in pairs)}"

    right = sum(v.is_right for v in served)
    columns = [total([v.valid for v in served]), total([v.as_written for v in served]), total([v.invalid for v in served])]
    print(f"| {name} | {len(served)} | {right} | " + " | ".join(columns) + " |", flush=True)
    record(
        "fully right", right, "schemas", f"{of} real schemas, {name}", accepted=len(served), valid=columns[0], as_written=columns[1], invalid=columns[2]
    )  # fmt: skip


def alone(engine: str, vocabulary: Vocabulary) -> Callable[[Any], Any]:
    """The engine as it comes: no lowering, no audit."""
    return lambda schema: backend(engine).compile(spec_of(schema, json_whitespace=WHITESPACE), vocabulary, Limits())


def main() -> None:
    opened = open_model(None)
    tokenizer = load_tokenizer(opened)
    vocabulary, rows = vocabulary_of(tokenizer, tokenizer.eos_ids, opened.config.vocabulary), real_schemas()
    ours = [
        judge(row, vocabulary, lambda s: compiled(spec_of(s, json_whitespace=WHITESPACE), vocabulary), WHITESPACE)
        for row in rows
    ]
    print("| | accepted | right | valid taken | as they stand | invalid taken |\n|---|---|---|---|---|---|")
    line("Phloem", ours, len(rows))
    for engine in sorted(Counter(v.engine for v in ours if v.engine)):
        line(f"of these, {engine}", [v for v in ours if v.engine == engine], len(rows))
    for engine in ("xgrammar", "llguidance"):
        line(f"{engine} alone", [judge(row, vocabulary, alone(engine, vocabulary), WHITESPACE) for row in rows], len(rows))


if __name__ == "__main__":
    main()
