"""Pipeline: in order, at most two at once, and whatever an executor raises is a failed step."""

from __future__ import annotations

import pytest

from phloem.runtime.engine.pipeline import Pipeline
from phloem.runtime.scheduler.flight import Flight
from phloem.runtime.step import SampleRow, SampleSpec, StepPlan, StepResult


class Odd:
    """An executor that raises where it is told to."""

    width, num_pages, page_size = 8, 8, 4

    def __init__(self, where: str = "") -> None:
        self.where, self.calls = where, list[str]()

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            raise RuntimeError(f"{name} raised")

    def launch(self, plan: StepPlan) -> Odd:
        self.plan = plan
        self._call("launch")
        return self

    def sample(self, ticket: Odd, spec: SampleSpec) -> None:
        self._call("sample")

    def collect(self, ticket: Odd) -> StepResult:
        self._call("collect")
        return StepResult(ticket.plan.step)

    def reset(self) -> None: ...
    def close(self) -> None: ...


SPEC = SampleSpec([SampleRow(0, "q", 0, 0, 0, 0, None, (), 0)])  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["launch", "sample", "collect"])
def test_what_is_raised_is_a_failed_step(where: str) -> None:
    executor = Odd(where)
    pipeline = Pipeline(executor)
    pipeline.launch(Flight(StepPlan(3)))
    assert (pipeline.newest() is None) is (where == "launch"), "nothing is drawn from what did not start"
    pipeline.sample(SPEC)
    flight, result = pipeline.collect()
    assert flight.plan.step == result.step == 3 and f"{where} raised" in str(result.failed) and not pipeline
    assert executor.calls == {"launch": ["launch"]}.get(where, ["launch", "sample", "collect"]), "the device is waited for"


def test_without_draws_nothing_is_sampled() -> None:
    executor = Odd()
    pipeline = Pipeline(executor)
    pipeline.launch(Flight(StepPlan(1)))
    pipeline.sample(SampleSpec())
    assert pipeline.collect()[1].failed is None and executor.calls == ["launch", "collect"]


def test_first_launched_first_collected() -> None:
    pipeline = Pipeline(Odd())
    for n in (1, 2):
        pipeline.launch(Flight(StepPlan(n)))
    assert pipeline.newest() is not None and len(pipeline) == 2
    assert pipeline.collect()[0].plan.step == 1
    assert [flight.plan.step for flight in pipeline.land()] == [2] and not pipeline
