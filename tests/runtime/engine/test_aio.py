"""AsyncEngine: the same results as Engine, cancellation, several loops, sleep and end. Over the real core, without weights."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import phloem
from phloem.runtime.engine.aio import AsyncEngine, AsyncStream
from phloem.runtime.engine.sync import Engine
from tests.runtime.engine.parts import SlowExecutor, parts

ROOT = Path(__file__).resolve().parents[3]
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
GREEDY = phloem.SamplingParams(**FIELDS)
LONG = phloem.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
WARM = phloem.SamplingParams(max_tokens=16, seed=5, ignore_eos=True)


def device(engine: AsyncEngine) -> SlowExecutor:
    return engine._client._core.executor  # type: ignore[attr-defined,no-any-return]


async def idle(engine: AsyncEngine) -> None:
    """Nothing is left behind; an abort takes at most a step."""
    for _ in range(200):
        stats = await engine.stats()
        if not stats.running and not stats.waiting:
            break
        await asyncio.sleep(0.005)
    assert stats.running == stats.waiting == stats.pages_live == 0
    await engine.check()


def test_every_verb_gives_what_the_blocking_engine_gives() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with Engine.from_parts(parts()) as engine:
        expected = [
            engine.generate("hello", GREEDY), engine.generate(["a", "b"], WARM, n=2), engine.chat(messages, GREEDY), engine.chat([messages], WARM, n=2),
            engine.score("hello", 1), engine.score(["hello", "you"]), engine.explain("hello").num_cached, list(engine.stream("hello", GREEDY)),
            list(engine.stream_chat(messages, WARM)), engine.generate([], GREEDY),
        ]  # fmt: skip

    async def main() -> list[Any]:
        async with AsyncEngine.from_parts(parts()) as e:
            got: list[Any] = [
                await e.generate("hello", GREEDY), await e.generate(["a", "b"], WARM, n=2), await e.chat(messages, GREEDY),
                await e.chat([messages], WARM, n=2), await e.score("hello", 1), await e.score(["hello", "you"]), (await e.explain("hello")).num_cached,
                [d async for d in e.stream("hello", GREEDY)], [d async for d in e.stream_chat(messages, WARM)], await e.generate([], GREEDY),
            ]  # fmt: skip
            assert e.encode_chat(messages) == list(b"<user>hi<assistant>")
            assert await e.flush() > 0
            await idle(e)
            return got

    assert asyncio.run(main()) == expected


def test_many_tasks_get_what_they_would_alone() -> None:
    prompts = [f"prompt {i}" for i in range(24)]
    with Engine.from_parts(parts()) as engine:
        alone = [engine.generate(p, GREEDY).token_ids for p in prompts]

    async def main() -> list[list[int]]:
        async with AsyncEngine.from_parts(parts()) as engine:
            outputs = await asyncio.gather(*(engine.generate(p, GREEDY) for p in prompts))
            assert (await engine.stats()).steps < 24 * 12, "tasks share steps"
            return [o.token_ids for o in outputs]

    assert asyncio.run(main()) == alone


def test_an_argument_that_means_nothing_is_never_ignored() -> None:
    async def main() -> None:
        async with AsyncEngine.from_parts(parts()) as engine:
            with pytest.raises(TypeError, match="no argument 'streaming'"):
                await engine.generate("x", streaming=True)  # type: ignore[call-overload]
            for stream, prompt in ((engine.stream, "x"), (engine.stream_chat, [{"role": "user", "content": "x"}])):
                for name in ("on_error", "progress"):
                    with pytest.raises(TypeError, match=f"a stream takes no {name}"):
                        stream(prompt, **{name: None})  # type: ignore[operator]

    asyncio.run(main())


def test_a_stream_comes_in_pieces_and_ends_with_its_output() -> None:
    async def main() -> None:
        async with AsyncEngine.from_parts(parts(pause=0.002)) as engine:
            whole = await engine.generate("hello", {**FIELDS, "logprobs": True})
            stream = engine.stream("hello", {**FIELDS, "logprobs": True})
            with pytest.raises(RuntimeError, match="not over"):
                _ = stream.output
            deltas = [d async for d in stream]
            assert "".join(d.text for d in deltas) == whole.text == stream.output.text
            assert [entry for d in deltas for entry in d.logprobs or []] == whole.logprobs
            assert len(deltas) == 12 and deltas[-1].finish_reason == "length"
            assert [d async for d in stream] == []
            texts = ["", "", ""]
            many = engine.stream("hello", WARM, n=3)
            async for delta in many:
                texts[delta.index] += delta.text
            assert texts == [o.text for o in many.outputs] == [o.text for o in await engine.generate("hello", WARM, n=3)]

    asyncio.run(main())


@pytest.mark.parametrize("verb", ["generate", "stream", "list"])
def test_cancelling_a_task_aborts_its_request(verb: str) -> None:
    """S5: within one step."""

    async def main() -> None:
        async with AsyncEngine.from_parts(parts(pause=0.005)) as engine:

            async def work() -> None:
                if verb == "stream":
                    async for _ in engine.stream("hello", LONG):
                        pass
                else:
                    await engine.generate(["hello", "you"] if verb == "list" else "hello", LONG)  # type: ignore[arg-type]

            task = asyncio.create_task(work())
            await asyncio.sleep(0.05)
            assert (await engine.stats()).running == (2 if verb == "list" else 1)
            steps = (await engine.stats()).steps
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await idle(engine)
            assert (await engine.stats()).steps <= steps + 3
            assert (await engine.generate("hello", GREEDY)).finish_reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize("leave", ["aclose", "with", "drop", "break"])
def test_leaving_a_stream_aborts_its_request(leave: str) -> None:
    async def main() -> None:
        async with AsyncEngine.from_parts(parts(pause=0.002)) as engine:
            stream: AsyncStream | None = engine.stream("hello", LONG)
            assert stream is not None
            await anext(stream)
            if leave == "aclose":
                await stream.aclose()
                await stream.aclose()
                assert [d async for d in stream] == []
            elif leave == "with":
                async with stream:
                    pass
            elif leave == "break":
                async for _ in stream:
                    break
            stream = None
            gc.collect()
            await idle(engine)
            assert (await engine.stats()).aborted == 1

    asyncio.run(main())


def test_errors_are_those_of_the_blocking_engine() -> None:
    async def main() -> None:
        async with AsyncEngine.from_parts(parts()) as engine:
            with pytest.raises(phloem.InvalidRequestError, match="prompt 1 of 2"):
                await engine.generate(["a", [128]], GREEDY)
            with pytest.raises(phloem.InvalidRequestError, match="128"):
                async for _ in engine.stream([128]):
                    pass
            with pytest.raises(phloem.InvalidRequestError, match="empty"):
                await engine.generate("")
            with pytest.raises(phloem.ContextLengthError):
                await engine.score("x" * 600)
            good, bad = await engine.generate(["a", [128]], GREEDY, on_error="return")
            assert good.error is None and isinstance(bad.error, phloem.InvalidRequestError)
            (empty,) = await engine.generate([""], GREEDY, on_error="return")
            assert isinstance(empty.error, phloem.InvalidRequestError)
            assert (await engine.stats()).running == 0

    asyncio.run(main())


def test_a_timeout_aborts_and_says_so() -> None:
    async def main() -> None:
        async with AsyncEngine.from_parts(parts(pause=0.01)) as engine:
            with pytest.raises(phloem.RequestTimeoutError, match=r"timeout=0.1 s"):
                await engine.generate("hello", LONG, timeout=0.1)
            short, late = await engine.generate(["a", "b"], [{"max_tokens": 1}, LONG], timeout=0.2, on_error="return")
            assert short.error is None and isinstance(late.error, phloem.RequestTimeoutError) and late.text
            with pytest.raises(phloem.RequestTimeoutError):
                async for _ in engine.stream("hello", LONG, timeout=0.1):
                    pass
            with pytest.raises(TimeoutError) as caught:  # a caller's own limit stays a plain TimeoutError
                async with asyncio.timeout(0.1):
                    await engine.generate("hello", LONG)
            assert not isinstance(caught.value, phloem.RequestTimeoutError)
            await idle(engine)

    asyncio.run(main())


def test_what_progress_raises_wakes_the_task() -> None:
    def refuse(ended: int, total: int) -> None:
        raise LookupError(f"{ended} of {total}")

    async def main() -> None:
        async with AsyncEngine.from_parts(parts()) as e:
            for prompts, on_error in ((["a", "b"], "raise"), (["a", ""], "return")):
                with pytest.raises(LookupError, match="1 of 2"):
                    await asyncio.wait_for(e.generate(prompts, GREEDY, on_error=on_error, progress=refuse), 10)  # type: ignore[call-overload]
            await idle(e)

    asyncio.run(main())


def test_one_engine_serves_loops_one_after_another_and_at_once() -> None:
    engine = AsyncEngine.from_parts(parts())

    async def ask() -> list[int]:
        return (await engine.generate("hello", GREEDY)).token_ids

    first = asyncio.run(ask())
    assert asyncio.run(ask()) == first
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(ask()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [first] * 4
    asyncio.run(engine.close())


def test_a_loop_that_goes_away_takes_its_requests_with_it() -> None:
    engine = AsyncEngine.from_parts(parts(pause=0.002))

    async def leave() -> None:
        asyncio.get_running_loop().create_task(engine.generate("hello", LONG))
        await asyncio.sleep(0.02)

    asyncio.run(leave())
    loop = asyncio.new_event_loop()  # not even cancelled: the loop is closed under its stream

    async def start() -> AsyncStream:
        stream = engine.stream("hello", LONG)
        await anext(stream)
        return stream

    stream = loop.run_until_complete(start())
    loop.close()
    asyncio.run(idle(engine))
    del stream
    asyncio.run(engine.close())


def test_an_idle_engine_sleeps() -> None:
    async def main() -> None:
        async with AsyncEngine.from_parts(parts()) as engine:
            await engine.generate("hello", GREEDY)
            cpu = time.process_time()
            await asyncio.sleep(0.3)
            assert time.process_time() - cpu < 0.1

    asyncio.run(main())


def test_the_loop_stays_free_while_the_model_runs() -> None:
    async def main() -> None:
        async with AsyncEngine.from_parts(parts(pause=0.05)) as engine:
            task = asyncio.create_task(engine.generate("hello", GREEDY))
            ticks = 0
            while not task.done():
                await asyncio.sleep(0.005)
                ticks += 1
            assert ticks > 30

    asyncio.run(main())


def test_close_fails_what_is_pending_and_refuses_the_rest() -> None:
    async def main() -> None:
        engine = AsyncEngine.from_parts(parts(pause=0.005))
        executor, thread = device(engine), engine._thread
        tasks = [asyncio.create_task(engine.generate("hello", LONG)) for _ in range(3)]
        stream = engine.stream("you", LONG)
        await anext(stream)
        await engine.close()
        await engine.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, phloem.EngineClosedError)
        with pytest.raises(phloem.EngineClosedError):
            async for _ in stream:
                pass
        uses: list[Callable[[], Any]] = [
            lambda: engine.generate("x"),
            engine.stats,
            engine.flush,
            lambda: engine.score("xy"),
            lambda: engine.explain("x"),
        ]
        for use in uses:
            with pytest.raises(phloem.EngineClosedError, match="closed"):
                await use()
        with pytest.raises(phloem.EngineClosedError, match="closed"):
            engine.stream("x")
        assert executor.closed and not thread.is_alive()

    asyncio.run(main())


def test_a_step_that_raises_reaches_every_task() -> None:
    async def main() -> None:
        async with AsyncEngine.from_parts(parts()) as engine:
            engine._client._core.step = lambda now: (_ for _ in ()).throw(RuntimeError("boom"))  # type: ignore[attr-defined]
            results = await asyncio.gather(*(engine.generate("hello") for _ in range(3)), return_exceptions=True)
            assert all(isinstance(r, phloem.EngineDeadError) and "boom" in str(r) for r in results)
            with pytest.raises(phloem.EngineDeadError):
                await engine.stats()

    asyncio.run(main())


def test_a_forgotten_engine_ends_its_thread_and_is_freed() -> None:
    made = parts()
    executor, core = made.core.executor, weakref.ref(made.core)  # type: ignore[attr-defined]
    engine: AsyncEngine | None = AsyncEngine.from_parts(made)
    assert engine is not None
    asyncio.run(_ask(engine))
    thread = engine._thread
    del made
    engine.itself = engine  # type: ignore[attr-defined]  # a cycle: the collector, not the last reference, finds it
    engine = None
    gc.collect()
    thread.join(5)
    assert not thread.is_alive() and executor.closed
    gc.collect()  # what the thread left behind may be a cycle of its own
    assert core() is None


async def _ask(engine: AsyncEngine) -> None:
    await engine.generate("hello", GREEDY)


def test_a_program_that_forgets_to_close_exits_at_once() -> None:
    code = """
import asyncio, time
import phloem
from tests.runtime.engine.parts import parts
engine = phloem.AsyncEngine.from_parts(parts(pause=0.01))
async def main():
    task = asyncio.create_task(engine.generate("hello", {"max_tokens": 400, "ignore_eos": True}))
    await asyncio.sleep(0.1)
asyncio.run(main())
print(time.monotonic(), flush=True)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and not done.stderr
    assert time.monotonic() - float(done.stdout) < 10
