"""State and AsyncState: what a program holds. `+=` records; reading waits for what stands before it (K3). Tokens are path.py's.

    s += user(mail) + assistant(ticket)        recorded, nothing is sent
    s[ticket]                                  the stage goes out, the engine works, the value is there

A state is a view: a path, and a scope of names. A program inlined on a state has the same path and a scope of its own (K5).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from phloem.lang.budget import current_limits
from phloem.lang.ir import Expr, Gen, Part, Ref, RoleClose, RoleOpen, Select, caller, located, parts_of, role
from phloem.lang.path import ForkPoint, Path, Slot, text_of
from phloem.runtime.errors import BackendUnsupported, InvalidRequestError, PhloemError, ProgramError
from phloem.runtime.text.markup import Message

if TYPE_CHECKING:
    from phloem.lang.choices import ChoiceScore
    from phloem.lang.group import AsyncGroup, Group
    from phloem.lang.line import Segment
    from phloem.lang.run import Run
    from phloem.lang.stream import AsyncEvents, Events
    from phloem.lang.tools import Reply

__all__ = ["AsyncState", "BaseState", "Scope", "State"]

T = TypeVar("T")
S = TypeVar("S", bound="BaseState")


class Scope:
    """Names and handles of one place. A fork freezes it: both sides go on in a new one behind it (K5)."""

    __slots__ = ("base", "log", "names")

    def __init__(self, base: Scope | None) -> None:
        self.base = base
        self.names: dict[Any, Slot] = {}
        self.log: list[Slot] = []

    def add(self, slot: Slot, name: str | None) -> None:
        self.log.append(slot)
        if slot.node is not None:
            self.names[slot.node] = slot
        if name is not None:
            self.names[name] = slot

    def find(self, key: Any) -> Slot | None:
        scope: Scope | None = self
        while scope is not None:
            slot = scope.names.get(key)
            if slot is not None:
                return slot
            scope = scope.base
        return None

    def all(self, key: Any) -> list[Slot]:
        found = [] if self.base is None else self.base.all(key)
        return found + [
            s for s in self.log if s.node is key or (isinstance(key, str) and s.node is not None and s.node.name == key)
        ]

    def own_names(self, upto: Scope | None) -> dict[str, Slot]:
        """Names set since the scope `upto`."""
        found: dict[str, Slot] = {}
        scope: Scope | None = self
        while scope is not None and scope is not upto:
            for key, slot in scope.names.items():
                if isinstance(key, str):
                    found.setdefault(key, slot)
            scope = scope.base
        return found


class BaseState:
    """What State and AsyncState share: recording, and reading what is there already."""

    __slots__ = ("__weakref__", "_path", "_scope", "run")

    def __init__(self, path: Path, scope: Scope, run: Run[Any]) -> None:
        self._path, self._scope, self.run = path, scope, run

    # ---- recording ------------------------------------------------------------------------------------------------------

    def __iadd__(self: S, other: Part | Expr | None) -> S:
        path = self._path
        if path.closed or path.final:
            raise located(
                ProgramError(f"this state is closed ({path.run.why_closed(path)}); nothing can be appended to it."), caller()
            )
        if type(other) is str:
            path.queue.append(other)
        else:
            for part in parts_of(other):
                if isinstance(part, (Gen, Select)):
                    path.queue.append(self._slot(part))
                elif isinstance(part, Ref):
                    path.queue.append(_Appended(self._find(part.key)))
                else:
                    path.queue.append(part)
        path.session.touch(path)
        return self

    def _slot(self, node: Gen[Any] | Select[Any]) -> Slot:
        slot = Slot(node, self._path)
        slot.limits = current_limits()
        slot.streaming = self.run.streaming
        problem = self.run.unsupported(node)
        if problem is not None:
            raise located(BackendUnsupported(problem), node.at, node.name)
        self._scope.add(slot, node.name)
        return slot

    def _call(self, function: Callable[[Path, Any], None]) -> None:
        self._path.queue.append(function)
        self._path.session.touch(self._path)

    def set_var(self, name: str, value: Any) -> None:
        self._scope.add(_done(value, self._path), name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, key: Any) -> bool:
        return self._scope.find(key) is not None

    def add_message(self, role: str, content: str, **extra: Any) -> None:
        """A whole message; extra: further keys that the template reads (tool_calls, tool_call_id, name)."""
        at = caller()
        self._call(lambda path, line: line.add_message(Message(role, (content,), extra), at))

    def set_tools(self, tools: Sequence[Any] | None) -> None:
        """What the template's `tools` is from here on."""
        self._call(lambda path, line: setattr(line, "tools", tools))

    @contextmanager
    def _block(self, name: str) -> Iterator[None]:
        at = caller()
        self += RoleOpen(name, at)
        yield
        self += RoleClose(name, at)

    @overload
    def role(self, name: str) -> Any: ...
    @overload
    def role(self, name: str, content: Any) -> Expr: ...
    def role(self, name: str, content: Any = None) -> Any:
        """Without content a block: `with s.user(): …`; with it an expression."""
        return self._block(name) if content is None else role(name, content)

    def system(self, content: Any = None) -> Any:
        return self.role("system", content)

    def user(self, content: Any = None) -> Any:
        return self.role("user", content)

    def assistant(self, content: Any = None) -> Any:
        return self.role("assistant", content)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """The text that is appended inside the block becomes the variable `name`."""
        slot = Slot(None, self._path)
        start = [0]

        def begin(path: Path, line: Any) -> None:
            start[0] = len(line.opened.message().text if line.opened is not None else line.text())

        def end(path: Path, line: Any) -> None:
            slot.value = (line.opened.message().text if line.opened is not None else line.text())[start[0] :]
            path.end(slot)

        self._call(begin)
        yield
        self._scope.add(slot, name)
        self._path.queue.append(_Ending(slot, end))
        self._path.session.touch(self._path)

    def flush(self) -> None:
        """Send what was recorded, without waiting for it (Y1)."""
        self._path.session.flush()

    # ---- reading, of what is there --------------------------------------------------------------------------------------

    def _find(self, key: Any) -> Slot:
        slot = self._scope.find(key)
        if slot is None:
            if isinstance(key, (Gen, Select)):
                raise KeyError(f"{key!r} was not appended to this state: `s += {key!r}` comes before its value is read")
            names = ", ".join(sorted(self._scope.own_names(None)))
            raise KeyError(f"there is no variable {key!r} here; {f'the names are: {names}' if names else 'there is none yet'}")
        return slot

    def _check(self) -> None:
        error = self._path.error
        if error is not None:
            self.run.seen(error)
            raise error.with_traceback(None)

    def error(self) -> PhloemError | None:
        """What ended this state, None if nothing did. Does not wait."""
        if self._path.error is not None:
            self.run.seen(self._path.error)
        return self._path.error

    @property
    def branch(self) -> tuple[int, ...]:
        """Indices of the forks that lead here."""
        return self._path.branch

    def segments(self) -> list[Segment]:
        """What is committed so far."""
        return [] if self._path.line is None else self._path.line.segments()

    def _messages(self) -> list[dict[str, Any]]:
        line = self._path.line
        if line is None:
            return []
        shown = [*line.messages, *([line.opened.message()] if line.opened is not None else [])]
        return [{"role": m.role, "content": m.text, **m.extra} for m in shown]

    def _meta(self, slot: Slot) -> dict[str, Any]:
        from phloem.lang.meta import meta_info

        found: dict[str, Any] = meta_info(slot, self._path.session.backend.tokenizer)
        return found

    def _branch(self, n: int, run_at: str) -> tuple[ForkPoint, list[Path], Scope]:
        """n children that leave here. Copies nothing (K1, F1)."""
        limits, path = current_limits(), self._path
        if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n <= 1_000_000:
            raise located(
                InvalidRequestError(f"fork({n!r}): expected a number of branches from 0 to 1,000,000.", param="n"), run_at
            )
        if path.closed or path.final:
            raise located(ProgramError("this state is closed; it cannot be forked."), run_at)
        if limits is not None:
            try:
                limits.fork(n)
            except PhloemError as error:
                raise located(error, run_at) from None
        frozen = self._scope
        if frozen.names:
            self._scope = Scope(frozen)
        else:
            frozen = frozen.base or frozen
        point, session, run, first, branch = ForkPoint(), path.session, path.run, path.num_children, path.branch
        path.num_children += n
        control = path.control_text
        children = point.children
        for i in range(first, first + n):
            child = Path(session, run, (*branch, i), None, point)
            child.control_text = control
            children.append(child)
        path.queue.append(point)
        session.touch(path)
        return point, children, frozen


class _Ending:
    """A recorded end of a variable's scope: called in its turn; fails with the path."""

    __slots__ = ("_function", "slot")

    def __init__(self, slot: Slot, function: Callable[[Path, Any], None]) -> None:
        self.slot, self._function = slot, function

    def __call__(self, path: Path, line: Any) -> None:
        self._function(path, line)


class _Appended:
    """A recorded `ref`: the value, when its turn comes."""

    __slots__ = ("_value",)

    def __init__(self, slot: Slot) -> None:
        self._value = slot

    def __call__(self, path: Path, line: Any) -> None:
        line.literal(text_of(self._value.read()))


def _done(value: Any, path: Path) -> Slot:
    return Slot(None, path, value, True)


class State(BaseState):
    """Of a `def` program. Reading blocks until the value is there, and the engine works meanwhile."""

    __slots__ = ()

    def _wait(self, slot: Slot) -> None:
        if not slot.done:
            slot.path.session.wait(lambda: slot.done, slot)

    def _read(self, slot: Slot) -> Any:
        self._wait(slot)
        if slot.error is not None:
            self.run.seen(slot.error)
        return slot.read()

    @overload
    def __getitem__(self, key: Gen[T]) -> T: ...
    @overload
    def __getitem__(self, key: Select[T]) -> T: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: Any) -> Any:
        """The value. Raises what the gen failed with, at this line; KeyError for a name that nothing has."""
        return self._read(self._find(key))

    def get_var(self, name: str) -> Any:
        return self[name]

    def all(self, key: Gen[T] | str) -> list[T]:
        """Every value of a handle that was used several times, in order (V1)."""
        return [self._read(slot) for slot in self._scope.all(key)]

    def get_meta_info(self, key: Any) -> dict[str, Any]:
        """SGLang's: finish reason, token counts, logprobs of a gen or select."""
        slot = self._find(key)
        self._read(slot)
        return self._meta(slot)

    def scores(self, key: Any) -> list[ChoiceScore]:
        """Of a select, per choice: text, ids, logprobs, scores, probability (Q5)."""
        slot = self._find(key)
        self._read(slot)
        if slot.selection is None:
            raise InvalidRequestError(f"{key!r} is no select.", param="key")
        return slot.selection.per_choice

    def sync(self) -> None:
        """Wait until everything recorded here is done. Raises what failed."""
        path = self._path
        path.session.wait(lambda: path.idle or path.error is not None, path)
        self._check()

    def text(self) -> str:
        """Everything up to here, markup included."""
        self.sync()
        return "" if self._path.line is None else self._path.line.text()

    def messages(self) -> list[dict[str, Any]]:
        self.sync()
        return self._messages()

    @property
    def tokens(self) -> list[int]:
        """The ids of `text()`, as they are on the path."""
        self.sync()
        return [] if self._path.line is None else self._path.line.all_ids()

    def fork(
        self,
        n: int = 1,
        position_ids_offset: Any = None,
        *,
        timeout: float | None = None,
        on_error: Literal["raise", "collect"] = "raise",
    ) -> Group:
        """n branches that go on from here (F1). As a block it owns them; else `join()` ends it."""
        from phloem.lang.group import Group

        at = caller()
        if position_ids_offset is not None:
            raise located(InvalidRequestError("position_ids_offset is not supported.", param="position_ids_offset"), at)
        return Group.of([self], n, at, timeout, on_error)

    @contextmanager
    def copy(self) -> Iterator[State]:
        """A branch that the block owns; this state stays as it is."""
        with self.fork(1) as branches:
            yield branches[0]

    def adopt(self, branch: State) -> None:
        """Move this state to where the branch is, O(1); the branch is over. Names that it set are seen here."""
        self.sync()
        branch.sync()
        _adopt(self, branch)

    def map(self, items: Sequence[Any], fn: Callable[[State, Any], T], limit: int | None = None) -> list[T]:
        """fn(branch, item) for each item, on a branch each, at once (at most `limit`); the results in order (F3)."""
        from phloem.lang.group import run_map

        return run_map(self, items, fn, limit)

    def race(self, fns: Sequence[Callable[[State], T]], until: Callable[[T], bool] = bool) -> T:
        """The result of the first of `fns`, in their order, that satisfies `until`; the rest is aborted (F3)."""
        from phloem.lang.group import run_race

        return run_race(self, fns, until)

    def stream(self, key: Any) -> Events:
        """Token, Partial, Done … of one gen, as they come (U4)."""
        from phloem.lang.stream import Events

        return Events(self, self._find(key))

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """SGLang's: the text of this state, or of one variable, piece by piece."""
        from phloem.lang.stream import text_iter

        return text_iter(self, var_name)

    def call_tools(self, reply: Reply, **options: Any) -> Any:
        from phloem.lang import tools

        return tools.call_tools(self, reply, **options)


class Value(Generic[T]):
    """What `s[handle]` of an AsyncState is: await it."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make

    def __await__(self) -> Generator[Any, None, T]:
        return self._make().__await__()


class AsyncState(BaseState):
    """Of an `async def` program: reading is awaited."""

    __slots__ = ()

    async def _read(self, slot: Slot) -> Any:
        if not slot.done:
            await slot.path.session.until(lambda: slot.done, slot)
        if slot.error is not None:
            self.run.seen(slot.error)
        return slot.read()

    @overload
    def __getitem__(self, key: Gen[T]) -> Value[T]: ...
    @overload
    def __getitem__(self, key: Select[T]) -> Value[T]: ...
    @overload
    def __getitem__(self, key: str) -> Value[Any]: ...
    def __getitem__(self, key: Any) -> Any:
        slot = self._find(key)
        return Value(lambda: self._read(slot))

    def get_var(self, name: str) -> Value[Any]:
        return self[name]

    async def all(self, key: Gen[T] | str) -> list[T]:
        return [await self._read(slot) for slot in self._scope.all(key)]

    async def get_meta_info(self, key: Any) -> dict[str, Any]:
        slot = self._find(key)
        await self._read(slot)
        return self._meta(slot)

    async def scores(self, key: Any) -> list[ChoiceScore]:
        slot = self._find(key)
        await self._read(slot)
        if slot.selection is None:
            raise InvalidRequestError(f"{key!r} is no select.", param="key")
        return slot.selection.per_choice

    async def sync(self) -> None:
        path = self._path
        await path.session.until(lambda: path.idle or path.error is not None, path)
        self._check()

    async def text(self) -> str:
        await self.sync()
        return "" if self._path.line is None else self._path.line.text()

    async def messages(self) -> list[dict[str, Any]]:
        await self.sync()
        return self._messages()

    async def token_ids(self) -> list[int]:
        """As State.tokens."""
        await self.sync()
        return [] if self._path.line is None else self._path.line.all_ids()

    def fork(self, n: int = 1, *, timeout: float | None = None, on_error: Literal["raise", "collect"] = "raise") -> AsyncGroup:
        """As State.fork, for `async with`."""
        from phloem.lang.group import AsyncGroup

        return AsyncGroup.of([self], n, caller(), timeout, on_error)

    async def adopt(self, branch: AsyncState) -> None:
        await self.sync()
        await branch.sync()
        _adopt(self, branch)

    async def map(
        self, items: Sequence[Any], fn: Callable[[AsyncState, Any], Awaitable[T]], limit: int | None = None
    ) -> list[T]:
        from phloem.lang.group import run_map_async

        return await run_map_async(self, items, fn, limit)

    async def race(self, fns: Sequence[Callable[[AsyncState], Awaitable[T]]], until: Callable[[T], bool] = bool) -> T:
        from phloem.lang.group import run_race_async

        return await run_race_async(self, fns, until)

    def stream(self, key: Any) -> AsyncEvents:
        from phloem.lang.stream import AsyncEvents

        return AsyncEvents(self, self._find(key))

    def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        from phloem.lang.stream import text_async_iter

        return text_async_iter(self, var_name, return_meta_data)

    async def call_tools(self, reply: Reply, **options: Any) -> Any:
        from phloem.lang import tools

        return await tools.call_tools(self, reply, **options)


def _adopt(state: BaseState, branch: BaseState) -> None:
    ours, theirs = state._path, branch._path
    if ours.run is not theirs.run or ours is theirs:
        raise located(InvalidRequestError("adopt takes another branch of the same run.", param="branch"), caller())
    assert theirs.line is not None
    lease, theirs.lease = theirs.lease, None
    if ours.lease is not None:
        ours.session.release(ours.lease)
    ours.line, ours.lease, ours.known, ours.parent_request = theirs.line.copy(), lease, theirs.known, theirs.parent_request
    ours.ordinal = max(ours.ordinal, theirs.ordinal)
    state._scope = Scope(branch._scope)
    theirs.close()
