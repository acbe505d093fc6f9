"""Branches of a fork, and the block that owns them (F1-F5). Decides who goes on; when, is the session's.

    with s.fork(6) as branches:            left by an exception: the branches are aborted, their pages free within a step
        for b, topic in zip(branches, topics): b += topic + gen("point")
    s["point"]                             a list, in branch order

`Group` blocks, `AsyncGroup` awaits; what they do between two waits is `BaseGroup`'s.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, overload

from phloem.lang.ir import Expr, Gen, Part, caller, located
from phloem.lang.path import Path, Slot
from phloem.lang.state import AsyncState, BaseState, Scope, State
from phloem.runtime.errors import Cancelled, InvalidRequestError, PhloemError

__all__ = ["AsyncGroup", "BaseGroup", "Group", "fork_each"]

T = TypeVar("T")
S = TypeVar("S", bound=BaseState)
OnError = Literal["raise", "collect"]


class BaseGroup(Generic[S]):
    """States of the branches; a sequence of them. See `State.fork`."""

    def __init__(self, parents: list[S], at: str, on_error: OnError, timeout: float | None = None) -> None:
        self._parents, self._at, self.on_error = parents, at, on_error
        self._states: list[S] = []
        self._parent_of: list[S] = []
        self._frozen: list[Scope] = []
        self._kept: set[Path] = set()
        self._over = False
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.failures = 0  # counted by the paths: looking at each would cost n² over a block

    def _fill(self, n: int) -> None:
        for parent in self._parents:
            _, children, frozen = parent._branch(n, self._at)
            make, run = type(parent), parent.run
            for child in children:
                child.owner = self
                self._states.append(make(child, Scope(frozen), run))
            self._parent_of += [parent] * n
            self._frozen += [frozen] * n

    # ---- a sequence -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, index: int) -> S: ...
    @overload
    def __getitem__(self, index: slice) -> list[S]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._states[index]

    def __setitem__(self, index: int, state: S) -> None:
        """For `forks[i] += …`."""
        if self._states[index] is not state:
            raise located(InvalidRequestError("a branch cannot be replaced; use adopt.", param="fork"), caller())

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    def __iadd__(self, other: Part | Expr | Sequence[Part | Expr] | Callable[[int], Part | Expr] | None) -> Any:
        """The same to every branch; a function of the index; or a list, one a branch."""
        what: Any = other
        if callable(what):
            for i, state in enumerate(self._states):
                state += what(i)
        elif isinstance(what, (list, tuple)):
            if len(what) != len(self._states):
                raise located(
                    InvalidRequestError(f"{len(what)} parts for {len(self._states)} branches.", param="fork"), caller()
                )
            for state, part in zip(self._states, what):
                state += part
        else:
            for state in self._states:
                state += what
        return self

    # ---- what both forms do between waits -------------------------------------------------------------------------------

    @property
    def _session(self) -> Any:
        return self._parents[0]._path.session

    def _paths(self) -> list[Path]:
        return [s._path for s in self._states]

    def _failed(self) -> list[Path]:
        return [p for p in self._paths() if p.error is not None and not p.closed]

    def _settled(self, path: Path) -> bool:
        return path.idle or path.error is not None or path.closed

    def _gather(self) -> None:
        """F1: new variables become lists on the parent, in branch order."""
        for parent in self._parents:
            mine = [(s, f) for s, p, f in zip(self._states, self._parent_of, self._frozen) if p is parent]
            names = dict.fromkeys(name for s, f in mine for name in s._scope.own_names(f))
            for name in names:
                slots = [s._scope.own_names(f).get(name) for s, f in mine]
                parent.set_var(name, [slot.value if slot is not None and slot.error is None else None for slot in slots])

    def _end(self, error: PhloemError | None = None) -> None:
        """Abort what runs, drop the leases; chosen branches pass to the owner of the block."""
        self._over = True
        for path in self._paths():
            if path not in self._kept and not path.closed:
                path.cancel(error or Cancelled("its block was left."))

    def _raise_failures(self) -> None:
        """S: a failing branch cancels its siblings and surfaces here, with its index and line (F2)."""
        failed = self._failed()
        if not failed or self.on_error == "collect":
            for path in failed:
                assert path.error is not None
                path.run.seen(path.error)
            return
        errors = list({id(p.error): p.error for p in failed if p.error is not None}.values())
        for error in errors:
            self._parents[0].run.seen(error)
        self._end(Cancelled("a sibling failed."))
        if len(errors) == 1:
            raise errors[0].with_traceback(None)
        raise ExceptionGroup(f"{len(errors)} of {len(self._states)} branches failed", errors)

    def _slot(self, state: S, key: Any) -> Slot:
        return state._find(key)

    def _quit(self, keep: Sequence[S], pass_on: bool = True) -> None:
        """The rest of the branches is over.   pass_on: those kept outlive the block, and are its owner's."""
        kept = {s._path for s in keep}
        if pass_on:
            self._kept |= kept
        for state in self._states:
            if state._path not in kept and not state._path.closed:
                state._path.cancel(Cancelled("another branch was chosen."))

    def _concatenate(self) -> None:
        """F5: append to the parent, in order, what each branch added."""
        at = self._at
        for parent in self._parents:
            journals = [
                s._path.line.journal or []
                for s, p in zip(self._states, self._parent_of)
                if p is parent and s._path.line is not None
            ]

            def replay(path: Path, line: Any, journals: list[Any] = journals) -> None:
                for journal in journals:
                    line.replay(journal, at)

            parent._call(replay)

    def _counted(self, key: Any, slots: list[Slot], by: Callable[[Any], Any] | None) -> bool:
        failed = self.on_error == "raise" and self.failures > 0
        return failed or self._ballot(key, slots, by)[1] or all(s.done for s in slots)

    def _raise_if_none(self, slots: list[Slot]) -> None:
        """A failure that counts here; or none has voted, which is no result."""
        if self.on_error == "raise" and any(s.error is not None for s in slots):
            self._raise_failures()
        if slots and not any(s.done and s.error is None for s in slots):
            errors = [s.error for s in slots if s.error is not None]
            self._end()
            raise errors[0].with_traceback(None)
        if not slots:
            raise located(InvalidRequestError("there are no branches to vote.", param="fork"), self._at)

    # ---- combinators, decided --------------------------------------------------------------------------------------------

    def _ballot(self, key: Any, slots: list[Slot], by: Callable[[Any], Any] | None) -> tuple[Any, bool]:
        """The leading value, and whether nothing that is still open could change it."""
        done = [(i, s) for i, s in enumerate(slots) if s.done and s.error is None]
        votes: dict[Any, list[tuple[int, Slot]]] = {}
        for i, slot in done:
            votes.setdefault(_hashable(slot.value if by is None else by(slot.value)), []).append((i, slot))
        if not votes:
            return None, False
        order = sorted(votes.values(), key=lambda v: (-len(v), -_mean_logprob(v), v[0][0]))
        still_open = sum(not s.done for s in slots)
        second = len(order[1]) if len(order) > 1 else 0
        decided = still_open == 0 or len(order[0]) > second + still_open
        return order[0][0][1].value, decided


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _mean_logprob(votes: list[tuple[int, Slot]]) -> float:
    """Of the tokens behind a value, best sample first; 0 where no logprobs were asked for."""
    means = []
    for _, slot in votes:
        entries = slot.outputs[0].logprobs if slot.outputs else None
        if entries:
            means.append(sum(e.logprob for e in entries) / len(entries))
    return sum(means) / len(means) if means else 0.0


class Group(BaseGroup[State]):
    """Branches of a State. A block, or SGLang's bare form that ends at `join()`."""

    @classmethod
    def of(cls, parents: list[State], n: int, at: str, timeout: float | None = None, on_error: OnError = "raise") -> Group:
        made = cls(parents, at, on_error, timeout)
        made._fill(n)
        return made

    def _wait(self) -> None:
        # No flush of its own: in a batch the stage is over when every body has recorded, not when the first comes to its join (Y1).
        for path in self._paths():
            self._session.wait(
                lambda path=path: (
                    self._settled(path) or (self.failures > 0 and self.on_error == "raise" and bool(self._failed()))
                ),
                path,
            )
        self._raise_failures()

    def join(self, mode: Literal["gather_variable", "concate_and_append"] = "gather_variable") -> None:
        """Wait for all; their new variables become lists on the parent, or what they added is appended to it (F5). Once: later ones do nothing."""
        if mode not in ("gather_variable", "concate_and_append"):
            raise located(
                InvalidRequestError(f"mode is {mode!r}; expected 'gather_variable' or 'concate_and_append'.", param="mode"),
                caller(),
            )
        if self._over:
            return
        self._wait()
        self._gather()
        if mode == "concate_and_append":
            self._concatenate()
        self._end()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._over:
            return
        if error is not None:
            self._end()
            return
        try:
            self._wait()
            self._gather()
        finally:
            self._end()

    # ---- combinators ----------------------------------------------------------------------------------------------------

    def vote(self, key: Gen[T], by: Callable[[T], Any] | None = None) -> T:
        """The value that most branches give; ties by mean logprob (where the gen asks for logprobs), then index. The rest is aborted once
        it cannot change the winner.
        """
        slots = [self._slot(s, key) for s in self._states]
        self._session.wait(lambda: self._counted(key, slots, by))
        self._raise_if_none(slots)
        value, _ = self._ballot(key, slots, by)
        self._quit([s for s, slot in zip(self._states, slots) if slot.done], pass_on=False)
        found: T = value
        return found

    def best(self, key: Gen[Any] | Callable[[State], Any]) -> State:
        """The branch of the highest value; the first of equals."""
        return self.top(1, key)[0]

    def top(self, k: int, key: Gen[Any] | Callable[[State], Any]) -> list[State]:
        """The k branches of the highest values, best first; the others are over, their pages free within a step."""
        self._wait()
        ranks = [key(s) if callable(key) and not isinstance(key, Gen) else s[key] for s in self._states]
        order = sorted(range(len(ranks)), key=lambda i: (_Down(ranks[i]), i))[:k]
        chosen = [self._states[i] for i in order]
        self._quit(chosen)
        return chosen


class _Down:
    """Sorts highest first, whatever the type."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Down) -> bool:
        return bool(other.value < self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Down) and bool(self.value == other.value)


class AsyncGroup(BaseGroup[AsyncState]):
    """Branches of an AsyncState, for `async with`."""

    @classmethod
    def of(
        cls, parents: list[AsyncState], n: int, at: str, timeout: float | None = None, on_error: OnError = "raise"
    ) -> AsyncGroup:
        made = cls(parents, at, on_error, timeout)
        made._fill(n)
        return made

    async def _wait(self) -> None:
        for path in self._paths():
            await self._session.until(
                lambda path=path: (
                    self._settled(path) or (self.failures > 0 and self.on_error == "raise" and bool(self._failed()))
                ),
                path,
            )
        self._raise_failures()

    async def join(self, mode: Literal["gather_variable", "concate_and_append"] = "gather_variable") -> None:
        """As Group.join."""
        if self._over:
            return
        await self._wait()
        self._gather()
        if mode == "concate_and_append":
            self._concatenate()
        self._end()

    async def __aenter__(self) -> AsyncGroup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._over:
            return
        if error is not None:
            self._end()
            return
        try:
            await self._wait()
            self._gather()
        finally:
            self._end()

    async def vote(self, key: Gen[T], by: Callable[[T], Any] | None = None) -> T:
        """As Group.vote."""
        slots = [self._slot(s, key) for s in self._states]
        await self._session.until(lambda: self._counted(key, slots, by))
        self._raise_if_none(slots)
        value, _ = self._ballot(key, slots, by)
        self._quit([s for s, slot in zip(self._states, slots) if slot.done], pass_on=False)
        found: T = value
        return found

    async def best(self, key: Gen[Any] | Callable[[AsyncState], Any]) -> AsyncState:
        """As Group.best."""
        return (await self.top(1, key))[0]

    async def top(self, k: int, key: Gen[Any] | Callable[[AsyncState], Any]) -> list[AsyncState]:
        """As Group.top; a function may be async."""
        await self._wait()
        ranks = []
        for state in self._states:
            rank: Any = key(state) if callable(key) and not isinstance(key, Gen) else state[key]
            ranks.append(await rank if isinstance(rank, Awaitable) else rank)
        order = sorted(range(len(ranks)), key=lambda i: (_Down(ranks[i]), i))[:k]
        chosen = [self._states[i] for i in order]
        self._quit(chosen)
        return chosen


@overload
def fork_each(states: Sequence[State], n: int, *, on_error: OnError = "raise") -> Group: ...
@overload
def fork_each(states: Sequence[AsyncState], n: int, *, on_error: OnError = "raise") -> AsyncGroup: ...
def fork_each(states: Any, n: int, *, on_error: OnError = "raise") -> Any:
    """n branches of each state, one group (F3)."""
    at = caller()
    found = list(states)
    if not found:
        raise located(InvalidRequestError("fork_each got no states.", param="states"), at)
    return (AsyncGroup if isinstance(found[0], AsyncState) else Group).of(found, n, at, None, on_error)


# ---- map and race --------------------------------------------------------------------------------------------------------------


def run_map(state: State, items: Sequence[Any], fn: Callable[[State, Any], T], limit: int | None) -> list[T]:
    items = list(items)
    with Group.of([state], len(items), caller()) as branches:
        session = branches._session
        jobs = [lambda b=b, item=item: fn(b, item) for b, item in zip(branches, items)]
        return list(session.together(jobs, limit))


def run_race(state: State, fns: Sequence[Callable[[State], T]], until: Callable[[T], bool]) -> T:
    fns = list(fns)
    with Group.of([state], len(fns), caller(), None, "collect") as branches:
        results = branches._session.race([lambda b=b, fn=fn: fn(b) for b, fn in zip(branches, fns)], until)
        found: T = _winner(results, until, branches)
        return found


def _winner(results: list[Any], until: Callable[[Any], bool], branches: BaseGroup[Any]) -> Any:
    errors = []
    for number, result in enumerate(results):
        if isinstance(result, BaseException):
            errors.append(result)
        elif result is not None and until(result[0]):
            branches._quit([branches[number]])
            return result[0]
    if errors:
        raise errors[0]
    raise located(Cancelled(f"none of {len(results)} branches gave what the race waits for."), branches._at)


async def run_map_async(
    state: AsyncState, items: Sequence[Any], fn: Callable[[AsyncState, Any], Awaitable[T]], limit: int | None
) -> list[T]:
    import asyncio

    items = list(items)
    gate = asyncio.Semaphore(limit or max(len(items), 1))
    async with AsyncGroup.of([state], len(items), caller()) as branches:

        async def one(branch: AsyncState, item: Any) -> T:
            async with gate:
                return await fn(branch, item)

        try:
            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(one(b, item)) for b, item in zip(branches, items)]
        except BaseExceptionGroup as group:
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
        return [task.result() for task in made]


async def run_race_async(
    state: AsyncState, fns: Sequence[Callable[[AsyncState], Awaitable[T]]], until: Callable[[T], bool]
) -> T:
    import asyncio

    fns = list(fns)
    async with AsyncGroup.of([state], len(fns), caller(), None, "collect") as branches:
        tasks = [asyncio.ensure_future(fn(b)) for b, fn in zip(branches, fns)]
        results: list[Any] = [None] * len(tasks)
        try:
            for number, task in enumerate(tasks):
                try:
                    results[number] = (await task,)
                except PhloemError as error:
                    results[number] = error
                    continue
                if until(results[number][0]):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        found: T = _winner(results, until, branches)
        return found
