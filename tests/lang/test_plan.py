"""Stages, segment trees, plans and the reuse law (Y), and runs (U1, U2, U4, U6, U8, Z2)."""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import threading
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phloem
import phloem.lang as sgl
from phloem.lang import AsyncState, State, assistant, function, gen, select, system, user
from phloem.lang.backend import Job, Record
from phloem.lang.compile import segment_tree
from phloem.lang.partial import PartialJson
from phloem.lang.testing import Scripted
from phloem.runtime.errors import Cancelled, IncompleteOutput, InvalidRequestError, ProgramError, ProgramTimeout
from phloem.runtime.request import Request


def said(record: Any, prompt: str) -> str:
    if record.kind == "score":
        return "good"
    return f" b{'.'.join(map(str, record.branch))}o{record.ordinal}"


@function
def chat(s: State, topic: str) -> Any:
    s += system("Be brief.") + user(f"Tell me about {topic}.") + assistant(gen("a", max_tokens=12))
    s += user("And now?") + assistant("Well, " + gen("b", max_tokens=12))
    with s.fork(3) as branches:
        for i, b in enumerate(branches):
            b += user(f"Point {i}?") + assistant(gen("p", max_tokens=12))
    s += user("Grade?") + assistant(select("grade", ["good", "goodness", "bad"]))
    return s["grade"], s["p"]


# ---- Y -----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None, derandomize=True)
@given(paths=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=12))
def test_y2_each_token_stands_in_exactly_one_node(paths: list[tuple[int, ...]]) -> None:
    jobs = [
        Job(Record("gen", Request(id=str(i), token_ids=p), "", None, (), 0, 0, 0), None, lambda j, f: None)
        for i, p in enumerate(paths)
    ]
    roots = segment_tree(jobs)
    spelled: list[tuple[int, ...]] = []
    found: dict[str, tuple[int, ...]] = {}

    def walk(node: Any, before: tuple[int, ...]) -> None:
        assert node.ids[: node.start] == before and node.start == len(before) < node.end
        whole = node.ids[: node.end]
        spelled.extend(whole[:n] for n in range(node.start + 1, node.end + 1))
        assert len(node.children) != 1 or node.jobs, "a node ends where something parts"
        for job in node.jobs:
            found[job.request.id] = whole
        for child in node.children:
            walk(child, whole)

    for root in roots:
        walk(root, ())
    assert len(spelled) == len(set(spelled)) == len({p[:n] for p in paths for n in range(1, len(p) + 1)})
    assert found == {str(i): p for i, p in enumerate(paths)}


def test_y1_a_straight_line_program_is_one_stage() -> None:
    @function
    def straight(s: State) -> None:
        s += "a" + gen("x", max_tokens=4) + "b" + gen("y", max_tokens=4)

    with Scripted(said) as backend:
        run = straight.run(backend=backend)
        assert len(run.records) == 2


def test_y3_what_a_stage_shares_is_warmed_and_held_until_the_last_child_is_admitted() -> None:
    @function
    def program(s: State, i: int) -> None:
        s += "A prefix that they all have, of some length. " + f"{i} " + gen("x", max_tokens=4)

    with Scripted(said) as backend:
        runs = program.run_batch([{"i": i} for i in range(8)], backend=backend)
        warm = [r for r in runs.records if r.kind == "warm"]
        assert warm[0].request.hold and warm[0].request.sampling.max_tokens == 0 and len(warm) == 1
        assert runs.records[0] is warm[0]
        assert backend.stats().holds == 0
        assert runs.usage.recomputed == 0 and runs.usage.hit > 0.8


@pytest.mark.parametrize("program,args", [(chat, {"topic": "tea"})])
def test_y4_compiled_and_interpreted_send_the_same_sampling_requests(program: Any, args: dict[str, Any]) -> None:
    def requests(compile: bool) -> tuple[Any, list[Any]]:
        with Scripted(said) as backend:
            run = program.run(backend=backend, seed=3, compile=compile, **args)
            backend.check()
            key = lambda r: (r.branch, r.ordinal, r.attempt, r.request.token_ids)  # noqa: E731
            sent = sorted((r for r in run.records if r.kind != "warm"), key=key)
            return run.value, [
                (r.request.token_ids, r.request.sampling, r.request.grammar, r.branch, r.ordinal, r.output.token_ids)
                for r in sent
            ]

    assert requests(True) == requests(False)


def test_y5_plan_prints_what_is_shared_and_runs_nothing() -> None:
    @function
    def judge(s: State, essay: str) -> Any:
        s += system("You judge.") + user(essay)
        with s.fork(3) as b:
            for x, name in zip(b, ("clarity", "evidence", "style")):
                x += user(f"Judge its {name}.") + assistant(gen(name, max_tokens=64))
            first = b[0]["clarity"]
        return first

    with Scripted({}) as backend:
        plan = judge.plan(essay="word " * 50, backend=backend)
        assert backend.stats().requests == 0
        lines = str(plan).splitlines()
        assert plan.unique < plan.prompt / 2 and lines[0].startswith("judge(essay=…)   prompt ")
        assert sum("≤ 64" in line for line in lines) == 3
        assert f"{plan.prompt:,}".replace(",", " ") in lines[0] and lines[-1].startswith("then reads `clarity` (test_plan.py:")
        assert [r.sampling.max_tokens for r in plan.requests] == [64] * 3
    with pytest.raises(InvalidRequestError):
        judge.plan(essay="x", backend=Scripted({}), seed="no")


@pytest.mark.parametrize("compile", [True, False])
def test_y6_the_reuse_law(compile: bool) -> None:
    with Scripted(said) as backend:
        run = chat.run(topic="tea", backend=backend, compile=compile)
        usage, stats = run.usage, backend.stats()
        assert usage.prompt == usage.cached + usage.computed
        assert (usage.cached, usage.computed) == (
            stats.cached_tokens,
            stats.prefill_tokens + stats.scratch_tokens,
        ) or usage.cached == stats.cached_tokens
        assert usage.completion == sum(len(r.output.token_ids) for r in run.records)
        assert usage.recomputed == usage.again + usage.siblings
        if compile:
            assert usage.siblings == 0
        else:
            assert usage.siblings < backend.lang_backend().page_size * len(run.records)


@pytest.mark.parametrize("order", ["given", "reversed", "shuffled"])
def test_y6_few_shot_in_any_order(order: str) -> None:
    rng = random.Random(3)
    words = ["tea", "salt", "iron", "rain", "light", "stone"]
    questions = [f"{rng.choice(words)} {rng.choice(words)} {n}?" for n in range(40)]
    if order == "reversed":
        questions.reverse()
    elif order == "shuffled":
        rng.shuffle(questions)

    @function
    def qa(s: State, q: str) -> None:
        s += "Q: one?\nA: two\n" * 20 + f"Q: {q}\nA:" + gen("a", stop="\n", max_tokens=6)

    with Scripted({"a": " yes\nmore"}) as backend:
        runs = qa.run_batch([{"q": q} for q in questions], backend=backend)
        assert [r["a"] for r in runs] == [" yes"] * 40
        assert runs.usage.recomputed == 0 and runs.usage.hit > 0.9
        backend.check()


def test_f4_siblings_carry_their_parent_and_its_lease_outlives_a_pause() -> None:
    held: list[int] = []

    @function
    def program(s: State) -> Any:
        s += "A text that the branches share." + gen("a", max_tokens=4)
        assert s["a"]
        held.append(backend.stats().holds)  # a tool at work, say: nothing runs, and what the path has computed stays
        with s.fork(3) as branches:
            for i, b in enumerate(branches):
                b += f" {i}:" + gen("x", max_tokens=4)
        return s["x"]

    with Scripted(said) as backend:
        run = program.run(backend=backend)
        first, *siblings = [r for r in run.records if r.kind == "gen"]
        assert [r.request.parent for r in siblings] == [first.request.id] * 3 and first.request.hold
        assert held == [1] and backend.stats().holds == 0
        assert run.usage.recomputed == run.usage.again


# ---- U -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-DSL-12")
def test_u1_works_twice_from_threads_and_loops_and_after_a_restart() -> None:
    @function
    def plain_program(s: State) -> Any:
        s += "a" + gen("x", max_tokens=8)
        return s["x"] + s.text()

    @function
    async def async_program(s: AsyncState) -> Any:
        s += "a" + gen("x", max_tokens=8)
        return await s["x"] + await s.text()

    def everything(results: list[Any]) -> None:
        with Scripted(said) as backend:
            results += [plain_program.run(backend=backend).value for _ in range(2)]
            results += [asyncio.run(async_program(backend=backend)).value for _ in range(2)]
            results.append(async_program.run(backend=backend).value)
            thread = threading.Thread(target=lambda b=backend: results.append(plain_program.run(backend=b).value))
            thread.start()
            thread.join(20)

            async def notebook(b: Any = backend) -> None:
                results.append(plain_program.run(backend=b).value)
                results.append((await async_program(backend=b)).value)
                results.append((await plain_program.arun(backend=b)).value)
                with pytest.raises(ProgramError, match=r"`await async_program"):
                    async_program.run(backend=b)

            asyncio.run(notebook())

    results: list[Any] = []
    everything(results)
    everything(results)
    assert len(results) == 18 and set(results) == {" bo0a bo0"}


def test_u2_run_batch_is_in_order_on_one_thread() -> None:
    @function
    def program(s: State, n: int) -> Any:
        s += f"{n}: " + gen("x", max_tokens=8)
        if n % 2:
            s += s["x"] + gen("y", max_tokens=8)
        return threading.get_ident(), n

    with Scripted(said) as backend:
        before = threading.active_count()
        runs = program.run_batch([{"n": n} for n in range(50)], backend=backend)
        assert [r.value for r in runs] == [(threading.get_ident(), n) for n in range(50)]
        assert threading.active_count() == before
        few = program.run_batch([(n,) for n in range(20)], num_threads=3, backend=backend)
        assert [r.value[1] for r in few] == list(range(20))
        ended = list(program.run_batch([{"n": n} for n in range(9)], generator_style=True, backend=backend))
        assert sorted(r.value[1] for r in ended) == list(range(9))
        backend.check()
        assert backend.stats().holds == 0
    assert program.run_batch([], backend=Scripted({})) == []


def test_u2_errors_in_a_batch() -> None:
    @function
    def program(s: State, n: int) -> Any:
        s += f"{n}: " + gen("x", int, max_tokens=8)
        return 10 // s["x"]

    def script(record: Any, prompt: str) -> str:
        return str(record.program - 2)

    with Scripted(script) as backend:
        with pytest.raises(ZeroDivisionError):
            program.run_batch([{"n": n} for n in range(5)], backend=backend)
        backend.check()
        assert backend.stats().pages_live == backend.stats().holds == 0
        runs = program.run_batch([{"n": n} for n in range(5)], on_error="return", backend=backend)
        assert [None if r.error() else r.value for r in runs] == [-5, -10, None, 10, 5]
        with pytest.raises(InvalidRequestError, match=r"batch\[1\]"):
            program.run_batch([{"n": 1}, {"m": 2}], backend=backend)


def test_z2_run_batch_sync_and_async_give_the_same_tokens() -> None:
    @function
    async def twin(s: AsyncState, topic: str) -> Any:
        s += system("Be brief.") + user(f"Tell me about {topic}.") + assistant(gen("a", max_tokens=12))
        s += user("And now?") + assistant("Well, " + gen("b", max_tokens=12))
        async with s.fork(3) as branches:
            for i, b in enumerate(branches):
                b += user(f"Point {i}?") + assistant(gen("p", max_tokens=12))
        s += user("Grade?") + assistant(select("grade", ["good", "goodness", "bad"]))
        return await s["grade"], await s["p"]

    with Scripted(said) as backend:
        runs = [
            chat.run(topic="tea", backend=backend, seed=1), twin.run(topic="tea", backend=backend, seed=1),
            chat.run_batch([{"topic": "tea"}] * 3, backend=backend, seed=1)[2], twin.run_batch([{"topic": "tea"}] * 3, backend=backend, seed=1)[2],
        ]  # fmt: skip
        assert len({tuple(r.tokens) for r in runs}) == 1 and len({str(r.value) for r in runs}) == 1
        sent = [sorted((r.request.token_ids, r.request.sampling.seed) for r in run.records if r.kind != "warm") for run in runs]
        assert all(each == sent[0] for each in sent)


class Item(pydantic.BaseModel):
    name: str
    count: int
    tags: list[str]


def test_u4_partials_grow_and_the_last_is_the_value() -> None:
    text = '{"name": "B\\u00e9 \\ud83d\\ude00", "count": 123, "tags": ["a", "bc"]}'
    reader, seen = PartialJson(), []
    for char in text:
        reader.push(char)
        seen.append(reader.value())
    assert seen[-1] == {"name": "Bé 😀", "count": 123, "tags": ["a", "bc"]}
    for before, after in itertools.pairwise(seen):
        assert before is None or extends(before, after), (before, after)
    assert {"name": "Bé "} in seen and not any(s and s.get("count") in (1, 12) for s in seen)


def extends(before: Any, after: Any) -> bool:
    if isinstance(before, str):
        return isinstance(after, str) and after.startswith(before)
    if isinstance(before, list):
        return len(after) >= len(before) and all(extends(b, a) for b, a in zip(before, after))
    if isinstance(before, dict):
        return all(k in after and extends(v, after[k]) for k, v in before.items())
    return bool(before == after)


def test_u4_events_of_a_stream() -> None:
    handle = gen("item", Item, max_tokens=200)

    @function
    def program(s: State) -> Any:
        s += "item: " + handle
        events = list(s.stream(handle))
        return events, s[handle]

    with Scripted({"item": Item(name="Bo", count=7, tags=["x"])}) as backend:
        run = program.run(backend=backend)
        events, value = run.value
        partials = [e.value for e in events if isinstance(e, sgl.Partial)]
        assert isinstance(events[-1], sgl.Done) and events[-1].value == value == Item(name="Bo", count=7, tags=["x"])
        assert partials[-1] == value.model_dump() and len(partials) > 3
        assert all(extends(a, b) for a, b in itertools.pairwise(partials))
        assert "".join(e.text for e in events if isinstance(e, sgl.Token)) == run.records[0].output.text


@pytest.mark.parametrize("name", [None, "b"])
def test_u4_text_iterators(name: str | None) -> None:
    with Scripted(said) as backend:
        whole = chat.run(topic="tea", backend=backend)
        run = chat.run(topic="tea", backend=backend, stream=True)
        pieces = list(run.text_iter(name))
        assert "".join(pieces) == (whole.text() if name is None else whole[name]) and len(pieces) > 3
        assert run.value == whole.value
        stream = chat.run(topic="tea", backend=backend, stream=True, return_logprob=True)

        async def read() -> list[Any]:
            return [piece async for piece in stream.text_async_iter("b", return_meta_data=True)]

        chunks = asyncio.run(read())
        assert "".join(text for text, _ in chunks) == whole["b"]
        totals = [meta["completion_tokens"] for _, meta in chunks]
        assert totals == sorted(totals) and sum(len(meta["output_token_logprobs"]) for _, meta in chunks) <= totals[-1]


def test_u6_timeouts_name_the_gen_and_free_its_pages() -> None:
    @function
    def program(s: State, **how: Any) -> None:
        s += "a" + gen("x", max_tokens=7000, **how)

    with Scripted({"x": "y" * 7000}) as backend:
        with pytest.raises(ProgramTimeout, match=r"test_plan\.py:\d+ 'x'"):
            program.run(backend=backend, timeout=0.02)
        with sgl.limits(seconds=0.02), pytest.raises(ProgramTimeout):
            program.run(backend=backend)
        with pytest.raises(TimeoutError):
            function(lambda s: s.__iadd__("a" + gen("x", timeout=0.02, max_tokens=7000))).run(backend=backend)

        @function
        def forks(s: State) -> None:
            s += "a"
            with s.fork(2, timeout=0.02) as b:
                b += gen("x", max_tokens=7000)

        with pytest.raises((ProgramTimeout, ExceptionGroup)):
            forks.run(backend=backend)
        backend.check()
        assert backend.stats().pages_live == backend.stats().holds == 0


@pytest.mark.parametrize(
    ("seed", "scenes"), [(0, 8), pytest.param(1, 300, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_u6_random_cancellations_leave_nothing(seed: int, scenes: int) -> None:
    """At any moment; 2,400 of them in the slow one: nothing hangs or is held, siblings' values are unchanged."""
    rng = random.Random(seed)

    @function
    async def victim(s: AsyncState, depth: int) -> Any:
        s += f"start {depth}" + gen("x", max_tokens=40)
        async with s.fork(2) as b:
            for i, each in enumerate(b):
                each += f" {i}" + gen("y", max_tokens=40) + gen("z", max_tokens=40)
            await asyncio.sleep(0)
            await b[0]["y"]
        return await s["x"]

    async def scene(backend: Any) -> None:
        tasks = [asyncio.ensure_future(victim(depth=n, backend=backend)) for n in range(10)]
        lucky = {n for n in range(10) if rng.random() < 0.2}
        doomed = [n for n in range(10) if n not in lucky]
        while doomed:
            await asyncio.sleep(0)
            if rng.random() < 0.3:
                tasks[doomed.pop(rng.randrange(len(doomed)))].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for n in lucky:
            assert results[n].value == "bo0 " * 5, "siblings are unchanged"
        assert all(isinstance(r, (asyncio.CancelledError, sgl.Run)) for r in results)

    def script(record: Any, prompt: str) -> str:
        return f"b{'.'.join(map(str, record.branch))}o{record.ordinal} " * 5

    with Scripted(script) as backend:
        for _ in range(scenes):
            asyncio.run(asyncio.wait_for(scene(backend), 60))
            backend.check()
            stats = backend.stats()
            assert stats.running == stats.waiting == stats.pages_live == stats.holds == 0


def test_u6_closing_a_run_ends_it() -> None:
    @function
    def program(s: State) -> None:
        s += "a" + gen("x", max_tokens=7000) + gen("y", max_tokens=100)

    with Scripted({"x": "y" * 7000, "y": ""}) as backend:
        with program.run(backend=backend, stream=True) as run:
            assert next(iter(run.text_iter("x")))
        assert isinstance(run._raised, Cancelled)
        backend.check()
        assert backend.stats().pages_live == backend.stats().holds == 0


def test_thousand_branches_make_no_thread() -> None:
    @function
    def program(s: State) -> Any:
        s += "root "
        with s.fork(1000) as b:
            for i, x in enumerate(b):
                x += f"{i}" + gen("v", max_tokens=4)
        return len(s["v"])

    with Scripted({"v": "abc"}) as backend:
        before = threading.active_count()
        assert program.run(backend=backend).value == 1000 and threading.active_count() == before
        backend.check()


def test_importing_the_language_loads_no_torch() -> None:
    code = "import phloem.lang as s; s.gen; s.function; s.State; s.limits; import sys; print(*(m in sys.modules for m in ('torch', 'pydantic', 'asyncio', 'tokenizers')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 4


# ---- the embedded model ----------------------------------------------------------------------------------------------------------


def test_y6_and_u8_on_the_embedded_model(idle_engine: phloem.Engine) -> None:
    before = idle_engine.stats()
    run = chat.run(topic="tea", backend=idle_engine, temperature=0)
    usage, after = run.usage, idle_engine.stats()
    assert usage.cached == after.cached_tokens - before.cached_tokens
    assert usage.forced == after.forced_tokens - before.forced_tokens
    assert usage.recomputed == usage.again
    assert run.value[0] in ("good", "goodness", "bad")
    interpreted = chat.run(topic="tea", backend=idle_engine, temperature=0, compile=False)
    batch = chat.run_batch([{"topic": "tea"}, {"topic": "rain"}], backend=idle_engine, temperature=0)
    assert run.tokens == interpreted.tokens == batch[0].tokens


def test_an_async_engine_runs_both_forms() -> None:
    async def scene() -> None:
        async with phloem.AsyncEngine(kv_tokens=2048) as engine:
            first = await chat.arun(topic="tea", backend=engine, temperature=0)

            @function
            async def twin(s: AsyncState) -> str:
                s += system("Be brief.") + user("Tell me about tea.") + assistant(gen("a", max_tokens=12))
                return str(await s["a"])

            assert (await twin(backend=engine, temperature=0)).value == first["a"]
            blocking = await asyncio.to_thread(lambda: chat.run(topic="tea", backend=engine, temperature=0))
            assert blocking.tokens == first.tokens
            await engine.check()
            assert (await engine.stats()).holds == 0

    asyncio.run(scene())


def test_errors_of_the_engine_arrive_located(idle_engine: phloem.Engine) -> None:
    @function
    def program(s: State) -> None:
        s += "a" + gen("x", regex="(?=a)b", max_tokens=4)

    with pytest.raises(phloem.GrammarError, match=r"test_plan\.py:\d+ 'x'"):
        program.run(backend=idle_engine)
    with pytest.raises(IncompleteOutput):
        function(lambda s: s.__iadd__("List three colours as JSON: " + gen("y", list[str], max_tokens=2))).run(
            backend=idle_engine
        )
