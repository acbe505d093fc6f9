"""Who sends, who waits: one run, or one batch of runs, on one backend (Y1, U1, U2). Owns time; knows no prompts.

    paths touched ──flush──> advance each ──outbox──> compile.arrange (order, warm-ups) ──> backend.submit
         ▲                                                                                       │
         └──── woken: slots, paths ◄── process ◄── events ◄──────────── Job.push, any thread ◄───┘

A program waits in place (the caller's thread pumps), on a greenlet (run_batch, stream), or on an asyncio future; nothing else differs.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from phloem.lang.backend import Backend, Job, Record
from phloem.lang.compile import Arranger
from phloem.lang.ir import caller
from phloem.runtime.errors import EngineClosedError, PhloemError, ProgramError, ProgramTimeout
from phloem.runtime.text.markup import Markup

if TYPE_CHECKING:
    import asyncio

    from phloem.lang.path import Path, Slot

__all__ = ["Plan", "Session"]

_numbers = itertools.count()  # next() on it is atomic
STEP_SECONDS = 0.0005  # on an event loop: one engine step, then the loop has its turn
LOOK_SECONDS = 0.1
OUTSIDE_SECONDS = 0.001  # between two looks at a tool that runs in a thread


class Plan(BaseException):
    """A dry session has come to the first read: `plan` has what it wants. Not an Exception, so that programs do not catch it.

    on: the Slot or Path that is read, None for several.   at: the line that reads.
    """

    def __init__(self, on: Any, at: str) -> None:
        super().__init__("a dry run reads nothing")
        self.on, self.at = on, at


class Session:
    """compile: whole stages are arranged and sent; else each request alone, as it is recorded (Y4).   dry: answers nothing, for `plan`."""

    def __init__(self, backend: Backend, markup: Markup | None, *, compile: bool = True, dry: bool = False) -> None:
        self.backend, self.markup, self.compile, self.dry = backend, markup, compile, dry
        self.records: list[Record] = []
        self.stages = 0
        self.deadline: float | None = None
        self.arranger = Arranger(self)
        self._id = f"{next(_numbers):x}"
        self._count = 0
        self._dirty: dict[Path, None] = {}
        self.outbox: list[Job] = []
        self._prepare: Callable[[Job], None] | None = getattr(backend, "prepare", None)  # told of each job as it is recorded
        self._events: deque[tuple[Job, bool]] = deque()
        self.live: dict[str, Job] = {}
        self._timed: set[Job] = set()
        self._released: list[str] = []
        self._signal = threading.Event()
        self._anyone: list[Callable[[], None]] = []
        self._outside: list[Callable[[], bool]] = []
        # greenlets
        self.hub: Any = None
        self.runnable: deque[Any] = deque()
        # asyncio
        self.loop: asyncio.AbstractEventLoop | None = None
        self._pumping: asyncio.Task[None] | None = None
        self._ring: asyncio.Event | None = None
        self._waiting = 0
        self._failure: BaseException | None = None
        self._steps: list[Callable[[], int | None]] = []  # at the first request, and at the end

    def new_id(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._id}.{self._count}"

    # ---- paths ----------------------------------------------------------------------------------------------------------

    def touch(self, path: Path) -> None:
        """Something was recorded on it."""
        if not path.active:
            path.active = True
            path.run.num_active += 1
        self._dirty[path] = None
        if not self.compile and not self.dry:
            self.flush()

    def settle(self, path: Path) -> None:
        """It may have come to rest: tell who waits for it."""
        if path.active and path.idle:
            path.active = False
            path.run.num_active -= 1
            waiters, path.waiters = path.waiters, None
            for wake in waiters or ():
                wake()
            path.run.rested()

    def advance(self, path: Path) -> None:
        path.advance()
        self.settle(path)

    def send(self, record: Record, slot: Slot, timeout: float | None) -> None:
        job = Job(record, self.backend.tokenizer, self._wake)
        job.slot, job.streaming = slot, slot.streaming
        slot.jobs.append(job)
        ends = [self.deadline, slot.path.run.deadline, slot.limits.deadline if slot.limits is not None else None]
        if slot.path.owner is not None:
            ends.append(slot.path.owner.deadline)
        if timeout is not None:
            ends.append(time.monotonic() + timeout)
        known = [end for end in ends if end is not None]
        if known:
            job.deadline = min(known)
            self._timed.add(job)
        self.outbox.append(job)
        if self._prepare is not None:
            self._prepare(job)

    def flush(self) -> None:
        """The end of a stage: what was recorded goes out (Y1)."""
        while self._dirty:
            paths, self._dirty = self._dirty, {}
            for path in paths:
                self.advance(path)
        if self.outbox:
            jobs, self.outbox = self.outbox, []
            self.stages += 1
            self.submit(self.arranger.arrange(jobs) if self.compile and not self.dry else jobs)
        self._let_go()

    def outbox_preview(self) -> list[Job]:
        """What the programs have asked for so far and is not sent: for whoever plans how many to start."""
        while self._dirty:
            paths, self._dirty = self._dirty, {}
            for path in paths:
                self.advance(path)
        return self.outbox

    def submit(self, jobs: Sequence[Job]) -> None:
        now = time.monotonic()
        for job in jobs:
            job.record.started = now
            self.records.append(job.record)
            self.live[job.request.id] = job
        if jobs and not self.dry:
            with self._located():
                if not self._steps:
                    self._count_steps()
                self.backend.submit(jobs)

    def _count_steps(self) -> None:
        count = getattr(self.backend, "count_steps", None)
        if count is not None:
            self._steps.append(count())

    @property
    def forwards(self) -> int | None:
        """Steps of the engine from the first request to the end of the session; None while it goes on, or where nobody tells."""
        counts = [count() for count in self._steps]
        return counts[1] - counts[0] if len(counts) == 2 and counts[0] is not None and counts[1] is not None else None

    @contextmanager
    def _located(self) -> Iterator[None]:
        """U5: an engine that is gone, or was closed, says so at a line of the program too."""
        try:
            yield
        except PhloemError as error:
            slot = next((job.slot for job in self.live.values() if job.slot is not None and not job.slot.done), None)
            if error.at is None and slot is not None:
                slot.path.locate(error, slot)
            raise

    def abort(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.output is None:
                self.arranger.forget(job)
        ids = [job.request.id for job in jobs if job.output is None and job.request.id in self.live]
        if ids:
            with suppress(EngineClosedError):  # then they are over, and whoever waits for one is told so
                self.backend.abort(ids)

    def release(self, name: str) -> None:
        self._released.append(name)

    def _let_go(self) -> None:
        if self._released:
            names, self._released = self._released, []
            if not self.dry:
                self.backend.release(names)

    # ---- what came back -------------------------------------------------------------------------------------------------

    def _wake(self, job: Job, first: bool) -> None:
        """From any thread."""
        self._events.append((job, first))
        if self.backend.self_driven:
            self._signal.set()
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self._ring_bell)

    def _ring_bell(self) -> None:
        if self._ring is not None:
            self._ring.set()

    def process(self) -> None:
        while self._events:
            job, first = self._events.popleft()
            if first:
                self.arranger.computed(job)
            if job.output is None:
                continue
            if self.live.pop(job.request.id, None) is None:
                continue
            self._timed.discard(job)
            slot: Slot | None = job.slot
            if slot is not None and slot.done and job.request.hold:
                self.release(job.request.id)  # it ended before our abort reached it: nobody else knows of its hold
            if slot is not None and not slot.done:
                slot.wanted -= 1
                if slot.wanted <= 0 or job.output.error is not None:
                    path = slot.path
                    path.finish(slot)
                    self.advance(path)
        waiters, self._anyone = self._anyone, []
        for wake in waiters:
            wake()

    def _check_deadlines(self) -> None:
        if not self._timed:
            return
        now = time.monotonic()
        late = [job for job in self._timed if job.deadline is not None and job.deadline <= now]
        for job in late:
            self._timed.discard(job)
            slot: Slot = job.slot
            if job.output is None and not slot.done:
                self.abort(slot.jobs)
                slot.path.fail(
                    ProgramTimeout("its time was up before it ended; it was aborted. Raise timeout, or ask for fewer tokens."),
                    slot,
                )
                self.advance(slot.path)

    # ---- waiting, in place or on a greenlet -----------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], on: Slot | Path | None = None) -> None:
        """Work until done(). on: what it waits for, where that is one thing."""
        if done():
            return
        if self.hub is not None:
            self._park(done, on)
            return
        if self.loop is not None:
            raise ProgramError("a blocking read inside an async program; use `await`, or the async form of the block.")
        while not done():
            if self.dry:
                self.flush()
                if not done():
                    raise Plan(on, caller())
                return
            self.pump(done)

    def pump(self, done: Callable[[], bool]) -> None:
        """Send what there is, then work until something comes back."""
        self.flush()
        if done():
            return
        if self.dry:
            raise Plan(None, caller())
        if not self._events and self._outside and not self.live and not self.arranger.waiting:
            time.sleep(OUTSIDE_SECONDS)
        elif not self._events:
            self._check_stuck()
            deadline = min((job.deadline for job in self._timed if job.deadline is not None), default=None)
            if self.backend.self_driven:
                look = OUTSIDE_SECONDS if self._outside else LOOK_SECONDS
                left = look if deadline is None else max(0.0, min(look, deadline - time.monotonic()))
                self._signal.wait(left)
                self._signal.clear()
            else:
                with self._located():
                    self.backend.wait(lambda: bool(self._events) or any(over() for over in self._outside), deadline)
        self.process()
        self._check_deadlines()

    def wait_outside(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Until something that is no request is over, such as a tool in a thread; False if the deadline passed before. Bodies beside this
        one go on meanwhile."""
        if self.hub is None:
            self.flush()
        else:
            import greenlet

            me = greenlet.getcurrent()
        self._outside.append(done)
        try:
            while not done():
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                if self.hub is None or me is self.hub:
                    time.sleep(OUTSIDE_SECONDS)
                    continue
                self._anyone.append(lambda: self.runnable.append(me))
                self.hub.switch()
        finally:
            self._outside.remove(done)
        return True

    def _check_stuck(self) -> None:
        assert self.live or self.arranger.waiting, "a program waits for something that nobody works on"

    def _register(self, on: Slot | Path | None, wake: Callable[[], None]) -> None:
        if on is None:
            self._anyone.append(wake)
        elif on.waiters is None:
            on.waiters = [wake]
        else:
            on.waiters.append(wake)

    def _park(self, done: Callable[[], bool], on: Slot | Path | None) -> None:
        import greenlet

        me = greenlet.getcurrent()
        if me is self.hub:
            while not done():
                self.pump_hub(done)
            return
        while not done():
            self._register(on, lambda: self.runnable.append(me))
            self.hub.switch()

    def pump_hub(self, done: Callable[[], bool]) -> None:
        """One round of the hub: bodies that can go on do, then the engine works."""
        while self.runnable:
            self._switch(self.runnable.popleft())
        if not done():
            if self._dirty or self.outbox:
                self.flush()
            if not self.runnable and not done():
                self.pump(lambda: bool(self.runnable) or done())

    def _switch(self, other: Any) -> None:
        if not other.dead:
            other.switch()

    def spawn(self, body: Callable[[], Any], ended: Callable[[Any], None]) -> Any:
        """Run `body` on a greenlet, soon. ended(result in a tuple, or the exception) is called there at its end. Only with a hub."""
        import greenlet

        def run() -> None:
            try:
                result: Any = (body(),)
            except greenlet.GreenletExit:
                return
            except BaseException as error:
                result = error
            ended(result)
            waiters, self._anyone = self._anyone, []
            for wake in waiters:
                wake()

        made = greenlet.greenlet(run, parent=self.hub)
        self.runnable.append(made)
        return made

    def gather(self, jobs: Sequence[Callable[[], Any]], limit: int | None, done: Callable[[list[Any]], bool]) -> list[Any]:
        """Run jobs at once, at most `limit`; until done(results so far): None is open, (value,) or an exception is an end."""
        import greenlet

        me, own_hub = greenlet.getcurrent(), self.hub is None
        if own_hub:
            self.hub = me
        results: list[Any] = [None] * len(jobs)
        todo, made = deque(enumerate(jobs)), list[Any]()

        def start() -> None:
            if todo:
                number, job = todo.popleft()

                def ended(result: Any) -> None:
                    results[number] = result
                    start()

                made.append(self.spawn(job, ended))

        try:
            for _ in range(limit or len(jobs)):
                start()
            self.wait(lambda: done(results))
        finally:
            todo.clear()
            for each in made:
                if not each.dead:
                    each.parent = me
                    each.throw(greenlet.GreenletExit)
            if own_hub:
                self.hub = None
                self.runnable.clear()
        return results

    def together(self, jobs: Sequence[Callable[[], Any]], limit: int | None) -> list[Any]:
        """The results, in order. Raises the first failure, at once."""

        def done(results: list[Any]) -> bool:
            return all(r is not None for r in results) or any(isinstance(r, BaseException) for r in results)

        results = self.gather(jobs, limit, done)
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            raise errors[0]
        return [r[0] for r in results]

    def race(self, jobs: Sequence[Callable[[], Any]], until: Callable[[Any], bool]) -> list[Any]:
        """Until the first in order that satisfies `until` is known."""

        def done(results: list[Any]) -> bool:
            for result in results:
                if result is None:
                    return False
                if not isinstance(result, BaseException) and until(result[0]):
                    return True
            return True

        return self.gather(jobs, None, done)

    # ---- waiting, on an event loop --------------------------------------------------------------------------------------

    async def until(self, done: Callable[[], bool], on: Slot | Path | None = None) -> None:
        import asyncio

        if self.dry:
            self.flush()
            if not done():
                raise Plan(on, caller())
            return
        loop = asyncio.get_running_loop()
        if self.loop is None:
            self.loop, self._ring = loop, asyncio.Event()
        elif self.loop is not loop:
            raise ProgramError("this run belongs to another event loop.")
        while not done():
            future = loop.create_future()
            self._register(on, lambda future=future: None if future.done() else future.set_result(None))  # type: ignore[misc]
            self._waiting += 1
            try:
                if self._pumping is None or self._pumping.done():
                    self._pumping = loop.create_task(self._pump_loop())
                await future
            finally:
                self._waiting -= 1
            if self._failure is not None:
                raise self._failure

    async def on_loop(self, body: Callable[[], Any]) -> Any:
        """The result of a blocking body, run on a greenlet that this loop resumes."""
        import greenlet

        ends: list[Any] = []
        self.hub = greenlet.getcurrent()
        made = self.spawn(body, ends.append)
        try:
            while not ends:
                while self.runnable:
                    self._switch(self.runnable.popleft())
                if not ends:
                    await self.until(lambda: bool(self.runnable) or bool(ends))
        finally:
            if not made.dead:
                made.parent = greenlet.getcurrent()
                made.throw(greenlet.GreenletExit)
            self.hub = None
        if isinstance(ends[0], BaseException):
            raise ends[0]
        return ends[0][0]

    async def _pump_loop(self) -> None:
        """Works for as long as somebody waits. One step of the engine, then everybody else's turn."""
        import asyncio

        assert self._ring is not None
        try:
            while self._waiting:
                await asyncio.sleep(0)  # whoever can go on records first: a stage is what all of them ask for
                self.flush()
                if not self._events and (self.live or self.arranger.waiting):
                    deadline = min((job.deadline for job in self._timed if job.deadline is not None), default=None)
                    if self.backend.self_driven:
                        left = None if deadline is None else max(0.0, deadline - time.monotonic())
                        try:
                            async with asyncio.timeout(left):
                                await self._ring.wait()
                        except TimeoutError:
                            pass
                        self._ring.clear()
                    else:
                        self.backend.wait(lambda: bool(self._events), time.monotonic() + STEP_SECONDS)
                elif not self._events and not self._dirty and not self.outbox:
                    # Everybody waits for something of their own (a tool, a sleep): the next record or event starts the pump again.
                    waiters, self._anyone = self._anyone, []
                    for wake in waiters:
                        wake()
                    await asyncio.sleep(0)
                    if not self._events and not self._dirty and not self.outbox and not self.live:
                        await asyncio.sleep(0.001)
                self.process()
                self._check_deadlines()
        except BaseException as error:
            self._failure = error
            for job in list(self.live.values()):
                if job.slot is not None:
                    for wake in [*(job.slot.waiters or ()), *(job.slot.path.waiters or ())]:
                        wake()
            for wake in self._anyone:
                wake()
            if not isinstance(error, Exception):
                raise

    # ---- the end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what lives and give back every hold. Returns once the engine has let go. Never raises for an engine that is gone."""
        self.outbox.clear()
        self._dirty.clear()
        self._released += self.arranger.held()
        if self.dry:
            return
        try:
            if self.live:
                self.backend.abort(list(self.live))
                if not self.backend.self_driven:
                    self.backend.wait(lambda: all(job.output is not None for job in self.live.values()), time.monotonic() + 60)
            self._released += [job.request.id for job in self.live.values() if job.request.hold]
            self._let_go()
            if self._steps:
                self._count_steps()
            drain = getattr(self.backend, "drain", None)
            if drain is not None:
                drain()
        except PhloemError:
            pass
        self.live.clear()
