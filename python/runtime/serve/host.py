"""What the app is given, and what it tells: the engine's client, the model as this process knows it, the state of life, the observer.

    lifecycle ── ready(client, model), life ──> Host <── handlers read
    observe   <── one RequestRecord a request ──┘  |
                                                   └── who waits, who is open, who may be aborted

One Host a server, touched by the event loop's thread alone. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from phloem.runtime.config import EngineConfig, Resolved
from phloem.runtime.engine.client import EngineClient
from phloem.runtime.serve.config import ServerConfig

if TYPE_CHECKING:
    from phloem.runtime.engine.build import Parts
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["AlwaysReady", "Host", "Life", "Observer", "Phase", "RequestRecord", "Served", "Silent"]

Phase = Literal["loading", "ready", "draining", "dead"]


class Life(Protocol):
    """How the server is, from the last beat: reading it never waits."""

    @property
    def phase(self) -> Phase: ...
    @property
    def progress(self) -> str:
        """What is being loaded, for people: "weights 40%"."""

    @property
    def asleep(self) -> bool:
        """The KV pool was handed back."""

    def stalled(self) -> float | None:
        """Seconds since the last finished step or idle beat, if that is too long ago (L3); else None."""


class AlwaysReady:
    """A Life for an engine in this process."""

    phase: Phase = "ready"
    progress = ""
    asleep = False

    def stalled(self) -> float | None:
        return None


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One HTTP request to a generating route, from its first byte to its last. Times: time.perf_counter(); started_at: time.time().

    client_id: their x-request-id.   handle: their request_id or rid.   trace: their traceparent.   key: the name of the API key.
    status: 499 if the client went away.   code: of the error.   finish: one a choice, in the words of the wire.
    gaps: seconds between two deltas of one choice, and gap_tokens: how many tokens the later one brought.
    queue_seconds, prefill_seconds, compile_seconds, preemptions: None where the engine does not tell; of several samples, the longest, and the
    sum.   chunks: (begin, end) of the steps that computed the prompt, in seconds from `submitted`.   params: of the request, for spans.
    """

    id: str
    endpoint: str
    started_at: float = field(default_factory=time.time)
    arrived: float = field(default_factory=time.perf_counter)
    submitted: float | None = None
    first_token: float | None = None
    ended: float = 0.0
    client_id: str = ""
    handle: str = ""
    trace: str | None = None
    key: str = ""
    model: str = ""
    stream: bool = False
    status: int = 0
    code: str | None = None
    finish: list[str] = field(default_factory=list)
    num_choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    discarded_tokens: int = 0
    gaps: array[float] = field(default_factory=lambda: array("d"))
    gap_tokens: array[int] = field(default_factory=lambda: array("q"))
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    compile_seconds: float | None = None
    chunks: list[tuple[float, float]] = field(default_factory=list)
    preemptions: int | None = None
    grammar: str = ""
    ignored: tuple[str, ...] = ()
    clipped: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    """The prompt, only under --log-prompts."""


class Observer(Protocol):
    """Told of each request at its end. Called by the event loop: must be quick, must not raise."""

    def request(self, record: RequestRecord) -> None: ...
    def other(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        """Any other request. endpoint: the route's pattern, never a path that a client made up."""

    def warn(self, message: str) -> None:
        """A line for the log, once (W3)."""

    def failed(self, request_id: str, error: BaseException) -> None:
        """A bug of ours ended this request with 500: log its trace."""

    def metrics(self) -> bytes:
        """Prometheus text."""


class Silent:
    """An Observer for nobody."""

    def request(self, record: RequestRecord) -> None: ...
    def other(self, endpoint: str, method: str, status: int, seconds: float) -> None: ...
    def warn(self, message: str) -> None: ...
    def failed(self, request_id: str, error: BaseException) -> None: ...
    def metrics(self) -> bytes:
        return b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The model as the process that speaks HTTP knows it: its text, its limits, its names. No weights.

    name: what replies call it.   path: as it was given; of a folder, its name.   vocab_size: ids below it are tokens.
    fingerprint: equal for equal weights, dtype and arithmetic.   sampling_defaults: of generation_config, by our names.
    """

    tokenizer: Tokenizer
    engine: EngineConfig
    resolved: Resolved
    name: str
    path: str
    vocab_size: int
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    weight_version: str = "0"
    fingerprint: str = "00000000"
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def max_context(self) -> int:
        return self.resolved.max_context

    @property
    def pool_tokens(self) -> int:
        return self.resolved.num_pages * self.resolved.config.page_size

    @classmethod
    def of_parts(cls, parts: Parts, **given: Any) -> Served:
        """Of an engine in this process. given: fields that are known better."""
        return cls.of(parts.tokenizer, parts.resolved, **given)

    @classmethod
    def of(cls, tokenizer: Tokenizer, resolved: Resolved, **given: Any) -> Served:
        config = resolved.config
        name = "smollm2" if config.model is None else Path(config.model).name
        path = "embedded" if config.model is None else name if Path(config.model).exists() else config.model
        what = [config.model, config.dtype, resolved.device, resolved.kv_dtype, tokenizer.vocab_size, given.pop("weights", "")]
        known: dict[str, Any] = {
            "tokenizer": tokenizer, "engine": config, "resolved": resolved, "name": name, "path": path,
            "vocab_size": min(tokenizer.vocab_size, tokenizer.width or tokenizer.vocab_size),
            "fingerprint": hashlib.sha256(json.dumps(what).encode()).hexdigest()[:8],
        }  # fmt: skip
        return cls(**(known | given))


class Abortable(Protocol):
    """An open request, as the administrative routes and the drain see it."""

    key: str
    handle: str
    id: str

    def abort(self) -> int:
        """End it now; how many samples that ended."""


class Host:
    """life, observer: None stands for an engine in this process and nobody who listens."""

    def __init__(self, config: ServerConfig, *, life: Life | None = None, observer: Observer | None = None) -> None:
        self.config = config
        self.life: Life = life if life is not None else AlwaysReady()
        self.observer: Observer = observer if observer is not None else Silent()
        self.client: EngineClient | None = None
        self.model: Served | None = None
        self.started = int(time.time())
        self.updating = False  # between begin_weight_update and end_weight_update (rl.py)
        self.weight_version: str | None = None  # the label that a trainer gave the weights; None: the model's own
        self.on_ready: list[Callable[[Served], None]] = []
        self._open: dict[str, Abortable] = {}
        self._handles: dict[tuple[str, str], str] = {}
        self.waiting = 0  # samples that were submitted and have said nothing yet
        self.waiting_tokens = 0  # of their prompts
        self._warned: set[str] = set()
        self._served, self._served_since = 0, time.perf_counter()
        self._rate = 0.0

    def ready(self, client: EngineClient, model: Served) -> None:
        """The engine is there (again)."""
        self.client, self.model = client, model
        for tell in self.on_ready:
            tell(model)

    # ---- who is open ----------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._open)

    def find_handle(self, key: str, handle: str) -> Abortable | None:
        request_id = self._handles.get((key, handle))
        return self._open.get(request_id) if request_id is not None else None

    def opened(self, job: Abortable, *more_handles: str) -> None:
        """more_handles: of a batch whose prompts have a name each; any of them means all of it."""
        self._open[job.id] = job
        for handle in (job.handle, *more_handles):
            if handle:
                self._handles[job.key, handle] = job.id

    def closed(self, job: Abortable) -> None:
        self._open.pop(job.id, None)
        if job.handle:
            for name in [name for name, request_id in self._handles.items() if request_id == job.id]:
                del self._handles[name]

    def abort(self, key: str | None, name: str) -> int:
        """End the request that its client calls `name`, or whose id it is.   key: whose it must be; None: anybody's."""
        own = {i for (whose, handle), i in self._handles.items() if handle == name and key in (None, whose)}
        tail = name.partition("-")[2] or name.partition("_")[2]
        own |= {job.id for job in self._open.values() if key in (None, job.key) and tail and job.id == f"req_{tail}"}
        found = [self._open[i] for i in own if i in self._open]
        return sum(job.abort() > 0 for job in found)

    def abort_all(self) -> int:
        """End every open request: each gets its error. How many there were."""
        return sum(job.abort() > 0 for job in list(self._open.values()))

    # ---- the queue ------------------------------------------------------------------------------------------------------

    def served(self, num_tokens: int) -> None:
        """Tokens were computed: the rate that Retry-After is made of."""
        self._served += num_tokens
        now = time.perf_counter()
        if now - self._served_since >= 1.0:
            rate = self._served / (now - self._served_since)
            self._rate = rate if not self._rate else 0.7 * self._rate + 0.3 * rate
            self._served, self._served_since = 0, now

    def retry_after(self) -> int:
        """Seconds until the queue will have moved, 1 … 60."""
        return max(1, min(60, round(self.waiting_tokens / self._rate))) if self._rate else 1

    # ---- words for the log ----------------------------------------------------------------------------------------------

    def warn_once(self, name: str, message: str) -> None:
        if name not in self._warned and len(self._warned) < 1024:  # the names are clients' words: no log without end
            self._warned.add(name)
            self.observer.warn(message)
