"""What the core says: the new tokens of a sequence as an OutputDelta, and its last words. Emitting moves `q.emitted`."""

from __future__ import annotations

from phloem.runtime.request import OutputDelta, Request, Usage
from phloem.runtime.scheduler.flight import wire_error
from phloem.runtime.scheduler.sequence import Sequence

__all__ = ["final_deltas", "new_deltas", "refusal"]


def new_deltas(q: Sequence, version: int) -> list[OutputDelta]:
    """What is new of q: one delta, or one for each version of the weights under which its tokens were drawn."""
    deltas, ready = list[OutputDelta](), q.num_ready()
    while q.emitted < ready or q.prompt_logprobs:
        first, end = q.emitted, ready
        drawn = q.versions[first:end]
        if drawn and drawn[0] != drawn[-1]:
            end = first + drawn.count(drawn[0])
        delta = OutputDelta(q.request.id, q.tokens[q.num_prompt + first : q.num_prompt + end])
        delta.seed, delta.weights_version = q.seed, drawn[0] if drawn else version
        if q.keeps_logprobs:
            delta.logprobs = [logprob for logprob in q.logprobs[first:end] if logprob is not None]
        if q.prompt_logprobs:
            delta.prompt_logprobs, q.prompt_logprobs = q.prompt_logprobs, []
        q.emitted = end
        deltas.append(delta)
    return deltas


def final_deltas(q: Sequence, version: int) -> list[OutputDelta]:
    """The last of q, with its finish. Tokens come with it only if it ended by itself: none is emitted after an abort, a stop
    or an error (S5, S6)."""
    deltas = new_deltas(q, version) if q.finish not in ("abort", "error", "stop_string") else []
    if not deltas:
        deltas.append(OutputDelta(q.request.id, seed=q.seed, weights_version=version))
    last = deltas[-1]
    last.finish_reason, last.error = q.finish, q.error
    last.usage = Usage(q.num_prompt, q.cached_tokens or 0, q.emitted, q.num_forced(), q.num_dropped)
    last.kv_mixed = q.kv_mixed
    last.dropped_keywords = getattr(q.cursor, "dropped_keywords", ())
    return deltas


def refusal(request: Request, error: Exception, version: int) -> OutputDelta:
    """The only delta of a request that was not taken."""
    num_prompt = len(request.token_ids) if isinstance(request.token_ids, (tuple, list)) else 0
    delta = OutputDelta(str(request.id), finish_reason="error", usage=Usage(num_prompt), error=wire_error(error))
    delta.weights_version = version
    return delta
