"""The words that policy and mechanism share: a StepPlan goes down, a StepResult comes back. Plain data.

    scheduler --StepPlan--> executor.launch          copies, then the forward of all rows
              --SampleSpec-> executor.sample         which rows draw, under which masks: made after commit n-1
              <-StepResult-- executor.collect        tokens, logprobs, what failed

A prefill chunk, a decode, a forced run and a draft check are the same `Row`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.request import SamplingParams, Support, TokenLogprob

__all__ = [
    "FUTURE",
    "NO_SLOT",
    "PageCopy",
    "Row",
    "RowFailure",
    "SampleRow",
    "SampleSpec",
    "Sampled",
    "StepPlan",
    "StepResult",
    "Under",
]

FUTURE = -1  # a token that the device has drawn, or will have, before this row runs: read from its slot
NO_SLOT = -1


@dataclass(slots=True, frozen=True)
class PageCopy:
    """Copy all layers of page `src` onto `dst` before the forward. Copies of one plan commute: no source is a target."""

    src: int
    dst: int


@dataclass(slots=True, frozen=True)
class Under:
    """What a known token was drawn from, where its sampled logprob is wanted too: a temperature, and a support (None: all)."""

    temperature: float
    support: Support | None = None


@dataclass(slots=True)
class Row:
    """Consecutive tokens of one sequence, at positions start .. start + len(tokens) - 1.

    tokens: known ids, or FUTURE (only as the last one): the id drawn last for `slot`.
    pages: the page table, page i holds positions i * page_size ...; covers every position of the row and before it.
    write_from: K and V of earlier positions go to the scratch page, because a page of the tree has them already (R4).
    logits_from: the first position whose logits are wanted; start + len(tokens) if none is.
    targets: known next ids for positions logits_from ...: their model logprobs are wanted (prompt logprobs, forced runs).
        Shorter than the logits by one when the last logits row is there to draw from.
    top_logprobs: alternatives wanted for each target.   under: for each target what it was drawn from, or empty.
    """

    request_id: str
    slot: int
    start: int
    tokens: Sequence[int]
    pages: NDArray[np.int32]
    write_from: int = 0
    logits_from: int = 0
    targets: Sequence[int] = ()
    top_logprobs: int = 0
    under: Sequence[Under | None] = ()

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class StepPlan:
    """One step. Steps run on the device in the order in which they are launched, each its copies first (P4)."""

    step: int
    rows: list[Row] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(slots=True)
class SampleRow:
    """One draw from the last logits row of `plan.rows[row]`. Samples of a group may list the same row (S4).

    slot: where the token is kept for FUTURE; NO_SLOT if no row will read it.
    position: index of the token in the output; with (seed, sample) it is all the randomness there is (M2).
    history: prompt and output ids so far, read-only, and num_prompt of them are the prompt (penalties, M3).
    mask: index into SampleSpec.masks, or None.   block: ids masked besides (stop ids before min_tokens, padded ids).
    """

    row: int
    request_id: str
    slot: int
    position: int
    seed: int
    sample: int
    sampling: SamplingParams
    history: Sequence[int]
    num_prompt: int
    mask: int | None = None
    block: Sequence[int] = ()


@dataclass(slots=True)
class SampleSpec:
    """Which rows of a launched plan draw. masks: [rows, ceil(width / 32)] int32, bit t of row r: token t is legal."""

    rows: list[SampleRow] = field(default_factory=list)
    masks: NDArray[np.int32] | None = None


@dataclass(slots=True)
class Sampled:
    """token, and its logprobs when asked for."""

    request_id: str
    token: int
    logprob: TokenLogprob | None = None


@dataclass(slots=True)
class RowFailure:
    """This request alone fails (non-finite logits, empty mask): `error` becomes its Output's."""

    request_id: str
    error: Exception


@dataclass(slots=True)
class StepResult:
    """sampled: one for each SampleRow that drew.   scored: request id -> logprobs of its row's targets, in order.

    device_seconds: that the step took.   stall_seconds: that the device waited for the host before and within it.
    failed: an exception of the forward itself; then nothing that this step wrote can be trusted, and the lists are empty.
    """

    step: int
    sampled: list[Sampled] = field(default_factory=list)
    scored: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    failures: list[RowFailure] = field(default_factory=list)
    failed: Exception | None = None
    device_seconds: float = 0.0
    stall_seconds: float = 0.0
