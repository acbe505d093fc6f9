"""Sends a plan to a server and measures: each stream's times, and the figures of all. Any server of the OpenAI API will do.

    arrivals (rate or all at once) ─> slots (concurrency) ─> one stream a request ─> Measured ─> summary()

TTFT: to the first chunk with text.   TPOT: (E2EL - TTFT) / (tokens - 1).   ITL: between chunks, divided among the tokens of the
later one.   E2EL: to the end.   Times count from when a request is sent; one that waits for a slot has not been sent.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from phloem.cli.bench_data import Planned

__all__ = ["Goals", "Measured", "percentile", "send_all", "summary"]

QUANTILES = (50, 95, 99)


@dataclass(slots=True)
class Measured:
    """One request. Seconds; status 0: the connection failed. valid: of a request for JSON, whether its answer is some."""

    status: int = 0
    error: str = ""
    sent: float = 0.0
    ttft: float | None = None
    e2el: float = 0.0
    itl: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    finish: str = ""
    valid: bool | None = None

    @property
    def good(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def tpot(self) -> float | None:
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Goals:
    """Seconds that a good request keeps to; None: any."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def met(self, m: Measured) -> bool:
        pairs = ((self.ttft, m.ttft), (self.tpot, m.tpot), (self.e2el, m.e2el))
        return m.good and all(goal is None or value is None or value <= goal for goal, value in pairs)


async def send_all(
    url: str,
    plan: Sequence[Planned],
    *,
    headers: Mapping[str, str] = {},
    rate: float = math.inf,
    concurrency: int = 64,
    seed: int = 0,
    timeout: float = 600.0,
    extra: Mapping[str, Any] = {},
) -> tuple[list[Measured], float]:
    """(what became of each, seconds in all).   rate: requests a second, at Poisson's intervals.   extra: joins each body."""
    done: list[Measured] = [Measured() for _ in plan]
    over = [asyncio.Event() for _ in plan]
    slots = asyncio.Semaphore(concurrency)
    draw, start = random.Random(seed), time.perf_counter()
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, headers=dict(headers), timeout=timeout, limits=limits) as http:

        async def one(number: int, at: float) -> None:
            planned = plan[number]
            try:
                if planned.after is not None:
                    await over[planned.after].wait()
                    if not done[planned.after].good:
                        done[number].error = "the request before it failed"
                        return
                await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
                async with slots:
                    answer = done[planned.after].text if planned.after is not None else ""
                    await _stream(http, planned.path, {**planned.body(answer), **extra}, done[number])
            finally:
                over[number].set()

        at, tasks = 0.0, []
        for number, planned in enumerate(plan):
            tasks.append(asyncio.create_task(one(number, at if planned.at is None else planned.at)))
            at += draw.expovariate(rate) if math.isfinite(rate) else 0.0
        await asyncio.gather(*tasks)
    return done, time.perf_counter() - start


async def _stream(http: httpx.AsyncClient, path: str, body: dict[str, Any], m: Measured) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    m.sent = time.perf_counter()
    try:
        async with http.stream("POST", path, json=body) as answer:
            m.status = answer.status_code
            if m.status != 200:
                m.error = (await answer.aread()).decode("utf-8", "replace")[:500]
                return
            await _read(answer, m)
    except (httpx.HTTPError, OSError) as error:
        m.error = f"{type(error).__name__}: {error}"
    finally:
        m.e2el = time.perf_counter() - m.sent
    if "response_format" in body and m.good:
        m.valid = m.finish == "length" or _is_json(m.text)


async def _read(answer: httpx.Response, m: Measured) -> None:
    held, last, texts, ended = b"", m.sent, list[str](), False
    async for piece in answer.aiter_raw():
        held += piece
        *blocks, held = held.split(b"\n\n")
        for block in blocks:
            if not block.startswith(b"data: "):
                continue
            if block == b"data: [DONE]":
                ended = True
                continue
            event = json.loads(block[6:])
            if "error" in event:
                m.error = json.dumps(event["error"])[:500]
                continue
            text = _take(event, m)
            fresh = _take_usage(event, m)
            if text:
                texts.append(text)
                now = time.perf_counter()
                if m.ttft is None:
                    m.ttft = now - m.sent
                else:
                    m.itl.extend([(now - last) / max(fresh, 1)] * max(fresh, 1))
                last = now
    m.text = "".join(texts)
    if not ended and not m.error:
        m.error = "the stream broke off before [DONE]"


def _take(event: Mapping[str, Any], m: Measured) -> str:
    """The text of a chunk."""
    said = ""
    for choice in event.get("choices") or ():
        said += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        m.finish = choice.get("finish_reason") or m.finish
    return said


def _take_usage(event: Mapping[str, Any], m: Measured) -> int:
    """How many tokens are new, as the running usage says."""
    usage = event.get("usage")
    if not usage:
        return 1
    fresh = usage["completion_tokens"] - m.output_tokens
    m.prompt_tokens, m.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    m.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return int(fresh)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def percentile(values: Sequence[float], q: float) -> float:
    """Linear between the nearest ranks, as numpy's default. nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(done: Sequence[Measured], seconds: float, goals: Goals) -> dict[str, Any]:
    """The figures, times in milliseconds."""
    good = [m for m in done if m.good]
    series: dict[str, list[float]] = {
        "ttft": [m.ttft for m in good if m.ttft is not None],
        "tpot": [t for m in good if (t := m.tpot) is not None],
        "itl": [gap for m in good for gap in m.itl],
        "e2el": [m.e2el for m in good],
    }
    found: dict[str, Any] = {
        "requests": len(done),
        "completed": len(good),
        "failed": dict(Counter(str(m.status) if m.status != 200 else "stream" for m in done if not m.good)),
        "seconds": round(seconds, 3),
        "requests_per_s": _round(len(good) / seconds),
        "input_tokens": sum(m.prompt_tokens for m in good),
        "cached_tokens": sum(m.cached_tokens for m in good),
        "output_tokens": sum(m.output_tokens for m in good),
    }
    found["input_tokens_per_s"] = _round(found["input_tokens"] / seconds)
    found["output_tokens_per_s"] = _round(found["output_tokens"] / seconds)
    found["cache_hit_ratio"] = _round(found["cached_tokens"] / found["input_tokens"]) if found["input_tokens"] else 0.0
    for name, values in series.items():
        found[f"mean_{name}_ms"] = _round(1000 * sum(values) / len(values)) if values else None
        for q in QUANTILES:
            found[f"p{q}_{name}_ms"] = _round(1000 * percentile(values, q)) if values else None
    met = sum(goals.met(m) for m in done)
    found["goodput_requests_per_s"], found["goodput_ratio"] = _round(met / seconds), _round(met / len(done)) if done else 0.0
    checked = [m.valid for m in good if m.valid is not None]
    if checked:
        found["valid_json"] = sum(checked)
        found["checked_json"] = len(checked)
    return found


def _round(value: float) -> float:
    return float(f"{value:.6g}")
