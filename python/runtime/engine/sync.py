"""Engine: the blocking facade. Submits, works until its own results are there, returns them. Owns no text, policy or threads.

engine = Engine()                          the caller's own thread runs the model (client.py: the baton)
out    = engine.generate("…", sampling)    Output · n > 1: a list of them · a list of prompts: a list of that
for delta in engine.stream("…"): …         the model runs while the loop asks for more
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from phloem.runtime.config import EngineConfig, Resolved, make_config
from phloem.runtime.engine.build import EngineOptions, Parts, build
from phloem.runtime.engine.calls import (
    Call,
    CallOptions,
    ChatOptions,
    Conversations,
    Message,
    Prompt,
    Prompts,
    Sampling,
    SamplingOfMany,
    Verbs,
    check_timeout,
)
from phloem.runtime.engine.client import EngineClient, InprocClient
from phloem.runtime.engine.constraint import GrammarOptions
from phloem.runtime.engine.select import ChoiceScores, Method, Plan, Selection, plan_choices
from phloem.runtime.engine.textside import Side
from phloem.runtime.errors import RequestTimeoutError
from phloem.runtime.request import Delta, Output, TokenLogprob

if TYPE_CHECKING:
    from phloem.runtime.engine.core import EngineStats, Explanation
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Engine", "Stream"]


class Engine:
    """A model, its KV pool and its radix tree, in this process.

    model: None is the embedded SmolLM2-135M-Instruct; else a directory, a .gguf file, or org/name.
    options: the other fields of EngineConfig, checked: ConfigError names a wrong one.   on_load: told of each loading stage.

    A prompt is text (special tokens in it are parsed) or a list, tuple or integer array of token ids. A list of prompts gives a
    list of results in order; `[]` is a list of no prompts and gives `[]`. Without `sampling`, SamplingParams() holds:
    temperature 1.0 and at most 128 tokens, whatever the model's generation_config.json proposes.

    May be used from several threads at once, and beside other engines. Not in a forked child: there every verb raises
    EngineClosedError. Ctrl-C waits for the end of the running step, aborts the requests of the call, and leaves the engine usable.
    Raises ConfigError, ModelLoadError, UnsupportedModelError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        on_load: Callable[[str], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        parts = build(make_config(model, **options), on_load)  # type: ignore[arg-type]
        self._set_up(InprocClient(parts.core, on_close=parts.on_close), parts)

    @classmethod
    def from_parts(cls, parts: Parts) -> Engine:
        """An engine over ready-made parts: tests use fakes, embedders their own executor."""
        return cls.from_client(InprocClient(parts.core, on_close=parts.on_close), parts)

    @classmethod
    def from_client(cls, client: EngineClient, side: Side) -> Engine:
        """An engine over a client of one's own, which it then owns: a ProcessClient, say, whose core is in another process."""
        self = cls.__new__(cls)
        self._set_up(client, side)
        return self

    def _set_up(self, client: EngineClient, side: Side) -> None:
        self._client = client
        # Holds the client, not the engine: a forgotten engine is closed by the garbage collector, at the latest at exit.
        self._finalizer = weakref.finalize(self, self._client.close)
        self._verbs = Verbs(side.text, policy=side.config.policy)
        self.config: EngineConfig = side.config
        self.resolved: Resolved = side.resolved
        self.tokenizer: Tokenizer = side.tokenizer

    # ---- generating -----------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: Literal[1] = 1, **options: Unpack[CallOptions]
    ) -> Output: ...
    @overload
    def generate(
        self, prompt: Prompt, sampling: Sampling | None = None, *, n: int, **options: Unpack[CallOptions]
    ) -> list[Output]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompts, sampling: SamplingOfMany = None, *, n: Literal[1] = 1, **options: Unpack[CallOptions]
    ) -> list[Output]: ...
    @overload
    def generate(
        self, prompt: Prompts, sampling: SamplingOfMany = None, *, n: int, **options: Unpack[CallOptions]
    ) -> list[list[Output]]: ...
    def generate(self, prompt: Any, sampling: Any = None, *, n: int = 1, timeout: float | None = None, **options: Any) -> Any:
        """Generate. One prompt gives an Output, n > 1 a list of n; a list of prompts gives a list of that, in order.

        sampling: SamplingParams, a mapping of its fields, or for a list of prompts a list, one a prompt.
        n: samples a prompt; they share its prefill and differ, also with one seed.   options: see CallOptions.
        Raises InvalidRequestError, ContextLengthError, CapacityError, RequestTimeoutError, EngineClosedError, EngineDeadError.
        """
        self._client.ensure_usable()
        return self._finish(self._verbs.generate(prompt, sampling, n=n, **options), timeout).result()

    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        n: Literal[1] = 1,
        **options: Unpack[ChatOptions],
    ) -> Output: ...
    @overload
    def chat(
        self, messages: Sequence[Message], sampling: Sampling | None = None, *, n: int, **options: Unpack[ChatOptions]
    ) -> list[Output]: ...
    @overload
    def chat(  # type: ignore[overload-overlap]
        self, messages: Conversations, sampling: SamplingOfMany = None, *, n: Literal[1] = 1, **options: Unpack[ChatOptions]
    ) -> list[Output]: ...
    @overload
    def chat(
        self, messages: Conversations, sampling: SamplingOfMany = None, *, n: int, **options: Unpack[ChatOptions]
    ) -> list[list[Output]]: ...
    def chat(self, messages: Any, sampling: Any = None, *, n: int = 1, timeout: float | None = None, **options: Any) -> Any:
        """Generate the assistant's next message, through the model's chat template. Special tokens in contents stay text.

        messages: [{"role": "user", "content": "hi"}, …], or a list of such conversations. The rest as `generate`.
        """
        self._client.ensure_usable()
        return self._finish(self._verbs.chat(messages, sampling, n=n, **options), timeout).result()

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        timeout: float | None = None,
        priority: int = 0,
        namespace: str = "",
        **constraint: Unpack[GrammarOptions],
    ) -> Stream:
        """Generate piece by piece: an iterator of Deltas. The request is checked and queued at once.

        Closing the iterator, or dropping it, aborts the request. With n > 1 the deltas of the samples come interleaved, told apart
        by `delta.index`. The pieces of a sample add up to its Output, `stream.output` in the end.
        """
        self._client.ensure_usable()
        call = self._verbs.stream("generate", prompt, sampling, n=n, priority=priority, namespace=namespace, **constraint)
        return Stream(self, call, timeout)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        n: int = 1,
        timeout: float | None = None,
        priority: int = 0,
        namespace: str = "",
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **constraint: Unpack[GrammarOptions],
    ) -> Stream:
        """`chat`, piece by piece."""
        self._client.ensure_usable()
        call = self._verbs.stream(
            "chat", messages, sampling, n=n, priority=priority, namespace=namespace, template=template, variables=variables, tools=tools,
            **constraint,
        )  # fmt: skip
        return Stream(self, call, timeout)

    @overload
    def score(
        self,
        prompt: Prompt,
        from_position: int = 0,
        *,
        top_logprobs: int = 0,
        namespace: str = "",
        timeout: float | None = None,
    ) -> list[TokenLogprob | None]: ...
    @overload
    def score(
        self,
        prompt: Prompts,
        from_position: int = 0,
        *,
        top_logprobs: int = 0,
        namespace: str = "",
        timeout: float | None = None,
    ) -> list[list[TokenLogprob | None]]: ...
    def score(
        self, prompt: Any, from_position: int = 0, *, top_logprobs: int = 0, namespace: str = "", timeout: float | None = None
    ) -> Any:
        """Logprobs of the prompt's own tokens, raw model distribution, one entry for each position from `from_position` on.

        Position 0 has no token before it: its entry is None. Nothing is generated. A list of prompts gives a list.
        """
        self._client.ensure_usable()
        call = self._finish(self._verbs.score(prompt, from_position, top_logprobs, namespace), timeout)
        return self._verbs.scores(call, from_position)

    def select(
        self,
        prompt: Prompt,
        choices: Sequence[str],
        *,
        method: Method = "token_length_normalized",
        namespace: str = "",
        timeout: float | None = None,
    ) -> Selection:
        """The likeliest of some texts behind the prompt, with every choice's score and token logprobs. Nothing is generated.

        method: "token_length_normalized" (mean logprob), "greedy_token_selection" (best first token, then the best second, …),
        "unconditional_likelihood_normalized" (less what the choice has without the prompt), or "sum" (the log-probability).
        Choices are tokenised with the prompt, and scored from where they part from it. Raises InvalidRequestError.
        """
        plan, found = self._score_choices(prompt, choices, method, namespace, timeout)
        return plan.select(found)

    def score_choices(
        self,
        prompt: Prompt,
        choices: Sequence[str],
        *,
        method: Method = "token_length_normalized",
        namespace: str = "",
        timeout: float | None = None,
    ) -> ChoiceScores:
        """As `select`, without choosing."""
        return self._score_choices(prompt, choices, method, namespace, timeout)[1]

    def _score_choices(
        self, prompt: Prompt, choices: Sequence[str], method: Method, namespace: str, timeout: float | None
    ) -> tuple[Plan, ChoiceScores]:
        self._client.ensure_usable()
        plan = plan_choices(self.tokenizer, prompt, choices, method, self._verbs.prompt_ids(prompt))
        paths = self.score(plan.paths, plan.start, namespace=namespace, timeout=timeout)
        alone = self.score(plan.alone, namespace=namespace, timeout=timeout) if plan.alone else []
        return plan, plan.scores(paths, alone)

    # ---- about the engine -----------------------------------------------------------------------------------------------

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The token ids that `chat` would send: the model's template, ready for the assistant's answer."""
        return list(self._verbs.chat_ids(messages, template=template, variables=variables, tools=tools))

    def stats(self) -> EngineStats:
        """Counters since the start, and what is held now."""
        stats: EngineStats = self._control("stats")
        return stats

    def explain(self, prompt: Prompt, *, namespace: str = "") -> Explanation:
        """How many tokens of this prompt the cache would give, through which nodes, and how long those have been idle (R9)."""
        explanation: Explanation = self._control("explain", self._verbs.prompt_ids(prompt), namespace)
        return explanation

    def flush(self) -> int:
        """Forget every cached prefix; how many pages that freed. Raises EngineBusyError while requests run."""
        freed: int = self._control("flush")
        return freed

    def check(self) -> None:
        """Verify that each page has exactly one owner (P2) and the tree is sound. AssertionError says what is not."""
        self._control("check")

    def close(self) -> None:
        """Free the model and the pool. What is pending in other threads fails with EngineClosedError. May be called again."""
        self._client.close()
        self._finalizer.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<phloem.Engine {self.config.model or 'embedded model'} on {self.resolved.device}>"

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _finish(self, call: Call, timeout: float | None) -> Call:
        """Run a call to its end: all of it done, failed, or out of time."""
        seconds = check_timeout(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            self._client.submit(call.entries(), atomic=call.on_error == "raise")
            in_time = self._client.run(call.done, deadline)
        finally:
            live = call.live_ids()  # interrupted, out of time, or the others of a call that is to raise
            self._client.abandon(live)
        if not in_time and seconds is not None:
            call.time_out(seconds, live)
        return call

    def _control(self, verb: Literal["stats", "explain", "flush", "check"], *args: Any) -> Any:
        future = self._client.call(verb, *args)
        self._client.run(future.done)
        return future.result()


class Stream(Iterator[Delta]):
    """Deltas of one `stream` call. Also a context manager; `close` aborts what is unfinished."""

    _over = True  # until queued: __del__ runs also when __init__ was interrupted before its first line

    def __init__(self, engine: Engine, call: Call, timeout: float | None) -> None:
        self._engine, self._client, self._call = engine, engine._client, call
        self._seconds = check_timeout(timeout)
        self._deadline = None if self._seconds is None else time.monotonic() + self._seconds
        self._over = False
        try:
            # What is refused is refused here, like in `generate`, and not at the first `next`.
            self._client.run(self._client.submit(call.entries(), atomic=True).done)
        except BaseException:
            self.close()
            raise
        self._raise_failure()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        if self._over:
            raise StopIteration
        try:
            in_time = self._client.run(self._call.stirred, self._deadline)
        except BaseException:
            self.close()
            raise
        if not in_time and self._seconds is not None:
            live = self._call.live_ids()
            self.close()
            self._call.time_out(self._seconds, live)
            raise RequestTimeoutError(
                f"the stream was not over after timeout={self._seconds:g} s, and was aborted.", param="timeout"
            )
        if self._call.deltas:
            return self._call.deltas.popleft()
        self.close()
        self._raise_failure()
        raise StopIteration

    def _raise_failure(self) -> None:
        error = self._call.failure()
        if error is not None:
            self.close()
            raise error

    def close(self) -> None:
        """Abort what is unfinished and free it. May be called again."""
        if not self._over:
            self._client.abandon(self._call.live_ids())
            self._over = True  # not before: what Ctrl-C keeps from being abandoned here, __del__ abandons

    @property
    def outputs(self) -> list[Output]:
        """The Outputs of the n samples, in order. Raises RuntimeError before the end of the stream."""
        if self._call.live_ids():
            raise RuntimeError("the stream is not over; read it to its end, or close it, before asking for its outputs.")
        return self._call.outputs()

    @property
    def output(self) -> Output:
        """The whole Output (of sample 0, if there are more). Raises RuntimeError before the end of the stream."""
        return self.outputs[0]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
