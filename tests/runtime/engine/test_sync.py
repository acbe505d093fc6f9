"""Engine: shapes, order, streams, errors, threads, interrupts, closing. Over the real core and a device without weights."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import phloem
from phloem.runtime.engine.build import EngineOptions
from phloem.runtime.engine.sync import Engine, Stream
from tests.runtime.engine.parts import SlowExecutor, parts

ROOT = Path(__file__).resolve().parents[3]
GREEDY_FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
GREEDY = phloem.SamplingParams(**GREEDY_FIELDS)
LONG = phloem.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.from_parts(parts()) as made:
        yield made
        stats = made.stats()
        assert stats.running == stats.waiting == stats.pages_live == 0
        made.check()


def device(engine: Engine) -> SlowExecutor:
    return engine._client._core.executor  # type: ignore[attr-defined,no-any-return]


# ---- results ------------------------------------------------------------------------------------------------------------


def test_results_have_the_shape_and_the_order_of_the_prompts(engine: Engine) -> None:
    one = engine.generate("hello", GREEDY)
    assert len(one.token_ids) == 12 and one.finish_reason == "length"
    assert one.text == bytes(one.token_ids).decode()
    two = engine.generate(["abc", "hello"], GREEDY)
    assert [o.token_ids for o in two] == [engine.generate("abc", GREEDY).token_ids, one.token_ids]
    assert [o.token_ids for o in engine.generate("hello", GREEDY, n=2)] == [one.token_ids] * 2
    nested = engine.generate(["abc", "hello"], GREEDY, n=2)
    assert [[o.token_ids for o in os] for os in nested] == [[two[0].token_ids] * 2, [two[1].token_ids] * 2]
    assert engine.generate([], GREEDY) == []


def test_ids_and_text_are_the_same_prompt(engine: Engine) -> None:
    text = engine.generate("hello", GREEDY)
    assert engine.generate(list(b"hello"), GREEDY).token_ids == text.token_ids
    assert engine.tokenizer.encode("hello") == list(b"hello")


def test_usage_says_what_came_from_the_cache(engine: Engine) -> None:
    """R4, R9: the last token is always computed."""
    first = engine.generate("hello there", GREEDY)
    assert (first.usage.prompt_tokens, first.usage.cached_tokens, first.usage.completion_tokens) == (11, 0, 12)
    assert engine.explain("hello there").num_cached == 10
    again = engine.generate("hello there", GREEDY)
    assert again.usage.cached_tokens == 10 and again.token_ids == first.token_ids
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.cached_tokens) == (12, 10)
    assert engine.flush() > 0
    assert engine.explain("hello there").num_cached == 0
    assert engine.explain("hello there", namespace="other").num_cached == 0


def test_namespaces_share_nothing(engine: Engine) -> None:
    """R8."""
    engine.generate("hello there", GREEDY)
    assert engine.generate("hello there", GREEDY, namespace="other").usage.cached_tokens == 0
    assert engine.explain("hello there", namespace="other").num_cached == 10


def test_seeds_are_reported_and_repeat_the_draw(engine: Engine) -> None:
    """M2."""
    warm = phloem.SamplingParams(max_tokens=20, ignore_eos=True)
    first = engine.generate("hello", warm, n=3)
    assert len({tuple(o.token_ids) for o in first}) == 3
    assert len({o.seed for o in first}) == 1
    again = engine.generate("hello", {"max_tokens": 20, "ignore_eos": True, "seed": first[0].seed}, n=3)
    assert [o.token_ids for o in again] == [o.token_ids for o in first]


def test_two_engines_with_one_seed_draw_alike() -> None:
    with Engine.from_parts(parts()) as a, Engine.from_parts(parts()) as b:
        assert [o.token_ids for o in a.generate(["x", "y"], n=2)[1]] == [o.token_ids for o in b.generate(["x", "y"], n=2)[1]]


def test_sampling_can_differ_from_prompt_to_prompt(engine: Engine) -> None:
    outputs = engine.generate(["a", "b", "c"], [{"max_tokens": m, "ignore_eos": True} for m in (1, 5, 3)])
    assert [len(o.token_ids) for o in outputs] == [1, 5, 3]


def test_no_tokens_may_be_asked_for(engine: Engine) -> None:
    output = engine.generate("hello", {"max_tokens": 0})
    assert (output.text, output.token_ids, output.finish_reason) == ("", [], "length")
    assert engine.explain("hello!").num_cached == 5


def test_logprobs_come_one_a_token_and_with_the_prompt(engine: Engine) -> None:
    output = engine.generate(
        "hello", {"max_tokens": 6, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0, "ignore_eos": True}
    )
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert all(len(entry.top) == 2 for entry in output.logprobs)
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:] if entry] == list(b"ello")


def test_scores_are_the_prompt_logprobs(engine: Engine) -> None:
    """M4: from any position, cached or not."""
    cold = engine.score("hello there")
    assert cold[0] is None and [entry.token_id for entry in cold[1:] if entry] == list(b"ello there")
    assert engine.score("hello there", 4) == cold[4:]
    assert engine.score(["hello there", "hello"], 2) == [cold[2:], cold[2:5]]
    assert engine.stats().decode_tokens == 0
    best = engine.score("hello", 3, top_logprobs=4)
    assert [len(entry.top) for entry in best if entry] == [4, 4]


def test_chat_goes_through_the_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert engine.encode_chat(messages) == list(b"<user>hi<assistant>")
    said = engine.chat(messages, GREEDY)
    assert said.token_ids == engine.generate("<user>hi<assistant>", GREEDY).token_ids
    assert [o.token_ids for o in engine.chat([messages, messages], GREEDY)] == [said.token_ids] * 2
    assert "".join(d.text for d in engine.stream_chat(messages, GREEDY)) == said.text


def test_a_stop_string_ends_the_output_at_its_token(engine: Engine) -> None:
    whole = engine.generate("hello", GREEDY).text
    stopped = engine.generate("hello", {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "stop": whole[5:7]})
    assert stopped.text == whole[:5] and stopped.finish_reason == "stop_string" and stopped.stop_reason == whole[5:7]
    assert len(stopped.token_ids) == 7 == stopped.usage.completion_tokens
    assert engine.stats().running == 0


# ---- errors -------------------------------------------------------------------------------------------------------------


def test_one_bad_prompt_raises_for_the_call_and_nothing_is_computed(engine: Engine) -> None:
    for bad in ("", [127, 128], [-1], "x" * 600, [1.5]):
        with pytest.raises(phloem.RequestError, match="prompt 1 of 3"):
            engine.generate(["good", bad, "fine"], GREEDY)
    assert engine.stats().steps == 0 and engine.stats().prefill_tokens == 0


def test_one_bad_prompt_can_be_returned_instead(engine: Engine) -> None:
    good, bad, odd, fine = engine.generate(["good", [127, 128], "", "fine"], GREEDY, on_error="return")
    assert len(good.token_ids) == len(fine.token_ids) == 12
    assert isinstance(bad.error, phloem.InvalidRequestError) and "128" in str(bad.error) and bad.finish_reason == "error"
    assert isinstance(odd.error, phloem.InvalidRequestError)


def test_a_single_bad_prompt_raises_its_own_error(engine: Engine) -> None:
    with pytest.raises(phloem.InvalidRequestError, match=r"^the prompt holds id 128"):
        engine.generate([128])
    with pytest.raises(phloem.ContextLengthError):
        engine.generate("x" * 513)
    with pytest.raises(TypeError, match="temperature"):
        engine.generate("x", temperature=1)  # type: ignore[call-overload]


def test_an_argument_that_means_nothing_is_never_ignored(engine: Engine) -> None:
    with pytest.raises(TypeError, match="no argument 'streaming'"):
        engine.generate("x", streaming=True)  # type: ignore[call-overload]
    for stream, prompt in ((engine.stream, "x"), (engine.stream_chat, [{"role": "user", "content": "x"}])):
        for name in ("on_error", "progress"):
            with pytest.raises(TypeError, match=f"a stream takes no {name}"):
                stream(prompt, **{name: None})  # type: ignore[operator]


def test_a_row_that_fails_fails_alone(engine: Engine) -> None:
    """S6."""
    clean = engine.generate(["aaa", "bbb"], GREEDY)
    executor = device(engine)

    def break_first() -> None:
        live = sorted(engine._client._core._live, key=lambda i: int(i[1:]))  # type: ignore[attr-defined]
        executor.row_errors[live[0]] = phloem.NumericalError("the row is NaN")
        executor.hook = None

    executor.hook = break_first
    failed, fine = engine.generate(["aaa", "bbb"], GREEDY, on_error="return")
    assert isinstance(failed.error, phloem.NumericalError) and fine.token_ids == clean[1].token_ids
    executor.hook = break_first
    with pytest.raises(phloem.NumericalError, match="prompt 0 of 2"):
        engine.generate(["aaa", "bbb"], GREEDY)


def test_a_timeout_aborts_and_says_so() -> None:
    with Engine.from_parts(parts(pause=0.01)) as engine:
        start = time.monotonic()
        with pytest.raises(phloem.RequestTimeoutError, match=r"timeout=0.1 s"):
            engine.generate("hello", LONG, timeout=0.1)
        assert time.monotonic() - start < 10
        assert engine.stats().running == 0
        short, late = engine.generate(["a", "b"], [{"max_tokens": 1}, LONG], timeout=0.2, on_error="return")
        assert short.error is None and short.finish_reason in ("length", "eos")
        assert isinstance(late.error, TimeoutError) and late.finish_reason == "abort" and late.text
        with pytest.raises(phloem.RequestTimeoutError), engine.stream("hello", LONG, timeout=0.1) as stream:
            for _ in stream:
                pass
        assert engine.generate("hello", GREEDY, timeout=60).finish_reason == "length"
        engine.check()


def test_a_timeout_may_be_longer_than_clocks_can_count() -> None:
    with Engine.from_parts(parts(pause=0.002)) as engine:
        ends: list[str] = []
        long: list[Any] = [float("inf"), 1e300, 10**400]
        threads = [threading.Thread(target=lambda t=t: ends.append(engine.generate("hello", GREEDY, timeout=t).finish_reason)) for t in long]  # type: ignore[misc]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert ends == ["length"] * 3, "also for those that wait for another thread's steps"


# ---- progress -----------------------------------------------------------------------------------------------------------


def test_what_progress_raises_ends_the_call_and_leaves_the_engine_and_its_other_calls_alone(engine: Engine) -> None:
    def refuse(ended: int, total: int) -> None:
        raise LookupError(f"{ended} of {total}")

    other = engine.stream("hello", LONG)
    with pytest.raises(LookupError, match="1 of 2"):
        engine.generate(["a", "b"], [GREEDY, LONG], progress=refuse)
    with pytest.raises(LookupError, match="1 of 2"):
        engine.generate(["", "b"], LONG, progress=refuse, on_error="return")
    assert engine.stats().running == 1, "what was left of those calls is aborted"
    assert len([i for delta in other for i in delta.token_ids]) == 400


@pytest.mark.parametrize("verb", ["generate", "stream", "stats", "explain"])
def test_an_engine_cannot_be_used_from_inside_its_own_step(engine: Engine, verb: str) -> None:
    uses: dict[str, Any] = {
        "generate": lambda: engine.generate("a", GREEDY), "stream": lambda: engine.stream("a", GREEDY), "stats": engine.stats,
        "explain": lambda: engine.explain("a"),
    }  # fmt: skip
    with pytest.raises(phloem.EngineBusyError, match="inside a step"):
        engine.generate("hello", GREEDY, progress=lambda ended, total: uses[verb]())
    assert engine.generate("hello", GREEDY).finish_reason == "length"


def test_an_engine_can_be_closed_from_inside_its_own_step() -> None:
    freed: list[bool] = []
    made = parts()
    engine = Engine.from_parts(dataclasses.replace(made, on_close=lambda: freed.append(True)))
    assert engine.generate("hello", GREEDY, progress=lambda ended, total: engine.close()).finish_reason == "length"
    assert freed == [True], "at once when the step has ended"
    with pytest.raises(phloem.EngineClosedError):
        engine.stats()


# ---- streams ------------------------------------------------------------------------------------------------------------


def test_a_streams_pieces_are_the_whole(engine: Engine) -> None:
    whole = engine.generate("hello", {**GREEDY_FIELDS, "logprobs": True})
    stream = engine.stream("hello", {**GREEDY_FIELDS, "logprobs": True})
    deltas = list(stream)
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert [entry for d in deltas for entry in d.logprobs or []] == whole.logprobs
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert len(deltas) == 12, "one piece a token, not one at the end"
    assert deltas[-1].usage == stream.output.usage and stream.output.token_ids == whole.token_ids
    assert list(stream) == []


def test_a_stream_of_samples_tells_them_apart(engine: Engine) -> None:
    sampling = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
    stream = engine.stream("hello", sampling, n=3)
    texts = {0: "", 1: "", 2: ""}
    for delta in stream:
        texts[delta.index] += delta.text
    assert list(texts.values()) == [o.text for o in engine.generate("hello", sampling, n=3)]
    assert [o.text for o in stream.outputs] == list(texts.values())


def test_a_stream_refuses_when_made_not_when_read(engine: Engine) -> None:
    with pytest.raises(phloem.InvalidRequestError, match="128"):
        engine.stream([128])
    with pytest.raises(phloem.InvalidRequestError, match="one prompt"):
        engine.stream(["a", "b"])  # type: ignore[list-item]
    assert engine.stats().steps == 0


@pytest.mark.parametrize("how", ["close", "with", "drop", "exception"])
def test_leaving_a_stream_aborts_its_request(engine: Engine, how: str) -> None:
    """S5."""
    stream: Stream | None = engine.stream("hello", LONG)
    assert next(stream).text and engine.stats().running == 1  # type: ignore[arg-type]
    if how == "close":
        stream.close()  # type: ignore[union-attr]
        stream.close()  # type: ignore[union-attr]
        assert list(stream) == [] and stream.output.finish_reason == "abort"  # type: ignore[arg-type,union-attr]
    elif how == "with":
        with stream:  # type: ignore[union-attr]
            pass
    elif how == "exception":
        with pytest.raises(KeyError), stream:  # type: ignore[union-attr]
            raise KeyError
    stream = None
    gc.collect()
    stats = engine.stats()
    assert stats.running == 0 and stats.aborted == 1


def test_an_unread_streams_output_is_not_there_yet(engine: Engine) -> None:
    with engine.stream("hello", LONG) as stream:
        next(stream)
        with pytest.raises(RuntimeError, match="not over"):
            _ = stream.output


def test_streams_and_calls_interleave(engine: Engine) -> None:
    alone = [engine.generate(p, GREEDY).text for p in ("one", "two", "three")]
    engine.flush()
    first, second = engine.stream("one", GREEDY), engine.stream("two", GREEDY)
    texts = [next(first).text, next(second).text]
    third = engine.generate("three", GREEDY).text
    texts[1] += "".join(d.text for d in second)
    texts[0] += "".join(d.text for d in first)
    assert [*texts, third] == alone


# ---- threads, interrupts, closing ---------------------------------------------------------------------------------------


def test_threads_share_an_engine_and_get_what_they_would_alone(engine: Engine) -> None:
    prompts = [f"prompt {i}" for i in range(12)]
    alone = [engine.generate(p, GREEDY).token_ids for p in prompts]
    engine.flush()
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        if i % 3 == 0:
            results[i] = [t for d in engine.stream(prompts[i], GREEDY) for t in d.token_ids]
        else:
            results[i] = engine.generate(prompts[i], GREEDY).token_ids
        engine.stats()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [results[i] for i in range(12)] == alone


def test_ctrl_c_ends_the_call_and_leaves_the_engine_usable(engine: Engine) -> None:
    before = engine.generate("hello", GREEDY).token_ids
    executor, count = device(engine), 0

    def interrupt() -> None:
        nonlocal count
        count += 1
        if count == 5:
            signal.raise_signal(signal.SIGINT)

    executor.hook = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["hello", "there"], LONG)
    assert engine.stats().running == engine.stats().waiting == 0
    count = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in engine.stream("hello", LONG):
            pass
    executor.hook = None
    assert engine.stats().running == 0
    assert engine.generate("hello", GREEDY).token_ids == before


def test_ctrl_c_in_one_thread_leaves_the_others_calls_alone() -> None:
    with Engine.from_parts(parts(pause=0.003)) as engine:
        executor, results = device(engine), list[Any]()
        alone = engine.generate("other", LONG).token_ids
        engine.flush()
        executor.started.clear()
        other = threading.Thread(target=lambda: results.append(engine.generate("other", LONG).token_ids))
        other.start()
        executor.started.wait(5)
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.generate("mine", LONG)
        other.join(30)
        assert results == [alone] and engine.stats().running == 0


def test_what_ctrl_c_keeps_from_being_abandoned_is_abandoned_later(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = engine.stream("hello", LONG)
    with monkeypatch.context() as patch:
        patch.setattr(engine._client, "abandon", lambda ids: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    assert engine.stats().running + engine.stats().waiting == 1
    del stream
    gc.collect()
    assert engine.stats().running == engine.stats().waiting == 0
    Stream.__new__(Stream).close()  # interrupted before the first line of __init__: collecting it says nothing


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ctrl-C may also fall into a __del__
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "beside another thread"])
def test_ctrl_c_at_any_moment_leaves_nothing_behind(shared: bool) -> None:
    """KeyboardInterrupt and nothing else comes out, wherever it falls: in a step, in a wait, on the way in or out."""
    rng, interrupted = random.Random(1), 0
    with Engine.from_parts(parts(pause=0.0003, kv_tokens=128, max_running=3)) as engine:
        expected, stop, wrong = engine.generate("hello", GREEDY).token_ids, threading.Event(), list[Any]()

        def work() -> None:
            while not stop.is_set():
                wrong.extend(o.token_ids for o in engine.generate("hello", GREEDY, n=2) if o.token_ids != expected)

        other = threading.Thread(target=work)
        if shared:
            other.start()
        before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            for _ in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.choice((1e-4, 1e-3, 5e-3)) * rng.random() + 1e-6)
                    assert engine.generate("hello", GREEDY).token_ids == expected
                    for _ in engine.stream("there", GREEDY, n=2):
                        engine.explain("hello")
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            stop.set()
        if shared:
            other.join(30)
        gc.collect()
        engine.check()
        stats = engine.stats()
        assert not wrong and interrupted > 20
        assert stats.running == stats.waiting == stats.pages_live == 0


def test_after_close_every_verb_is_refused_and_close_may_be_repeated() -> None:
    engine = Engine.from_parts(parts())
    stream = engine.stream("hello", LONG)
    next(stream)
    executor = device(engine)
    engine.close()
    engine.close()
    uses: list[Any] = [
        lambda: engine.generate("x"), lambda: engine.chat([{"role": "user", "content": "x"}]), lambda: engine.stream("x"), lambda: engine.score("xy"),
        engine.stats, engine.flush, engine.check, lambda: engine.explain("x"), lambda: next(stream),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(phloem.EngineClosedError, match="closed"):
            use()
    stream.close()
    assert executor.closed


def test_close_ends_calls_of_other_threads() -> None:
    engine = Engine.from_parts(parts(pause=0.005))
    errors: list[Exception] = []

    def work() -> None:
        try:
            engine.generate("hello", LONG)
        except phloem.EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    device(engine).started.wait(5)
    start = time.monotonic()
    engine.close()
    thread.join(5)
    assert len(errors) == 1 and time.monotonic() - start < 10


def test_a_forgotten_engine_is_freed() -> None:
    made = parts()
    executor, core = made.core.executor, weakref.ref(made.core)  # type: ignore[attr-defined]
    engine: Engine | None = Engine.from_parts(made)
    assert engine is not None
    engine.generate("hello", GREEDY)
    stream: Stream | None = engine.stream("hello", LONG)
    next(stream)  # type: ignore[arg-type]
    del made
    engine = stream = None
    gc.collect()
    assert executor.closed and core() is None


def test_a_dead_engine_says_so_and_a_new_one_works() -> None:
    with Engine.from_parts(parts()) as engine:
        core = engine._client._core  # type: ignore[attr-defined]
        core.step = lambda now: (_ for _ in ()).throw(RuntimeError("boom"))
        with pytest.raises(phloem.EngineDeadError, match="boom"):
            engine.generate("hello")
        with pytest.raises(phloem.EngineDeadError, match="boom"):
            engine.stats()
    with Engine.from_parts(parts()) as engine:
        assert engine.generate("hello", GREEDY).token_ids


PRELUDE = """
import os, signal, sys, threading, time
import phloem
from tests.runtime.engine.parts import parts
LONG = phloem.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
"""


def run(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=60, **options
    )  # fmt: skip


def test_a_program_that_forgets_to_close_exits_at_once() -> None:
    done = run(
        """
        engine = phloem.Engine.from_parts(parts())
        engine.generate("hello")
        stream = engine.stream("hello", LONG); next(stream)
        threading.Thread(target=lambda: None).start()
        print(time.monotonic(), flush=True)
        """
    )
    assert done.returncode == 0 and not done.stderr
    assert time.monotonic() - float(done.stdout) < 10


def test_a_program_stopped_by_ctrl_c_exits_soon() -> None:
    code = """
    engine = phloem.Engine.from_parts(parts(pause=0.01))
    print("ready", flush=True)
    engine.generate(["hello"] * 8, LONG)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert "KeyboardInterrupt" in errors and process.returncode != 0


def test_a_forked_child_is_told_to_make_its_own_engine() -> None:
    """Also while another thread is inside a step, with the locks that go with it."""
    done = run(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of fork in a threaded program
        engine = phloem.Engine.from_parts(parts(pause=0.005))
        thread = threading.Thread(target=engine.generate, args=("hello", LONG))
        thread.start()
        engine._client._core.executor.started.wait(5)
        time.sleep(0.02)
        pid = os.fork()
        if pid == 0:
            refused = 0
            for use in (lambda: engine.generate("x"), lambda: engine.stream("x"), engine.stats, engine.check):
                try:
                    use()
                except phloem.EngineClosedError as error:
                    refused += "Create the engine in the child" in str(error)
            engine.close()
            with phloem.Engine.from_parts(parts()) as own:
                refused += len(own.generate("hello", {"max_tokens": 3, "ignore_eos": True}).token_ids) == 3
            del engine
            os._exit(refused)
        status = os.waitpid(pid, 0)[1]
        thread.join()
        assert os.waitstatus_to_exitcode(status) == 5, status
        assert engine.generate("hello", {"max_tokens": 3, "ignore_eos": True}).token_ids
        """
    )
    assert done.returncode == 0, done.stderr


def test_the_engines_options_are_the_configs_fields() -> None:
    assert ["model", *EngineOptions.__annotations__] == list(phloem.EngineConfig.__dataclass_fields__)
