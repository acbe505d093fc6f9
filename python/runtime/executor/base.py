"""The executor's promise: plans run in launch order, and a failed one comes back as a result, never as a dead loop."""

from __future__ import annotations

from typing import Protocol

from phloem.runtime.step import SampleSpec, StepPlan, StepResult

__all__ = ["Executor", "Ticket"]


class Ticket(Protocol):
    """A launched step."""

    @property
    def plan(self) -> StepPlan: ...


class Executor(Protocol):
    """Mechanism behind `EngineCore`. One plan is launched at a time; at most two are uncollected.

    launch(plan)          starts copies and forward; returns at once if the device is asynchronous.
    sample(ticket, spec)  draws, after the forward of that ticket and before any later forward; at most once a ticket.
    collect(ticket)       waits for both; the result. Without `sample`, waits for the forward alone.

    After a result with `failed`, results of tickets launched later are failed too; `reset()` makes the executor usable again.
    """

    width: int  # logits per row: the padded vocabulary
    num_pages: int
    page_size: int

    def launch(self, plan: StepPlan) -> Ticket: ...
    def sample(self, ticket: Ticket, spec: SampleSpec) -> None: ...
    def collect(self, ticket: Ticket) -> StepResult: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
