"""From logits to tokens: what the order M1 means, exactly. `ReferenceSampler` is the executable specification, in numpy.

    logits [width] float32 ──hard masks──► legal ids ──penalties, bias──► x ──temperature──► z = (x - max x) / T
       ──top-k──► ──top-p──► ──min-p──► kept ──draw──► token

* Legal: the grammar's bit, allowed_token_ids, not in `block`, and below vocab_size: a padded id is never drawn. Nothing below
  revives a masked id. Where a grammar leaves only blocked ids (min_tokens at its end), the grammar outranks the block (M1).
* Penalties and bias, in float32: repetition (x / r above 0, else x * r) on every id of prompt and output, then
  frequency * times + presence on ids of the output, then the bias. Clamped to +-1e30, so that nothing overflows.
* Every filter keeps a prefix of the same order: x falling, lower id first. top-k keeps exactly k. top-p keeps the fewest whose
  share of what top-k left reaches p, so the token that crosses p stays, and one always does. min-p keeps
  probability >= min_p * the highest one; both shrink by the same factor when others go, so its place in the order is moot.
* The draw: weights exp(z), 0 below exp(-87); u from philox.py; the first kept id, *in id order*, whose running sum of weights
  exceeds u * total. Nothing here depends on another row.
* temperature 0: the first id in that order, no draw. A tiny temperature underflows to the same; it never overflows.
* "both" also tells the support, which is the legal ids, or the kept ones if a filter was on, and its mass: log-softmax of the raw
  logits / temperature at the token, less "sampled"; 0 at temperature 0. A score under that support gives the same numbers.
* Logprobs, float32: "model" = log-softmax over all `width` raw logits (what a trainer computes); "sampled" = of the kept set,
  0.0 at temperature 0. Alternatives: the best of the vocabulary ("model", "both") or of the kept set ("sampled").
* A raw row fails its request alone (NumericalError) if a logit of the vocabulary is not finite, or a padded one NaN or +inf;
  a padded -inf is a model that masks its own padding.

The native twin is native_sampler.py; both are held together by tests/kernels/test_sample.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import GrammarDeadEnd, InvalidRequestError, NumericalError
from phloem.runtime.executor.penalties import CountsCache
from phloem.runtime.executor.philox import uniform
from phloem.runtime.executor.support import Supports, cuts
from phloem.runtime.request import SamplingParams, TokenLogprob
from phloem.runtime.step import RowFailure, Sampled, SampleRow, SampleSpec, Under

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Draw", "Filtered", "ReferenceSampler", "Sampler", "ScoreRow", "dead_end", "filtered", "has_penalties", "not_finite"]

Floats = NDArray[np.float32]
Draw = Callable[["Tensor"], "list[Sampled | RowFailure]"]

MAX_EDITED = np.float32(1e30)
MIN_Z = -87.0  # exp of less is no normal float32: weight 0 in both samplers
MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)
MIN_LOGPROB = float(np.finfo(np.float32).min)


@dataclass(slots=True, frozen=True)
class ScoreRow:
    """Logits row `row` is to say how likely `target` was, with `top` alternatives; `under`: and under what it was drawn from."""

    row: int
    target: int
    top: int
    under: Under | None = None


class Sampler(Protocol):
    """Two implementations: ReferenceSampler here, NativeSampler for CPU kernels. One thread at a time each."""

    def prepare(self, spec: SampleSpec, logit_rows: Sequence[int]) -> Draw:
        """Everything that needs no logits, on the caller's thread while the forward runs. Copies what it takes from `spec`.

        logit_rows: for each spec row the logits row to draw from. The result, called once with the logits float32 [L, width],
        gives a Sampled or a RowFailure a spec row, in order.
        """
        ...

    def score(self, logits: Tensor, rows: Sequence[ScoreRow]) -> list[TokenLogprob | None]:
        """Model logprobs of given tokens (prompt logprobs, forced runs); None for a row that is not finite."""
        ...


def has_penalties(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1.0 or s.frequency_penalty != 0.0 or s.presence_penalty != 0.0


def dead_end(row: SampleRow) -> RowFailure:
    """No token may be drawn. Of a grammar alone that is a fault of ours; together with allowed_token_ids it is the caller's wish."""
    at = f"no legal token is left at output position {row.position}"
    if row.sampling.allowed_token_ids is None:
        return RowFailure(row.request_id, GrammarDeadEnd(f"{at}: the grammar mask is empty. Please report this."))
    beside = "the ids masked before min_tokens leave none of" if row.mask is None else "the grammar allows none of"
    message = f"{at}: {beside} allowed_token_ids. Allow more of them."
    return RowFailure(row.request_id, InvalidRequestError(message, param="allowed_token_ids", code="no_legal_token"))


def not_finite(request_id: str, what: str) -> RowFailure:
    message = (
        f"the model's logits {what} are not finite (NaN or infinite). Check the weights and the dtype; nothing was emitted."
    )
    return RowFailure(request_id, NumericalError(message))


class ReferenceSampler:
    """Numpy, float64 from the temperature on; slow, obviously right. Owns the penalty counts of live requests."""

    def __init__(self, *, vocab_size: int, width: int, max_requests: int = 1024) -> None:
        """vocab_size: ids that may be drawn; width >= vocab_size: logits a row. max_requests: whose counts are remembered."""
        self._vocab_size, self._width = vocab_size, width
        self._counts = CountsCache(vocab_size, max_requests)
        self._supports = Supports(vocab_size, width)

    def prepare(self, spec: SampleSpec, logit_rows: Sequence[int]) -> Draw:
        jobs = []
        for row, at in zip(spec.rows, logit_rows, strict=True):
            s = row.sampling
            counts = self._counts.get(row.request_id, row.history, row.num_prompt) if has_penalties(s) else None
            mask = None
            if row.mask is not None:
                assert spec.masks is not None, "a row names a mask, the spec has none"
                mask = mask_bits(spec.masks[row.mask], self._vocab_size)
            jobs.append((row, at, legal_ids(mask, s.allowed_token_ids, row.block, self._vocab_size), counts))

        def draw(logits: Tensor) -> list[Sampled | RowFailure]:
            values = logits.numpy()
            return [self._draw(row, values[at], legal, counts) for row, at, legal, counts in jobs]

        return draw

    def score(self, logits: Tensor, rows: Sequence[ScoreRow]) -> list[TokenLogprob | None]:
        values = logits.numpy()
        found: list[TokenLogprob | None] = []
        for row in rows:
            raw = values[row.row]
            if not is_finite(raw, self._vocab_size):
                found.append(None)
                continue
            logprobs = log_softmax(raw)
            top = best(raw[: self._vocab_size], row.top)
            model = TokenLogprob(row.target, rounded(logprobs[row.target]), pairs(top, logprobs))
            found.append(model if row.under is None else self._under(raw, model, row.under))
        return found

    def _under(self, raw: Floats, model: TokenLogprob, under: Under) -> TokenLogprob:
        target, temperature = model.token_id, under.temperature
        sampled = mass = 0.0
        if temperature != 0.0:
            legal = self._supports.mask(under.support)
            if target < len(legal) and legal[target]:
                kept = filtered(raw[: self._vocab_size], legal, SamplingParams(temperature=temperature))
                sampled, mass = float(kept.logprobs[target]), logmass(raw, target, temperature, kept)
            else:
                sampled = MIN_LOGPROB
        return TokenLogprob(target, model.logprob, model.top, rounded(sampled), mass, under.support)

    def _draw(
        self,
        row: SampleRow,
        raw: Floats,
        legal: NDArray[np.bool_],
        counts: tuple[NDArray[np.int32], NDArray[np.int32]] | None,
    ) -> Sampled | RowFailure:
        s = row.sampling
        if not is_finite(raw, self._vocab_size):
            return not_finite(row.request_id, f"for output position {row.position}")
        if not legal.any():
            return dead_end(row)
        x = edited(raw[: self._vocab_size], s, counts)
        kept = filtered(x, legal, s)
        if s.temperature == 0.0:
            token = int(kept.order[0])
        else:
            sums = np.cumsum(kept.weights)
            token = int(np.searchsorted(sums, uniform(row.seed, row.sample, row.position) * sums[-1], side="right"))
            token = min(token, int(np.flatnonzero(kept.weights)[-1]))
        return Sampled(row.request_id, token, self._logprob(s, raw, token, kept, legal))

    def _logprob(
        self, s: SamplingParams, raw: Floats, token: int, kept: Filtered, legal: NDArray[np.bool_]
    ) -> TokenLogprob | None:
        if s.logprobs is None:
            return None
        if s.logprobs == "sampled":
            top = kept.order[: s.top_logprobs]
            return TokenLogprob(token, rounded(kept.logprobs[token]), pairs(top[kept.weights[top] > 0], kept.logprobs))
        model = log_softmax(raw)
        top = best(raw[: self._vocab_size], s.top_logprobs)
        if s.logprobs == "model":
            return TokenLogprob(token, rounded(model[token]), pairs(top, model))
        support = self._supports.of(kept.weights > 0 if cuts(s, self._vocab_size) else legal)
        mass = 0.0 if s.temperature == 0.0 else logmass(raw, token, s.temperature, kept)
        return TokenLogprob(token, rounded(model[token]), pairs(top, model), rounded(kept.logprobs[token]), mass, support)


@dataclass(slots=True)
class Filtered:
    """What may be drawn. order: kept ids, likeliest first.   weights: float64 [vocab], 0 where not kept.
    logprobs: float64 [vocab], of the kept ids under the distribution drawn from; meaningless elsewhere."""

    order: NDArray[np.int64]
    weights: NDArray[np.float64]
    logprobs: NDArray[np.float64]


def filtered(x: Floats, legal: NDArray[np.bool_], s: SamplingParams) -> Filtered:
    """Temperature, top-k, top-p, min-p over the legal ids of x [vocab]; at temperature 0 the argmax alone. Never empty."""
    ids = np.flatnonzero(legal)
    if s.temperature == 0.0:
        order = ids[[int(np.argmax(x[ids]))]]  # the first of the highest
    else:
        order = ids[np.argsort(-x[ids], kind="stable")]
    top = x[order[0]]
    with np.errstate(over="ignore"):  # x / tiny T is -inf: weight 0
        z = (x.astype(np.float64) - np.float64(top)) / max(s.temperature, MIN_TEMPERATURE)
    if s.top_k > 0:
        order = order[: s.top_k]
    weights = np.where(z[order] >= MIN_Z, np.exp(np.maximum(z[order], MIN_Z)), 0.0)
    if s.top_p < 1.0:
        sums = np.cumsum(weights)
        order = order[: int(np.searchsorted(sums, s.top_p * sums[-1], side="left")) + 1]
    if s.min_p > 0.0:
        order = order[z[order] >= np.log(s.min_p)]
    kept = np.zeros(len(x), np.float64)
    kept[order] = weights[: len(order)]
    return Filtered(order, kept, z - np.log(kept.sum()))


def logmass(raw: Floats, token: int, temperature: float, kept: Filtered) -> float:
    scaled = log_softmax(raw.astype(np.float64) / max(temperature, MIN_TEMPERATURE))
    mass = float(scaled[token] - kept.logprobs[token])
    return float(np.float32(mass)) if abs(mass) > 1e-12 else 0.0  # what float64 rounds is nothing that was cut


def edited(raw: Floats, s: SamplingParams, counts: tuple[NDArray[np.int32], NDArray[np.int32]] | None) -> Floats:
    """Penalties, then bias, on a copy."""
    x = raw.copy()
    if counts is not None:
        ids, times = counts
        v = x[ids]
        if s.repetition_penalty != 1.0:
            r = np.float32(s.repetition_penalty)
            with np.errstate(over="ignore", divide="ignore", under="ignore"):
                v = np.where(v > 0, v / r, v * r)
        penalty = s.frequency_penalty * times + s.presence_penalty * (times > 0)
        x[ids] = clamped(v.astype(np.float64) - penalty)
    if s.logit_bias:
        named = [(t, b) for t, b in s.logit_bias.items() if 0 <= t < len(x)]
        ids = np.array([t for t, _ in named], np.int32)
        x[ids] = clamped(x[ids].astype(np.float64) + np.array([b for _, b in named], np.float64))
    return x


def clamped(v: NDArray[np.float64]) -> Floats:
    return np.clip(v, -np.float64(MAX_EDITED), np.float64(MAX_EDITED)).astype(np.float32)


def mask_bits(row: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Bit t of a packed mask row, for every id of the vocabulary; bits that the row lacks are 0."""
    bits = np.zeros(vocab_size, np.bool_)
    unpacked = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")[:vocab_size]
    bits[: len(unpacked)] = unpacked
    return bits


def legal_ids(
    mask: NDArray[np.bool_] | None, allowed: Sequence[int] | None, block: Sequence[int], vocab_size: int
) -> NDArray[np.bool_]:
    """The hard masks [vocab]. Ids outside the vocabulary name nothing."""
    legal = np.ones(vocab_size, np.bool_) if mask is None else mask.copy()
    if allowed is not None:
        listed = np.zeros(vocab_size, np.bool_)
        listed[[t for t in allowed if 0 <= t < vocab_size]] = True
        legal &= listed
    before = legal.copy()
    legal[[t for t in block if 0 <= t < vocab_size]] = False
    return before if mask is not None and not legal.any() else legal


def is_finite(raw: Floats, vocab_size: int) -> bool:
    return bool(np.isfinite(raw[:vocab_size]).all() and (raw[vocab_size:] < np.inf).all())


def log_softmax(raw: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    x = raw.astype(np.float64)
    x -= x.max()
    logprobs: NDArray[np.float64] = x - np.log(np.exp(x).sum())
    return logprobs


def best(raw: Floats, count: int) -> NDArray[np.int64]:
    """The `count` highest, highest first, lower id first among equals."""
    if count <= 0:
        return np.zeros(0, np.int64)
    if count < len(raw):
        ids = np.flatnonzero(raw >= np.partition(raw, len(raw) - count)[len(raw) - count])
    else:
        ids = np.arange(len(raw))
    return ids[np.argsort(-raw[ids], kind="stable")][:count]


def rounded(logprob: float) -> float:
    """Float32, finite, and no more than 0 for any rounding."""
    return float(np.float32(max(min(logprob, 0.0), MIN_LOGPROB)))


def pairs(ids: NDArray[np.int64], logprobs: NDArray[np.float64]) -> tuple[tuple[int, float], ...]:
    return tuple((int(t), rounded(logprobs[t])) for t in ids)
