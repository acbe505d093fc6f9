"""`with limits(tokens=…, seconds=…, forks=…):` bounds what is recorded inside it; the tightest of nested ones holds (U6)."""

from __future__ import annotations

import time
from contextvars import ContextVar, Token
from types import TracebackType

from phloem.runtime.errors import InvalidRequestError, LimitExceeded

__all__ = ["Limits", "current_limits", "limits"]

_current: ContextVar[Limits | None] = ContextVar("phloem_limits", default=None)


class Limits:
    """A context manager; may be entered once. What was recorded inside it stays bound by it after the block.

    tokens: drawn by all gens inside, together.   seconds: from the entry on; what runs then is aborted.   forks: branches made inside.
    Raises LimitExceeded, or ProgramTimeout for the seconds, at the gen or fork that goes beyond.
    """

    def __init__(self, *, tokens: int | None = None, seconds: float | None = None, forks: int | None = None) -> None:
        for name, value in (("tokens", tokens), ("forks", forks)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise InvalidRequestError(f"{name} is {value!r}; expected an integer from 0 up.", param=name)
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0):
            raise InvalidRequestError(f"seconds is {seconds!r}; expected a number above 0.", param="seconds")
        self.tokens, self.seconds, self.forks = tokens, seconds, forks
        self.tokens_left, self.forks_left = tokens, forks
        self.outer: Limits | None = None
        self.deadline: float | None = None
        self._token: Token[Limits | None] | None = None

    def __enter__(self) -> Limits:
        self.outer = _current.get()
        if self.seconds is not None:
            self.deadline = time.monotonic() + self.seconds
        if self.outer is not None and self.outer.deadline is not None:
            self.deadline = self.outer.deadline if self.deadline is None else min(self.deadline, self.outer.deadline)
        self._token = _current.set(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._token is not None
        _current.reset(self._token)

    def chain(self) -> list[Limits]:
        found, at = list[Limits](), self
        while at is not None:
            found.append(at)
            at = at.outer  # type: ignore[assignment]
        return found

    def check_open(self) -> None:
        for each in self.chain():
            if each.tokens_left is not None and each.tokens_left <= 0:
                raise LimitExceeded(f"limits(tokens={each.tokens}) is used up; nothing more is drawn.", param="tokens")

    def bound_tokens(self, wanted: int | None, n: int) -> int | None:
        """max_tokens of a gen of n samples, no more than what is left. What is under way is counted when it ends."""
        for each in self.chain():
            if each.tokens_left is not None:
                room = max(1, each.tokens_left // n)
                wanted = room if wanted is None else min(wanted, room)
        return wanted

    def spend(self, tokens: int) -> None:
        for each in self.chain():
            if each.tokens_left is not None:
                each.tokens_left -= tokens

    def fork(self, branches: int) -> None:
        for each in self.chain():
            if each.forks_left is not None:
                if each.forks_left < branches:
                    raise LimitExceeded(
                        f"limits(forks={each.forks}) allows {each.forks_left} more, not {branches}.", param="forks"
                    )
                each.forks_left -= branches


limits = Limits


def current_limits() -> Limits | None:
    return _current.get()
