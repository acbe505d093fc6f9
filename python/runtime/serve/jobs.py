"""One HTTP request's samples on their way back: pushed by the engine's thread, taken by the event loop, merged while nobody takes.

    engine thread:  push(delta) ─> Collector ─> Sample's pending slot        no task, queue item or future a token
                                                  │  rings at most once a step, for all streams together
    event loop:     Wakeups.flush ─> Job.news ──> take() ─> one larger chunk if the reader was slow

A slow reader costs the engine nothing: its text, ids and logprobs wait in the slot as one. Knows no HTTP and no formats.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from phloem.runtime.engine.collect import Collector
from phloem.runtime.engine.wire import Timing
from phloem.runtime.errors import PhloemError
from phloem.runtime.request import Output, OutputDelta, Request, TokenLogprob
from phloem.runtime.serve.errors import ApiError
from phloem.runtime.serve.host import Host, RequestRecord

__all__ = ["Job", "Piece", "Sample", "Wakeups"]


@dataclass(slots=True)
class Piece:
    """What is new of one sample since it was last taken. output: it has ended, and this is all of it."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    output: Output | None = None


class Wakeups:
    """Brings news from the engine's thread to one event loop: one call across for all the jobs that a step moved."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._rung: list[Job] = []

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def ring(self, job: Job) -> None:
        """From any thread. Raises RuntimeError if the loop is closed: the client then aborts the request, for nobody waits."""
        with self._lock:
            first = not self._rung
            self._rung.append(job)
        if first:
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            rung, self._rung = self._rung, []
        for job in rung:
            job.wake()


class Sample:
    """One request of the engine, and the sink that its client pushes to.

    index: of the choice.   number: of its prompt.   seed: told by the first delta.
    """

    __slots__ = (
        "_collector", "_job", "_last", "_pending", "_said", "error", "index", "num_tokens", "number", "output", "request", "seed", "weights",
    )  # fmt: skip

    def __init__(self, job: Job, request: Request, collector: Collector, index: int, number: int) -> None:
        self._job, self._collector = job, collector
        self.request, self.index, self.number = request, index, number
        self._pending: Piece | None = None
        self._said = False
        self._last = 0.0
        self.num_tokens = 0
        self.seed = 0
        self.weights = 0
        self.output: Output | None = None
        self.error: Exception | None = None

    @property
    def over(self) -> bool:
        return self.output is not None or self.error is not None

    # ---- the engine's thread --------------------------------------------------------------------------------------------

    def push(self, delta: OutputDelta) -> int | None:
        collector, job = self._collector, self._job
        if self.over:
            return None
        self.seed, self.weights = delta.seed, delta.weights_version
        said = collector.push(delta)
        with job.lock:
            if delta.token_ids:
                self._note_time(len(delta.token_ids))
            if said is not None and (said.text or said.token_ids or said.finish_reason is not None):
                pending = self._pending
                if pending is None:
                    pending = self._pending = Piece()
                pending.text = pending.text + said.text if pending.text else said.text
                pending.ids += said.token_ids
                if said.logprobs:
                    pending.logprobs += said.logprobs
                pending.output = collector.output
            if collector.output is not None:
                self.output = collector.output
                self.error = collector.output.error
                job.num_over += 1
            first, self._said = not self._said, True
            job.newly_said += first
        # A token without text yet is no news, but the first word of a sample is: it waits no more.
        if first or self._pending is not None:
            job.ring()
        return collector.stopped_at

    def timing(self, told: Timing) -> None:
        """What the engine knows of this sample's way, just before its last delta. Only an engine in another process tells."""
        record = self._job.record
        with self._job.lock:
            if told.queue is not None:
                record.queue_seconds = max(told.queue, record.queue_seconds or 0.0)
            if told.compile is not None:
                record.compile_seconds = max(told.compile, record.compile_seconds or 0.0)
            if told.prefill is not None:
                if told.prefill >= (record.prefill_seconds or 0.0):
                    record.chunks = told.chunks
                record.prefill_seconds = max(told.prefill, record.prefill_seconds or 0.0)
            record.preemptions = (record.preemptions or 0) + told.preemptions

    def fail(self, error: Exception) -> None:
        with self._job.lock:
            if self.over:
                return
            if isinstance(error, PhloemError) and self._collector.output is None:
                self._collector.fail(error)
                self.output = self._collector.output
            self.error = error
            self._job.num_over += 1
            first, self._said = not self._said, True
            self._job.newly_said += first
        self._job.ring()

    def _note_time(self, num_tokens: int) -> None:
        record, now = self._job.record, time.perf_counter()
        if record.first_token is None:
            record.first_token = now
        if self._last:
            record.gaps.append(now - self._last)
            record.gap_tokens.append(num_tokens)
        self._last = now
        self.num_tokens += num_tokens
        self._job.fresh_tokens += num_tokens

    # ---- the event loop -------------------------------------------------------------------------------------------------

    def take(self) -> Piece | None:
        """What is new, once."""
        with self._job.lock:
            piece, self._pending = self._pending, None
        return piece

    @property
    def num_dropped(self) -> int:
        return self._collector.num_dropped

    def prompt_logprobs(self) -> list[TokenLogprob | None]:
        """One entry a prompt token, as far as it was asked for. Complete with the first token of the output."""
        return self._collector.aligned_prompt_logprobs() or []


class Job:
    """All samples of one HTTP request. Made, submitted, awaited and closed on the event loop.

    lock: guards what the engine's thread and the loop share.
    """

    def __init__(self, host: Host, wakeups: Wakeups, record: RequestRecord, *, partial: bool = False) -> None:
        """partial: what an aborted sample has so far is an answer, not an error (/generate)."""
        self._partial = partial
        self.host, self.record, self._wakeups = host, record, wakeups
        self.id, self.key, self.handle = record.id, record.key, record.handle
        self.lock = threading.Lock()
        self.samples: list[Sample] = []
        self.newly_said = self.fresh_tokens = self.num_over = 0
        self.on_error: Callable[[Exception], Exception] = lambda error: error
        self._waiting = self._waiting_tokens = 0
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None
        self._end: Exception | None = None  # why the whole request ends, whatever its samples do
        self._closed = False

    def add(self, request: Request, collector: Collector, index: int, number: int) -> Sample:
        sample = Sample(self, request, collector, index, number)
        self.samples.append(sample)
        return sample

    def submit(self) -> None:
        """Raises EngineDeadError and the like when the engine takes no requests."""
        client = self.host.client
        assert client is not None
        self.record.submitted = time.perf_counter()
        self._waiting = len(self.samples)
        self._waiting_tokens = sum(len(s.request.token_ids) for s in self.samples)
        self.host.waiting += self._waiting
        self.host.waiting_tokens += self._waiting_tokens
        client.submit([(s.request, s) for s in self.samples], atomic=True)

    # ---- news -----------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """From the engine's thread."""
        if not self._rung:
            self._rung = True
            self._wakeups.ring(self)

    def wake(self) -> None:
        with self.lock:
            self._rung = False
            said, self.newly_said = self.newly_said, 0
            fresh, self.fresh_tokens = self.fresh_tokens, 0
        if said:
            self._said(said)
        if fresh:
            self.host.served(fresh)
        self._notify()

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _said(self, count: int) -> None:
        share = self._waiting_tokens if count >= self._waiting else self._waiting_tokens * count // max(1, self._waiting)
        self.host.waiting -= min(count, self._waiting)
        self.host.waiting_tokens -= share
        self.host.served(share)
        self._waiting -= min(count, self._waiting)
        self._waiting_tokens -= share

    @property
    def done(self) -> bool:
        return self._end is not None or self.num_over == len(self.samples)

    def has_news(self) -> bool:
        return self.done or self.failure() is not None or any(s._pending is not None for s in self.samples)

    async def news(self) -> None:
        """Until a sample has something new, one has failed, or all have ended."""
        while not self.has_news():
            await self._wait()

    async def finished(self) -> None:
        """Until all have ended, or one has failed."""
        while not self.done and self.failure() is None:
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = self._wakeups.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def failure(self) -> Exception | None:
        """What the whole request fails with: its own end, or the first sample's error."""
        if self._end is not None:
            return self._end
        if not self.num_over:
            return None
        for sample in self.samples:
            if sample.error is not None:
                return self.on_error(sample.error)
            if sample.output is not None and sample.output.finish_reason == "abort" and not self._partial:
                return _aborted()
        return None

    # ---- the end --------------------------------------------------------------------------------------------------------

    def abort(self) -> int:
        """End it for everybody who waits (S5): by its client, an administrator, or the server's own end. How many samples lived."""
        live = [s.request.id for s in self.samples if not s.over]
        if live and self._end is None and not self._partial:
            self._end = _aborted()
        self._let_go(live)
        self._notify()
        return len(live)

    def _let_go(self, live: Sequence[str]) -> None:
        if live and self.host.client is not None:
            with suppress(PhloemError):  # the engine is closed or dead: it holds nothing any more
                self.host.client.abort(live)

    def close(self) -> None:
        """Nobody waits any more: what lives is aborted, and the record is complete."""
        if self._closed:
            return
        self._closed = True
        self._let_go([s.request.id for s in self.samples if not s.over])
        if self._waiting:
            self._said(self._waiting)
        self.host.closed(self)


def _aborted() -> ApiError:
    return ApiError(
        503, "request_aborted", "the request was aborted before it was complete. Send it again if it is still wanted."
    )
