"""Steps on the device: launched, drawn from, collected in order. Whatever an executor raises becomes a failed step.

launch(a)   [a]        launch(b)   [a b]        collect() -> a   [b]         at most two at once: the overlap
"""

from __future__ import annotations

from dataclasses import dataclass

from phloem.runtime.executor.base import Executor, Ticket
from phloem.runtime.scheduler.flight import Flight
from phloem.runtime.step import SampleSpec, StepResult

__all__ = ["Pipeline"]


@dataclass(slots=True)
class _Launched:
    flight: Flight
    ticket: Ticket | None
    error: Exception | None = None  # launching or drawing raised: the step is void


class Pipeline:
    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.device_seconds = self.stall_seconds = 0.0
        self._flying: list[_Launched] = []

    def __len__(self) -> int:
        return len(self._flying)

    def launch(self, flight: Flight) -> None:
        try:
            self._flying.append(_Launched(flight, self.executor.launch(flight.plan)))
        except Exception as error:
            self._flying.append(_Launched(flight, None, error))

    def newest(self) -> Flight | None:
        """The flight to draw from; None if it did not even start."""
        newest = self._flying[-1]
        return newest.flight if newest.ticket is not None else None

    def sample(self, spec: SampleSpec) -> None:
        newest = self._flying[-1]
        if spec.rows and newest.ticket is not None:
            try:
                self.executor.sample(newest.ticket, spec)
            except Exception as error:
                newest.error = error

    def collect(self) -> tuple[Flight, StepResult]:
        """The oldest flight, and what came of it."""
        launched = self._flying.pop(0)
        return launched.flight, self._result(launched)

    def land(self) -> list[Flight]:
        """Wait for everything in flight, and forget what it did."""
        flights = []
        while self._flying:
            flights.append(self.collect()[0])
        return flights

    def _result(self, launched: _Launched) -> StepResult:
        step = launched.flight.plan.step
        if launched.ticket is None:
            return StepResult(step, failed=launched.error)
        try:
            result = self.executor.collect(launched.ticket)
        except Exception as error:
            return StepResult(step, failed=error)
        self.device_seconds += result.device_seconds
        self.stall_seconds += result.stall_seconds
        return result if launched.error is None else StepResult(step, failed=launched.error)
