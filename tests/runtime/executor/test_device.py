"""DeviceExecutor: the engine's loop over a device that runs as late, and streams as unordered, as their events allow.

If an event is missing, or pinned memory is written too early, or FUTURE is read before it is drawn, some order shows it: the tokens
differ from those of a device that runs everything at once. Both are compared with LocalExecutor on `reference`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phloem.runtime.backends.base import KVSpec, Limits
from phloem.runtime.backends.cuda import Cuda
from phloem.runtime.backends.cuda.runner import RunnerOptions
from phloem.runtime.backends.cuda.staging import Staging
from phloem.runtime.backends.reference import Reference
from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.errors import EngineClosedError, KernelError
from phloem.runtime.executor.device import DeviceExecutor
from phloem.runtime.executor.device_sampler import DeviceSampler
from phloem.runtime.executor.local import LocalExecutor
from phloem.runtime.executor.sampler import ReferenceSampler
from phloem.runtime.models.loader import load_model
from phloem.runtime.request import Request, SamplingParams, TokenLogprob
from phloem.runtime.step import Row, SampleRow, SampleSpec, StepPlan
from tests.fake_device import FakeDevice, FakeFlashInfer
from tests.tiny_models import tiny_config, write_hf

PAGES, PAGE, VOCAB, RUNNING = 40, 4, 96, 6
LIMITS = Limits(max_tokens=16, max_rows=RUNNING, max_logits=5, max_pages=PAGES * RUNNING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny") / "m", tiny_config(num_hidden_layers=1))


def spec_of(config: Any) -> KVSpec:
    return KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, PAGES, PAGE, "f32")


def on_device(folder: Path, device: FakeDevice, **options: Any) -> DeviceExecutor:
    backend = Cuda(
        compute="f32",
        options=RunnerOptions(any_head_dim=True, workspace_bytes=1 << 16),
        device=device,
        flashinfer=FakeFlashInfer(),
    )
    loaded = load_model(str(folder), backend, "f32")
    runner = backend.bind(loaded.model, spec_of(loaded.config), LIMITS)
    sampler = DeviceSampler(device, vocab_size=VOCAB - 3, width=VOCAB)
    return DeviceExecutor(
        runner,
        sampler,
        page_size=PAGE,
        num_pages=PAGES,
        width=VOCAB,
        max_running=RUNNING,
        max_logits=LIMITS.max_logits,
        **options,
    )


def on_reference(folder: Path) -> LocalExecutor:
    loaded = load_model(str(folder), Reference(), "f32")
    runner = Reference().bind(loaded.model, spec_of(loaded.config), LIMITS)
    sampler = ReferenceSampler(vocab_size=VOCAB - 3, width=VOCAB)
    return LocalExecutor(
        runner, sampler, page_size=PAGE, num_pages=PAGES, width=VOCAB, max_running=RUNNING, max_logits=LIMITS.max_logits
    )


def requests() -> list[Request]:
    rng = random.Random(3)
    trunk = rng.choices(range(3, 90), k=14)
    found = []
    for i in range(9):
        prompt = [*trunk[: rng.choice([0, 6, 14])], *rng.choices(range(3, 90), k=rng.randrange(1, 9))]
        logprobs = (None, "model", "both")[i % 3]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 12), temperature=(0.0, 0.9)[i % 2], seed=i, top_p=(1.0, 0.8)[i // 3 % 2], ignore_eos=True,
            repetition_penalty=(1.0, 1.2)[i % 2], logprobs=logprobs, top_logprobs=2 if logprobs else 0, prompt_logprobs=2 if i in (4, 7) else None,
        )  # fmt: skip
        found.append(Request(id=f"q{i}", token_ids=tuple(prompt), sampling=params, group="g" if i > 6 else None, sample=i))
    return found


Told = dict[str, tuple[list[int], list[TokenLogprob], list[TokenLogprob], str]]


def serve(executor: Any, *, overlap: bool) -> Told:
    settings = CoreSettings(
        page_size=PAGE, num_pages=PAGES, max_context=64, vocab_size=VOCAB - 3, width=VOCAB, max_running=RUNNING, max_step_tokens=LIMITS.max_tokens,
        eos_ids=frozenset({2}), seed=0, overlap=overlap,
    )  # fmt: skip
    core = EngineCore(settings, executor)
    told: Told = {}
    waiting = requests()
    for step in range(400):
        if step % 2 == 0 and waiting:
            core.add(waiting.pop(0))
        if step == 9:
            core.abort("q3")
        for delta in core.step(float(step)):
            said = told.setdefault(delta.request_id, ([], [], [], ""))
            said[0].extend(delta.token_ids)
            said[1].extend(delta.logprobs)
            said[2].extend(delta.prompt_logprobs)
            if delta.finish_reason is not None:
                assert delta.error is None, delta.error
                told[delta.request_id] = (*said[:3], delta.finish_reason)
        core.check()
        if not waiting and not core.has_work:
            break
    assert len(told) == 9 and all(said[3] for said in told.values())
    core.close()
    return told


def test_every_order_that_the_events_allow_gives_the_same_tokens(folder: Path) -> None:
    at_once = serve(on_device(folder, FakeDevice(0, eagerness=1.0)), overlap=True)
    for seed, eagerness in ((1, 0.0), (2, 0.3), (3, 0.7), (4, 0.5)):
        executor = on_device(folder, FakeDevice(seed, eagerness))
        assert serve(executor, overlap=True) == at_once
        assert executor.steps > 20 and executor.device_stall_seconds >= 0
    reference = serve(on_reference(folder), overlap=False)
    same = {name: said for name, said in reference.items() if name != "q3"}  # how far the aborted one came depends on overlap
    assert {name: said[0] for name, said in same.items()} == {name: said[0] for name, said in at_once.items() if name != "q3"}
    for name, said in same.items():
        for one, other in zip([*said[1], *said[2]], [*at_once[name][1], *at_once[name][2]], strict=True):
            assert one.token_id == other.token_id and abs(one.logprob - other.logprob) < 1e-4


def test_overlap_is_the_host_running_ahead(folder: Path) -> None:
    """With it, the host launches a step before the device has finished the one before; without it, never."""
    late = FakeDevice(0, eagerness=0.0)
    executor = on_device(folder, late)
    ahead = watch_launches(executor)
    serve(executor, overlap=True)
    assert sum(ahead) > 20, "steps launched while the one before had not run"
    off = on_device(folder, FakeDevice(0, eagerness=0.0), overlap=False)
    ahead = watch_launches(off)
    serve(off, overlap=False)
    assert sum(ahead) == 0 and off.device_stall_seconds == 0.0


def watch_launches(executor: DeviceExecutor) -> list[bool]:
    """For each launch: is the step before still under way?"""
    ahead, launch, last = list[bool](), executor.launch, list[Any]()

    def watched(plan: StepPlan) -> Any:
        ahead.append(bool(last) and last[-1].end is not None and not last[-1].end.done())
        last.append(launch(plan))
        return last[-1]

    executor.launch = watched  # type: ignore[method-assign]
    return ahead


class Forgetful(FakeDevice):
    """A device on which one kind of waiting does not work: what a missing event would be."""

    def __init__(self, seed: int, *, forget: str) -> None:
        super().__init__(seed, eagerness=0.0)
        self.forget = forget

    def wait(self, stream: Any, event: Any) -> None:
        if self.forget != "stream":
            super().wait(stream, event)


def test_the_fake_device_finds_a_missing_event(folder: Path) -> None:
    """The copies stream that does not wait for the draw reads what is not there yet."""
    with pytest.raises(AssertionError):
        for seed in range(20):
            told = serve(on_device(folder, Forgetful(seed, forget="stream")), overlap=True)
            assert told == serve(on_device(folder, FakeDevice(0, eagerness=1.0)), overlap=True)


def test_the_fake_device_finds_pinned_memory_that_is_written_too_early() -> None:
    device = FakeDevice(0, eagerness=0.0)
    staging, stream, seen = Staging(device, depth=1), device.stream("compute"), list[int]()

    def step(value: int, *, mark: bool) -> None:
        bundle = staging.put({"x": np.array([value], np.int32)})
        device.run(stream, bundle.upload)
        device.run(stream, lambda: seen.append(int(bundle.device["x"][0])))
        if mark:
            staging.used(bundle, stream)

    for value in range(4):
        step(value, mark=True)
    device.synchronize()
    assert seen == [0, 1, 2, 3]
    seen.clear()
    for value in range(4):
        step(value, mark=False)
    device.synchronize()
    assert seen != [0, 1, 2, 3], "the fake is too kind"


def row(tokens: list[int], pages: list[int], slot: int = 0, request_id: str = "a") -> Row:
    return Row(request_id, slot, 0, tokens, np.array(pages, np.int32), logits_from=len(tokens) - 1)


def draw_spec() -> SampleSpec:
    return SampleSpec([SampleRow(0, "a", 0, 0, 1, 0, SamplingParams(temperature=0.0), [5, 6], 2)])


def test_a_failed_step_fails_those_behind_it_until_reset(folder: Path) -> None:
    executor = on_device(folder, FakeDevice(0))
    bad = executor.launch(StepPlan(1, [row([5, 6], [PAGES + 9])]))
    executor.sample(bad, draw_spec())
    behind = executor.launch(StepPlan(2, [row([5, 6], [1])]))
    assert (
        isinstance(executor.collect(bad).failed, KernelError)
        and executor.collect(behind).failed is executor.collect(bad).failed
    )
    executor.reset()
    good = executor.launch(StepPlan(3, [row([5, 6], [1])]))
    executor.sample(good, draw_spec())
    result = executor.collect(good)
    assert result.failed is None and len(result.sampled) == 1 and result.device_seconds > 0
    assert executor.collect(good) is result


def test_what_the_device_raises_surfaces_in_collect(folder: Path) -> None:
    device = FakeDevice(0)
    executor = on_device(folder, device)
    ticket = executor.launch(StepPlan(1, [row([5, 6], [1])]))

    def fault() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    device.run(executor._compute, fault)
    executor.sample(ticket, draw_spec())
    result = executor.collect(ticket)
    assert "illegal memory access" in str(result.failed) and not result.sampled


def test_a_row_of_nan_fails_alone_and_its_slot_holds_a_legal_id(folder: Path) -> None:
    executor = on_device(folder, FakeDevice(0))
    ticket = executor.launch(StepPlan(1, [row([5, 6], [1]), row([7, 8], [2], 1, "b")]))
    executor.device.synchronize()
    assert ticket.logits is not None
    ticket.logits = ticket.logits.clone()
    ticket.logits[0, 3] = torch.nan
    executor.last_token.fill_(77)
    params = SamplingParams(temperature=0.0)
    executor.sample(ticket, SampleSpec([SampleRow(i, "ab"[i], i, 0, 1, 0, params, [5], 1) for i in range(2)]))
    result = executor.collect(ticket)
    assert [f.request_id for f in result.failures] == ["a"] and [s.request_id for s in result.sampled] == ["b"]
    assert executor.last_token[0] == 0 and executor.last_token[1] == result.sampled[0].token


def test_an_empty_plan_and_close(folder: Path) -> None:
    executor = on_device(folder, FakeDevice(0))
    ticket = executor.launch(StepPlan(1))
    assert executor.collect(ticket).failed is None
    executor.close()
    executor.close()
    with pytest.raises(EngineClosedError):
        executor.launch(StepPlan(2))


def test_the_stats_say_how_long_the_device_waited_for_the_host(folder: Path) -> None:
    """device_stall_seconds: before a forward launched while the step before was not collected, and between a forward and its draw."""
    executor = on_device(folder, FakeDevice(0, eagerness=0.0))
    settings = CoreSettings(
        page_size=PAGE, num_pages=PAGES, max_context=64, vocab_size=VOCAB - 3, width=VOCAB, max_running=RUNNING, max_step_tokens=LIMITS.max_tokens,
        eos_ids=frozenset({2}), seed=0, overlap=True,
    )  # fmt: skip
    core = EngineCore(settings, executor)
    core.add(Request(id="a", token_ids=(5, 6), sampling=SamplingParams(max_tokens=6, ignore_eos=True)))
    while core.has_work:
        core.step()
    stats = core.stats()
    assert stats.device_seconds == executor.device_seconds > 0
    assert stats.device_stall_seconds == executor.device_stall_seconds > 0
    # The fake's clock ticks once an operation: a stall is the few marks and copies in the gaps, and the host is late in none.
    assert stats.device_stall_seconds < 2 * stats.device_seconds


def test_a_host_that_is_late_is_a_stall_wherever_it_is_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it plans the next forward, its arrays included, and while it prepares a draw; none of it is the device's own time."""
    late = 1_000_000  # ticks: a second
    device = FakeDevice(0)
    executor = on_device(folder, device)
    stage, prepare = executor._runner.stage, executor._sampler.prepare

    def slow(work: Any) -> Any:
        def then(*args: Any) -> Any:
            device.synchronize()
            device.clock += late
            return work(*args)

        return then

    page = np.array([3], np.int32)
    spec = SampleSpec([SampleRow(0, "a", 0, 0, 1, 0, SamplingParams(), (5, 6), 2)])
    first = executor.launch(StepPlan(1, [Row("a", 0, 0, (5, 6), page, logits_from=1)]))
    monkeypatch.setattr(executor._sampler, "prepare", slow(prepare))
    executor.sample(first, spec)
    monkeypatch.setattr(executor._runner, "stage", slow(stage))
    second = executor.launch(StepPlan(2, [Row("a", 0, 2, (7,), page, logits_from=2)]))
    results = [executor.collect(first), executor.collect(second)]
    for result in results:
        assert 1.0 <= result.stall_seconds < 1.001 and 0 < result.device_seconds < 0.001
    assert executor.device_stall_seconds == results[0].stall_seconds + results[1].stall_seconds
