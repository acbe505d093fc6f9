"""NativeSampler: the same draws in C++, one call a batch (kernels/include/phloem_sample.h). Owns the packing of its arguments.

    SampleRow ──prepare──► 160 bytes of phloem_sample_row, pointing at arrays that this draw keeps alive
    logits + rows ──phloem_sample──► phloem_sample_result, 184 bytes ──► Sampled | RowFailure

sampler.py says what is computed. What a request's SamplingParams fix is packed once and remembered.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int32, c_int64, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.executor.penalties import CountsCache
from phloem.runtime.executor.philox import MASK64
from phloem.runtime.executor.sampler import Draw, ScoreRow, dead_end, has_penalties, not_finite
from phloem.runtime.executor.support import Supports, cuts
from phloem.runtime.request import MAX_TOP_LOGPROBS, SamplingParams, Support, TokenLogprob
from phloem.runtime.step import RowFailure, Sampled, SampleRow, SampleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from phloem.runtime.native import Context

__all__ = ["NativeSampler"]

SIGNATURE: list[Any] = [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_int32, c_void_p, c_int32, c_void_p]
ROW = struct.Struct("=8Q5d3Qf7i")
SCORE_ROW = struct.Struct("=Qd4i")
RESULT = np.dtype(
    [
        ("token", "i4"),
        ("status", "i4"),
        ("model", "f4"),
        ("sampled", "f4"),
        ("mass", "f4"),
        ("num_top", "i4"),
        ("top_ids", "i4", MAX_TOP_LOGPROBS),
        ("top_logprobs", "f4", MAX_TOP_LOGPROBS),
    ]
)
MODEL, SAMPLED, MASS = 1, 2, 4
DRAWN, NOT_FINITE, DEAD_END = 0, 1, 2
KINDS = {None: 0, "model": MODEL, "sampled": SAMPLED, "both": MODEL | SAMPLED | MASS}


class _Options:
    """What SamplingParams alone decide of a row."""

    __slots__ = (
        "allowed",
        "allowed_words",
        "bias_ids",
        "bias_values",
        "fixed",
        "keep",
        "num_bias",
        "penalties",
        "sampling",
        "tail",
    )

    def __init__(self, s: SamplingParams, vocab_size: int) -> None:
        self.sampling = s  # kept, so that its id() stays its own
        self.penalties = has_penalties(s)
        self.allowed = self.bias_ids = self.bias_values = 0
        self.allowed_words: NDArray[np.uint32] | None = None
        self.keep: list[NDArray[np.generic]] = []
        if s.allowed_token_ids is not None:
            words = np.zeros(-(-vocab_size // 32), np.uint32)
            ids = np.array([t for t in s.allowed_token_ids if 0 <= t < vocab_size], np.int64)
            np.bitwise_or.at(words, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
            self.allowed, self.allowed_words = self._address(words), words
        bias = [(t, b) for t, b in s.logit_bias.items() if 0 <= t < vocab_size]
        self.num_bias = len(bias)
        if bias:
            self.bias_ids = self._address(np.array([t for t, _ in bias], np.int32))
            self.bias_values = self._address(np.array([b for _, b in bias], np.float64))
        self.fixed = (s.temperature, s.top_p, s.min_p, s.frequency_penalty, s.presence_penalty)
        top = s.top_logprobs if s.logprobs is not None else 0
        self.tail = (s.repetition_penalty, min(max(s.top_k, 0), 2**31 - 1), KINDS[s.logprobs], top)

    def _address(self, array: NDArray[np.generic]) -> int:
        self.keep.append(array)
        return address(array)


class NativeSampler:
    """Sampler over the kernels of `context`. For logits in host memory."""

    def __init__(self, context: Context, *, vocab_size: int, width: int, max_requests: int = 1024) -> None:
        """vocab_size: ids that may be drawn; width >= vocab_size: logits a row. max_requests: whose options and counts are
        remembered."""
        self._context, self._vocab_size, self._width = context, vocab_size, width
        self._sample, self._score = context.library.phloem_sample, context.library.phloem_score
        for function in (self._sample, self._score):
            function.restype, function.argtypes = c_int, SIGNATURE
        self._counts = CountsCache(vocab_size, max_requests)
        self._supports = Supports(vocab_size, width)
        self._options: OrderedDict[int, _Options] = OrderedDict()
        self._max_requests = max_requests

    def prepare(self, spec: SampleSpec, logit_rows: Sequence[int]) -> Draw:
        rows = list(spec.rows)
        packed = np.zeros(len(rows) * ROW.size, np.uint8)
        masks = self._masks(spec.masks)
        mask_base, mask_bytes = (0, 0) if masks is None else (address(masks), masks.strides[0])
        counts = [
            self._counts.get(row.request_id, row.history, row.num_prompt) if has_penalties(row.sampling) else None
            for row in rows
        ]
        blocked = [[t for t in row.block if 0 <= t < self._vocab_size] if row.block else () for row in rows]
        # One array of each kind for the whole batch; the rows point into it.
        penalty_ids = np.concatenate([c[0] for c in counts if c is not None] or [np.zeros(0, np.int32)])
        penalty_times = np.concatenate([c[1] for c in counts if c is not None] or [np.zeros(0, np.int32)])
        block_ids = np.array([t for ids in blocked for t in ids], np.int32)
        supports: list[_Kept | Support | None] = [
            self._support(row, masks, block) if row.sampling.logprobs == "both" else None for row, block in zip(rows, blocked)
        ]
        ids_at, times_at, block_at = address(penalty_ids), address(penalty_times), address(block_ids)
        options: list[_Options] = []
        into = packed.data
        for i, (row, at, count, block) in enumerate(zip(rows, logit_rows, counts, blocked, strict=True)):
            o = self._options_of(row.sampling)
            options.append(o)
            mask = 0
            if row.mask is not None:
                assert masks is not None and 0 <= row.mask < len(masks), "a row names a mask that the spec does not have"
                mask = mask_base + row.mask * mask_bytes
            num_penalty = 0 if count is None else len(count[0])
            repetition, top_k, kind, top = o.tail
            ROW.pack_into(
                into, i * ROW.size,
                mask, o.allowed, ids_at, times_at, o.bias_ids, o.bias_values, block_at, _address_of(supports[i]),
                *o.fixed,
                row.seed & MASK64, row.sample & MASK64, row.position & MASK64,
                repetition, top_k, num_penalty, o.num_bias, len(block), at, kind, top,
            )  # fmt: skip
            ids_at += 4 * num_penalty
            times_at += 4 * num_penalty
            block_at += 4 * len(block)
        return partial(self._draw, rows, packed, supports, (options, masks, penalty_ids, penalty_times, block_ids))

    def _support(self, row: SampleRow, masks: NDArray[np.int32] | None, block: Sequence[int]) -> _Kept | Support | None:
        """What the row can draw; where a filter decides, the place for the kernel to write it."""
        if cuts(row.sampling, self._vocab_size):
            return _Kept(self._supports.num_words)
        allowed, words = self._options_of(row.sampling).allowed_words, self._supports.everything
        if row.mask is not None and masks is not None:
            words = words & masks[row.mask, : len(words)].view(np.uint32)
        if allowed is not None:
            words = words & allowed
        if len(block):
            before, ids = words, np.array(block, np.int64)
            words = words.copy()
            np.bitwise_and.at(words, ids // 32, ~np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
            if row.mask is not None and not words.any():  # the grammar outranks the block (M1)
                words = before
        return self._supports.of_words(words)

    def _draw(
        self,
        rows: Sequence[SampleRow],
        packed: NDArray[np.uint8],
        supports: Sequence[_Kept | Support | None],
        pointed_at: object,
        logits: Tensor,
    ) -> list[Sampled | RowFailure]:
        results = np.zeros(len(rows), RESULT)
        self._call(self._sample, logits, packed, len(rows), results)
        return _outcomes(rows, results, [self._supports.of_words(s.words) if isinstance(s, _Kept) else s for s in supports])

    def score(self, logits: Tensor, rows: Sequence[ScoreRow]) -> list[TokenLogprob | None]:
        results = np.zeros(len(rows), RESULT)
        packed = np.zeros(len(rows) * SCORE_ROW.size, np.uint8)
        words: dict[int, NDArray[np.uint32]] = {}  # a support that many rows share is unpacked once
        for i, r in enumerate(rows):
            mask, temperature, kind = 0, 1.0, 0
            if r.under is not None:
                temperature, kind = r.under.temperature, SAMPLED | MASS
                if r.under.support is not None:
                    mask = address(words.setdefault(id(r.under.support), self._supports.words(r.under.support)))
            SCORE_ROW.pack_into(packed.data, i * SCORE_ROW.size, mask, temperature, r.row, r.target, r.top, kind)
        self._call(self._score, logits, packed, len(rows), results)
        status, alternatives = results["status"].tolist(), _alternatives(results)
        model, sampled, mass = (results[name].tolist() for name in ("model", "sampled", "mass"))
        found: list[TokenLogprob | None] = []
        for i, row in enumerate(rows):
            if status[i] != DRAWN:
                found.append(None)
            elif row.under is None:
                found.append(TokenLogprob(row.target, model[i], alternatives[i]))
            else:
                found.append(TokenLogprob(row.target, model[i], alternatives[i], sampled[i], mass[i], row.under.support))
        return found

    def _call(
        self, function: Callable[..., int], logits: Tensor, rows: NDArray[np.generic], num_rows: int, results: NDArray[np.void]
    ) -> None:
        if num_rows == 0:
            return
        num_logits, width = logits.shape
        assert width == self._width and logits.stride(1) == 1 and logits.element_size() == 4, "logits are float32 [L, width]"
        context = self._context
        context.check(
            function(
                context.handle, logits.data_ptr(), logits.stride(0), num_logits, width, self._vocab_size,
                address(rows), num_rows, address(results),
            )
        )  # fmt: skip

    def _options_of(self, s: SamplingParams) -> _Options:
        options = self._options.get(id(s))
        if options is None:
            options = self._options[id(s)] = _Options(s, self._vocab_size)
            if len(self._options) > self._max_requests:
                self._options.popitem(last=False)
        return options

    def _masks(self, masks: NDArray[np.int32] | None) -> NDArray[np.int32] | None:
        """A copy with a word for every id of the vocabulary; ids that a narrower mask does not name are masked."""
        words = -(-self._vocab_size // 32)
        if masks is None or masks.shape[1] >= words:
            return None if masks is None else np.array(masks, np.int32, order="C")
        return np.pad(masks, ((0, 0), (0, words - masks.shape[1])))


class _Kept:
    """Where the kernel writes what a draw kept."""

    __slots__ = ("words",)

    def __init__(self, num_words: int) -> None:
        self.words = np.zeros(num_words, np.uint32)


def _address_of(support: _Kept | Support | None) -> int:
    return address(support.words) if isinstance(support, _Kept) else 0


def address(array: NDArray[np.generic]) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def _outcomes(
    rows: Sequence[SampleRow], results: NDArray[np.void], supports: Sequence[Support | None]
) -> list[Sampled | RowFailure]:
    tokens, status = results["token"].tolist(), results["status"].tolist()
    logprobs: list[TokenLogprob | None] = [None] * len(rows)
    if any(row.sampling.logprobs is not None for row in rows):
        model, sampled, mass = (results[name].tolist() for name in ("model", "sampled", "mass"))
        alternatives = _alternatives(results)
        for i, row in enumerate(rows):
            kind = row.sampling.logprobs
            if kind == "sampled":
                logprobs[i] = TokenLogprob(tokens[i], sampled[i], alternatives[i])
            elif kind == "model":
                logprobs[i] = TokenLogprob(tokens[i], model[i], alternatives[i])
            elif kind == "both":
                logprobs[i] = TokenLogprob(tokens[i], model[i], alternatives[i], sampled[i], mass[i], supports[i])
    outcomes: list[Sampled | RowFailure] = []
    for i, row in enumerate(rows):
        if status[i] == DRAWN:
            outcomes.append(Sampled(row.request_id, tokens[i], logprobs[i]))
        elif status[i] == DEAD_END:
            outcomes.append(dead_end(row))
        else:
            outcomes.append(not_finite(row.request_id, f"for output position {row.position}"))
    return outcomes


def _alternatives(results: NDArray[np.void]) -> list[tuple[tuple[int, float], ...]]:
    counts = results["num_top"].tolist()
    most = max(counts, default=0)
    if most == 0:
        return [()] * len(counts)
    ids, logprobs = results["top_ids"][:, :most].tolist(), results["top_logprobs"][:, :most].tolist()
    return [tuple(zip(ids[i][:n], logprobs[i][:n])) for i, n in enumerate(counts)]
