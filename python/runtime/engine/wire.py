"""The words between an API process and its engine process: msgpack frames, one struct each, tagged by name. No sockets here.

    to the engine     Launch · Add · Abort · Stop · Control · Shut
    from the engine   Loading · Opened · Hello · Outputs (one a step) · Answer · Failure

A frame is data of types that are known beforehand: decoding one makes no object of the sender's choosing (no pickle), and a frame
that is none of them is a `msgspec.DecodeError`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from phloem.runtime.cache.prefix import Explanation
from phloem.runtime.config import Resolved
from phloem.runtime.engine.compiling import Times
from phloem.runtime.engine.stats import EngineStats
from phloem.runtime.errors import PhloemError
from phloem.runtime.request import OutputDelta, Request, WireError

__all__ = [
    "Abort", "Add", "Answer", "Beat", "Control", "Failed", "Failure", "FromEngine", "Hello", "Launch", "Loading", "Opened", "Outputs", "Shut",
    "Stop", "Timing", "ToEngine", "decode_value", "decoder_of_engine", "decoder_to_engine", "encode", "plain_error",
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ to the engine


class Launch(msgspec.Struct, frozen=True, tag=True):
    """The first frame: which engine to make. factory: "module:function", called with (options, report); gives a child.Made.

    options: its argument; of the usual factory, the fields of an EngineConfig.
    """

    factory: str
    options: dict[str, Any]


class Add(msgspec.Struct, frozen=True, tag=True):
    """Requests of one `submit`. ticket: comes back in `Outputs.taken` once each was taken or refused."""

    ticket: int
    requests: list[Request]
    atomic: bool


class Abort(msgspec.Struct, frozen=True, tag=True):
    ids: list[str]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """A stop string was complete with output token `num_tokens`."""

    id: str
    num_tokens: int


class Control(msgspec.Struct, frozen=True, tag=True):
    """A verb of EngineClient.call. Its Answer bears the same ticket."""

    ticket: int
    verb: str
    args: list[Any]


class Shut(msgspec.Struct, frozen=True, tag=True):
    """End the engine; what is pending is not waited for."""


ToEngine = Launch | Add | Abort | Stop | Control | Shut


# ---------------------------------------------------------------------------------------------------------------- from the engine


class Loading(msgspec.Struct, frozen=True, tag=True):
    """stage: as build's `on_load` says it.   done: share of the weights that are read, or None for other stages."""

    stage: str
    done: float | None = None


class Opened(msgspec.Struct, frozen=True, tag=True):
    """The headers are read: what the API side needs to make text of tokens, while the weights still load.

    metadata: of a GGUF file, with its tokenizer; None where `directory` has one.   generation: the checkpoint's
    generation_config, its numbers only.   width: ids of the output layer.   source: for messages.
    """

    metadata: dict[str, Any] | None
    directory: str | None
    width: int
    source: str
    name: str
    model_type: str
    architectures: list[str]
    generation: dict[str, float]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The engine is up. seconds: of each stage of the start.   fingerprint: equal weights, arithmetic and kernels, equal word.

    vocab_size: ids that a prompt may hold.   device_name: the kernels' variant, or a GPU's name.   pid: of the engine process.
    """

    resolved: Resolved
    vocab_size: int
    fingerprint: str
    device_name: str
    seconds: dict[str, float]
    pid: int


class Failed(msgspec.Struct, frozen=True):
    """A request that ended without a last delta."""

    id: str
    error: WireError


MAX_CHUNKS = 64


class Timing(msgspec.Struct, frozen=True):
    """What the loop saw of a request that ended, in seconds. queue: until it was admitted; prefill: from then to its first token;
    either is None for what never came.   preemptions: how often it lost its pages.   compile: while its grammar was compiled; None: it
    had none, or a compiled one was there.   chunks: (begin, end) of the steps that computed its prompt, from when it was added; those
    behind the first MAX_CHUNKS are one."""

    queue: float | None = None
    prefill: float | None = None
    preemptions: int = 0
    compile: float | None = None
    chunks: list[tuple[float, float]] = []


class Beat(msgspec.Struct, frozen=True):
    """What the loop says of itself. waiting_*: parts of stats.waiting.   dropped_frames: that did not decode, ever.

    pages_leased: pages of the tree that running requests read.   compile_times, fill_times: of grammars, by backend.
    """

    stats: EngineStats
    pages_leased: int
    waiting_grammar: int
    waiting_preempted: int
    dropped_frames: int
    compile_times: Times | None = None
    fill_times: dict[str, Times] = {}


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Everything that one turn of the loop has to say. seq counts these frames, so that a lost one is noticed.

    steps: (seconds, tokens computed) of each step since the last frame; empty: the loop turns and has nothing to compute.
    timings: of the requests whose last delta is here, by id.   beat: now and then, and always when the loop falls idle.
    """

    seq: int
    steps: list[tuple[float, int]]
    deltas: list[OutputDelta]
    failed: list[Failed] = []
    taken: list[int] = []
    timings: dict[str, Timing] = {}
    beat: Beat | None = None


class Answer(msgspec.Struct, frozen=True, tag=True):
    """value: see `decode_value`. error: the verb raised."""

    ticket: int
    value: msgspec.Raw
    error: WireError | None = None


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The last frame of an engine that could not start, or whose loop broke."""

    error: WireError


FromEngine = Loading | Opened | Hello | Outputs | Answer | Failure

_VALUES: dict[str, Any] = {"stats": EngineStats, "explain": Explanation, "flush": int}
_ENCODER = msgspec.msgpack.Encoder()


def encode(frame: Any) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what msgpack cannot say: foreign types, integers beyond 64 bits."""
    return _ENCODER.encode(frame)


def decoder_to_engine() -> msgspec.msgpack.Decoder[ToEngine]:
    return msgspec.msgpack.Decoder(ToEngine)


def decoder_of_engine() -> msgspec.msgpack.Decoder[FromEngine]:
    return msgspec.msgpack.Decoder(FromEngine)


def decode_value(verb: str, value: msgspec.Raw) -> Any:
    """The result of a control verb as its own type; of verbs not named here, as plain values."""
    return msgspec.msgpack.decode(value, type=_VALUES.get(verb, Any))


def plain_error(error: BaseException) -> WireError:
    """Any exception as data. What is not Phloem's own keeps its kind in the message."""
    if isinstance(error, PhloemError):
        return WireError(type(error).__name__, error.message, error.param, error.code)
    return WireError("PhloemError", f"{type(error).__name__}: {error}")
