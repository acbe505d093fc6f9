"""`phloem bench`: how fast `Engine.generate` is here, on synthetic prompts. Two figures, measured apart: prefill and decode."""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phloem.cli import bench_serve
from phloem.cli.flags import with_flags
from phloem.cli.session import DEBUG, QUIET, fail, one_line_errors, open_engine

if TYPE_CHECKING:
    import phloem

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    group = typer.Typer(rich_markup_mode=None, add_completion=False)
    group.callback(invoke_without_command=True)(one_line_errors(with_flags()(bench)))
    bench_serve.register(group)
    app.add_typer(group, name="bench")


def bench(
    ctx: typer.Context,
    prompts: Annotated[int, typer.Option("--prompts", help="Prompts that run at once.", min=1)] = 8,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Tokens a prompt; no two prompts share a prefix.", min=2)
    ] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="Tokens an output.", min=2)] = 128,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds with fresh prompts; the median counts.", min=1)] = 3,
    format: Annotated[str, typer.Option("--format", help="text, or json: one line.")] = "text",
    quiet: Annotated[bool, QUIET] = False,
    debug: Annotated[bool, DEBUG] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Measure prefill and decode throughput; `bench serve` measures a running server."""
    if ctx.invoked_subcommand is not None:
        return
    from phloem.runtime.config import make_config

    make_config(**engine)
    if format not in ("text", "json"):
        fail(f"--format is {format!r}; expected text or json.", status=2)
    with open_engine(engine, quiet) as session:
        generator = random.Random(session.config.seed or 0)
        measure(session, generator, prompts, prompt_tokens, output_tokens)  # buffers and pages are touched once
        runs = [measure(session, generator, prompts, prompt_tokens, output_tokens) for _ in range(rounds)]
        result = {
            "model": session.config.model or "embedded",
            "device": session.resolved.device,
            "threads": session.resolved.threads,
            "prompts": prompts,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "rounds": rounds,
            "prefill_tok_s": round(statistics.median(r[0] for r in runs), 1),
            "decode_tok_s": round(statistics.median(r[1] for r in runs), 1),
        }
    if format == "json":
        print(json.dumps(result))
    else:
        print(
            f"{prompts} prompts of {prompt_tokens} tokens, {output_tokens} tokens each, on {result['device']} x{result['threads']}"
        )
        print(f"prefill {result['prefill_tok_s']:>9} tok/s")
        print(f"decode  {result['decode_tok_s']:>9} tok/s")


def measure(
    session: phloem.Engine, generator: random.Random, prompts: int, prompt_tokens: int, output_tokens: int
) -> tuple[float, float]:
    """(prefill, decode) tokens a second. The prompts are computed first, with no output; then continued from the cache."""
    session.flush()
    vocabulary = range(min(session.tokenizer.vocab_size, 32_000))
    ids = [generator.choices(vocabulary, k=prompt_tokens) for _ in range(prompts)]
    start = time.perf_counter()
    session.generate(ids, {"max_tokens": 0})
    middle = time.perf_counter()
    outputs = session.generate(ids, {"max_tokens": output_tokens, "temperature": 0.0, "ignore_eos": True})
    end = time.perf_counter()
    drawn = sum(output.usage.completion_tokens for output in outputs)
    return prompts * prompt_tokens / (middle - start), drawn / (end - middle)
