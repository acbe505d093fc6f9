"""`phloem bench serve`: load for a running server, with the figures and names that such tools use. Measures any OpenAI-like server."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from phloem.cli.session import DEBUG, fail, one_line_errors

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    app.command("serve")(one_line_errors(bench_serve))


def bench_serve(
    url: Annotated[str, typer.Option("--url", help="Of the server.")] = "http://127.0.0.1:8000",
    dataset: Annotated[
        str, typer.Option("--dataset", help="random, shared-prefix, multi-turn, fork, json-schema or replay.")
    ] = "random",
    requests: Annotated[int, typer.Option("--requests", help="How many; of replay: at most.", min=1)] = 100,
    input_tokens: Annotated[int, typer.Option("--input-tokens", help="Of a prompt, beside what it shares.", min=1)] = 128,
    output_tokens: Annotated[int, typer.Option("--output-tokens", help="Of an answer.", min=1)] = 64,
    prefix_tokens: Annotated[int, typer.Option("--prefix-tokens", help="shared-prefix: of what a group shares.", min=1)] = 256,
    groups: Annotated[int, typer.Option("--groups", help="shared-prefix: how many groups.", min=1)] = 4,
    turns: Annotated[int, typer.Option("--turns", help="multi-turn: of a conversation.", min=1)] = 4,
    branches: Annotated[int, typer.Option("--branches", help="fork: that continue each text.", min=1)] = 3,
    file: Annotated[Path | None, typer.Option("--file", help="replay: a JSON body a line.", show_default=False)] = None,
    request_rate: Annotated[
        float, typer.Option("--request-rate", help="Requests a second, Poisson; inf: all at once.")
    ] = math.inf,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Most requests under way.", min=1)] = 64,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput", help="A goal, such as ttft:500 or tpot:50 or e2el:5000, in ms. May be repeated.", show_default=False
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Default: the server's first.", show_default=False)] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="PHLOEM_API_KEY", show_default=False, show_envvar=False)
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option("--extra-body", help="JSON that joins each body.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the prompts and the arrivals.")] = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one request.")] = 600.0,
    format: Annotated[str, typer.Option("--format", help="text: a table; json: one line.")] = "text",
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Measure a running server under load.

    Examples:  phloem bench serve --dataset shared-prefix --requests 200 --request-rate 20
               phloem bench serve --dataset json-schema --concurrency 16 --goodput ttft:500 --goodput tpot:50
    """
    import httpx

    from phloem.cli.bench_data import Shape, plan
    from phloem.cli.bench_load import send_all, summary

    if format not in ("text", "json"):
        fail(f"--format is {format!r}; expected text or json.", status=2)
    if not request_rate > 0:
        fail(f"--request-rate is {request_rate:g}; expected a number above 0, or inf.", status=2)
    goals = read_goals(goodput or [])
    extra = read_extra(extra_body)
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        name, vocabulary = ask(url, headers, model)
    except httpx.HTTPError as error:
        fail(f"{url} does not answer: {error}. Start a server with `phloem serve`, or name one with --url.", status=1)
        return
    shape = Shape(
        requests, input_tokens, output_tokens, seed, vocabulary, prefix_tokens=prefix_tokens, groups=groups, turns=turns, branches=branches,
        file=file,
    )  # fmt: skip
    planned = plan(dataset, shape)
    done, seconds = asyncio.run(
        send_all(
            url, planned, headers=headers, rate=request_rate, concurrency=concurrency, seed=seed, timeout=timeout, extra={"model": name, **extra}
        )
    )  # fmt: skip
    said = {
        "model": name, "dataset": dataset, "request_rate": None if math.isinf(request_rate) else request_rate, "concurrency": concurrency,
        "seed": seed, **summary(done, seconds, goals),
    }  # fmt: skip
    print(json.dumps(said) if format == "json" else table(said))
    if said["completed"] == 0:
        why = next((m.error for m in done if m.error), "no request was made")
        fail(f"no request was answered. The first error: {why}", status=1)


def ask(url: str, headers: dict[str, str], model: str | None) -> tuple[str, int]:
    """(the model's name, how many ids a prompt may use): asked of the server."""
    import httpx

    with httpx.Client(base_url=url, headers=headers, timeout=30) as http:
        answer = http.get("/v1/models")
        answer.raise_for_status()
        name = model or answer.json()["data"][0]["id"]
        info = http.get("/tokenizer_info")
        vocabulary = info.json().get("vocab_size") if info.status_code == 200 else None
    return name, int(vocabulary) if isinstance(vocabulary, int) and vocabulary > 0 else 1000


def read_goals(words: list[str]) -> Any:
    from phloem.cli.bench_load import Goals

    goals: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            goals[name] = float(value) / 1000
            Goals(**goals)
        except (ValueError, TypeError):
            fail(f"--goodput is {word!r}; expected ttft, tpot or e2el, a colon, and milliseconds, such as ttft:500.", status=2)
    return Goals(**goals)


def read_extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        fail(f"--extra-body is no JSON: {error}.", status=2)
    if not isinstance(value, dict):
        fail("--extra-body is no JSON object.", status=2)
    found: dict[str, Any] = value
    return found


def table(said: dict[str, Any]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"

    rate = "all at once" if said["request_rate"] is None else f"{said['request_rate']:g}/s"
    lines = [
        f"{said['model']} · {said['dataset']} · {said['requests']} requests, {rate}, at most {said['concurrency']} at a time",
        f"completed {said['completed']}, failed {sum(said['failed'].values())} {said['failed'] or ''}".rstrip(),
        "",
        f"{'seconds':<24}{number(said['seconds']):>12}",
        f"{'requests/s':<24}{number(said['requests_per_s']):>12}",
        f"{'input tokens/s':<24}{number(said['input_tokens_per_s']):>12}",
        f"{'output tokens/s':<24}{number(said['output_tokens_per_s']):>12}",
        f"{'cached prompt tokens':<24}{number(said['cached_tokens']):>12}  of {number(said['input_tokens'])}",
        f"{'goodput requests/s':<24}{number(said['goodput_requests_per_s']):>12}  {said['goodput_ratio']:.1%} of requests",
    ]
    if "checked_json" in said:
        lines.append(f"{'valid JSON':<24}{number(said['valid_json']):>12}  of {number(said['checked_json'])}")
    lines += ["", f"{'ms':<8}{'mean':>12}{'p50':>12}{'p95':>12}{'p99':>12}"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        cells = [said[f"mean_{name}_ms"], *(said[f"p{q}_{name}_ms"] for q in (50, 95, 99))]
        lines.append(f"{name.upper():<8}" + "".join(f"{number(cell):>12}" for cell in cells))
    return "\n".join(lines)
