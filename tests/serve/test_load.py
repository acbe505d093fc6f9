"""Many streams at once, some of whose readers go away: no reply is lost, no byte is wrong, nothing is kept.

The same run on the scripted engine (each change) and on the embedded model (slow: 2 000 requests, 200 at a time).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.serve.processes import Process


@dataclass
class Tally:
    whole: int = 0
    left: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[tuple[str, str, str]] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


async def stream(port: int, body: dict[str, Any], leave_after: int | None = None) -> tuple[int, str, bool]:
    """(status, text, whether it ended in order). A bare socket: 200 clients should cost little beside the server.

    leave_after: close the connection after so many events.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        text, ended, events = "", False, 0
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue  # chunk sizes and blank lines
            if line.startswith(b"data: [DONE]"):
                ended = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return status, json.dumps(event), False
            text += event["choices"][0]["text"]
            events += 1
            if leave_after is not None and events >= leave_after:
                return status, text, False
        return status, text, ended
    finally:
        writer.close()


async def load(process: Process, prompts: list[dict[str, Any]], requests: int, at_once: int, seed: int) -> Tally:
    port, draw, tally = int(process.url.rsplit(":", 1)[1]), random.Random(seed), Tally()
    alone = [(await stream(port, body)) for body in prompts]
    assert all(status == 200 and ended for status, _, ended in alone), alone
    slots, over = asyncio.Semaphore(at_once), asyncio.Event()

    async def one(number: int, leave_after: int | None) -> None:
        async with slots:
            which = number % len(prompts)
            try:
                status, text, ended = await stream(port, prompts[which], leave_after)
            except (OSError, IndexError, ValueError) as error:
                tally.lost.append(repr(error))
                return
        expected = alone[which][1]
        if leave_after is not None and not ended:
            tally.left += 1
            if not expected.startswith(text):
                tally.wrong.append(("left", expected, text))
        elif status != 200 or not ended:
            tally.lost.append(f"{status} {text[-200:]}")
        else:
            tally.whole += 1
            if text != expected:
                tally.wrong.append(("whole", expected, text))

    async def ask_for_health() -> None:
        while not over.is_set():
            start = time.perf_counter()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            tally.health.append(time.perf_counter() - start)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(ask_for_health())
    await asyncio.gather(*(one(n, draw.randrange(1, 6) if draw.random() < 0.1 else None) for n in range(requests)))
    over.set()
    await watching
    return tally


def resident(pid: int) -> int:
    """Bytes of a process in memory, shared pages left out."""
    words = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(words[1]) - int(words[2])) * 4096


def run(process: Process, prompts: list[dict[str, Any]], requests: int, at_once: int) -> Tally:
    process.ready()
    first = asyncio.run(load(process, prompts, requests // 2, at_once, seed=1))
    pids = (process.process.pid, process.engine_pid)
    process.wait_for(lambda: process.metric("num_requests_running") == process.metric("num_requests_waiting") == 0)
    before = [resident(pid) for pid in pids]
    second = asyncio.run(load(process, prompts, requests - requests // 2, at_once, seed=2))
    process.wait_for(lambda: process.metric("num_requests_running") == process.metric("num_requests_waiting") == 0)
    process.wait_for(lambda: process.metric('kv_tokens{state="used"}') == 0)
    for tally in (first, second):
        assert not tally.lost, tally.lost[:3]
        assert not tally.wrong, tally.wrong[:3]
        assert tally.whole + tally.left == requests // 2
    assert first.left + second.left > 0
    free = sum(process.metric(f'kv_tokens{{state="{s}"}}') for s in ("free", "evictable"))
    assert free == sum(process.metric(f'kv_tokens{{state="{s}"}}') for s in ("free", "evictable", "used", "pinned"))
    grown = [resident(pid) - was for pid, was in zip(pids, before)]
    assert max(grown) < 64 << 20, grown  # the second half of the load needs nothing that the first did not
    assert process.metric("invariant_repairs_total") == 0
    health = sorted([*first.health, *second.health])
    print(
        f"health: {len(health)} answers, p50 {health[len(health) // 2] * 1e3:.1f} ms, p99 {health[int(len(health) * 0.99)] * 1e3:.1f} ms"
    )
    return second


def prompts_of(count: int, tokens: int) -> list[dict[str, Any]]:
    draw = random.Random(5)
    words = "the a river stone of and lantern winter engine under bright old door".split()  # noqa: SIM905
    found = []
    for number in range(count):
        text = " ".join(draw.choice(words) for _ in range(draw.randrange(2, 12)))
        found.append({"prompt": text, "max_tokens": 1 + (number * 7) % tokens, "temperature": 0, "ignore_eos": True})
    return found


def test_200_streams_of_the_scripted_engine() -> None:
    with Process("--port", "0", engine={}) as process:
        run(process, prompts_of(20, 12), requests=400, at_once=200)
        assert process.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_200_streams_of_the_embedded_model() -> None:
    with Process("--port", "0", "--kv-tokens", "32768", "--log-level", "warning") as process:
        run(process, prompts_of(40, 24), requests=2000, at_once=200)
        assert process.stop() == 0
