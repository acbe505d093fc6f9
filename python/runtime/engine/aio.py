"""AsyncEngine: the awaitable facade. One engine thread works for all; results come to their event loop. Owns no text or policy.

    event loop(s) ── submit, call ──> client inbox ──> engine thread: client.serve()
                  <── call_soon_threadsafe ──────────┘ (asleep when there is nothing to do)

An engine belongs to no loop: each call brings its results to the loop that it was made in.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from phloem.runtime.config import EngineConfig, Resolved, make_config
from phloem.runtime.engine.build import EngineOptions, Parts, build
from phloem.runtime.engine.calls import (
    Call,
    CallOptions,
    ChatOptions,
    Conversations,
    Message,
    Prompt,
    Prompts,
    Sampling,
    SamplingOfMany,
    Verbs,
    check_timeout,
)
from phloem.runtime.engine.client import EngineClient, InprocClient
from phloem.runtime.engine.constraint import GrammarOptions
from phloem.runtime.engine.select import ChoiceScores, Method, Plan, Selection, plan_choices
from phloem.runtime.engine.textside import Side
from phloem.runtime.errors import PhloemError, RequestTimeoutError
from phloem.runtime.request import Delta, Output, TokenLogprob

if TYPE_CHECKING:
    from phloem.runtime.engine.core import EngineStats, Explanation
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "AsyncStream"]


class AsyncEngine:
    """Engine for asyncio: the same verbs, arguments, results and errors, awaitable; the same tokens.

    Cancelling a task aborts its request within one step. The constructor loads the model and blocks for that; to keep a loop
    free, construct in a thread: `await asyncio.to_thread(AsyncEngine)`. One engine serves any number of loops and
    `asyncio.run` calls, at once or in turn, until `await engine.close()` or the end of `async with`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        on_load: Callable[[str], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        parts = build(make_config(model, **options), on_load)  # type: ignore[arg-type]
        self._set_up(InprocClient(parts.core, on_close=parts.on_close), parts)

    @classmethod
    def from_parts(cls, parts: Parts) -> AsyncEngine:
        """As Engine.from_parts."""
        return cls.from_client(InprocClient(parts.core, on_close=parts.on_close), parts)

    @classmethod
    def from_client(cls, client: EngineClient, side: Side) -> AsyncEngine:
        """As Engine.from_client."""
        self = cls.__new__(cls)
        self._set_up(client, side)
        return self

    def _set_up(self, client: EngineClient, side: Side) -> None:
        self._client = client
        self._verbs = Verbs(side.text, policy=side.config.policy)
        self.config: EngineConfig = side.config
        self.resolved: Resolved = side.resolved
        self.tokenizer: Tokenizer = side.tokenizer
        # The thread holds the client, not the engine, so that a forgotten engine can be collected. It is a daemon because
        # Python joins other threads before the exit hooks run, and one of those, the finalizer, is what ends it.
        self._thread = threading.Thread(target=self._client.serve, name="phloem-engine", daemon=True)
        self._finalizer = weakref.finalize(self, self._client.close)
        self._thread.start()

    # ---- generating -----------------------------------------------------------------------------------------------------

    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: Literal[1] = 1, **options: Unpack[CallOptions]
    ) -> Output: ...
    @overload
    async def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: int, **options: Unpack[CallOptions]
    ) -> list[Output]: ...
    @overload
    async def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompts, sampling: SamplingOfMany = None, *, n: Literal[1] = 1, **options: Unpack[CallOptions]
    ) -> list[Output]: ...
    @overload
    async def generate(
        self, prompt: Prompts, sampling: SamplingOfMany = None, *, n: int, **options: Unpack[CallOptions]
    ) -> list[list[Output]]: ...
    async def generate(
        self, prompt: Any, sampling: Any = None, *, n: int = 1, timeout: float | None = None, **options: Any
    ) -> Any:
        """As Engine.generate."""
        self._client.ensure_usable()
        return (await self._finish(self._verbs.generate(prompt, sampling, n=n, **options), timeout)).result()

    @overload
    async def chat(  # type: ignore[overload-overlap]
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[ChatOptions],
    ) -> Output: ...
    @overload
    async def chat(
        self, messages: Sequence[Message], sampling: Sampling | None = None, *, n: int, **options: Unpack[ChatOptions]
    ) -> list[Output]: ...
    @overload
    async def chat(  # type: ignore[overload-overlap]
        self, messages: Conversations, sampling: SamplingOfMany = None, *, n: Literal[1] = 1, **options: Unpack[ChatOptions]
    ) -> list[Output]: ...
    @overload
    async def chat(
        self, messages: Conversations, sampling: SamplingOfMany = None, *, n: int, **options: Unpack[ChatOptions]
    ) -> list[list[Output]]: ...
    async def chat(
        self, messages: Any, sampling: Any = None, *, n: int = 1, timeout: float | None = None, **options: Any
    ) -> Any:
        """As Engine.chat."""
        self._client.ensure_usable()
        return (await self._finish(self._verbs.chat(messages, sampling, n=n, **options), timeout)).result()

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        timeout: float | None = None,
        priority: int = 0,
        namespace: str = "",
        **constraint: Unpack[GrammarOptions],
    ) -> AsyncStream:
        """As Engine.stream: `async for delta in engine.stream(…)`. Needs a running loop; a refused prompt raises at the first step."""
        self._client.ensure_usable()
        call = self._verbs.stream("generate", prompt, sampling, n=n, priority=priority, namespace=namespace, **constraint)
        return AsyncStream(self, call, timeout)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        timeout: float | None = None,
        priority: int = 0,
        namespace: str = "",
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **constraint: Unpack[GrammarOptions],
    ) -> AsyncStream:
        """`chat`, piece by piece."""
        self._client.ensure_usable()
        call = self._verbs.stream(
            "chat", messages, sampling, n=n, priority=priority, namespace=namespace, template=template, variables=variables, tools=tools,
            **constraint,
        )  # fmt: skip
        return AsyncStream(self, call, timeout)

    @overload
    async def score(
        self,
        prompt: Prompt,
        from_position: int = 0,
        *,
        top_logprobs: int = 0,
        namespace: str = "",
        timeout: float | None = None,
    ) -> list[TokenLogprob | None]: ...
    @overload
    async def score(
        self,
        prompt: Prompts,
        from_position: int = 0,
        *,
        top_logprobs: int = 0,
        namespace: str = "",
        timeout: float | None = None,
    ) -> list[list[TokenLogprob | None]]: ...
    async def score(
        self, prompt: Any, from_position: int = 0, *, top_logprobs: int = 0, namespace: str = "", timeout: float | None = None
    ) -> Any:
        """As Engine.score."""
        self._client.ensure_usable()
        call = await self._finish(self._verbs.score(prompt, from_position, top_logprobs, namespace), timeout)
        return self._verbs.scores(call, from_position)

    async def select(
        self,
        prompt: Prompt,
        choices: Sequence[str],
        *,
        method: Method = "token_length_normalized",
        namespace: str = "",
        timeout: float | None = None,
    ) -> Selection:
        """As Engine.select."""
        plan, found = await self._score_choices(prompt, choices, method, namespace, timeout)
        return plan.select(found)

    async def score_choices(
        self,
        prompt: Prompt,
        choices: Sequence[str],
        *,
        method: Method = "token_length_normalized",
        namespace: str = "",
        timeout: float | None = None,
    ) -> ChoiceScores:
        """As Engine.score_choices."""
        return (await self._score_choices(prompt, choices, method, namespace, timeout))[1]

    async def _score_choices(
        self, prompt: Prompt, choices: Sequence[str], method: Method, namespace: str, timeout: float | None
    ) -> tuple[Plan, ChoiceScores]:
        self._client.ensure_usable()
        plan = plan_choices(self.tokenizer, prompt, choices, method, self._verbs.prompt_ids(prompt))
        paths = await self.score(plan.paths, plan.start, namespace=namespace, timeout=timeout)
        alone = await self.score(plan.alone, namespace=namespace, timeout=timeout) if plan.alone else []
        return plan, plan.scores(paths, alone)

    # ---- about the engine -----------------------------------------------------------------------------------------------

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """As Engine.encode_chat; not awaitable, since no model runs."""
        return list(self._verbs.chat_ids(messages, template=template, variables=variables, tools=tools))

    async def stats(self) -> EngineStats:
        """As Engine.stats."""
        stats: EngineStats = await self._control("stats")
        return stats

    async def explain(self, prompt: Prompt, *, namespace: str = "") -> Explanation:
        """As Engine.explain."""
        explanation: Explanation = await self._control("explain", self._verbs.prompt_ids(prompt), namespace)
        return explanation

    async def flush(self) -> int:
        """As Engine.flush."""
        freed: int = await self._control("flush")
        return freed

    async def check(self) -> None:
        """As Engine.check."""
        await self._control("check")

    async def close(self) -> None:
        """As Engine.close. Waits for the engine thread's running step without blocking the loop."""
        await asyncio.to_thread(self._shut)

    def _shut(self) -> None:
        self._client.close()
        self._thread.join()
        self._finalizer.detach()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<phloem.AsyncEngine {self.config.model or 'embedded model'} on {self.resolved.device}>"

    # ---- inside ---------------------------------------------------------------------------------------------------------

    async def _finish(self, call: Call, timeout: float | None) -> Call:
        seconds = check_timeout(timeout)
        waker = _Waker()
        call.listener = waker.ring
        try:
            self._client.submit(call.entries(), atomic=call.on_error == "raise")
            try:
                async with asyncio.timeout(seconds):
                    await waker.wait_for(call.done)
            except TimeoutError:
                assert seconds is not None
                live = call.live_ids()
                self._client.abort(live)
                await waker.wait_for(lambda: not call.live_ids())
                call.time_out(seconds, live)
        finally:
            _abort(self._client, call)  # cancelled, or the others of a call that is to raise
        return call

    async def _control(self, verb: Literal["stats", "explain", "flush", "check"], *args: Any) -> Any:
        return await asyncio.wrap_future(self._client.call(verb, *args))


class AsyncStream(AsyncIterator[Delta]):
    """Deltas of one `AsyncEngine.stream` call. `aclose`, dropping it, or cancelling the task that reads it aborts the request."""

    def __init__(self, engine: AsyncEngine, call: Call, timeout: float | None) -> None:
        self._over = True  # until queued: __del__ runs also when the next lines raise
        self._engine, self._client, self._call = engine, engine._client, call
        self._seconds = check_timeout(timeout)
        # The call holds the waker, not the stream: a stream that nobody holds is collected, which aborts it.
        self._waker = _Waker()
        call.listener = self._waker.ring
        self._deadline = None if self._seconds is None else asyncio.get_running_loop().time() + self._seconds
        self._client.submit(call.entries(), atomic=True)
        self._over = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        if self._over:
            raise StopAsyncIteration
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._waker.wait_for(self._call.stirred)
        except TimeoutError:
            await self.aclose()
            raise RequestTimeoutError(
                f"the stream was not over after timeout={self._seconds:g} s, and was aborted.", param="timeout"
            ) from None
        except BaseException:
            await self.aclose()
            raise
        if self._call.deltas:
            return self._call.deltas.popleft()
        await self.aclose()
        error = self._call.failure()
        if error is not None:
            raise error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort what is unfinished; it is freed within one step. May be called again."""
        if not self._over:
            self._over = True
            _abort(self._client, self._call)

    @property
    def outputs(self) -> list[Output]:
        """The Outputs of the n samples, in order. Raises RuntimeError before the end of the stream."""
        if self._call.live_ids():
            raise RuntimeError("the stream is not over; read it to its end before asking for its outputs.")
        return self._call.outputs()

    @property
    def output(self) -> Output:
        """The whole Output (of sample 0, if there are more). Raises RuntimeError before the end of the stream."""
        return self.outputs[0]

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._over:
            _abort(self._client, self._call)


def _abort(client: EngineClient, call: Call) -> None:
    live = call.live_ids()
    if live:
        with suppress(PhloemError):  # the engine is closed or dead: nothing is held any more
            client.abort(live)


class _Waker:
    """Wakes one waiting coroutine of the loop it was made in, from any thread. Rings between two looks cost one wake-up."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._rung = False

    def ring(self) -> None:
        """Raises RuntimeError if the loop is closed: the client then aborts the request, since nobody waits for it (S5)."""
        if not self._rung:
            self._rung = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._rung = False
        self._event.set()

    async def wait_for(self, done: Callable[[], bool]) -> None:
        while not done():
            self._event.clear()
            if done():
                return
            await self._event.wait()
