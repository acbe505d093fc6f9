"""One request's deltas from the core, made into a Sample: ids, both logprobs, supports and version spans, never cut by text.

Where the sampling has stop strings a Collector finds them in the text; the ids keep the token that completed one (rl L6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phloem.runtime.errors import from_wire
from phloem.runtime.request import OutputDelta, Request, Support, TokenLogprob
from phloem.runtime.rl.sample import Sample, Span

__all__ = ["SampleSink"]


class SampleSink:
    """The sink of one request. `sample`: the result, once the request has ended.

    before: the partial Sample that this request goes on with, or None.   matcher: a Collector, if there are stop strings.
    """

    __slots__ = (
        "_at_end",
        "_before",
        "_collector",
        "_group",
        "_ids",
        "_logprobs",
        "_spans",
        "_version",
        "prompt_logprobs",
        "request",
        "sample",
    )

    def __init__(
        self, request: Request, group: int | str, version: int, *, before: Sample | None = None, collector: Any = None,
        at_end: Callable[[SampleSink], None] | None = None,
    ) -> None:  # fmt: skip
        self.request, self._group, self._version, self._before = request, group, version, before
        self._collector, self._at_end = collector, at_end
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._spans: list[Span] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.sample: Sample | None = None

    @property
    def over(self) -> bool:
        return self.sample is not None

    def push(self, delta: OutputDelta) -> int | None:
        if self.sample is not None:
            return None
        self.prompt_logprobs += delta.prompt_logprobs
        stopped, taken = None, len(delta.token_ids)
        if self._collector is not None:
            self._collector.push(delta)
            stopped = self._collector.stopped_at
            taken = min(taken, len(self._collector.token_ids) - len(self._ids))
        if taken:
            start = len(self._ids)
            self._ids += delta.token_ids[:taken]
            self._logprobs += delta.logprobs[:taken]
            last = self._spans[-1] if self._spans else None
            if last is not None and last.version == delta.weights_version:
                self._spans[-1] = Span(last.start, start + taken, last.version)
            else:
                self._spans.append(Span(start, start + taken, delta.weights_version))
        if delta.finish_reason is not None:
            error = None
            if delta.error is not None and not (self._collector is not None and stopped is not None):
                error = from_wire(delta.error.name, delta.error.message, delta.error.param, delta.error.code)
            self._end(delta, "stop_string" if stopped is not None else delta.finish_reason, error)
        return stopped

    def fail(self, error: Exception) -> None:
        if self.sample is None:
            self._end(OutputDelta(self.request.id), "error", error)

    def _end(self, delta: OutputDelta, finish: Any, error: Exception | None) -> None:
        request, old = self.request, self._before
        seed = delta.seed if delta.seed or request.sampling.seed is None else request.sampling.seed
        logprobs = self._logprobs
        supports: list[Support | None] = [lp.support for lp in logprobs]
        prompt = list(request.token_ids)
        sample = Sample(
            prompt_ids=prompt[: len(prompt) - request.num_output],
            output_ids=self._ids,
            logprobs_sampled=[lp.sampled if lp.sampled is not None else 0.0 for lp in logprobs],
            logprobs_model=[lp.logprob for lp in logprobs],
            support=supports,
            support_logmass=[lp.logmass or 0.0 for lp in logprobs],
            forced=[s is not None and s.kind == "ids" and len(s.data) == 4 for s in supports],
            loss_mask=[1] * len(self._ids),
            finish=finish,
            spans=tuple(self._spans),
            version_at_submit=self._version,
            kv_mixed=delta.kv_mixed,
            group_id=self._group,
            sample_index=request.sample,
            seed=seed,
            temperature=request.sampling.temperature,
            cached_tokens=delta.usage.cached_tokens if delta.usage is not None else 0,
            partial=finish == "abort",
            error=error,
        )
        self.sample = sample if old is None else joined(old, sample)
        if self._at_end is not None:
            self._at_end(self)


def joined(old: Sample, new: Sample) -> Sample:
    """The whole of a sample that was cut: what came before, and what was drawn since."""
    at = len(old.output_ids)
    for name in ("output_ids", "logprobs_sampled", "logprobs_model", "support", "support_logmass", "forced", "loss_mask"):
        setattr(new, name, [*getattr(old, name), *getattr(new, name)])
    spans = list(old.spans)
    for span in new.spans:
        moved = Span(span.start + at, span.end + at, span.version)
        if spans and spans[-1].version == moved.version:
            spans[-1] = Span(spans[-1].start, moved.end, moved.version)
        else:
            spans.append(moved)
    new.spans, new.prompt_ids = tuple(spans), old.prompt_ids
    new.version_at_submit, new.cached_tokens = old.version_at_submit, old.cached_tokens
    new.kv_mixed = new.kv_mixed or old.kv_mixed
    return new
