"""One request's deltas from the core, made into text: detokenised, cut at stop strings, with logprobs and usage.

    core --OutputDelta(ids)--> Detokenizer --text--> StopMatcher --certain text--> Delta     (a stream's piece)
                                                                                `-> Output    (the whole, at the end)

A stop string is found here and nowhere else. The output ends with the token that completes it: `stopped_at` tells the
caller to tell the core; what the core drew meanwhile is dropped, and the core's last delta, with the usage, ends the
request like any other. Pure: no clock, no thread, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phloem.runtime.errors import PhloemError, from_wire
from phloem.runtime.request import Delta, FinishReason, Output, OutputDelta, Request, TokenLogprob, Usage
from phloem.runtime.text.stop import StopMatcher

if TYPE_CHECKING:
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Collector"]


class Collector:
    """Feed it every OutputDelta of `request`, in order, until `output` is there.

    stopped_at: None, or the number of output tokens with which a stop string was completed. Set by the `push` that finds
        it; the caller then has the core end the request there. Deltas still come until the core's last one.
    output: the result, once the last delta was pushed.
    num_dropped: tokens that the core drew behind the stop; in no Output and no usage.
    """

    __slots__ = (
        "_detokenizer",
        "_prompt_logprobs",
        "_request",
        "_texts",
        "_unsent_ids",
        "_unsent_logprobs",
        "_visible",
        "_wants_logprobs",
        "logprobs",
        "matcher",
        "num_dropped",
        "output",
        "stopped_at",
        "token_ids",
    )

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._request = request
        # Behind a prompt that shows text, the output's first blank is part of the text (SentencePiece would drop it).
        hidden = tokenizer.special_ids
        continues = any(i not in hidden for i in request.token_ids)
        self._detokenizer = tokenizer.detokenizer(sampling.skip_special_tokens, continuation=continues)
        self.matcher: StopMatcher | None = None
        if sampling.stop:
            self.matcher = StopMatcher(sampling.stop, min_tokens=sampling.min_tokens, keep_stop=sampling.keep_stop)
        self._wants_logprobs = sampling.logprobs is not None
        self._prompt_logprobs: list[TokenLogprob] = []
        self._texts: list[str] = []
        self._unsent_ids: list[int] = []
        self._unsent_logprobs: list[TokenLogprob] = []
        self._visible = sampling.keep_stop or not sampling.skip_special_tokens
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.stopped_at: int | None = None
        self.num_dropped = 0
        self.output: Output | None = None

    def push(self, delta: OutputDelta) -> Delta | None:
        """The new text and the tokens behind it, or None while there is no text to show. The last delta is always shown."""
        assert self.output is None, f"request {self._request.id} got a delta after its last one"
        assert delta.request_id == self._request.id, f"{delta.request_id} is not {self._request.id}"
        if delta.prompt_logprobs:
            self._prompt_logprobs += delta.prompt_logprobs
        text = self._take(delta) if delta.token_ids else ""
        if delta.finish_reason is not None:
            return self._finish(delta, text)
        if not text:
            return None
        self._texts.append(text)
        return self._piece(text)

    def fail(self, error: PhloemError) -> Delta:
        """End the request here and now: the engine that would have sent its last delta is gone."""
        assert self.output is None, f"request {self._request.id} has ended already"
        usage = Usage(prompt_tokens=len(self._request.token_ids), completion_tokens=len(self.token_ids))
        return self._close("error", self._flush(), OutputDelta(self._request.id, usage=usage), error)

    def _take(self, delta: OutputDelta) -> str:
        """Append the delta's tokens, as far as a stop string lets them in; returns the text that is certain."""
        ids = delta.token_ids
        if self.stopped_at is not None:
            self.num_dropped += len(ids)
            return ""
        shown: Sequence[int] = ids
        if not self._visible and delta.finish_reason in ("eos", "stop_token"):
            shown = ids[:-1]  # the token that ended it counts, and is not shown
        if self.matcher is None:
            text, num_taken = self._detokenizer.push(shown), len(ids)
        else:
            text, num_taken = self._match(shown, len(ids), self.matcher)
        self.token_ids += ids[:num_taken]
        self._unsent_ids += ids[:num_taken]
        if self._wants_logprobs:
            self.logprobs += delta.logprobs[:num_taken]
            self._unsent_logprobs += delta.logprobs[:num_taken]
        self.num_dropped += len(ids) - num_taken
        return text

    def _match(self, shown: Sequence[int], num_ids: int, matcher: StopMatcher) -> tuple[str, int]:
        """Token by token, since the output ends at the very token that completes a stop."""
        texts, count = [], len(self.token_ids)
        for n, token_id in enumerate(shown, start=1):
            text = self._detokenizer.push((token_id,))
            if text:
                texts.append(matcher.push(text, count + n))
                if matcher.matched is not None:
                    self.stopped_at = count + n
                    return "".join(texts), n
        return "".join(texts), num_ids

    def _flush(self) -> str:
        """The text still held: it belongs to the output whenever no stop string ended it."""
        if self.stopped_at is not None:
            return ""
        rest = self._detokenizer.flush()
        if self.matcher is None:
            return rest
        text = self.matcher.push(rest, len(self.token_ids)) if rest else ""
        if self.matcher.matched is not None:
            self.stopped_at = len(self.token_ids)
            return text
        return text + self.matcher.flush()

    def _finish(self, delta: OutputDelta, text: str) -> Delta:
        assert delta.finish_reason is not None
        text += self._flush()
        error = None
        if delta.error is not None:
            error = from_wire(delta.error.name, delta.error.message, delta.error.param, delta.error.code)
        return self._close("error" if error is not None else delta.finish_reason, text, delta, error)

    def _close(self, reason: FinishReason, text: str, delta: OutputDelta, error: PhloemError | None) -> Delta:
        usage = delta.usage if delta.usage is not None else Usage(prompt_tokens=len(self._request.token_ids))
        if self.stopped_at is not None:
            # Complete before whatever came behind it: a failure or an abort of a token that is dropped changes nothing.
            reason, error = "stop_string", None
        num = len(self.token_ids)
        # Whether the core drew beyond a stop string by then is chance, and no business of the output's.
        dropped = 0 if self.stopped_at is not None else usage.dropped_tokens
        usage = Usage(usage.prompt_tokens, usage.cached_tokens, num, min(usage.forced_tokens, num), dropped)
        if text:
            self._texts.append(text)
        stop_reason: str | int | None = None
        if reason == "stop_string":
            assert self.matcher is not None
            stop_reason = self.matcher.matched
        elif reason == "stop_token":
            stop_reason = self.token_ids[-1]
        self.output = Output(
            text="".join(self._texts),
            token_ids=self.token_ids,
            finish_reason=reason,
            logprobs=self.logprobs if self._wants_logprobs else None,
            prompt_logprobs=self.aligned_prompt_logprobs(),
            usage=usage,
            seed=delta.seed,
            weights_version=delta.weights_version,
            stop_reason=stop_reason,
            dropped_keywords=delta.dropped_keywords,
            error=error,
        )
        return self._piece(text, reason, usage)

    def _piece(self, text: str, reason: FinishReason | None = None, usage: Usage | None = None) -> Delta:
        ids, self._unsent_ids = self._unsent_ids, []
        logprobs = None
        if self._wants_logprobs:
            logprobs, self._unsent_logprobs = self._unsent_logprobs, []
        return Delta(text, ids, logprobs, self._request.sample, reason, usage)

    def aligned_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """One entry a prompt token: None at position 0, which nothing precedes, and before the position asked for."""
        start = self._request.sampling.prompt_logprobs
        if start is None:
            return None
        size = len(self._request.token_ids)
        before = min(max(1, start), size)
        aligned = [*([None] * before), *self._prompt_logprobs]
        # A request that was cut short has fewer; the list stays aligned.
        return aligned + [None] * (size - len(aligned))
