"""What programs run on: a door that takes requests, and what it can do (Z1). Everything that answers a program is a Backend.

    Engine, AsyncEngine, a process client ── EngineBackend ──┐
    Scripted, Replay, RuntimeEndpoint, OpenAI ──lang_backend──┴── Backend: submit(jobs) · abort · wait · hold · release

Knows no programs. A `Job` is a request, the sink of what comes back, and the record of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from phloem.runtime.engine.client import EngineClient
from phloem.runtime.engine.collect import Collector
from phloem.runtime.errors import BackendUnavailable, PhloemError
from phloem.runtime.request import Delta, Output, OutputDelta, Request, Usage

if TYPE_CHECKING:
    from phloem.lang.ir import Gen, Select
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Backend", "Capabilities", "EngineBackend", "Job", "Record", "TextPrompt", "as_backend"]

KINDS = frozenset({"json_schema", "json_object", "regex", "choices", "ebnf", "lark", "structural_tag"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """tokens: takes ids and returns ids; else text and messages.   logprobs: of drawn tokens.   prompt_logprobs: `select` needs them.
    grammars: kinds of GrammarSpec.   sampling: names of SamplingParams that it honours, None for all.   emulate: {"select"} and the like,
    where the user said emulate=True.   roles_end_only: gens stand at the end of an assistant's turn only.
    """

    tokens: bool = True
    logprobs: bool = True
    prompt_logprobs: bool = True
    grammars: frozenset[str] = KINDS
    open_end: bool = True
    seed: bool = True
    hold: bool = True
    tools: bool = True
    sampling: frozenset[str] | None = None
    roles_end_only: bool = False
    emulate: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """For backends without tokens.   messages: {"role", "content"}.   partial: of the assistant's turn begun.   text: without roles."""

    messages: tuple[Mapping[str, Any], ...]
    partial: str
    text: str


@dataclass(slots=True, eq=False)
class Record:
    """One request of a run, where in the program it comes from, and what came back.

    kind: "gen", "score" (a path of a select), "warm" (nothing is drawn).   branch: indices of the forks on the way.   ordinal: number of the
    gen in its state.   attempt: of `retries`.   num_unfed: output tokens that the model never read.   emulated: how, under Z1.
    """

    kind: Literal["gen", "score", "warm"]
    request: Request
    at: str
    name: str | None
    branch: tuple[int, ...]
    ordinal: int
    attempt: int
    program: int
    prompt: TextPrompt | None = None
    source: Gen[Any] | Select[Any] | None = None
    output: Output | None = None
    num_unfed: int = 0
    num_dropped: int = 0
    started: float = 0.0
    ended: float = 0.0
    emulated: str = ""
    selection: Any = None  # of a select, once it has chosen: choices.Scores


@runtime_checkable
class Backend(Protocol):
    """See docs of the module. Methods may be called from any thread; only `wait` and `flush` block.

    kv_tokens: size of the pool, for how many programs run at once; None: unknown.   self_driven: somebody else works; `wait` only waits.
    """

    name: str
    capabilities: Capabilities
    tokenizer: Tokenizer | None
    max_context: int | None
    kv_tokens: int | None
    page_size: int
    self_driven: bool

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue. Each job gets one ending: a last delta, or `fail`, or `end`."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None: ...
    def wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """Work until done(); False if the deadline (time.monotonic) passed before."""
        ...

    def hold(self, name: str, token_ids: Sequence[int], namespace: str) -> None: ...
    def release(self, names: Sequence[str]) -> None: ...
    def flush(self) -> int: ...
    def info(self) -> dict[str, Any]: ...


class Job:
    """One request under way. Deltas come from any thread; the session reads them in its own.

    pieces: of text, if `streaming`.   output: once ended.   on_first: called once, by the baton's thread, when the prompt is computed.
    """

    __slots__ = ("_collector", "_last", "_shown", "_wake", "aborted", "deadline", "output", "pieces", "record", "slot", "streaming", "text", "warmed")  # fmt: skip

    def __init__(self, record: Record, tokenizer: Tokenizer | None, wake: Callable[[Job, bool], None]) -> None:
        self.record = record
        self._collector = None if tokenizer is None else Collector(record.request, tokenizer)
        self._wake = wake
        self._last = self._shown = 0
        self.output: Output | None = None
        self.pieces: list[Delta] | None = None
        self.text = ""
        self.streaming = False
        self.deadline: float | None = None
        self.aborted: PhloemError | None = None  # why we ended it
        self.slot: Any = None
        self.warmed = False

    @property
    def request(self) -> Request:
        return self.record.request

    @property
    def prompt(self) -> TextPrompt | None:
        return self.record.prompt

    def rewrite(self, request: Request, tokenizer: Tokenizer | None) -> None:
        """Another request in place of the recorded one, before it is sent: for a backend's `prepare`."""
        self.record.request = request
        self._collector = None if tokenizer is None else Collector(request, tokenizer)

    def push(self, delta: OutputDelta) -> int | None:
        collector = self._collector
        if collector is None or collector.output is not None:
            return None
        before = len(collector.token_ids)
        piece = collector.push(delta)
        taken = len(collector.token_ids) - before
        if taken or delta.finish_reason not in ("stop_string", None):
            self._last = taken
        if collector.output is not None:
            self.record.num_unfed, self.record.num_dropped = self._last, collector.num_dropped
            self._ended(collector.output)
        if piece is not None and self.streaming:
            self._piece(piece)
        first = not self.warmed and (delta.finish_reason is not None or (taken > 0 and self._computed()))
        self.warmed = self.warmed or first
        if first or self.output is not None or (self.streaming and piece is not None):
            self._wake(self, first)
        return collector.stopped_at

    def _computed(self) -> bool:
        """A token shows that the prompt is computed, but for a grammar's: it may be a forced run that nobody asked the model for."""
        self._shown += 1
        return self.record.request.grammar is None or self._shown > 1

    def fail(self, error: Exception) -> None:
        if self.output is not None:
            return
        if self._collector is not None and self._collector.output is None and isinstance(error, PhloemError):
            self._collector.fail(error)
            assert self._collector.output is not None
            self._ended(self._collector.output)
        else:
            self._ended(Output(text=self.text, token_ids=[], finish_reason="error", usage=Usage(), error=error))
        self._wake(self, not self.warmed)

    def push_text(self, delta: Delta) -> None:
        """For backends without tokens."""
        self.text += delta.text
        if self.streaming:
            self._piece(delta)
        first, self.warmed = not self.warmed, True
        if first or self.streaming:
            self._wake(self, first)

    def end(self, output: Output) -> None:
        """For backends without tokens: the whole."""
        if self.output is None:
            self._ended(output)
            self._wake(self, not self.warmed)

    def _piece(self, piece: Delta) -> None:
        if self.pieces is None:
            self.pieces = []
        self.pieces.append(piece)

    def _ended(self, output: Output) -> None:
        self.record.output, self.record.ended = output, time.monotonic()
        self._collector = None
        self.output = output


@dataclass(eq=False)
class EngineBackend:
    """A Backend over any EngineClient of the runtime."""

    client: EngineClient
    tokenizer: Tokenizer | None
    name: str = "engine"
    page_size: int = 16
    max_context: int | None = None
    kv_tokens: int | None = None
    self_driven: bool = False
    policy: str = "prefix"
    capabilities: Capabilities = field(default_factory=Capabilities)
    keep: Any = None  # what must live as long as this

    _posted: Any = None

    def submit(self, jobs: Sequence[Job]) -> None:
        self.client.submit([(job.record.request, job) for job in jobs], atomic=False)

    def abort(self, request_ids: Iterable[str]) -> None:
        self.client.abort(request_ids)

    def wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        return self.client.run(done, deadline)

    def hold(self, name: str, token_ids: Sequence[int], namespace: str) -> None:
        self.client.call("hold", name, list(token_ids), namespace)

    def release(self, names: Sequence[str]) -> None:
        for name in names:
            self._posted = self.client.call("release", name)

    def count_steps(self) -> Callable[[], int | None]:
        """Steps made when the engine comes to this. Posted, not waited for; the answer is None until it is there."""
        posted = self._posted = self.client.call("stats")
        return lambda: posted.result().steps if posted.done() and posted.exception() is None else None

    def drain(self) -> None:
        """What was only posted is done when this returns; where another thread works, it does it."""
        if not self.self_driven and self._posted is not None:
            self.client.run(self._posted.done)

    def explain(self, token_ids: Sequence[int], namespace: str) -> int:
        """How many of these tokens the cache would give now (R9)."""
        return int(self._control("explain", list(token_ids), namespace).num_cached)

    def flush(self) -> int:
        return int(self._control("flush"))

    def info(self) -> dict[str, Any]:
        return {
            "backend": self.name,
            "max_context": self.max_context,
            "kv_tokens": self.kv_tokens,
            "page_size": self.page_size,
            "stats": self._control("stats"),
        }

    def _control(self, verb: Literal["flush", "stats", "explain"], *args: Any) -> Any:
        future = self.client.call(verb, *args)
        if self.self_driven:
            return future.result()
        self.client.run(future.done)
        return future.result()


def as_backend(thing: Any) -> Backend:
    """A Backend as it is; an Engine or AsyncEngine; or what has a method `lang_backend`. Raises BackendUnavailable."""
    if thing is None:
        raise BackendUnavailable(
            "there is no backend to run on. Pass backend=, or call set_default_backend(phloem.Engine()) first."
        )
    make = getattr(thing, "lang_backend", None)
    if make is not None:
        made: Backend = make()
        return made
    client, resolved = getattr(thing, "_client", None), getattr(thing, "resolved", None)
    if client is not None and resolved is not None:
        made = getattr(thing, "_lang_backend", None)  # type: ignore[assignment]
        if made is None:
            made = EngineBackend(
                client, thing.tokenizer, name=repr(thing), page_size=resolved.config.page_size, max_context=resolved.max_context,
                kv_tokens=resolved.num_pages * resolved.config.page_size, self_driven=hasattr(thing, "_thread"), policy=resolved.config.policy,
            )  # fmt: skip
        return made
    if isinstance(thing, Backend):
        return thing
    raise BackendUnavailable(
        f"{thing!r} is no backend: expected an Engine, an AsyncEngine, RuntimeEndpoint, OpenAI, Scripted, or another Backend."
    )
