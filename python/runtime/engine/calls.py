"""What a call of Engine or AsyncEngine means: arguments in, requests out, deltas in, results out. Pure: no thread, no loop, no I/O.

    generate(prompts, sampling, n=2)                                       Engine: client.run(call.done)
      └─ Verbs ──> Call                                                    AsyncEngine: await call's listener
                   ├─ Sample 0/0 ──Request──> client ──> core ─┐
                   ├─ Sample 0/1      ▲                        │ OutputDelta
                   └─ Sample 1/0 …    └──── push / fail ───────┘
                   result(): Output | list[Output] | list[list[Output]], or the error to raise

The two facades differ in how they wait and in nothing else, so whatever can be said without waiting is said here.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, Unpack

import msgspec

from phloem.runtime.engine.client import Sink
from phloem.runtime.engine.collect import Collector
from phloem.runtime.engine.constraint import GrammarOptions, grammar_spec, without_ignored_stops
from phloem.runtime.errors import InvalidRequestError, PhloemError, RequestTimeoutError
from phloem.runtime.request import Delta, GrammarSpec, Output, OutputDelta, Request, SamplingParams, TokenLogprob, Usage

__all__ = [
    "Call", "CallOptions", "ChatOptions", "Conversations", "IdArray", "Message", "OnError", "Prompt", "Prompts", "Sample", "Sampling", "SamplingOfMany", "TextSide",
    "Verbs", "check_timeout",
]  # fmt: skip

MAX_N = 4096
LONGEST_TIMEOUT = 1e9  # seconds: 31 years. The system's clocks take no infinity


class IdArray(Protocol):
    """A one-dimensional integer array of numpy or torch."""

    @property
    def ndim(self) -> int: ...
    def tolist(self) -> Any: ...


Prompt: TypeAlias = "str | Sequence[int] | IdArray"
Message: TypeAlias = Mapping[str, Any]
Prompts: TypeAlias = "list[str] | list[list[int]] | list[tuple[int, ...]] | list[IdArray] | list[Prompt] | tuple[Prompt, ...]"
Conversations: TypeAlias = "Sequence[Sequence[Message]]"
Sampling: TypeAlias = "SamplingParams | Mapping[str, Any]"
SamplingOfMany: TypeAlias = "Sampling | Sequence[Sampling] | None"
OnError: TypeAlias = Literal["raise", "return"]


class CallOptions(GrammarOptions, total=False):
    """Arguments that every generating verb takes, beside those of GrammarOptions.

    timeout: seconds for the whole call; then its requests are aborted and RequestTimeoutError is raised.
    on_error: "raise" refuses the whole call for one bad prompt, before anything is computed; "return" puts each error into its
        own Output (finish_reason "error"; a timeout keeps the text so far, finish_reason "abort").
    priority: higher is sooner; only with policy="priority".   namespace: shares no cache with other namespaces (R8).
    progress: called with (ended, all) outputs whenever one ends, by the thread that works; keep it quick, and do not call the
        engine from it. What it raises ends the call, which raises it.
    """

    timeout: float | None
    on_error: OnError
    priority: int
    namespace: str
    progress: Callable[[int, int], None] | None


class ChatOptions(CallOptions, total=False):
    """Further arguments of `chat`.

    template: the name of one of the model's chat templates, or the source of another.   variables: more names for it.
    tools: JSON schemas of functions, for the template to show.
    """

    template: str | None
    variables: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None


class TextSide(Protocol):
    """What the verbs need of the model's text side; `build.Text` is it."""

    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]: ...
    def collector(self, request: Request) -> Collector: ...


class Sample:
    """One request of a call and all that came back: the sink that the client pushes to.

    number: index of its prompt in the call.   sample: index among the prompt's n.   request: None if the prompt was bad.
    """

    __slots__ = ("_call", "_collector", "number", "output", "request", "sample")

    def __init__(self, call: Call, number: int, sample: int, request: Request | None, collector: Collector | None) -> None:
        self._call, self._collector = call, collector
        self.number, self.sample, self.request = number, sample, request
        self.output: Output | None = None

    @property
    def error(self) -> Exception | None:
        return self.output.error if self.output is not None else None

    @property
    def over(self) -> bool:
        return self.output is not None

    def push(self, delta: OutputDelta) -> int | None:
        collector = self._collector
        if collector is None:
            return None  # it ended on our side already, by `fail`
        piece = collector.push(delta)
        if collector.output is not None:
            self._end(collector.output)
        if piece is not None:
            self._call.piece(piece)
        return collector.stopped_at

    def fail(self, error: Exception) -> None:
        if self.over:
            return
        piece: Delta | None = None
        if self._collector is not None and self._collector.output is None and isinstance(error, PhloemError):
            piece = self._collector.fail(error)  # keeps the text so far
            output = self._collector.output
        else:
            num_prompt = len(self.request.token_ids) if self.request is not None else 0
            output = Output(text="", token_ids=[], finish_reason="error", usage=Usage(prompt_tokens=num_prompt), error=error)
        assert output is not None
        self._end(output)
        self._call.piece(piece)

    def _end(self, output: Output) -> None:
        self.output, self._collector = output, None
        self._call.ended(self)


class Call:
    """Every sample of one call. Written by the thread that holds the baton; read by the caller's, after `done`.

    single: one prompt was given, not a list.   n: samples a prompt; 1 gives Outputs, more give lists of them.
    streaming: `deltas` are kept.   listener: called by the baton's thread whenever there is something new; must be quick and must not block.
    progress: called with (ended samples, all samples) by the baton's thread.
    """

    def __init__(self, *, single: bool, n: int, on_error: OnError, progress: Callable[[int, int], None] | None = None) -> None:
        self.single, self.n, self.on_error, self.streaming = single, n, on_error, False
        self.samples: list[Sample] = []
        self.deltas: deque[Delta] = deque()
        self.listener: Callable[[], None] | None = None
        self._progress = progress
        self._open = 0
        self._error: Exception | None = None
        self._raised: BaseException | None = None  # by `progress`

    def add(self, number: int, sample: int, request: Request, collector: Collector) -> None:
        self.samples.append(Sample(self, number, sample, request, collector))
        self._open += 1

    def add_bad(self, number: int) -> list[Sample]:
        """A prompt that never became a request, under on_error="return". To be failed once all prompts are known."""
        bad = [Sample(self, number, sample, None, None) for sample in range(self.n)]
        self.samples += bad
        self._open += self.n
        return bad

    # ---- for the facades ------------------------------------------------------------------------------------------------

    def entries(self) -> list[tuple[Request, Sink]]:
        return [(s.request, s) for s in self.samples if s.request is not None]

    def live_ids(self) -> list[str]:
        return [s.request.id for s in self.samples if s.request is not None and not s.over]

    def done(self) -> bool:
        """Nothing more to wait for: all ended, or one failed and the call is to raise."""
        return self._open == 0 or self._raised is not None or (self._error is not None and self.on_error == "raise")

    def stirred(self) -> bool:
        """For a stream: a delta is there, or none will come."""
        return bool(self.deltas) or self.done()

    def failure(self) -> BaseException | None:
        """What the call must raise: of several failures, that of the first prompt."""
        if self._raised is not None:
            return self._raised
        if self._error is None or self.on_error == "return":
            return None
        if isinstance(self._error, RequestTimeoutError):
            return self._error
        first = next((s for s in self.samples if s.error is not None), None)
        if first is None or first.error is None:
            return self._error
        return first.error if self.single else _of_prompt(first.error, first.number, self._num_prompts())

    def result(self) -> Any:
        """Output, list of them for n > 1; for a list of prompts, a list of that. Raises what `failure` says."""
        error = self.failure()
        if error is not None:
            raise error
        by_prompt: list[list[Output]] = [[] for _ in range(self._num_prompts())]
        for s in self.samples:
            assert s.output is not None, "result() of a call that is not done"
            by_prompt[s.number].append(s.output)
        shaped: list[Any] = [outputs if self.n > 1 else outputs[0] for outputs in by_prompt]
        return shaped[0] if self.single else shaped

    def outputs(self) -> list[Output]:
        return [s.output for s in self.samples if s.output is not None]

    def time_out(self, seconds: float, live_ids: Sequence[str]) -> None:
        """The deadline passed with these requests unfinished; they have been aborted."""
        late = set(live_ids)
        error = RequestTimeoutError(
            f"{len(late)} of {len(self.samples)} outputs were unfinished after timeout={seconds:g} s, and were aborted. "
            "Raise timeout, or ask for fewer tokens.",
            param="timeout",
        )
        self._error = self._error or error
        for s in self.samples:  # one may have ended in the very step in which the time was up: that one stays as it is
            if s.request is not None and s.request.id in late and s.output is not None and s.output.finish_reason == "abort":
                s.output = msgspec.structs.replace(s.output, error=error)

    # ---- for its samples ------------------------------------------------------------------------------------------------

    def piece(self, piece: Delta | None) -> None:
        if self.streaming and piece is not None:
            self.deltas.append(piece)
        if self.listener is not None and (self.streaming or self.done()):
            self.listener()

    def ended(self, sample: Sample) -> None:
        self._open -= 1
        self._error = self._error or sample.error
        if self._progress is not None:
            try:
                self._progress(len(self.samples) - self._open, len(self.samples))
            except BaseException as error:  # the step that it interrupts is others' too: it surfaces in the call alone
                self._raised, self._progress = error, None
        if self.listener is not None and not self.streaming and self.done():
            self.listener()

    def _num_prompts(self) -> int:
        return self.samples[-1].number + 1 if self.samples else 0


class Verbs:
    """Makes Calls. Everything about the arguments is checked here, before anything reaches the engine.

    policy: the engine's, since only one of them knows priorities.
    """

    def __init__(self, text: TextSide, *, policy: str) -> None:
        self._text, self._policy = text, policy
        self._numbers = itertools.count()  # next() on it is atomic

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        priority: int = 0,
        namespace: str = "",
        progress: Callable[[int, int], None] | None = None,
        **constraint: Unpack[GrammarOptions],
    ) -> Call:
        single = is_one_prompt(prompt)
        prompts: Sequence[Any] = [prompt] if single else list(prompt)  # type: ignore[arg-type]
        return self._call(
            prompts, self.prompt_ids, sampling, single=single, n=n, on_error=on_error, priority=priority, namespace=namespace,
            progress=progress, grammar=grammar_spec(**constraint),
        )  # fmt: skip

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: Sampling | Sequence[Sampling] | None,
        *,
        n: int = 1,
        on_error: OnError = "raise",
        priority: int = 0,
        namespace: str = "",
        progress: Callable[[int, int], None] | None = None,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **constraint: Unpack[GrammarOptions],
    ) -> Call:
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
            raise InvalidRequestError(
                f'messages is a {type(messages).__name__}; expected a list such as [{{"role": "user", "content": "hi"}}].',
                param="messages",
            )
        single = not messages or not isinstance(messages[0], (list, tuple))
        conversations: Sequence[Any] = [messages] if single else messages
        return self._call(
            conversations, functools.partial(self.chat_ids, template=template, variables=variables, tools=tools), sampling, single=single, n=n, on_error=on_error, priority=priority, namespace=namespace,
            progress=progress, grammar=grammar_spec(**constraint),
        )  # fmt: skip

    def stream(self, verb: Literal["generate", "chat"], prompt: Any, sampling: Sampling | None, **options: Any) -> Call:
        """A call of that verb whose deltas are kept. Takes what the verb takes, but for one prompt only, and neither on_error nor
        progress: a stream raises its error, and its deltas are its progress.
        """
        for name in ("on_error", "progress"):
            if name in options:
                raise TypeError(f"a stream takes no {name}: it raises its error, and its deltas are its progress.")
        call = self.chat(prompt, sampling, **options) if verb == "chat" else self.generate(prompt, sampling, **options)
        if not call.single:
            what = "stream_chat takes one conversation" if verb == "chat" else "stream takes one prompt"
            raise InvalidRequestError(
                f"{what}, and this is a list of them. Use one stream each.", param="messages" if verb == "chat" else "prompt"
            )
        call.streaming = True
        return call

    def score(self, prompt: Prompt | Sequence[Prompt], from_position: int, top_logprobs: int, namespace: str) -> Call:
        if isinstance(from_position, bool) or not isinstance(from_position, int) or from_position < 0:
            raise InvalidRequestError(
                f"from_position is {from_position!r}; expected an index of the prompt.", param="from_position"
            )
        sampling = SamplingParams(
            max_tokens=0,
            temperature=0.0,
            prompt_logprobs=from_position,
            logprobs="model" if top_logprobs else None,
            top_logprobs=top_logprobs,
        )
        call = self.generate(prompt, sampling, namespace=namespace)
        for s in call.samples:
            assert s.request is not None
            if from_position >= len(s.request.token_ids):
                error = InvalidRequestError(
                    f"from_position is {from_position}, but the prompt has {len(s.request.token_ids)} tokens.",
                    param="from_position",
                )
                raise error if call.single else _of_prompt(error, s.number, len(call.samples))
        return call

    @staticmethod
    def scores(call: Call, from_position: int) -> Any:
        """The result of a `score` call: for each prompt, the entries of positions from_position ... of its prompt logprobs."""

        def entries(output: Output) -> list[TokenLogprob | None]:
            assert output.prompt_logprobs is not None
            return output.prompt_logprobs[from_position:]

        result = call.result()
        return entries(result) if call.single else [entries(output) for output in result]

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt: text is encoded (special tokens in it are parsed), ids are checked to be integers.

        Raises InvalidRequestError. Whether an id is of the vocabulary is the core's question.
        """
        ids = tuple(self._text.encode(prompt)) if isinstance(prompt, str) else _as_ids(prompt)
        if not ids:
            raise InvalidRequestError(
                "the prompt is empty: it has no tokens. Give at least one, such as the model's BOS.", param="prompt"
            )
        return ids

    def chat_ids(self, messages: Sequence[Message], **options: Any) -> tuple[int, ...]:
        """Token ids of a conversation. Raises InvalidRequestError that names the message."""
        return tuple(self._text.encode_chat(messages, **options))

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _call(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any], tuple[int, ...]],
        sampling: Sampling | Sequence[Sampling] | None,
        *,
        single: bool,
        n: int,
        on_error: OnError,
        priority: int,
        namespace: str,
        progress: Callable[[int, int], None] | None,
        grammar: GrammarSpec | None,
    ) -> Call:
        self._check(n, on_error, priority, namespace, progress)
        params = _sampling_of(sampling, len(prompts), single)
        call = Call(single=single, n=n, on_error=on_error, progress=progress)
        bad: list[tuple[Sample, PhloemError]] = []
        for number, prompt in enumerate(prompts):
            try:
                ids = encode(prompt)
            except PhloemError as error:
                if on_error == "raise":
                    raise error if single else _of_prompt(error, number, len(prompts)) from error
                bad += [(sample_of_it, error) for sample_of_it in call.add_bad(number)]
                continue
            group = f"g{next(self._numbers)}" if n > 1 else None
            for sample in range(n):
                request = Request(
                    id=f"r{next(self._numbers)}", token_ids=ids, sampling=without_ignored_stops(params[number], grammar), grammar=grammar,
                    namespace=namespace, group=group, sample=sample, priority=priority,
                )  # fmt: skip
                call.add(number, sample, request, self._text.collector(request))
        for sample_of_it, why in bad:
            sample_of_it.fail(why)
        return call

    def _check(self, n: int, on_error: str, priority: int, namespace: str, progress: object) -> None:
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
            raise InvalidRequestError(f"n is {n!r}; expected an integer from 1 to {MAX_N}.", param="n")
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error is {on_error!r}; expected 'raise' or 'return'.", param="on_error")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority is {priority!r}; expected an integer.", param="priority")
        if priority and self._policy != "priority":
            raise InvalidRequestError(
                f'priority is {priority}, but this engine runs policy="{self._policy}", which knows none. Create it with policy="priority".',
                param="priority",
            )
        if not isinstance(namespace, str):
            raise InvalidRequestError(f"namespace is {namespace!r}; expected a string.", param="namespace")
        if progress is not None and not callable(progress):
            raise InvalidRequestError(f"progress is {progress!r}; expected a function of (ended, all).", param="progress")


def check_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise InvalidRequestError(f"timeout is {timeout!r}; expected seconds above 0, or None.", param="timeout")
    return float(min(timeout, LONGEST_TIMEOUT))


def is_one_prompt(prompt: object) -> bool:
    """Text, an array, or a list of ids; a list of those, or an empty list, is a list of prompts."""
    if isinstance(prompt, str) or hasattr(prompt, "tolist"):
        return True
    if isinstance(prompt, (bytes, bytearray, memoryview, Mapping)) or not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"the prompt is a {type(prompt).__name__}; expected a string, a list of token ids, or a list of those.",
            param="prompt",
        )
    return len(prompt) > 0 and not _is_prompt_like(prompt[0])


def _is_prompt_like(item: object) -> bool:
    """An entry of a list of prompts, as opposed to an id (also a bad one, such as 1.5: `_as_ids` refuses it by name)."""
    return isinstance(item, (str, bytes, list, tuple, range, Mapping)) or getattr(item, "ndim", 0) > 0


def _as_ids(prompt: Any) -> tuple[int, ...]:
    if getattr(prompt, "ndim", 1) != 1:
        raise InvalidRequestError(
            f"the array of token ids has {prompt.ndim} dimensions; expected one. Pass a list of arrays for several prompts.",
            param="prompt",
        )
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, (bytes, bytearray, Mapping)) or not isinstance(values, Sequence):
        raise InvalidRequestError(
            f"the prompt is a {type(prompt).__name__}; expected a string or a list of token ids.", param="prompt"
        )
    if all(type(v) is int for v in values):
        return tuple(values)
    return tuple(_as_id(v, position) for position, v in enumerate(values))


def _as_id(value: Any, position: int) -> int:
    # True and 1.0 would pass as 1 here and there; a caller who sends them has mixed something up.
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise InvalidRequestError(
        f"the prompt holds {value!r} (a {type(value).__name__}) at position {position}; token ids are integers.", param="prompt"
    )


def _sampling_of(sampling: Sampling | Sequence[Sampling] | None, count: int, single: bool) -> list[SamplingParams]:
    if sampling is None:
        return [SamplingParams()] * count
    if isinstance(sampling, (SamplingParams, Mapping)):
        return [_one_sampling(sampling)] * count
    if not isinstance(sampling, (list, tuple)):
        raise InvalidRequestError(
            f"sampling is a {type(sampling).__name__}; expected SamplingParams, a mapping of its fields, or one of them a prompt.",
            param="sampling",
        )
    if single or len(sampling) != count:
        what = "a single prompt" if single else f"{count} prompts"
        raise InvalidRequestError(
            f"sampling has {len(sampling)} entries for {what}; expected one, or one a prompt.", param="sampling"
        )
    return [_one_sampling(s) for s in sampling]


def _one_sampling(sampling: Any) -> SamplingParams:
    if isinstance(sampling, SamplingParams):
        return sampling
    if not isinstance(sampling, Mapping):
        raise InvalidRequestError(
            f"sampling is {sampling!r}; expected SamplingParams or a mapping of its fields.", param="sampling"
        )
    known = SamplingParams.__struct_fields__
    for name in sampling:
        if name not in known:
            raise InvalidRequestError(
                f"there is no sampling field {name!r}. The fields are: {', '.join(known)}.", param=str(name)
            )
    return SamplingParams(**sampling)


def _of_prompt(error: Exception, number: int, count: int) -> Exception:
    """The same error, saying which prompt of the list it concerns."""
    if not isinstance(error, PhloemError):
        return error
    named = type(error)(f"prompt {number} of {count} (counted from 0): {error.message}", param=error.param, code=error.code)
    named.__cause__ = error.__cause__
    return named
