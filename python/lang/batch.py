"""`run_batch`: many runs of a program on one session and one thread (U2). Bodies are greenlets, or tasks of a loop.

    start bodies, up to `concurrency` ──> all recorded ──> one stage: a segment tree over all of them ──> as runs end, others start

Straight-line bodies are over before the first forward; one that reads a value parks until it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phloem.lang.ir import located
from phloem.lang.run import Program, Run, _seed
from phloem.lang.session import Session
from phloem.lang.usage import RunUsage, usage_of
from phloem.runtime.errors import Cancelled, InvalidRequestError

__all__ = ["Batch", "run_batch"]

FEWEST = 8
"""Programs at once, however small the pool: they wait for pages inside the engine, which knows how."""


class Batch(list[Run[Any]]):
    """The runs, in the order of the input. usage: of all their requests together (U8)."""

    def __init__(self, runs: Sequence[Run[Any]], session: Session) -> None:
        super().__init__(runs)
        self._session = session

    @property
    def usage(self) -> RunUsage:
        return usage_of(self._session.records, self._session.forwards, page_size=self._session.backend.page_size)

    @property
    def records(self) -> list[Any]:
        return self._session.records


def run_batch(program: Program[Any, Any], batch: Sequence[Any], options: Mapping[str, Any], at: str) -> Any:
    options = dict(options)
    limit = options.pop("concurrency", None)
    threads = options.pop("num_threads", None)
    if limit is None and threads not in (None, "auto"):
        limit = threads
    generator = bool(options.pop("generator_style", False))
    progress = bool(options.pop("progress_bar", False))
    on_error = options.pop("on_error", "raise")
    if on_error not in ("raise", "return"):
        raise located(InvalidRequestError(f"on_error is {on_error!r}; expected 'raise' or 'return'.", param="on_error"), at)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise located(InvalidRequestError(f"concurrency is {limit!r}; expected an integer from 1 up.", param="concurrency"), at)
    if options.pop("stream", False):
        raise located(InvalidRequestError("stream is for single runs; iterate with generator_style=True.", param="stream"), at)
    calls = [_call(program, item, options, number, at) for number, item in enumerate(batch)]
    made = _Batch(program, calls, options, limit, on_error)
    runs = made.on_a_loop() if program.is_async else made.on_greenlets()
    if progress:
        runs = _shown(runs, len(calls))
    if generator:
        return runs
    for _ in runs:
        pass
    return Batch([run for run in made.runs if run is not None], made.session)


def _call(program: Program[Any, Any], item: Any, options: Mapping[str, Any], number: int, at: str) -> tuple[Any, ...]:
    if isinstance(item, Mapping):
        args, kwargs = (), {**options, **item}
    elif isinstance(item, (tuple, list)):
        args, kwargs = tuple(item), dict(options)
    else:
        raise located(
            InvalidRequestError(f"batch[{number}] is a {type(item).__name__}; expected a mapping of arguments, or a tuple of them.", param="batch"), at
        )  # fmt: skip
    try:
        own, sampling, how = program._split(kwargs)
        program.signature.bind(None, *args, **own)
    except TypeError as error:
        raise located(InvalidRequestError(f"batch[{number}]: {error}", param="batch"), at) from None
    return args, own, sampling, how


def _shown(runs: Iterator[Run[Any]], total: int) -> Iterator[Run[Any]]:
    from rich.progress import track

    yield from track(runs, total=total, description="runs")


class _Batch:
    def __init__(
        self, program: Program[Any, Any], calls: Sequence[tuple[Any, ...]], options: Mapping[str, Any], limit: int | None, on_error: str
    ) -> None:  # fmt: skip
        self.program, self.calls, self.limit, self.on_error = program, calls, limit, on_error
        how = program._split(options)[2]
        self.session = program._session(how)
        # One seed for all: an item of a batch gives the same as a run of it alone (Z2). None: each draws its own.
        self.seed = how.get("seed")
        self.runs: list[Run[Any] | None] = [None] * len(calls)

    def _make(self, number: int) -> tuple[Run[Any], tuple[Any, ...], dict[str, Any]]:
        args, own, sampling, how = self.calls[number]
        run = self.program._run(self.session, number, sampling, how, _seed({"seed": self.seed}))
        self.runs[number] = run
        return run, args, own

    # ---- def ------------------------------------------------------------------------------------------------------------

    def on_greenlets(self) -> Iterator[Run[Any]]:
        import greenlet

        session, total = self.session, len(self.calls)
        finished: deque[Run[Any]] = deque()
        made: dict[int, Any] = {}
        started = num_live = 0
        failure: list[BaseException] = []

        def start(number: int) -> None:
            run, args, own = self._make(number)

            def body() -> None:
                self.program._body_recorded(run, args, own)
                session.wait(lambda: run.num_active == 0 or bool(run.failed and run._failure() is not None), run)  # type: ignore[arg-type]

            def ended(result: Any) -> None:
                nonlocal num_live
                num_live -= 1
                del made[number]
                if isinstance(result, BaseException):
                    run._raised = result
                    run._abandon(Cancelled("its program has failed."))
                else:
                    run._conclude()
                if run._raised is not None and self.on_error == "raise":
                    failure.append(run._raised)
                finished.append(run)

            made[number] = session.spawn(body, ended)

        def ready() -> bool:
            return bool(finished) or bool(failure) or (started < total and num_live < self._limit(started))

        try:
            while not failure:
                session.hub = greenlet.getcurrent()
                while started < total and num_live < self._limit(started):
                    start(started)
                    started += 1
                    num_live += 1
                    while session.runnable:
                        session._switch(session.runnable.popleft())
                while finished and not failure:
                    yield finished.popleft()
                if failure or (num_live == 0 and started == total and not finished):
                    break
                session.pump_hub(ready)
        finally:
            for number, each in list(made.items()):
                run = self.runs[number]
                assert run is not None
                run._abandon(Cancelled("its batch has ended."))
                run._raised = run._raised or Cancelled("its batch has ended.")
                each.parent = greenlet.getcurrent()
                each.throw(greenlet.GreenletExit)
            session.runnable.clear()
            session.close()
            session.hub = None
        if failure:
            raise failure[0]

    def _limit(self, started: int) -> int:
        """What the KV pool holds, by what the first programs have recorded: their own tokens, and what they may draw."""
        if self.limit is not None:
            return self.limit
        pool = self.session.backend.kv_tokens
        if pool is None:
            return len(self.calls)
        asked = [record.request for record in self.session.records if record.kind == "gen"]
        asked += [job.request for job in self.session.outbox_preview()]
        if not asked or started < min(FEWEST, len(self.calls)):
            return FEWEST
        shared = min((_common(asked[0].token_ids, each.token_ids) for each in asked[1:]), default=0)
        own = max(len(each.token_ids) - shared + (each.sampling.max_tokens or 128) for each in asked)
        self.limit = max(FEWEST, (pool - shared) // max(own, 1))
        return self.limit

    # ---- async def ------------------------------------------------------------------------------------------------------

    def on_a_loop(self) -> Iterator[Run[Any]]:
        import asyncio

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise Cancelled(
                f"{self.program.name} is async and a loop is running here: gather its calls instead of run_batch()."
            )
        yield from asyncio.run(self._all())

    async def _all(self) -> list[Run[Any]]:
        import asyncio

        gate = asyncio.Semaphore(self.limit or max(len(self.calls), 1))
        order: list[Run[Any]] = []

        async def one(number: int) -> None:
            async with gate:
                run, args, own = self._make(number)
                try:
                    await self.program._drive(run, args, own, close=False)
                except Exception:
                    if self.on_error == "raise":
                        raise
                order.append(run)

        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(self.calls)):
                    tasks.create_task(one(number))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self.session.close()
        return order


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
