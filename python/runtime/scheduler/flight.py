"""A step between its plan and its commit, and what is counted on the way. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from phloem.runtime.errors import PhloemError
from phloem.runtime.request import WireError
from phloem.runtime.scheduler.sequence import Sequence
from phloem.runtime.step import Row, StepPlan

__all__ = ["Counters", "Flight", "wire_error"]


@dataclass(slots=True)
class Flight:
    """A plan with the sequences of its rows. draws: request id -> who; probes: request id -> position of a known token,
    whose logprob alone the draw is for."""

    plan: StepPlan
    sequences: list[Sequence] = field(default_factory=list)
    draws: dict[str, Sequence] = field(default_factory=dict)
    probes: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """Tokens in the rows planned so far, by why they were computed, and what else happened."""

    prefill: int = 0  # prompt tokens, each counted once for its request
    cached: int = 0  # prompt tokens that were not computed
    decode: int = 0  # output tokens
    recomputed: int = 0  # computed before: preempted, or their forward failed (C-OPS-13)
    scratch: int = 0  # of all these, computed only for their logits: a page of the tree had them (R4, M4)
    preemptions: int = 0
    fallbacks: int = 0  # admitted without the copy, or not at all
    failed_steps: int = 0
    surplus_rows: int = 0  # rows of sequences that had ended when their step drew
    surplus_tokens: int = 0  # tokens drawn beyond an end
    finished: dict[str, int] = field(default_factory=dict)

    def count(self, q: Sequence, row: Row) -> None:
        """The tokens of a planned row. `q.high` divides what is new from what is computed again."""
        start, end = row.start, row.end
        new = max(start, q.high)
        if new > start:
            self.recomputed += min(new, end) - start
        if end > new:
            prompt = max(min(end, q.num_prompt) - new, 0)
            self.prefill += prompt
            self.decode += end - new - prompt
            q.high = end
        if row.write_from > start:
            self.scratch += min(row.write_from, end) - start


def wire_error(error: BaseException) -> WireError:
    if isinstance(error, PhloemError):
        return WireError(type(error).__name__, error.message, error.param, error.code)
    return WireError("PhloemError", f"{type(error).__name__}: {error}")
