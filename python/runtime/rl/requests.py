"""The requests of one rollout and what came of them: prompts and groups in, Samples out, one for each, in order (rl L7, L9, L10)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from phloem.runtime.engine.client import Sink
from phloem.runtime.errors import InvalidRequestError, StaleVersionError
from phloem.runtime.request import GrammarSpec, Request, SamplingParams
from phloem.runtime.rl.collect import SampleSink
from phloem.runtime.rl.sample import RolloutBatch, Sample

__all__ = ["Rollouts", "as_sampling"]

MAX_N = 4096


class Rollouts:
    """Written by the thread that steps the engine, read by the one that waits."""

    def __init__(self, sinks: list[SampleSink], kept: dict[int, Sample], on_error: str, min_groups: int | None) -> None:
        """kept: place in the batch -> a Sample that was complete already."""
        self._sinks, self._kept, self._on_error, self._min_groups = sinks, kept, on_error, min_groups
        self._open = len(sinks)
        self._failed = False
        self._waiting: dict[int | str, int] = {}
        for sink in sinks:
            sink._at_end = self._ended
            self._waiting[sink._group] = self._waiting.get(sink._group, 0) + 1
        self._whole = 0
        self._changed = threading.Condition()
        self._listener: Callable[[], None] | None = None
        self.started = time.monotonic()

    @classmethod
    def of(
        cls, prompts: Any, sampling: SamplingParams, n: int, grammar: GrammarSpec | None, seed: int | None, group_ids: Sequence[int | str] | None,
        *, on_error: str, min_groups: int | None, version: int, max_staleness: int | None, name: Callable[[], str],
        collector: Callable[[Request], Any] | None,
    ) -> Rollouts:  # fmt: skip
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
            raise InvalidRequestError(f"n is {n!r}; expected an integer from 1 to {MAX_N}.", param="n")
        if on_error not in ("raise", "return"):
            raise InvalidRequestError(f"on_error is {on_error!r}; expected 'raise' or 'return'.", param="on_error")
        if min_groups is not None and (isinstance(min_groups, bool) or not isinstance(min_groups, int) or min_groups < 1):
            raise InvalidRequestError(f"min_groups is {min_groups!r}; expected a positive integer.", param="min_groups")
        if isinstance(prompts, str) or not isinstance(prompts, Sequence) or not prompts or isinstance(prompts[0], int):
            raise InvalidRequestError("a rollout takes a list of prompts, each a list of token ids.", param="prompts")
        if group_ids is not None and len(group_ids) != len(prompts):
            raise InvalidRequestError(
                f"{len(group_ids)} group_ids for {len(prompts)} prompts; give one a prompt.", param="group_ids"
            )
        sampling = msgspec.structs.replace(sampling, seed=seed if seed is not None else sampling.seed)
        sinks, kept = list[SampleSink](), dict[int, Sample]()
        counts: dict[int | str, int] = {}
        place = group = -1
        before: Any = None
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, Sample):
                place += 1
                if n != 1:
                    raise InvalidRequestError("a Sample goes on alone: n must be 1.", param="n")
                if max_staleness is not None and version - prompt.version_at_submit > max_staleness:
                    raise StaleVersionError(
                        f"sample {i} began under version {prompt.version_at_submit}, which is {version - prompt.version_at_submit} before "
                        f"the current one; max_staleness is {max_staleness}. Draw it anew."
                    )
                if not prompt.partial or prompt.error is not None:
                    kept[place] = prompt
                    continue
                request = Request(
                    id=name(), token_ids=tuple(prompt.token_ids), num_output=len(prompt.output_ids), grammar=grammar,
                    sampling=msgspec.structs.replace(sampling, seed=prompt.seed), sample=prompt.sample_index,
                )  # fmt: skip
                sinks.append(
                    SampleSink(
                        request, prompt.group_id, version, before=prompt, collector=_replayed(collector, request, prompt)
                    )
                )
                continue
            ids = tuple(int(t) for t in (prompt.tolist() if hasattr(prompt, "tolist") else prompt))
            if group_ids is not None:
                key: int | str = group_ids[i]
            else:
                group += ids != before
                key, before = group, ids
            first = counts.get(key, 0)
            counts[key] = first + n
            for k in range(n):
                place += 1
                request = Request(
                    id=name(), token_ids=ids, sampling=sampling, grammar=grammar, group=None, sample=first + k,
                )  # fmt: skip
                sinks.append(SampleSink(request, key, version, collector=collector(request) if collector is not None else None))
        _group(sinks)
        return cls(sinks, kept, on_error, min_groups)

    # ---- for whoever waits ---------------------------------------------------------------------------------------------

    def entries(self) -> list[tuple[Request, Sink]]:
        return [(sink.request, sink) for sink in self._sinks]

    def live_ids(self) -> list[str]:
        return [sink.request.id for sink in self._sinks if not sink.over]

    def done(self) -> bool:
        return self._open == 0

    def enough(self) -> bool:
        """Done, or one failed and the rollout is to raise, or as many groups as were asked for are complete."""
        wanted = self._min_groups is not None and self._whole >= self._min_groups
        return self._open == 0 or wanted or (self._failed and self._on_error == "raise")

    def wait(self, seconds: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(self.done, seconds)

    def on_done(self, listener: Callable[[], None]) -> None:
        """Called once, by the thread that steps, or at once."""
        with self._changed:
            if self._open:
                self._listener = listener
                return
        listener()

    def batch(self) -> RolloutBatch:
        """Every Sample in its place. Raises the first error under on_error="raise"."""
        found = [sink.sample for sink in self._sinks if sink.sample is not None]
        if self._on_error == "raise":
            for sample in found:
                if sample.error is not None:
                    raise sample.error
        rest, samples = iter(found), list[Sample]()
        for place in range(len(self._sinks) + len(self._kept)):
            samples.append(self._kept[place] if place in self._kept else next(rest))
        tokens = sum(len(s.output_ids) for s in found)
        seconds = time.monotonic() - self.started
        return RolloutBatch(
            samples, {"seconds": seconds, "output_tokens": tokens, "cached_tokens": sum(s.cached_tokens for s in found)}
        )

    def _ended(self, sink: SampleSink) -> None:
        sample = sink.sample
        assert sample is not None
        with self._changed:
            self._open -= 1
            self._failed = self._failed or sample.error is not None
            self._waiting[sink._group] -= 1
            self._whole += self._waiting[sink._group] == 0
            listener = self._listener if self._open == 0 else None
            self._changed.notify_all()
        if listener is not None:
            listener()


def as_sampling(sampling: Any, off_policy: bool) -> SamplingParams:
    """Checked, and asking for both logprobs. Raises InvalidRequestError for what no trainer recomputes (rl L5)."""
    if sampling is None:
        sampling = SamplingParams()
    elif isinstance(sampling, Mapping):
        sampling = SamplingParams(**sampling)
    elif not isinstance(sampling, SamplingParams):
        raise InvalidRequestError(
            f"sampling is a {type(sampling).__name__}; expected SamplingParams or a mapping.", param="sampling"
        )
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {}}
    for name, value in neutral.items():
        if getattr(sampling, name) != value and not off_policy:
            raise InvalidRequestError(
                f"{name} changes what is drawn in a way that no trainer recomputes, so the logprobs would be of another policy. "
                "Leave it neutral, or pass off_policy=True.",
                param=name,
            )
    if sampling.prompt_logprobs is not None or sampling.top_logprobs:
        raise InvalidRequestError("a rollout has no prompt_logprobs and top_logprobs; use score().", param="prompt_logprobs")
    both: SamplingParams = msgspec.structs.replace(sampling, logprobs="both")
    return both


def _group(sinks: list[SampleSink]) -> None:
    """Samples of one prompt that begin together share its prefill (engine S4)."""
    by_prompt: dict[tuple[int | str, tuple[int, ...]], list[SampleSink]] = {}
    for sink in sinks:
        if not sink.request.num_output:
            by_prompt.setdefault((sink._group, sink.request.token_ids), []).append(sink)
    for members in by_prompt.values():
        if len(members) > 1:
            name = f"group of {members[0].request.id}"
            for sink in members:
                sink.request = msgspec.structs.replace(sink.request, group=name)


def _replayed(collector: Callable[[Request], Any] | None, request: Request, before: Sample) -> Any:
    """A Collector that knows the text so far, so that a stop string may lie across the cut."""
    if collector is None:
        return None
    from phloem.runtime.request import OutputDelta

    made = collector(
        msgspec.structs.replace(
            request,
            token_ids=tuple(before.prompt_ids),
            num_output=0,
            sampling=msgspec.structs.replace(request.sampling, logprobs=None),
        )
    )
    made.push(OutputDelta(request.id, list(before.output_ids)))
    return made
