"""LocalExecutor against a device that remembers tokens: what is drawn depends on each sequence's history and nothing else."""

from __future__ import annotations

import gc
import multiprocessing
import random
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from phloem.runtime.errors import EngineClosedError, GrammarDeadEnd, NumericalError, PhloemError
from phloem.runtime.executor.local import LocalExecutor
from phloem.runtime.executor.philox import uniform
from phloem.runtime.executor.sampler import ReferenceSampler, filtered
from phloem.runtime.request import SamplingParams
from phloem.runtime.step import FUTURE, NO_SLOT, PageCopy, Row, SampleRow, SampleSpec, StepPlan

WIDTH, VOCAB, PAGE = 70, 64, 4
GREEDY, HOT = SamplingParams(temperature=0), SamplingParams(temperature=0.9, logprobs="both", top_logprobs=2, top_p=0.9)


@pytest.fixture
def make(device):
    made = []

    def build(overlap=False, max_logits=8, num_pages=64):
        runner = device.TokenRunner(page_size=PAGE, num_pages=num_pages, width=WIDTH, max_logits=max_logits)
        executor = LocalExecutor(
            runner, ReferenceSampler(vocab_size=VOCAB, width=WIDTH), page_size=PAGE, num_pages=num_pages, width=WIDTH,
            max_running=16, max_logits=max_logits, overlap=overlap,
        )  # fmt: skip
        made.append(executor)
        return executor, runner

    yield build
    for executor in made:
        executor.close()


def pages_of(i, count=8):
    return np.arange(i * 8, i * 8 + count, dtype=np.int32)


def prompt_row(i, tokens, **fields):
    fields.setdefault("logits_from", len(tokens) - 1)
    return Row(f"r{i}", i, 0, tokens, pages_of(i), **fields)


def draw_of(i, history, num_prompt, sampling=GREEDY, row=None, **fields):
    fields.setdefault("slot", i)
    return SampleRow(
        row=i if row is None else row, request_id=f"r{i}", position=len(history) - num_prompt, seed=i, sample=0,
        sampling=sampling, history=history, num_prompt=num_prompt, **fields,
    )  # fmt: skip


def expected_token(device, history, position, seed, sampling):
    """One request at a time, no pages, no batch."""
    x = device.logits_of(tuple(history), WIDTH)[:VOCAB]
    kept = filtered(x, np.ones(VOCAB, bool), sampling)
    if sampling.temperature == 0:
        return int(kept.order[0])
    sums = np.cumsum(kept.weights)
    return int(np.searchsorted(sums, uniform(seed, 0, position) * sums[-1], side="right"))


def generate(executor, prompts, num_tokens, sampling, chunk):
    """Prompts in chunks, then decodes; with a token in flight at every step, as the engine's loop keeps it."""
    histories = [list(p) for p in prompts]
    done = [0] * len(prompts)  # tokens launched
    drawing = [False] * len(prompts)
    flying, logprobs = [], [[] for _ in prompts]
    order = list(range(len(prompts)))

    def commit(ticket):
        result = executor.collect(ticket)
        assert result.failed is None
        for sampled in result.sampled:
            i = int(sampled.request_id[1:])
            histories[i].append(sampled.token)
            logprobs[i].append(sampled.logprob)
            drawing[i] = False

    step = 0
    while True:
        rows, who = [], []
        for i in order:
            limit = len(prompts[i]) + num_tokens
            known = histories[i][done[i] : done[i] + chunk]
            tokens = known or ([FUTURE] if drawing[i] and done[i] == len(histories[i]) else [])
            if not tokens or done[i] + 1 >= limit + 1 or done[i] >= limit - 1:
                continue
            end = done[i] + len(tokens)
            last = end == len(histories[i]) + (1 if tokens[-1] == FUTURE else 0)
            rows.append(Row(f"r{i}", i, done[i], tokens, pages_of(i), logits_from=end - 1 if last else end))
            who.append((i, last))
            done[i] = end
        if not rows and not flying:
            return histories, logprobs
        ticket = executor.launch(StepPlan(step, rows)) if rows else None
        while flying:
            commit(flying.pop(0))
        if ticket is not None:
            spec = SampleSpec([
                draw_of(i, histories[i], len(prompts[i]), sampling, row=at) for at, (i, last) in enumerate(who) if last
            ])  # fmt: skip
            executor.sample(ticket, spec)
            for i, last in who:
                drawing[i] = drawing[i] or last
            flying.append(ticket)
        step += 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_tokens_depend_on_each_history_alone(device, make, overlap, chunk, sampling):
    rng = random.Random(chunk)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))] for _ in range(5)]
    histories, logprobs = generate(make(overlap)[0], prompts, 6, sampling, chunk)
    assert all((a is not None) == (sampling.logprobs is not None) for row in logprobs for a in row)
    for i, prompt in enumerate(prompts):
        history = list(prompt)
        for position in range(6):
            history.append(expected_token(device, history, position, i, sampling))
        assert histories[i] == history


def test_overlap_on_and_off_give_the_same_bits(make):
    prompts = [[i, i + 1, 5] * (i + 1) for i in range(5)]
    off, on = (generate(make(overlap)[0], prompts, 7, HOT, 4) for overlap in (False, True))
    assert off == on


def test_overlap_runs_elsewhere_and_launch_returns_at_once(make):
    executor, runner = make(overlap=True)
    runner.gate = threading.Event()
    ticket = executor.launch(StepPlan(0, [prompt_row(0, [1, 2])]))
    executor.sample(ticket, SampleSpec([draw_of(0, [1, 2], 2)]))
    later = executor.launch(StepPlan(1, [Row("r0", 0, 2, [FUTURE], pages_of(0), logits_from=2)]))
    assert not runner.batches
    runner.gate.set()
    token = executor.collect(ticket).sampled[0].token
    executor.collect(later)
    assert runner.batches[1].token_ids.tolist() == [token]
    assert runner.threads == {"phloem-executor"}


def test_a_plan_changed_after_launch_changes_nothing(device, make):
    executor, runner = make(overlap=True)
    runner.gate = threading.Event()
    tokens, pages, block, targets = [1, 2], pages_of(0), [], [2]
    masks = np.full((1, 3), -1, np.int32)
    ticket = executor.launch(StepPlan(0, [Row("r0", 0, 0, tokens, pages, logits_from=0, targets=targets)]))
    history = [1, 2]
    spec = SampleSpec([draw_of(0, history, 2, mask=0, block=block)], masks)
    executor.sample(ticket, spec)
    tokens[:], pages[:], masks[:], targets[:] = [60, 61], 0, 0, [7]
    block.extend(range(VOCAB))
    runner.gate.set()
    result = executor.collect(ticket)
    assert [s.token for s in result.sampled] == [expected_token(device, (1, 2), 0, 0, GREEDY)]
    assert [score.token_id for score in result.scored["r0"]] == [2]
    assert result.device_seconds > 0


def test_S4_samples_of_a_group_draw_from_one_row(make):
    executor, _ = make()
    ticket = executor.launch(StepPlan(0, [prompt_row(0, [1, 2, 3])]))
    rows = [
        SampleRow(0, f"s{i}", slot, 0, seed=7, sample=i, sampling=HOT, history=[1, 2, 3], num_prompt=3)
        for i, slot in enumerate([4, 5, NO_SLOT, 6])
    ]
    executor.sample(ticket, SampleSpec(rows))
    drawn = [s.token for s in executor.collect(ticket).sampled]
    assert len(drawn) == 4
    assert executor.last_token[[4, 5, 6]].tolist() == [drawn[0], drawn[1], drawn[3]]


def test_copies_run_before_the_forward_and_R4_reads_the_tree(device, make):
    executor, runner = make()
    first = executor.launch(StepPlan(0, [prompt_row(0, [1, 2, 3, 4, 5, 6])]))
    executor.collect(first)
    copy = Row("r1", 1, 6, [9], np.array([0, 9], np.int32), logits_from=6)
    again = Row("r2", 2, 3, [4], np.array([0], np.int32), write_from=4, logits_from=3)
    ticket = executor.launch(StepPlan(1, [copy, again], [PageCopy(1, 9)]))
    executor.sample(ticket, SampleSpec([draw_of(1, [1, 2, 3, 4, 5, 6, 9], 7, row=0), draw_of(2, [1, 2, 3, 4], 4, row=1)]))
    result = executor.collect(ticket)
    assert [s.token for s in result.sampled] == [
        expected_token(device, (1, 2, 3, 4, 5, 6, 9), 0, 0, GREEDY),
        expected_token(device, (1, 2, 3, 4), 0, 0, GREEDY),
    ]
    assert runner.slots[64, 3].tolist() == [4, 3], "the recomputed token went to the scratch page"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("max_logits", [1, 2, 5, 64])
def test_scores_do_not_depend_on_how_many_logits_rows_fit(device, make, max_logits, overlap):
    executor, runner = make(overlap, max_logits)
    prompt = [random.Random(1).randrange(VOCAB) for _ in range(21)]
    rows = [
        prompt_row(0, prompt, logits_from=0, targets=prompt[1:], top_logprobs=3),
        prompt_row(1, [5, 6, 7]),
        prompt_row(2, [5, 6, 7, 8], logits_from=1, targets=[7, 8, 9]),
    ]
    ticket = executor.launch(StepPlan(0, rows))
    executor.sample(ticket, SampleSpec([draw_of(0, prompt, 21), draw_of(1, [5, 6, 7], 3)]))
    result = executor.collect(ticket)
    assert result.failed is None
    assert [s.token for s in result.sampled] == [
        expected_token(device, history, 0, i, GREEDY) for i, history in enumerate([prompt, [5, 6, 7]])
    ]
    assert set(result.scored) == {"r0", "r2"}
    for history, name, first, targets in ((prompt, "r0", 0, prompt[1:]), ([5, 6, 7, 8], "r2", 1, [7, 8, 9])):
        assert [s.token_id for s in result.scored[name]] == targets
        for at, (target, score) in enumerate(zip(targets, result.scored[name])):
            x = device.logits_of(tuple(history[: first + at + 1]), WIDTH).astype(np.float64)
            logprobs = x - np.log(np.exp(x).sum())
            assert score.logprob == pytest.approx(logprobs[target], abs=1e-6)
            if name == "r0":
                assert [t for t, _ in score.top] == np.argsort(-logprobs[:VOCAB], kind="stable")[:3].tolist()
            else:
                assert score.top == ()
    assert len(runner.batches) == max(1, -(-25 // max_logits)), "21 and 3 scored logits and 1 to draw from, each token once"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_forward_fails_its_step_and_those_behind_it_until_reset(device, make, overlap):
    executor, runner = make(overlap)
    runner.fail_at = {1}
    good = executor.launch(StepPlan(0, [prompt_row(0, [1])]))
    executor.sample(good, SampleSpec([draw_of(0, [1], 1)]))
    bad = executor.launch(StepPlan(1, [prompt_row(1, [2, 3], logits_from=0, targets=[3])]))
    assert len(executor.collect(good).sampled) == 1
    executor.sample(bad, SampleSpec([draw_of(1, [2, 3], 2, row=0)]))
    behind = executor.launch(StepPlan(2, [prompt_row(2, [4])]))
    result = executor.collect(bad)
    assert isinstance(result.failed, RuntimeError)
    assert (result.step, result.sampled, result.scored, result.failures) == (1, [], {}, [])
    executor.sample(behind, SampleSpec([draw_of(2, [4], 1, row=0)]))
    assert executor.collect(behind).failed is not None
    assert len(runner.batches) == 2, "the step behind was not run"
    executor.reset()
    again = executor.launch(StepPlan(3, [prompt_row(2, [4])]))
    executor.sample(again, SampleSpec([draw_of(2, [4], 1, row=0)]))
    result = executor.collect(again)
    assert result.failed is None
    assert [s.token for s in result.sampled] == [expected_token(device, [4], 0, 2, GREEDY)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_that_cannot_be_packed_fails_in_order(make, overlap):
    executor, _ = make(overlap)
    good = executor.launch(StepPlan(0, [prompt_row(0, [1])]))
    executor.sample(good, SampleSpec([draw_of(0, [1], 1)]))
    bad = executor.launch(StepPlan(1, [Row("r1", 1, 0, [1, 2, 3], pages_of(1, 0))]))
    executor.sample(bad, SampleSpec([draw_of(1, [1, 2, 3], 3, row=0)]))
    assert executor.collect(good).failed is None
    assert isinstance(executor.collect(bad).failed, AssertionError)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fields", [{"logits_from": 1}, {"logits_from": 0, "targets": [5]}], ids=["no logits", "all scored"])
def test_a_spec_that_cannot_be_prepared_fails_its_step(make, overlap, fields):
    executor, _ = make(overlap)
    ticket = executor.launch(StepPlan(0, [prompt_row(0, [1], **fields)]))
    executor.sample(ticket, SampleSpec([draw_of(0, [1], 1)]))
    assert "no logits to draw from" in str(executor.collect(ticket).failed)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_is_not_finite_fails_its_request_alone(device, make, overlap):
    executor, runner = make(overlap)
    runner.poison = {(1, 2): float("nan"), (5,): float("inf")}
    executor.last_token[0] = 63
    rows = [
        prompt_row(0, [1, 2]),
        prompt_row(1, [3]),
        prompt_row(2, [5, 6, 7], logits_from=0, targets=[6, 7]),
        prompt_row(3, [8, 9], logits_from=0, targets=[9]),
    ]
    ticket = executor.launch(StepPlan(0, rows))
    dead = np.zeros((1, 3), np.int32)
    draws = [
        draw_of(0, [1, 2], 2),
        draw_of(1, [3], 1),
        draw_of(2, [5, 6, 7], 3),
        SampleRow(3, "r3", 3, 0, 3, 0, GREEDY, [8, 9], 2, mask=0),
    ]
    executor.sample(ticket, SampleSpec(draws, dead))
    result = executor.collect(ticket)
    assert result.failed is None
    assert {f.request_id: type(f.error) for f in result.failures} == {
        "r0": NumericalError, "r2": NumericalError, "r3": GrammarDeadEnd,
    }  # fmt: skip
    assert [(s.request_id, s.token) for s in result.sampled] == [("r1", expected_token(device, [3], 0, 1, GREEDY))]
    assert set(result.scored) == {"r3"}
    assert executor.last_token[0] == 0, "a row in flight that reads the slot gets an id that indexes something"


def test_an_empty_plan_is_a_step_too(make):
    executor, runner = make()
    ticket = executor.launch(StepPlan(0))
    executor.sample(ticket, SampleSpec())
    assert executor.collect(ticket).failed is None
    assert not runner.batches


def test_logits_are_drawn_from_once_and_before_the_next_forward(make):
    executor, _ = make()
    old = executor.launch(StepPlan(0, [prompt_row(0, [1])]))
    new = executor.launch(StepPlan(1, [prompt_row(1, [1])]))
    with pytest.raises(AssertionError, match="later forward"):
        executor.sample(old, SampleSpec([draw_of(0, [1], 1)]))
    executor.sample(new, SampleSpec([draw_of(1, [1], 1, row=0)]))
    with pytest.raises(AssertionError, match="once"):
        executor.sample(new, SampleSpec([draw_of(1, [1], 1, row=0)]))


def test_ctrl_c_in_a_step_leaves_an_executor_that_can_be_reset(make):
    executor, runner = make()
    real = runner.check
    runner.check = lambda batch: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        executor.launch(StepPlan(0, [prompt_row(0, [1])]))
    runner.check = real
    assert isinstance(executor.collect(executor.launch(StepPlan(1, [prompt_row(0, [1])]))).failed, PhloemError)
    executor.reset()
    assert executor.collect(executor.launch(StepPlan(2, [prompt_row(0, [1])]))).failed is None


@pytest.mark.parametrize("overlap", [False, True])
def test_close_is_quick_final_and_idempotent(make, overlap):
    executor, _ = make(overlap)
    ticket = executor.launch(StepPlan(0, [prompt_row(0, [1])]))
    executor.collect(ticket)
    started = time.perf_counter()
    executor.close()
    executor.close()
    assert time.perf_counter() - started < 10
    assert executor.collect(ticket).failed is None
    with pytest.raises(EngineClosedError):
        executor.launch(StepPlan(1, [prompt_row(0, [1])]))
    with pytest.raises(EngineClosedError):
        executor.reset()


def test_close_with_a_step_that_hangs_waits_a_second_and_collect_raises(make):
    executor, runner = make(overlap=True)
    runner.gate = threading.Event()
    ticket = executor.launch(StepPlan(0, [prompt_row(0, [1])]))
    while not runner.threads:  # else the step is dropped, and collect returns it as failed
        time.sleep(0.001)
    started = time.perf_counter()
    executor.close()
    assert time.perf_counter() - started < 10
    with pytest.raises(EngineClosedError):
        executor.collect(ticket)
    runner.gate.set()


def test_an_executor_that_nobody_closed_is_collected_with_its_thread(make, device):
    runner = device.TokenRunner(page_size=PAGE, num_pages=8, width=WIDTH, max_logits=8)
    executor = LocalExecutor(
        runner, ReferenceSampler(vocab_size=VOCAB, width=WIDTH), page_size=PAGE, num_pages=8, width=WIDTH, max_running=2,
        max_logits=8, overlap=True,
    )  # fmt: skip
    gone, thread = weakref.ref(executor), executor._lane._thread
    executor.collect(executor.launch(StepPlan(0, [prompt_row(0, [1])])))
    del executor
    gc.collect()
    assert gone() is None
    assert not thread.is_alive()


EXIT = """
import sys
sys.modules["torch"] = None  # not needed
from phloem.runtime.executor.local import LocalExecutor
executor = LocalExecutor(None, None, page_size=4, num_pages=1, width=1, max_running=1, max_logits=1, overlap=True)
print("made")
"""


def test_the_interpreter_exits_with_an_executor_left_open():
    run = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=30)
    assert (run.returncode, run.stdout, run.stderr) == (0, "made\n", "")


def _in_child(executor, queue):
    try:
        executor.launch(StepPlan(0, [prompt_row(0, [1])]))
    except EngineClosedError as error:
        executor.close()
        queue.put(str(error))


def test_a_forked_child_is_told(make):
    executor, _ = make(overlap=True)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(executor, queue))
    child.start()
    assert "process that made it" in queue.get(timeout=20)
    child.join(20)
    assert child.exitcode == 0
