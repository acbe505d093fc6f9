"""Values as they come (U4): events of one gen, and SGLang's text iterators. Partial values come from partial.py; time is the session's.

for event in s.stream(ticket):   Token(id, text, logprob) · Partial(value) · Done(value)
for piece in run.text_iter():    pieces that add up to run.text()
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from phloem.lang.ir import Gen
from phloem.lang.path import Slot
from phloem.runtime.request import Delta

if TYPE_CHECKING:
    from phloem.lang.backend import Job
    from phloem.lang.state import AsyncState, BaseState, State

__all__ = [
    "AsyncEvents",
    "Done",
    "Event",
    "Events",
    "Partial",
    "Token",
    "ToolArgs",
    "text_async_iter",
    "text_iter",
    "text_iter_meta",
]


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the output. text: what it completes, "" where a character is unfinished or a stop string may have begun.   logprob: None
    unless the gen asks for logprobs."""

    id: int
    text: str
    logprob: float | None


@dataclass(frozen=True, slots=True)
class Partial:
    """What there is of a JSON value: later ones extend earlier ones, the last equals the whole."""

    value: Any


@dataclass(frozen=True, slots=True)
class ToolArgs:
    """What there is of the arguments of a call: its index, the function's name, and the arguments so far."""

    index: int
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Done:
    value: Any


Event = Token | Partial | ToolArgs | Done


class _Reader:
    """Turns the pieces of a slot's job into events."""

    def __init__(self, slot: Slot) -> None:
        from phloem.lang.partial import PartialJson

        self.slot = slot
        slot.streaming = True
        for job in slot.jobs:
            job.streaming = True
        self._taken = 0
        self._json = PartialJson() if isinstance(slot.node, Gen) and slot.node.shape.json else None
        self._last: Any = None
        self.over = False

    def ready(self) -> bool:
        return self.slot.done or self._waiting() > 0

    def _job(self) -> Job | None:
        """Of a gen that may be tried again only the accepted attempt is told, once it is: what was shown cannot be taken back."""
        return self.slot.jobs[0] if self.slot.jobs and _is_certain(self.slot) else None

    def _waiting(self) -> int:
        job = self._job()
        return 0 if job is None or job.pieces is None else len(job.pieces) - self._taken

    def take(self) -> list[Event]:
        found: list[Event] = []
        job = self._job()
        while job is not None and job.pieces is not None and self._taken < len(job.pieces):
            piece = job.pieces[self._taken]
            self._taken += 1
            found += _tokens(piece)
            if self._json is not None and self._json.push(piece.text):
                value = self._json.value()
                if value != self._last or self._last is None:
                    self._last = value
                    found.append(Partial(value))
        if self.slot.done and not self.over:
            self.over = True
            self.slot.path.run.seen(self.slot.error) if self.slot.error is not None else None
            found.append(Done(self.slot.read()))
        return found


def _tokens(piece: Delta) -> list[Event]:
    count = len(piece.token_ids)
    if not count:
        return [] if not piece.text else [Token(-1, piece.text, None)]
    logprobs = piece.logprobs or []
    return [
        Token(token, piece.text if i == count - 1 else "", logprobs[i].logprob if i < len(logprobs) else None)
        for i, token in enumerate(piece.token_ids)
    ]  # fmt: skip


class Events(Iterator[Event]):
    """Of one gen; ends with Done. Raises what the gen failed with."""

    def __init__(self, state: State, slot: Slot) -> None:
        self._reader, self._session, self._events = _Reader(slot), state._path.session, list[Event]()

    def __next__(self) -> Event:
        while not self._events:
            if self._reader.over:
                raise StopIteration
            self._session.wait(self._reader.ready)
            self._events = self._reader.take()
        return self._events.pop(0)


class AsyncEvents(AsyncIterator[Event]):
    """As Events, awaited."""

    def __init__(self, state: AsyncState, slot: Slot) -> None:
        self._reader, self._session, self._events = _Reader(slot), state._path.session, list[Event]()

    async def __anext__(self) -> Event:
        while not self._events:
            if self._reader.over:
                raise StopAsyncIteration
            await self._session.until(self._reader.ready)
            self._events = self._reader.take()
        return self._events.pop(0)


class _Follow:
    """The text of a state, or of a variable, as far as it is certain."""

    def __init__(self, state: BaseState, name: str | None, ended: Callable[[], bool]) -> None:
        self._state, self._name, self._ended = state, name, ended
        self._sent = 0
        self.meta: dict[str, Any] = {}
        if name is not None:
            slot = state._find(name)
            slot.streaming = True
            for job in slot.jobs:
                job.streaming = True

    def text(self) -> str:
        if self._name is not None:
            slot = self._state._find(self._name)
            return slot.text if slot.done and slot.error is None else _so_far(slot)
        path = self._state._path
        line = path.line
        base = "" if line is None else line.text()
        return base + (_so_far(path.busy) if path.busy is not None else "")

    def over(self) -> bool:
        if self._name is not None:
            return self._state._find(self._name).done
        return self._ended() or self._state._path.error is not None

    def fresh(self) -> bool:
        return len(self.text()) > self._sent or self.over()

    def take(self) -> str:
        text = self.text()
        piece, self._sent = text[self._sent :], max(self._sent, len(text))
        self.meta = self._meta()
        return piece

    def _meta(self) -> dict[str, Any]:
        slot = self._state._find(self._name) if self._name is not None else self._state._path.busy
        if slot is None or not slot.jobs:
            return {}
        job = slot.jobs[0]
        pieces = job.pieces or []
        fresh, self._metered = pieces[self._metered if self._of is job else 0 :], len(pieces)
        self._of = job
        tokenizer = self._state._path.session.backend.tokenizer
        from phloem.lang.meta import entry

        info: dict[str, Any] = {
            "id": job.request.id,
            "prompt_tokens": len(job.request.token_ids),
            "completion_tokens": sum(len(p.token_ids) for p in pieces),
            "finish_reason": None if job.output is None else {"type": job.output.finish_reason},
        }
        if job.request.sampling.logprobs is not None:
            info["output_token_logprobs"] = [entry(e, tokenizer) for p in fresh for e in p.logprobs or []]
        return info

    _metered = 0
    _of: Any = None


def _is_certain(slot: Slot) -> bool:
    """Whether what it has drawn so far stays."""
    return slot.done or not (isinstance(slot.node, Gen) and slot.node.retries)


def _so_far(slot: Slot) -> str:
    job = slot.jobs[0] if slot.jobs and _is_certain(slot) else None
    return "".join(p.text for p in job.pieces) if job is not None and job.pieces else ""


def text_iter_meta(
    state: BaseState, name: str | None, ended: Callable[[], bool] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    path = state._path
    follow = _Follow(state, name, ended or (lambda: path.idle))
    while True:
        path.session.wait(follow.fresh)
        piece = follow.take()
        if piece:
            yield piece, follow.meta
        if follow.over() and not piece:
            return


def text_iter(state: BaseState, name: str | None, ended: Callable[[], bool] | None = None) -> Iterator[str]:
    for piece, _ in text_iter_meta(state, name, ended):
        yield piece


async def text_async_iter(state: AsyncState, name: str | None, with_meta: bool) -> AsyncIterator[Any]:
    import asyncio

    path = state._path
    follow = _Follow(state, name, lambda: path.idle)
    while True:
        await path.session.until(follow.fresh)
        piece = follow.take()
        if piece:
            yield (piece, follow.meta) if with_meta else piece
        if follow.over() and not piece:
            return
        await asyncio.sleep(0)
