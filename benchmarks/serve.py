"""What the server costs: its start, its rest, and what HTTP adds to the engine. One JSON line a figure.

    python -m benchmarks.serve [start] [idle] [overhead] [request] [health]        all of it unless parts are named

start      exec to the ready line, embedded model: median of three
idle       CPU of both processes over 20 idle seconds, as a share of one core
overhead   API process CPU a streamed token, at 64 streams of a device that draws at once (so that the engine is not the subject),
           against the same load on the engine in one process
request    API process CPU a request of 20 messages for one token, streamed and not, the embedded model and its tokenizer; tokenising, which
           is measured apart in this process, is left out and told beside, as is what the engine in one process pays for the same prompt
health     /health while 200 streams of the embedded model run
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import median, note, record
from phloem.runtime.engine.client import InprocClient
from phloem.runtime.request import Request, SamplingParams
from tests.serve.child_parts import scripted, tokenizer_folder
from tests.serve.processes import Process
from tests.serve.test_load import stream

TICK = os.sysconf("SC_CLK_TCK")
STREAMS, TOKENS, REQUESTS, MANY = 64, 64, 300, 200


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def start() -> None:
    seconds = []
    for _ in range(3):
        with Process("--port", "0") as process:
            process.ready()
            seconds.append(time.monotonic() - process.began)
            process.stop()
    record(
        "serve_start",
        median(seconds),
        "s",
        "phloem serve, embedded model: exec to the ready line",
        runs=[round(s, 2) for s in seconds],
    )


def idle() -> None:
    with Process("--port", "0") as process:
        process.ready()
        time.sleep(2)
        pids = (process.process.pid, process.engine_pid)
        before, began = [cpu_seconds(p) for p in pids], time.monotonic()
        time.sleep(20)
        wall = time.monotonic() - began
        api, engine = (cpu_seconds(p) - b for p, b in zip(pids, before))
        record(
            "serve_idle_cpu",
            100 * (api + engine) / wall,
            "% of a core",
            "both processes, 20 s idle",
            api=round(api, 2),
            engine=round(engine, 2),
        )
        process.stop()


def overhead() -> None:
    body = {
        "prompt": "noise",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    with Process("--port", "0", "--max-running", str(STREAMS), "--log-level", "warning", engine={}) as process:
        process.ready()
        port = int(process.url.rsplit(":", 1)[1])

        async def burst() -> None:
            plain = {k: v for k, v in body.items() if k != "stream_options"}
            done = await asyncio.gather(*(stream(port, plain) for _ in range(STREAMS)))
            assert all(status == 200 and ended for status, _, ended in done)

        asyncio.run(burst())
        before = cpu_seconds(process.process.pid)
        for _ in range(5):
            asyncio.run(burst())
        per_token = (cpu_seconds(process.process.pid) - before) / (5 * STREAMS * TOKENS)
        process.stop()
    record("serve_api_cpu_per_token", per_token * 1e6, "us", f"{STREAMS} streams x {TOKENS} tokens, scripted device, detokenising included",
           in_process_us=round(in_process() * 1e6, 2))  # fmt: skip


def request() -> None:
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"message {n} " + "word " * 8} for n in range(20)]
    tokenising, in_one_process = request_seconds(messages)
    with Process("--port", "0", "--log-level", "warning") as process, httpx.Client(timeout=60) as http:
        url = f"{process.ready().url}/v1/chat/completions"
        for streamed in (False, True):
            content = json.dumps({"messages": messages, "max_tokens": 1, "temperature": 0, "stream": streamed}).encode()
            for _ in range(20):
                http.post(url, content=content)
            before = cpu_seconds(process.process.pid)
            for _ in range(REQUESTS):
                assert http.post(url, content=content).status_code == 200
            used = (cpu_seconds(process.process.pid) - before) / REQUESTS
            record(
                "serve_api_cpu_per_request", (used - tokenising) * 1e3, "ms", "20 messages of 50 bytes, 1 token, embedded model, without tokenising",
                stream=streamed, tokenising_ms=round(tokenising * 1e3, 3), with_tokenising_ms=round(used * 1e3, 3),
                in_process_with_tokenising_ms=round(in_one_process * 1e3, 3),
            )  # fmt: skip
        process.stop()


def request_seconds(messages: list[dict[str, str]]) -> tuple[float, float]:
    """CPU a request of: tokenising alone; all that a caller of the engine in one process pays for the same prompt before it runs."""
    from phloem.runtime.engine.build import load_tokenizer
    from phloem.runtime.engine.collect import Collector
    from phloem.runtime.models.loader import open_model
    from phloem.runtime.text.chat import encode_chat, render_chat

    tokenizer = load_tokenizer(open_model(None))
    text = render_chat(tokenizer, messages)

    def whole() -> None:
        ids = tuple(encode_chat(tokenizer, messages))
        Collector(Request(id="r", token_ids=ids, sampling=SamplingParams(max_tokens=1, temperature=0.0)), tokenizer)

    found = []
    for work in (lambda: tokenizer.encode(text, add_special_tokens=False), whole):
        work()
        began = time.process_time()
        for _ in range(REQUESTS):
            work()
        found.append((time.process_time() - began) / REQUESTS)
    return found[0], found[1]


def in_process() -> float:
    """CPU a token of the same requests with a collector each, on the client in this process, less the device's own."""
    import tempfile

    from phloem.runtime.engine.collect import Collector
    from phloem.runtime.text.tokenizer import Tokenizer

    class Quiet:
        def stage(self, stage: str) -> None: ...
        def opened(self, opened: Any) -> None: ...

    with tempfile.TemporaryDirectory() as folder:
        directory = str(tokenizer_folder(Path(folder)))
        core = scripted({"directory": directory, "max_running": STREAMS}, Quiet()).core
        tokenizer = Tokenizer.from_directory(directory)
    client, spent = InprocClient(core), [0.0]

    class Sink:
        def __init__(self, request: Request) -> None:
            self.collector = Collector(request, tokenizer)

        def push(self, delta: Any) -> int | None:
            began = time.process_time()
            self.collector.push(delta)
            spent[0] += time.process_time() - began
            return None

        def fail(self, error: Exception) -> None:
            raise error

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    made = [Request(id=f"r{n}", token_ids=tuple(tokenizer.encode("noise")), sampling=sampling) for n in range(STREAMS)]
    sinks = [(request, Sink(request)) for request in made]
    client.submit(sinks, atomic=False)
    client.run(lambda: all(sink.collector.output is not None for _, sink in sinks))
    client.close()
    return spent[0] / (STREAMS * TOKENS)


def health() -> None:
    with Process("--port", "0", "--log-level", "warning") as process:
        process.ready()
        port = int(process.url.rsplit(":", 1)[1])
        seconds: list[float] = []

        async def measure() -> None:
            body = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
            streams = asyncio.gather(*(stream(port, body) for _ in range(MANY)))
            async with httpx.AsyncClient(base_url=process.url, timeout=60) as http:
                while not streams.done():
                    began = time.perf_counter()
                    assert (await http.get("/health")).status_code == 200
                    seconds.append(time.perf_counter() - began)
                    await asyncio.sleep(0.02)
            await streams

        asyncio.run(measure())
        ordered = sorted(seconds)
        record("serve_health_p99", ordered[int(len(ordered) * 0.99)] * 1e3, "ms", f"/health while {MANY} streams of the embedded model run", count=len(ordered))  # fmt: skip
        process.stop()


PARTS = {"start": start, "idle": idle, "overhead": overhead, "request": request, "health": health}


def main() -> None:
    for name in sys.argv[1:] or PARTS:
        note(f"-- {name}")
        PARTS[name]()


if __name__ == "__main__":
    main()
