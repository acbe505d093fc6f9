"""One run of a program: its value, its variables, what it cost. Made by run.Program; reading it makes a streaming run go on."""

from __future__ import annotations

import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from phloem.lang.ir import Gen, Select
from phloem.lang.line import Line
from phloem.lang.path import Path, Slot
from phloem.lang.session import Session
from phloem.lang.state import AsyncState, Scope, State
from phloem.lang.usage import RunUsage, usage_of
from phloem.runtime.errors import Cancelled, PhloemError

if TYPE_CHECKING:
    from phloem.lang.run import Program

__all__ = ["Run"]

T = TypeVar("T")
S_ = TypeVar("S_")


class Run(Generic[T]):
    """One run of a program: its value, its variables, what it cost.

    value: what the body returned.   state: the root state.   seed: of its draws (K4).   records: every request, in order.
    """

    def __init__(
        self, program: Program[Any, T], session: Session, *, number: int, seed: int, defaults: dict[str, Any], namespace: str, history: Any, streaming: bool,
        timeout: float | None, is_async: bool,
    ) -> None:  # fmt: skip
        self.program, self._session, self.number, self.seed = program, session, number, seed
        self.defaults, self.namespace, self.streaming = defaults, namespace, streaming
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.num_active = 0
        self.failed: list[Path] = []
        self.leased: set[Path] = set()
        self._seen: set[int] = set()
        self._warned = False
        self._ended = False
        self._body_done = False
        self._value: Any = None
        self._raised: BaseException | None = None
        self._greenlet: Any = None
        self.waiters: list[Callable[[], None]] | None = None
        self._full = session.backend.capabilities.sampling is None and session.backend.capabilities.tokens
        if session.backend.capabilities.tokens:
            assert session.markup is not None
            line: Any = Line(session.markup, history)
        else:
            from phloem.lang.textline import TextLine

            line = TextLine()
        path = Path(session, self, (), line)
        path.control_text = program.control_text
        self.state: Any = (AsyncState if is_async else State)(path, Scope(None), self)

    # ---- for paths and states -------------------------------------------------------------------------------------------

    def seen(self, error: BaseException) -> None:
        """It was raised to the program, so it need not be raised at the end."""
        self._seen.add(id(error))

    def rested(self) -> None:
        if self.num_active == 0:
            waiters, self.waiters = self.waiters, None
            for wake in waiters or ():
                wake()

    def why_closed(self, path: Path) -> str:
        return "its program has ended" if path.final or self._ended else "its block has ended, or another branch was chosen"

    def warn_control(self, text: str) -> None:
        """X7a, once a run."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a literal of {self.program.name} ({self.program.at}) spells a control token: {text[:60]!r}. It stays text. Use special(…) for the token, "
                "or @function(control_text=True).", stacklevel=2,
            )  # fmt: skip

    def unsupported(self, node: Gen[Any] | Select[Any]) -> str | None:
        """Z1: what the backend lacks of what this node needs."""
        if self._full:
            return None
        from phloem.lang.textline import lacking

        return lacking(node, self._session.backend, self.defaults)

    # ---- results --------------------------------------------------------------------------------------------------------

    @property
    def value(self) -> T:
        """Raises what the program raised."""
        self._finish()
        if self._raised is not None:
            raise self._raised
        value: T = self._value
        return value

    def _finish(self) -> None:
        if not self._ended and self.streaming:
            self._session.wait(lambda: self._ended)

    @overload
    def __getitem__(self, key: Gen[S_]) -> S_: ...
    @overload
    def __getitem__(self, key: Select[S_]) -> S_: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: Any) -> Any:
        slot: Slot = self.state._find(key)
        if not slot.done:
            self._session.wait(lambda: slot.done, slot)
        return slot.read()

    def __contains__(self, key: Any) -> bool:
        return key in self.state

    def get_var(self, name: str) -> Any:
        return self[name]

    def set_var(self, name: str, value: Any) -> None:
        self.state.set_var(name, value)

    def get_meta_info(self, key: Any) -> Any:
        self[key]
        return self.state._meta(self.state._find(key))

    def scores(self, key: Any) -> Any:
        self[key]
        return self.state._find(key).selection.per_choice

    def all(self, key: Any) -> list[Any]:
        self._finish()
        return [slot.read() for slot in self.state._scope.all(key)]

    def text(self) -> str:
        self._finish()
        line = self.state._path.line
        return "" if line is None else str(line.text())

    def messages(self) -> list[dict[str, Any]]:
        self._finish()
        found: list[dict[str, Any]] = self.state._messages()
        return found

    @property
    def tokens(self) -> list[int]:
        self._finish()
        line = self.state._path.line
        return [] if line is None else list(line.all_ids())

    def sync(self) -> None:
        """Wait for the end; for stream=True. Raises nothing: see `error`."""
        self._finish()

    def error(self) -> BaseException | None:
        self._finish()
        return self._raised or self.state.error()

    @property
    def records(self) -> list[Any]:
        return [r for r in self._session.records if r.program == self.number]

    @property
    def stages(self) -> int:
        return self._session.stages

    @property
    def usage(self) -> RunUsage:
        """U8. In a batch: of this program's own requests; `usage_of(runs)` counts a whole batch."""
        return usage_of(self.records, self._session.forwards, page_size=self._session.backend.page_size)

    @property
    def rewinds(self) -> tuple[tuple[int, int], ...]:
        """(tokens kept, tokens dropped) of each time the template rewrote the past of the root state (H5)."""
        line = self.state._path.line
        return () if line is None else line.rewinds

    @property
    def trace(self) -> Any:
        from phloem.lang.trace import Trace

        return Trace(self)

    def show(self) -> str:
        """The path tree, for a terminal (U8)."""
        from phloem.lang import show

        return show.show(self)

    def _repr_html_(self) -> str:
        from phloem.lang import show

        return show.html(self)

    def __repr__(self) -> str:
        state = "ended" if self._ended else "running"
        return f"<Run of {self.program.name}, {state}, {len(self._session.records)} requests>"

    # ---- streaming ------------------------------------------------------------------------------------------------------

    def stream(self, key: Any) -> Any:
        from phloem.lang.stream import Events

        return Events(self.state, self._await_name(key))

    def _await_name(self, key: Any) -> Slot:
        found: Slot | None = self.state._scope.find(key)
        while found is None and not self._ended:
            self._session.wait(lambda: self._ended or self.state._scope.find(key) is not None)
            found = self.state._scope.find(key)
        slot: Slot = self.state._find(key)
        return slot

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of the text, or of one variable, as they come. The program goes on while it is iterated."""
        from phloem.lang.stream import text_iter

        if var_name is not None:
            self._await_name(var_name)
        yield from text_iter(self.state, var_name, lambda: self._ended)
        if self._raised is not None:
            raise self._raised

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As text_iter, on an event loop; with chunk metadata: new logprobs only, running totals."""
        import asyncio

        from phloem.lang.stream import text_iter_meta

        if var_name is not None:
            self._await_name(var_name)
        for piece, meta in text_iter_meta(self.state, var_name, lambda: self._ended):
            yield (piece, meta) if return_meta_data else piece
            await asyncio.sleep(0)
        if self._raised is not None:
            raise self._raised

    # ---- the end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs; pages are free within a step. Nothing to do for a run that has ended."""
        if not self._ended:
            self._abandon(Cancelled("the run was closed."))
            self._raised = self._raised or Cancelled("the run was closed.")
            if self._greenlet is not None and not self._greenlet.dead:
                import greenlet

                self._greenlet.parent = greenlet.getcurrent()
                self._greenlet.throw(greenlet.GreenletExit)
            if self.streaming:
                self._session.close()

    def __enter__(self) -> Run[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _abandon(self, error: PhloemError) -> None:
        """Everything of this run is over, now."""
        session = self._session
        jobs = [job for job in [*session.live.values(), *session.outbox] if job.slot is not None and job.slot.path.run is self]
        for path in {job.slot.path for job in jobs}:
            path.cancel(error)
        self.state._path.cancel(error)
        self._let_go()

    def _let_go(self) -> None:
        self._ended = True
        for path in list(self.leased):
            path.close()
        self.state._path.final = True
        for path in (self.state._path,):
            path.close()
        self.rested()

    def _failure(self) -> BaseException | None:
        """What ended a path and was never raised to the program: raised at the end, by branch."""
        errors: dict[int, PhloemError] = {}
        for path in sorted(self.failed, key=lambda p: p.branch):
            error = path.error
            if (
                error is None
                or id(error) in self._seen
                or isinstance(error, Cancelled)
                or getattr(path.owner, "on_error", "") == "collect"
            ):
                continue
            errors[id(error)] = error
        if not errors:
            return None
        found = list(errors.values())
        return found[0] if len(found) == 1 else ExceptionGroup(f"{len(found)} branches of {self.program.name} failed", found)

    def _conclude(self) -> None:
        """Body done and nothing under way."""
        self._raised = self._failure()
        self._let_go()
