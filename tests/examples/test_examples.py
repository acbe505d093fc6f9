"""The examples, on the embedded model and on Scripted: what each is there to show, and the reuse law (Y6) exactly, on both."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from functools import partial, partialmethod
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import phloem as ph
from tests.examples.reuse import law_of

FOLDER = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    module = sys.modules.get(f"example_{name}")
    if module is None:
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


class Watched:
    """A backend whose counters are read before and after."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.before = backend.stats()

    def lang_backend(self) -> Any:
        from phloem.lang.backend import as_backend

        return as_backend(self.backend)

    def check(self, run: Any) -> None:
        """Y6, and that what is shown is what the engine counted."""
        stats, usage, law = self.backend.stats(), run.usage, law_of(run.records)
        cached, prefill = stats.cached_tokens - self.before.cached_tokens, stats.prefill_tokens - self.before.prefill_tokens
        assert (usage.unique, usage.fed) == (law.unique, law.fed)
        assert usage.computed == law.computed + usage.siblings, f"{usage} against {law}"
        assert usage.again == law.whole and usage.siblings < 16 * usage.requests
        assert (usage.cached, usage.computed) == (cached, prefill), (usage, cached, prefill)
        assert f"hit {usage.hit:.1%}" in (run.show() if hasattr(run, "show") else f"hit {usage.hit:.1%}")
        self.backend.check()
        after = self.backend.stats()
        assert after.running == after.waiting == after.pages_live == 0 and after.preemptions == self.before.preemptions


@pytest.fixture
def watched(idle_engine: ph.Engine) -> Watched:
    return Watched(idle_engine)


def scripted(script: Any) -> Iterator[Watched]:
    with ph.Scripted(script) as backend:
        yield Watched(backend)


def say(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


# --------------------------------------------------------------------------------------------------------------------- few-shot


def test_few_shot_computes_its_prefix_once(watched: Watched) -> None:
    run = load("few_shot_qa").main(watched, max_tokens=4)
    assert list(run.value) == load("few_shot_qa").QUESTIONS and all("\n" not in a for a in run.value.values())
    watched.check(run)
    assert run.usage.hit > 0.5


@pytest.mark.parametrize("order", ["as they come", "turned", "one by one"])
def test_few_shot_of_64_questions_hits_95_percent_in_any_order(order: str) -> None:
    """600 tokens before 64 questions of 20: 1 880 of 40 280 prompt tokens are unique."""
    prefix = "".join(f"{n:03} is odd or even. " for n in range(29)) + "Now. "
    prefix = prefix.ljust(600, ".")[:600]

    @ph.function
    def ask(s: ph.State, question: str) -> str:
        s += prefix + question + ph.gen("answer", max_tokens=2)
        return str(s["answer"])

    questions = [f"{n:02} " + "q" * 16 + " " for n in range(64)]
    if order == "turned":
        questions.reverse()
    for backend in scripted(lambda record, prompt: "yes"):
        if order == "one by one":
            runs = [ask.run(question=q, backend=backend) for q in questions]
            usage = ph.usage_of([r for run in runs for r in run.records])
        else:
            batch = ask.run_batch([{"question": q} for q in questions], backend=backend)
            usage = batch.usage
            law = law_of(batch.records)
            assert usage.computed == law.computed and usage.recomputed == law.whole
        # The trie: 600, then two digits and a blank that some share, then 17.
        assert usage.hit >= 0.95


# --------------------------------------------------------------------------------------------------------------------- chat


def test_chat_computes_each_turn_once_and_is_the_models_template(watched: Watched, engine: ph.Engine) -> None:
    run = load("multi_turn_chat").main(watched, max_tokens=6)
    watched.check(run)
    assert len(run.value) == 6 and run.rewinds == ()
    first, *later = [r for r in run.records if r.kind == "gen"]
    for before, after in pairwise([first, *later]):
        kept = len(before.request.token_ids) + len(before.output.token_ids) - before.num_unfed
        assert after.output.usage.cached_tokens == kept, "the new text, the markup and the one token that was not read"
    # The ids are those of the template, up to how the drawn replies were spelled.
    assert engine.tokenizer.decode(run.tokens, skip_special_tokens=False) == engine.tokenizer.decode(
        engine.encode_chat(run.messages(), template=None), skip_special_tokens=False
    ).removesuffix("<|im_start|>assistant\n")


def test_chat_scripted() -> None:
    for backend in scripted(lambda record, prompt: f"Reply {record.ordinal}."):
        run = load("multi_turn_chat").main(backend)
        backend.check(run)
        assert run.value == [f"Reply {i}." for i in range(6)]


# ------------------------------------------------------------------------------------------------------------- tree of thought


def test_tree_of_thought_keeps_the_best_and_frees_the_rest(watched: Watched) -> None:
    run = load("tree_of_thought").main(watched, idea_tokens=6, plan_tokens=6)
    watched.check(run)
    assert isinstance(run.value, str)
    branches = {r.branch for r in run.records if r.name == "idea"}
    assert len(branches) == 9, "three of the goal, then three of each of the best two"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 11])
def test_tree_of_thought_holds_to_the_reuse_law_for_any_seed(seed: int, idle_engine: ph.Engine) -> None:
    """At a low temperature siblings draw equal text, which ends in one step or in several."""
    example = load("tree_of_thought")
    watched = Watched(idle_engine)
    run = example.explore.run(
        goal=example.GOAL, idea_tokens=8, plan_tokens=8, seed=seed, temperature=0.3, backend=watched.lang_backend()
    )
    usage, stats = run.usage, idle_engine.stats()
    assert usage.computed == stats.prefill_tokens - watched.before.prefill_tokens
    assert usage.computed == usage.unique - usage.fed + usage.again + usage.siblings
    assert usage.siblings < 16 * usage.requests


def test_tree_of_thought_scripted_takes_the_highest_marks() -> None:
    marks = {(0,): 3, (1,): 9, (2,): 5, (1, 0): 2, (1, 1): 4, (1, 2): 1, (2, 0): 8, (2, 1): 0, (2, 2): 7}

    def script(record: Any, prompt: str) -> Any:
        return marks[record.branch] if record.name == "mark" else f"{record.name} {record.branch}"

    for backend in scripted(script):
        run = load("tree_of_thought").main(backend)
        backend.check(run)
        assert run.value == "plan (2, 0)", "the best of the second round"


# --------------------------------------------------------------------------------------------------------- skeleton of thought


def test_skeleton_expands_in_parallel(watched: Watched) -> None:
    run = load("skeleton_of_thought").main(watched, points=5, head_tokens=4, text_tokens=8)
    watched.check(run)
    assert len(run.value.splitlines()) >= 5


def test_skeleton_scripted_takes_as_many_forwards_as_its_longest_branch() -> None:
    texts = ["a" * 5, "b" * 40, "c" * 20, "d" * 10, "e" * 30]

    def script(record: Any, prompt: str) -> str:
        return texts[record.branch[0]] if record.name == "text" else f"point {record.ordinal}"

    for backend in scripted(script):
        run = load("skeleton_of_thought").main(backend)
        backend.check(run)
        stats = backend.backend.stats()
        serial = sum(len(r.output.token_ids) for r in run.records if r.kind == "gen" and r.name != "text")
        prefills = sum(r.kind in ("gen", "warm") and r.name != "text" for r in run.records)
        # One forward a token of the heads, and then the longest expansion with a few prefills, not the sum of all five.
        assert stats.steps - backend.before.steps <= serial + prefills + max(map(len, texts)) + 2


# ----------------------------------------------------------------------------------------------------------------------- ReAct


def test_react_with_real_tools_scripted() -> None:
    script = {
        "step": [say("search", {"words": "pier metres long"}), say("calculator", {"expression": "120 + 85"}), "205 metres."]
    }
    for backend in scripted(script):
        run = load("react_agent").main(backend, max_tokens=300)
        backend.check(run)
        assert run.value == "205 metres."
        said = [m["content"] for m in run.messages() if "<tool_response>" in m["content"] and m["role"] == "user"]
        assert "north pier is 120 metres" in said[0] and "\n205\n" in said[1]
        gens = [r for r in run.records if r.kind == "gen"]
        for before, after in pairwise(gens):
            kept = len(before.request.token_ids) + len(before.output.token_ids) - before.num_unfed
            assert after.output.usage.cached_tokens >= kept - 1, "a step computes observation and markup only"


def test_react_on_the_model_ends_whatever_it_calls(watched: Watched) -> None:
    run = load("react_agent").main(watched, max_steps=3, max_tokens=40)
    watched.check(run)
    assert isinstance(run.value, str)


def test_a_tool_that_raises_is_seen_by_the_model_and_ends_nothing() -> None:
    for backend in scripted({"step": [say("calculator", {"expression": "__import__('os')"}), "Sorry."]}):
        run = load("react_agent").main(backend, max_tokens=300)
        backend.check(run)
        assert run.value == "Sorry." and "error: ValueError: only numbers" in run.text()


@pytest.mark.parametrize("text, value", [("(120 + 85) * 2", 410), ("-3 // 2", -2), ("7 % 4 / 2", 1.5), (" 1e3 ", 1000.0)])
def test_the_calculator_computes(text: str, value: float) -> None:
    assert load("react_agent").calculator(text) == value


@pytest.mark.parametrize("text", [
    "__import__('os').system('true')", "open('x')", "().__class__", "9**9**9", "1 if 1 else 2", "[1]", "'a' * 3", "True + 1", "x", "", "1 / 0", "lambda: 1", "1" * 201, "1e308 * 10",
])  # fmt: skip
def test_the_calculator_runs_no_code(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        load("react_agent").calculator(text)


# ------------------------------------------------------------------------------------------------------------------ extraction


def test_extraction_gives_valid_tickets(watched: Watched) -> None:
    module = load("extract_json")
    run = module.main(watched, mails=module.MAILS[:2])
    watched.check(run)
    assert len(run.value) == 2 and all(isinstance(t, module.Ticket) for t in run.value)
    assert run.usage.forced > 0


@pytest.mark.slow
def test_extraction_of_50_mails_on_the_model(watched: Watched) -> None:
    module = load("extract_json")
    people = ["Ruth", "Tom", "Olga", "Jun", "Ines", "Bo", "Ada", "Piet", "Mia", "Lev", "Uma", "Kai", "Zoe"]
    mails = [f"{mail} {name}, order {i}" for i, (name, mail) in enumerate((n, m) for n in people for m in module.MAILS)][:50]
    run = module.main(watched, mails=mails)
    watched.check(run)
    assert len(run.value) == 50 and all(isinstance(t, module.Ticket) and 1 <= t.items <= 99 for t in run.value)
    assert run.usage.forced > 0 and run.usage.hit > 0.5


def test_extraction_of_50_mails_scripted() -> None:
    module = load("extract_json")

    def script(record: Any, prompt: str) -> Any:
        return module.Ticket(product=f"cup {record.branch[0]}", severity="low", refund=False, items=1 + record.branch[0])

    for backend in scripted(script):
        run = module.main(backend, mails=[f"Mail {i}." for i in range(50)], max_tokens=120)
        backend.check(run)
        assert [t.items for t in run.value] == list(range(1, 51)) and run.usage.forced > run.usage.completion / 3


def test_extraction_is_the_same_with_jump_forward_off(watched: Watched) -> None:
    module = load("extract_json")

    @ph.function
    def one(s: ph.State, mail: str, how: str) -> Any:
        ticket = ph.gen("ticket", module.Ticket, max_tokens=80, jump_forward=how, temperature=0)
        s += ph.user(mail) + ph.assistant(ticket)
        return s[ticket]

    runs = [one.run(mail=module.MAILS[0], how=how, backend=watched) for how in ("canonical", "off")]
    assert runs[0].value == runs[1].value
    assert runs[0].records[0].output.token_ids == runs[1].records[0].output.token_ids


# ----------------------------------------------------------------------------------------------------------------------- judge


def test_judge_reads_the_essay_once(watched: Watched) -> None:
    module = load("judge")
    run = module.main(watched, criteria=module.CRITERIA, max_tokens=6)
    watched.check(run)
    assert run.value["grade"] in "ABCDE" and list(run.value["reviews"]) == module.CRITERIA
    assert run.value["grade"] == max(run.scores("grade"), key=lambda c: c.scores["token_length_normalized"]).text


def test_judge_scripted_selects_with_one_more_forward() -> None:
    for backend in scripted({"review": [f"review {i}" for i in range(6)], "grade": "C"}):
        run = load("judge").main(backend)
        backend.check(run)
        assert run.value["grade"] == "C" and run.value["reviews"]["style"] == "review 3"


# ------------------------------------------------------------------------------------------------------------------------ vote


def test_majority_vote_aborts_what_cannot_change_it_scripted() -> None:
    lengths = [3, 3, 3, 3, 3, 40, 40, 40]

    def script(record: Any, prompt: str) -> Any:
        return 12 if record.name == "number" else "t" * lengths[record.branch[0]]

    for backend in scripted(script):
        load("majority_vote").main(backend)  # compiles the numbers' grammar: the scripted device is quicker than that
        run = load("majority_vote").main(backend)
        assert run.value == 12
        ended = [r.output.finish_reason for r in run.records if r.name == "thoughts"]
        assert ended.count("abort") == 3, "five of eight agree: the other three are not waited for"
        backend.backend.check()
        assert backend.backend.stats().pages_live == 0


def test_majority_vote_is_that_of_all_the_votes(watched: Watched) -> None:
    module = load("majority_vote")
    run = module.main(watched, ways=5, max_tokens=6)

    @ph.function
    def all_of_them(s: ph.State, question: str, ways: int, max_tokens: int) -> list[int]:
        s += ph.user(question)
        number = ph.gen("number", ph.IntRange(0, 999))
        with s.fork(ways) as branches:
            for b in branches:
                b += ph.assistant(
                    "Let me think. " + ph.gen("thoughts", stop="\n", max_tokens=max_tokens) + "\nThe answer is " + number
                )
        return [b[number] for b in branches]

    votes = all_of_them.run(question=module.QUESTION, ways=5, max_tokens=6, seed=4, temperature=0.7, backend=watched).value
    counts = {v: votes.count(v) for v in votes}
    assert counts[run.value] == max(counts.values()), f"{run.value} of {votes}"


# ------------------------------------------------------------------------------------------------------------------------- RAG


def test_rag_finds_its_documents_from_the_second_question_on(watched: Watched) -> None:
    run = load("rag").main(watched, max_tokens=6)
    watched.check(run)
    gens = [r for r in run.records if r.kind == "gen"]
    assert len(gens) == len(load("rag").QUESTIONS)
    for record in gens[1:]:
        assert record.output.usage.cached_tokens / len(record.request.token_ids) >= 0.9


def test_rag_digest_is_the_flat_prompt_by_ids_and_logits(watched: Watched) -> None:
    module = load("rag")
    run = module.digest.run(
        documents=module.DOCUMENTS,
        question="How long is the north pier?",
        max_tokens=4,
        temperature=0,
        return_logprob=True,
        backend=watched,
    )
    (record,) = [r for r in run.records if r.name == "answer"]
    flat = "Notes from the archive.\n" + "".join(f"\n[{n}] {t}\n" for n, t in module.DOCUMENTS.items())
    flat += "\nQuestion: How long is the north pier?\nAnswer:"
    engine: ph.Engine = watched.backend
    assert list(record.request.token_ids) == engine.tokenizer.encode(flat)
    engine.flush()
    alone = engine.generate(flat, record.request.sampling)
    assert alone.token_ids == record.output.token_ids and alone.logprobs == record.output.logprobs


# ------------------------------------------------------------------------------------------------------------- character sheet


@pytest.mark.case("C-DSL-10")
@pytest.mark.parametrize("variant", ["FIELDS", "FIELDS_CJK"])
def test_character_sheet_fields_match_in_full(variant: str, watched: Watched) -> None:
    module = load("character_sheet")
    fields = getattr(module, variant)
    run = module.main(watched, fields=fields)
    watched.check(run)
    for field, pattern in fields.items():
        assert re.fullmatch(pattern, run.value[field]), (field, run.value[field])
        assert f"{field}: {run.value[field]}\n" in run.text(), "the next literal follows directly"


# ---------------------------------------------------------------------------------------------------------------- each of them

SIZES: dict[str, dict[str, Any]] = {
    "few_shot_qa": {"max_tokens": 3}, "multi_turn_chat": {"max_tokens": 3}, "tree_of_thought": {"idea_tokens": 3, "plan_tokens": 3}, "skeleton_of_thought": {"points": 2, "head_tokens": 3, "text_tokens": 3},
    "react_agent": {"max_steps": 2, "max_tokens": 8}, "extract_json": {"mails": ["The lid broke. Ruth"]}, "judge": {"max_tokens": 3}, "majority_vote": {"ways": 3, "max_tokens": 3}, "rag": {"max_tokens": 3}, "character_sheet": {},
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_y4_interpreted_runs_send_the_same_sampling_requests(
    name: str, idle_engine: ph.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled or not: the same ids, sampling, grammar and seed, and the same values; hints, order and warm-ups may differ."""
    module, seen = load(name), []
    for compiled in (True, False):
        idle_engine.flush()
        with monkeypatch.context() as patch:
            patch.setattr(ph.Program, "run", partialmethod(ph.Program.run, compile=compiled, seed=11))
            run = module.main(idle_engine, **SIZES[name])
        done = [r for r in run.records if r.kind != "warm" and r.output.finish_reason != "abort"]
        seen.append(
            {
                (r.kind, r.branch, r.ordinal, r.request.token_ids, r.request.sampling.seed): (
                    repr(r.request.sampling),
                    r.request.grammar,
                    r.output.token_ids,
                )
                for r in done
            }
        )
        value = run.value
        seen.append(value)
    assert seen[1] == seen[3]
    same = set(seen[0]) & set(seen[2])
    assert all(seen[0][k] == seen[2][k] for k in same)
    if name != "majority_vote":  # whom a vote aborts is told by who is ready first
        assert seen[0] == seen[2]


def test_every_example_has_a_test_and_prints_what_it_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {p.stem for p in FOLDER.glob("*.py")} - {"main_job", "present"}
    assert set(SIZES) <= here
    monkeypatch.setattr(sys, "argv", ["chat"])
    monkeypatch.syspath_prepend(str(FOLDER))
    for backend in scripted(lambda record, prompt: "Hello."):
        monkeypatch.setattr(ph, "Engine", partial(getattr, backend, "backend"))
        import present

        present.present(load("multi_turn_chat").main, load("multi_turn_chat").__doc__)
    printed = capsys.readouterr().out
    assert "Hello." in printed and "hit " in printed and "gen reply_5  multi_turn_chat.py:" in printed
