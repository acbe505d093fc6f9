"""States, values and forks (K, V, F) on the real engine with a scripted model: every request is looked at."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any, Literal

import pydantic
import pytest

import phloem.lang as sgl
from phloem.lang import (
    State,
    assistant,
    fork_each,
    function,
    gen,
    gen_int,
    gen_string,
    plain,
    ref,
    select,
    special,
    system,
    user,
)
from phloem.lang.testing import Scripted
from phloem.runtime.errors import (
    BackendUnsupported,
    CheckFailed,
    IncompleteOutput,
    InvalidRequestError,
    LimitExceeded,
    PhloemError,
    ProgramError,
)
from phloem.runtime.text.tokenizer import Tokenizer


class Person(pydantic.BaseModel):
    name: str
    age: int


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def said(record: Any, prompt: str) -> str:
    """What the model says where a test does not care: depends on the branch and the ordinal."""
    return f" b{'.'.join(map(str, record.branch))}o{record.ordinal}"


def ends_clean(backend: Scripted) -> None:
    backend.check()
    stats = backend.stats()
    assert stats.running == stats.waiting == stats.pages_live == stats.holds == 0


# ---- K -----------------------------------------------------------------------------------------------------------------------


def test_k1_a_fork_copies_nothing_and_a_child_is_small() -> None:
    import tracemalloc

    @function
    def program(s: State) -> Any:
        s += "x" * 10_000
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        branches = s.fork(10_000)
        size = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        return size, branches[7].branch

    with Scripted({}, max_context=32_768) as backend:
        size, branch = program.run(backend=backend).value
        assert branch == (7,)
        assert size / 10_000 < 2048, "a branch is small, whatever its prefix"


def test_k2_a_lease_lives_as_long_as_its_state() -> None:
    held: list[int] = []

    @function
    def program(s: State) -> None:
        s += "A long enough prompt, of some pages: " * 3 + gen("a", max_tokens=8)
        s["a"]
        held.append(backend.stats().holds)
        with s.copy() as c:
            c += " more" + gen("b", max_tokens=8)
            c["b"]
            held.append(backend.stats().holds)
        s.flush()
        held.append(backend.stats().holds)

    with Scripted(said) as backend:
        program.run(backend=backend)
        assert held[:2] == [1, 2]
        ends_clean(backend)


def test_k3_reading_waits_for_what_stands_before_in_that_state() -> None:
    @function
    def program(s: State) -> Any:
        s += "a"
        with s.fork(3) as b:
            for x in b:
                x += gen("v", max_tokens=8)
            first = b[2]["v"]
        return first, s["v"]

    with Scripted(said) as backend:
        assert program.run(backend=backend).value == (" b2o0", [" b0o0", " b1o0", " b2o0"])


def test_k4_seeds_depend_on_seed_branch_ordinal_and_attempt_alone() -> None:
    @function
    def program(s: State, pause: bool) -> None:
        s += "a" + gen("x", max_tokens=4)
        if pause:
            s["x"]
        with s.fork(2) as b:
            for x in b:
                x += gen("y", max_tokens=4)
                if pause:
                    x["y"]
        s += gen("z", max_tokens=4)

    def seeds(**options: Any) -> dict[Any, int]:
        with Scripted(said) as backend:
            run = program.run(backend=backend, **options)
            found = {(r.branch, r.ordinal): r.request.sampling.seed for r in run.records if r.kind == "gen"}
            assert len(set(found.values())) == len(found)
            return found

    alike = seeds(pause=False, seed=7)
    assert alike == seeds(pause=True, seed=7) == seeds(pause=True, seed=7, compile=False)
    assert alike != seeds(pause=False, seed=8)
    drawn = seeds(pause=False)
    assert drawn != seeds(pause=False), "without a seed one is drawn"


@pytest.mark.case("C-DSL-13")
def test_k5_scopes_over_forks_and_inlined_programs() -> None:
    @function
    def inner(s: State) -> Any:
        s += "in " + gen("x", max_tokens=8)
        with s.fork(2) as b:
            for i, each in enumerate(b):
                each += f"{i}" + gen("y", max_tokens=8)
                assert each["x"] == s["x"], "set before the fork: seen in the branch"
        assert "z" not in s
        return s["x"], s["y"]

    @function
    def outer(s: State) -> Any:
        s += "A"
        s.set_var("given", 1)
        got = inner(s)
        assert "x" not in s, "names of an inlined program live in a scope of the call"
        s += "B" + gen("x", max_tokens=8)
        forks = s.fork(2)
        forks[0].set_var("given", 2)
        assert (s["given"], forks[0]["given"], forks[1]["given"]) == (1, 2, 1)
        forks.join()
        return got, s["x"], s["given"]

    @function
    def flat(s: State) -> None:
        s += "A" + "in " + gen("x", max_tokens=8)
        with s.fork(2) as b:
            for i, each in enumerate(b):
                each += f"{i}" + gen("y", max_tokens=8)
        s += "B" + gen("x", max_tokens=8)

    with Scripted(said) as backend:
        run = outer.run(backend=backend, seed=1)
        assert run.value == ((" bo0", [" b0o0", " b1o0"]), " bo1", [2, None])
        flattened = flat.run(backend=backend, seed=1)
        ids = [{r.request.token_ids for r in each.records if r.kind == "gen"} for each in (run, flattened)]
        assert ids[0] == ids[1]
        assert run.text() == flattened.text() == "Ain  bo0B bo1"


# ---- V -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (int, "42", 42), (float, "-1.5", -1.5), (bool, "true", True), (Literal["a", "b"], "b", "b"), (Literal[1, 2], "2", 2), (Colour, "blue", Colour.BLUE),
        (sgl.IntRange(0, 10), "7", 7), (Person, '{"name": "Bo", "age": 3}', Person(name="Bo", age=3)), (list[int], "[1, 2]", [1, 2]),
        (dict[str, int], '{"a": 1}', {"a": 1}), (int | None, "null", None), (str, "free", "free"),
    ],
)  # fmt: skip
def test_v1_v2_a_type_gives_its_value(type_: Any, text: str, value: Any) -> None:
    handle = gen("v", type_, max_tokens=60)

    @function
    def program(s: State) -> Any:
        s += "Value: " + handle + "."
        return s[handle], s["v"]

    with Scripted({"v": text}) as backend:
        run = program.run(backend=backend)
        assert run.value == (value, value)
        assert type(run.value[0]) is type(value)
        assert run.text() == f"Value: {text}."


def test_v1_a_handle_used_again_lists_and_ref_appends_without_reading() -> None:
    h = gen("x", max_tokens=4)

    @function
    def program(s: State) -> Any:
        s += "a" + h + "," + h + ";" + ref(h)
        assert s.run.stages == 0, "nothing was sent: ref does not read"
        return s.all(h), s[h]

    with Scripted({"x": ["1", "2"]}) as backend:
        run = program.run(backend=backend)
        assert run.value == (["1", "2"], "2")
        assert run.text() == "a1,2;2"


def test_v2_a_typed_value_is_whole_or_incomplete() -> None:
    @function
    def program(s: State, how: dict[str, Any]) -> Any:
        s += "v: " + gen("v", **how)
        return s["v"]

    with Scripted({"v": '{"name": "A very long name", "age": 3}'}) as backend:
        with pytest.raises(IncompleteOutput, match=r"test_state.py:\d+ 'v'") as caught:
            program.run(how={"type": Person, "max_tokens": 12}, backend=backend)
        assert caught.value.name == "v" and caught.value.branch == () and "v: " in (caught.value.prompt_tail or "")
        assert caught.value.at is not None and "test_state.py" in caught.value.at and caught.value.request_id
        partial = program.run(how={"json_schema": Person.model_json_schema(), "max_tokens": 12}, backend=backend).value
        assert partial.startswith('{"name":'), "SGLang's spelling gives what there is"
        ends_clean(backend)


def test_v2_sglangs_json_by_hand() -> None:
    """gen_int, gen_string, dtype and regex with stops, inside a var_scope: its text is JSON."""

    @function
    def program(s: State) -> Any:
        s += "Q:"
        with s.var_scope("json"):
            s += '{"name": ' + gen_string("name", max_tokens=12) + ', "age": ' + gen_int("age", stop=[",", "\n"], max_tokens=5)
            s += ', "f": ' + gen("f", dtype=float, max_tokens=8) + "}"
        return json.loads(s["json"])

    with Scripted({"name": '"Bo"', "age": "12", "f": "1.5"}) as backend:
        assert program.run(backend=backend).value == {"name": "Bo", "age": 12, "f": 1.5}


def test_v3_the_text_behind_an_open_ended_value_is_the_programs() -> None:
    @function
    def program(s: State) -> Any:
        s += "It is " + gen("n", int, max_tokens=8) + " degrees"
        return s["n"]

    with Scripted({"n": "21"}) as backend:
        run = program.run(backend=backend)
        assert run.value == 21 and run.text() == "It is 21 degrees"
        assert run.records[0].request.grammar.open_end


def test_v4_what_is_out_of_range_raises_at_its_line() -> None:
    for options in (
        {"temperature": -1},
        {"max_tokens": -3},
        {"top_p": 0},
        {"n": 0},
        {"retries": -1},
        {"timeout": 0},
        {"stop_regex": "a"},
        {"dtype": list},
    ):
        with pytest.raises(InvalidRequestError, match=r"test_state\.py:\d+") as caught:
            gen("x", **options)  # type: ignore[arg-type]
        assert caught.value.at is not None
    with pytest.raises(TypeError, match="no argument"):
        gen("x", temprature=1)
    with pytest.raises(InvalidRequestError, match="no type"):
        gen("x", object())  # type: ignore[call-overload]


@pytest.mark.case("C-DSL-03")
def test_v1_n_samples_are_a_list_and_the_path_goes_on_with_the_first() -> None:
    @function
    def program(s: State) -> Any:
        s += (
            user("Pick a number")
            + assistant(gen("a", n=3, temperature=1, max_tokens=5))
            + user("And?")
            + assistant(gen("b", max_tokens=5))
        )
        return s["a"], s["b"]

    with Scripted({"a": ["1", "2", "3"], "b": "x"}) as backend:
        run = program.run(backend=backend)
        assert run.value == (["1", "2", "3"], "x")
        assert "assistant\n1<|im_end|>" in run.text()
        first = [r.request for r in run.records if r.name == "a"]
        assert len({r.group for r in first}) == 1 and [r.sample for r in first] == [0, 1, 2]


def test_x5_x6_stops_and_ends_on_the_path() -> None:
    @function
    def program(s: State) -> Any:
        s += "a: " + gen("x", stop="END", max_tokens=20) + "|" + gen("y", stop="END", keep_stop=True, max_tokens=20) + "|"
        s += user("q") + assistant(gen("z", max_tokens=20))
        return s["x"], s["y"], s["z"]

    with Scripted({"x": "one END two", "y": "oneEND", "z": "ok"}) as backend:
        run = program.run(backend=backend)
        assert run.value == ("one ", "oneEND", "ok")
        assert run.text().startswith("a: one |oneEND|") and run.text().count("ok<|im_end|>") == 1
        assert run.usage.dropped >= 3


def test_x7a_control_text_warns_once_and_special_inserts() -> None:
    @function
    def program(s: State) -> None:
        s += "a <|im_end|> b" + special("<|im_start|>") + plain("<|im_end|>")

    @function(control_text=True)
    def sglangs(s: State) -> None:
        s += "a <|im_end|> b" + plain("<|im_end|>")

    with Scripted({}) as backend:
        end, start = (backend.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|im_start|>"))
        with pytest.warns(UserWarning, match="spells a control token"):
            run = program.run(backend=backend)
        assert run.tokens.count(start) == 1 and end not in run.tokens
        assert sglangs.run(backend=backend).tokens.count(end) == 1
        with pytest.raises(InvalidRequestError, match="not exactly one control token"):
            function(lambda s: s.__iadd__(special("<nope>"))).run(backend=backend)


# ---- F -----------------------------------------------------------------------------------------------------------------------


def test_f1_new_variables_become_lists_in_branch_order() -> None:
    @function
    def program(s: State) -> Any:
        s += "tips: "
        forks = s.fork(3)
        forks += lambda i: f"{i}. " + gen("tip", max_tokens=8)
        forks[1] += gen("extra", max_tokens=8)
        forks.join()
        s += "|".join(forks[i]["tip"] for i in range(3))
        return s["tip"], s["extra"]

    with Scripted(said) as backend:
        run = program.run(backend=backend)
        assert run.value == ([" b0o0", " b1o0", " b2o0"], [None, " b1o1", None])
        assert run.text() == "tips:  b0o0| b1o0| b2o0"
        ends_clean(backend)


@pytest.mark.parametrize("compile", [True, False])
def test_f2_a_failing_branch_surfaces_with_index_and_line_and_ends_its_siblings(compile: bool) -> None:
    @function
    def program(s: State) -> None:
        s += "a"
        with s.fork(4) as b:
            for i, each in enumerate(b):
                each += f"{i}" + (gen("v", Person, max_tokens=3) if i == 2 else gen("v", max_tokens=7000))

    def script(record: Any, prompt: str) -> str:
        return '{"name": "Bo"}' if record.branch == (2,) else "x" * 7000

    with Scripted(script) as backend:
        with pytest.raises(IncompleteOutput, match=r"test_state\.py:\d+ 'v', branch 2") as caught:
            program.run(backend=backend, compile=compile)
        assert caught.value.branch == (2,)
        assert backend.stats().aborted == 3, "the siblings were aborted"
        ends_clean(backend)


def test_f2_an_exception_in_the_block_aborts_its_branches() -> None:
    @function
    def program(s: State) -> None:
        s += "a"
        with s.fork(3) as b:
            for each in b:
                each += gen("v", max_tokens=400)
            b[0].flush()
            raise ZeroDivisionError

    with Scripted({"v": "x" * 300}) as backend:
        with pytest.raises(ZeroDivisionError):
            program.run(backend=backend)
        ends_clean(backend)


def test_f2_collect_keeps_the_others_and_several_failures_are_a_group() -> None:
    @function
    def program(s: State, on_error: Any) -> Any:
        s += "a"
        with s.fork(3, on_error=on_error) as b:
            for i, each in enumerate(b):
                each += gen("v", int, max_tokens=4) if i == 1 else gen("v", Person, max_tokens=3)
        return [b[1]["v"], [each.error() is None for each in b]]

    def script(record: Any, prompt: str) -> str:
        return "7" if record.branch == (1,) else '{"name": "Bo"}'

    with Scripted(script) as backend:
        assert program.run(on_error="collect", backend=backend).value == [7, [False, True, False]]
        ends_clean(backend)
    with Scripted(script) as backend, pytest.raises((ExceptionGroup, IncompleteOutput)):
        program.run(on_error="raise", backend=backend)


def test_f3_vote_ends_early_and_ties_go_to_the_first() -> None:
    @function
    def program(s: State) -> Any:
        s += "q"
        h = gen("v", max_tokens=500)
        with s.fork(5) as b:
            for each in b:
                each += h
            return b.vote(h)

    with Scripted({"v": ["a", "a", "a", "b" * 300, "c" * 300]}) as backend:
        assert program.run(backend=backend).value == "a"
        assert backend.stats().aborted == 2
        ends_clean(backend)
    with Scripted({"v": ["b", "a", "a", "b", "c"]}) as backend:
        assert program.run(backend=backend).value == "b"


def test_f3_top_best_fork_each_adopt() -> None:
    @function
    def program(s: State) -> Any:
        mark = gen("mark", int, max_tokens=4)
        s += "goal"
        with s.fork(3) as b:
            for i, each in enumerate(b):
                each += f" idea{i} " + mark
            chosen = b.top(2, key=mark)
        with fork_each(chosen, 2) as again:
            for each in again:
                each += "; " + mark
            best = again.best(lambda x: x[mark])
        s.adopt(best)
        s += " end"
        return s.text(), [c.branch for c in chosen], best.branch

    with Scripted({"mark": ["3", "9", "5", "1", "2", "4", "3"]}) as backend:
        text, chosen, best = program.run(backend=backend).value
        assert chosen == [(1,), (2,)] and best == (2, 0)
        assert text == "goal idea2 5; 4 end"
        ends_clean(backend)


def test_f3_map_and_race() -> None:
    @function
    def program(s: State) -> Any:
        s += "list: "

        def point(b: State, item: str) -> str:
            b += item + gen("p", max_tokens=8)
            first = b["p"]
            b += gen("p", max_tokens=8)
            return first + b["p"]

        mapped = s.map(["x", "y", "z"], point, limit=2)

        def runner(n: int) -> Any:
            def run(b: State) -> int:
                b += f"{n}" + gen("r", max_tokens=300)
                return len(b["r"])

            return run

        return mapped, s.race([runner(i) for i in range(3)], until=lambda size: size > 2), s["p"]

    def script(record: Any, prompt: str) -> str:
        return said(record, prompt) if record.name == "p" else ("ok", "found", "z" * 250)[record.branch[-1] - 3]

    with Scripted(script) as backend:
        mapped, won, points = program.run(backend=backend).value
        assert mapped == [f" b{i}o0 b{i}o1" for i in range(3)] and points == [f" b{i}o1" for i in range(3)]
        assert won == 5
        ends_clean(backend)


def test_f5_concate_and_append_is_the_flat_prompt() -> None:
    @function
    def program(s: State) -> Any:
        s += "Docs: "
        forks = s.fork(3)
        forks += lambda i: f"<{i}>" + gen("v", max_tokens=8) + "; "
        forks.join("concate_and_append")
        s += "done " + gen("end", max_tokens=8)
        return s.text()

    with Scripted(said) as backend:
        run = program.run(backend=backend)
        assert run.value == "Docs: <0> b0o0; <1> b1o0; <2> b2o0; done  bo0"
        prompt = next(r for r in run.records if r.name == "end").request.token_ids
        assert list(prompt) == backend.tokenizer.encode("Docs: <0> b0o0; <1> b1o0; <2> b2o0; done ", False)


def test_f5_forks_of_forks_make_sixteen_leaves() -> None:
    @function
    def program(s: State) -> Any:
        s += "a"
        with s.fork(4) as outer:
            for i, o in enumerate(outer):
                o += f" {i}"
                with o.fork(4) as inner:
                    for j, leaf in enumerate(inner):
                        leaf += f" {j}" + gen("v", max_tokens=10)
        return s["v"]

    with Scripted(said) as backend:
        found = program.run(backend=backend).value
        assert found == [[f" b{i}.{j}o0" for j in range(4)] for i in range(4)]


# ---- U7, limits, roles, errors --------------------------------------------------------------------------------------------------


def test_u7_a_failed_check_retries_and_the_accepted_ids_stand_on_the_original_path() -> None:
    calls: list[int] = []

    def even(value: int) -> Any:
        calls.append(value)
        return True if value % 2 == 0 else f"{value} is odd"

    @function
    def program(s: State, keep: Any, feedback: bool) -> Any:
        s += (
            user("A number?")
            + assistant(gen("n", int, max_tokens=5, check=even, retries=2, feedback=feedback, keep=keep))
            + user("Thanks")
        )
        return s["n"]

    with Scripted({"n": ["3", "5", "8"]}) as backend:
        run = program.run(keep="path", feedback=True, backend=backend)
        assert run.value == 8 and calls == [3, 5, 8]
        assert "is odd" not in run.text() and "assistant\n8<|im_end|>" in run.text()
        prompts = [backend.tokenizer.decode(r.request.token_ids, False) for r in run.records]
        assert "3 is odd" in prompts[1] and "5 is odd" in prompts[2] and [r.attempt for r in run.records] == [0, 1, 2]
        assert len({r.request.sampling.seed for r in run.records}) == 3
    with Scripted({"n": ["3", "8"]}) as backend:
        assert "3 is odd" in program.run(keep="dialogue", feedback=True, backend=backend).text()
    with Scripted({"n": ["3", "5", "7"]}) as backend:
        with pytest.raises(CheckFailed, match="after 3 attempts: 7 is odd"):
            program.run(keep="path", feedback=False, backend=backend)
        ends_clean(backend)


def test_u6_limits_bound_tokens_and_forks() -> None:
    @function
    def program(s: State) -> None:
        s += "a"
        with sgl.limits(tokens=6):
            s += gen("x", max_tokens=4) + gen("y", max_tokens=400)
        s += gen("z", max_tokens=10)

    with Scripted({"x": "abcd", "y": "e" * 100, "z": "z" * 10}) as backend:
        run = program.run(backend=backend)
        assert (run["x"], run["y"], run["z"]) == ("abcd", "ee", "z" * 10)

    @function
    def forks(s: State) -> None:
        with sgl.limits(forks=10), sgl.limits(forks=3):
            s.fork(2)
            s.fork(2)

    with Scripted({}) as backend, pytest.raises(LimitExceeded, match=r"test_state\.py.*allows 1 more"):
        forks.run(backend=backend)


def test_roles_in_every_form_give_the_same_tokens() -> None:
    @function
    def expressions(s: State) -> None:
        s += system("S") + user("U" + "V") + assistant("So " + gen("a", max_tokens=8))

    @function
    def blocks(s: State) -> None:
        with s.system():
            s += "S"
        with s.user():
            s += "U"
            s += "V"
        with s.assistant():
            s += "So "
            s += gen("a", max_tokens=8)

    @function
    def mixed(s: State) -> None:
        s += sgl.system_begin() + "S" + sgl.system_end()
        s += s.user("UV")
        s += sgl.assistant_begin()
        s += "So " + gen("a", max_tokens=8)
        s += sgl.assistant_end()

    with Scripted(said) as backend:
        runs = [p.run(backend=backend) for p in (expressions, blocks, mixed)]
        assert len({tuple(r.tokens) for r in runs}) == 1
        assert runs[0].messages() == [
            {"role": "system", "content": "S"}, {"role": "user", "content": "UV"}, {"role": "assistant", "content": "So  bo0"},
        ]  # fmt: skip


def test_h6_a_nested_role_is_an_error_at_its_line() -> None:
    @function
    def program(s: State) -> None:
        with s.user():
            s += assistant("no")

    with Scripted({}) as backend, pytest.raises(InvalidRequestError, match=r"test_state\.py:\d+.*opened inside") as caught:
        program.run(backend=backend)
    assert caught.value.at is not None


def test_u5_a_failed_gen_is_never_a_key_error_and_never_only_a_warning() -> None:
    @function
    def program(s: State, read: bool) -> Any:
        s += "a" + gen("x", max_tokens=100_000) + gen("y", max_tokens=4)
        return s["y"] if read else None

    with Scripted({"x": "b", "y": "c"}) as backend:
        for read in (True, False):
            with pytest.raises(PhloemError, match=r"test_state\.py:\d+ 'x': .*context") as caught:
                program.run(read=read, backend=backend)
            assert (caught.value.name, type(caught.value).__name__) == ("x", "ContextLengthError")
        with pytest.raises(KeyError, match="no variable 'nope'"):
            function(lambda s: s["nope"]).run(backend=backend)


def test_a_closed_state_says_why() -> None:
    kept: list[State] = []

    @function
    def program(s: State) -> None:
        with s.fork(1) as b:
            kept.append(b[0])

    with Scripted({}) as backend:
        program.run(backend=backend)
        with pytest.raises(ProgramError, match=r"its block has ended|its program has ended"):
            kept[0] += "more"


def test_z1_what_a_backend_lacks_is_refused_at_the_line() -> None:
    from phloem.lang import Capabilities

    @function
    def program(s: State) -> None:
        s += "a" + gen("x", regex="a+", max_tokens=3)

    @function
    def chooses(s: State) -> None:
        s += "a" + select("c", ["x", "y"])

    limited = Capabilities(
        grammars=frozenset(), prompt_logprobs=False, sampling=frozenset({"max_tokens", "temperature", "stop"})
    )
    with Scripted({"x": "aa"}, capabilities=limited) as backend:
        for each in (program, chooses):
            with pytest.raises(BackendUnsupported, match=r"test_state\.py:\d+"):
                each.run(backend=backend)
            with pytest.raises(BackendUnsupported):
                each.check(backend)
        assert backend.stats().requests == 0, "before anything was sent"


def test_with_a_models_own_tokenizer(smollm2_tokenizer: Tokenizer) -> None:
    @function
    def program(s: State) -> Any:
        s += user("hi") + assistant("It's " + gen("n", int, max_tokens=6) + "!")
        return s["n"]

    with Scripted({"n": "12"}, smollm2_tokenizer) as backend:
        assert program.run(backend=backend).value == 12


@pytest.mark.parametrize("value", [5, 2.5, True, ["a"], b"a"])
def test_what_is_no_text_is_refused_at_its_line(value: Any) -> None:
    @function
    def program(s: State) -> None:
        s += "n: "
        s += value

    with Scripted({}) as backend, pytest.raises(InvalidRequestError, match=r"cannot be appended.*str\(value\)") as caught:
        program.run(backend=backend)
    assert caught.value.at is not None and caught.value.at.startswith(__file__)
