"""The grammar service in the engine: forced runs are lossless, compiling never holds the loop, and every trap has its answer."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from phloem.runtime.engine.grammars import MAX_SLOW_FILLS, Grammars
from phloem.runtime.errors import EngineClosedError, GrammarError
from phloem.runtime.grammar import xgrammar
from phloem.runtime.grammar.base import Limits
from phloem.runtime.request import GrammarSpec, Request
from tests.drive import Driver, Said
from tests.runtime.grammar.oracle import BOS, EOS, EOS2, toy_vocabulary
from tests.runtime.grammar.test_compile import bushy

TOY = toy_vocabulary()
OPEN = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "ab": {"enum": ["yes", "no"]}},
    "required": ["a", "ab"],
    "maxProperties": 2,
}
CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "true": {"type": "boolean"}, "ab": {"enum": ["yes", "yester", "no"]}},
    "required": ["a", "true", "ab"],
    "additionalProperties": False,
}  # fmt: skip
SPECS = {
    "xgrammar": {"kind": "json_schema", "source": json.dumps(CLOSED), "json_whitespace": "spaced"},
    "flexible": {"kind": "json_schema", "source": json.dumps(CLOSED)},
    "string": {"kind": "json_schema", "source": json.dumps({**CLOSED, "properties": {**CLOSED["properties"], "a": {"type": "string"}}})},
    "llguidance": {"kind": "json_schema", "source": json.dumps(OPEN), "json_whitespace": "compact"},
    "regex": {"kind": "regex", "source": "(true|false)abab(yes|no){1,3}é"},
    "choices": {"kind": "choices", "source": '["yesterabab", "yes", "truetrue"]'},
    "ebnf": {"kind": "ebnf", "source": 'root ::= "abab" ("yes" | "no") "abab" [a-z]{2,4} "truefalse"'},
}  # fmt: skip


@pytest.fixture(scope="module")
def service() -> Iterator[Grammars]:
    made = Grammars(lambda: TOY, EOS)
    yield made
    made.close()


def driver(service: Grammars, **settings: Any) -> Driver:
    settings.setdefault("eos_ids", frozenset((EOS, EOS2)))
    return Driver(grammars=service, vocab_size=TOY.width, **settings)  # type: ignore[arg-type]


def spec(name: str, **options: Any) -> GrammarSpec:
    return GrammarSpec(**{"trusted": True, **SPECS[name], **options})


def ready(service: Grammars, *specs: GrammarSpec) -> None:
    """Compile them, so that what follows depends on no clock."""
    for one in specs:
        pending = service.begin(Request(id="warm", token_ids=(5,), grammar=one))
        assert pending.wait(60)
        pending.cursor()


def say(d: Driver, *grammars: GrammarSpec, n: int = 1, **sampling: Any) -> dict[str, Said]:
    for i, grammar in enumerate(grammars):
        prompt = [10 + i] * (7 + 9 * i)
        for sample in range(n):
            group = f"g{i}" if n > 1 else None
            d.submit(
                prompt,
                id=f"{i}.{sample}",
                request={"grammar": grammar, "group": group, "sample": sample},
                max_tokens=48,
                **sampling,
            )
    return d.finish()


def told(said: Said) -> Any:
    return (
        said.tokens,
        said.logprobs,
        said.finish,
        said.usage.completion_tokens,
        said.usage.forced_tokens,
        said.last and said.last.error,
    )


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "chunked": {"max_step_tokens": 8, "max_running": 4},
    "preempted": {"num_pages": 40, "overlap": True},
    "n=8": {"n": 8},
}  # fmt: skip


@pytest.mark.parametrize("drawing", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shape", ENGINES)
def test_j3_jump_on_is_jump_off(shape: str, drawing: dict[str, Any], service: Grammars) -> None:
    """Token for token, logprob for logprob, for every engine at once, whatever happens to the rows."""
    options = dict(ENGINES[shape])
    n = options.pop("n", 1)
    runs = {}
    for jump in ("canonical", "off"):
        grammars = [spec(name, jump_forward=jump) for name in SPECS]
        ready(service, *grammars)
        d = driver(service, **options)
        runs[jump] = say(d, *grammars, n=n, logprobs="both", top_logprobs=2, **drawing)
        d.assert_no_leak()
        if shape == "preempted":
            assert d.core.stats().preemptions > 0
    on, off = runs["canonical"], runs["off"]
    assert {name: told(said) for name, said in on.items()} == {name: told(said) for name, said in off.items()}
    assert sum(said.usage.forced_tokens for said in on.values()) > 10 * n
    for i, name in enumerate(SPECS):
        check_text(name, on[f"{i}.0"])


def check_text(name: str, said: Said) -> None:
    text = TOY.join(t for t in said.tokens if t != EOS)
    if said.finish != "grammar":
        assert said.finish == "length"
    elif name in ("xgrammar", "flexible", "string", "llguidance"):
        jsonschema.validate(json.loads(text), json.loads(SPECS[name]["source"]))
    elif name == "regex":
        assert re.fullmatch(SPECS["regex"]["source"], text.decode())
    elif name == "choices":
        assert text.decode() in json.loads(SPECS["choices"]["source"])


@pytest.mark.parametrize("opener", [None, 77])
def test_j3_behind_thoughts_too(opener: int | None, service: Grammars) -> None:
    """The constraint begins within the commit of the mark: what is forced there comes with it, by a jump or one by one."""
    runs = {}
    for jump in ("canonical", "off"):
        grammars = [spec(name, jump_forward=jump, thoughts_close=BOS, thoughts_open=opener) for name in SPECS]
        ready(service, *grammars)
        bias = {BOS: 5.0} if opener is None else {BOS: 9.0, opener: 9.0}
        runs[jump] = say(driver(service, overlap=True), *grammars, temperature=1.0, seed=6, logit_bias=bias)
    assert {name: told(said) for name, said in runs["canonical"].items()} == {
        name: told(said) for name, said in runs["off"].items()
    }
    closed = 0
    for i, name in enumerate(SPECS):
        said = runs["canonical"][f"{i}.0"]
        thinks = opener is None or said.tokens[0] == opener
        if thinks and BOS not in said.tokens:
            assert said.finish == "length"
            continue
        closed += thinks
        said.tokens = said.tokens[said.tokens.index(BOS) + 1 if thinks else 0 :]
        check_text(name, said)
    assert closed > 3


def test_j6_forced_runs_are_rows_and_not_steps(service: Grammars) -> None:
    steps = {}
    for jump in ("canonical", "off"):
        one = spec("xgrammar", jump_forward=jump)
        ready(service, one)
        d = driver(service, check=False)
        said = say(d, one, temperature=0.0)["0.0"]
        steps[jump] = d.core.stats().steps
        sampled = said.usage.completion_tokens - said.usage.forced_tokens
    assert steps["canonical"] <= sampled + 3 < steps["off"]


def test_every_run_is_what_the_tokenizer_writes(service: Grammars) -> None:
    """Greedy over a model of random taste, the ids are not canonical; the forced ones behind each sampled token are legal ones."""
    for name in SPECS:
        ready(service, spec(name))
        said = say(driver(service), spec(name), temperature=1.0, seed=3)["0.0"]
        assert said.finish in ("grammar", "length")
        if said.finish == "grammar":
            assert said.tokens[-1] == EOS  # J8


def test_g2_eight_beside_each_other_equal_eight_alone(service: Grammars) -> None:
    ready(service, spec("xgrammar"))
    together = say(driver(service), *[spec("xgrammar")] * 8, temperature=1.0, seed=9)
    for i in range(8):
        d = driver(service)
        d.submit(
            [10 + i] * (7 + 9 * i), id="alone", request={"grammar": spec("xgrammar")}, max_tokens=48, temperature=1.0, seed=9
        )
        assert d.finish()["alone"].tokens == together[f"{i}.0"].tokens


# ------------------------------------------------------------------------------------------------------------------ compiling


def begin(service: Grammars, **grammar: Any) -> Any:
    return service.begin(Request(id="r", token_ids=(5, 6), grammar=GrammarSpec(**grammar)))


def fresh(**options: Any) -> Grammars:
    return Grammars(lambda: TOY, EOS, **options)


def test_c5_one_compile_however_many_wait() -> None:
    service = fresh()
    try:
        waiting = [begin(service, kind="regex", source="ab{1,40}", trusted=True) for _ in range(20)]
        assert all(pending.wait(60) for pending in waiting)
        counters = service.counters()
        assert counters.cache_misses == 1 and counters.cache_hits == 19 and counters.compile_seconds > 0
        assert len({id(pending.cursor()) for pending in waiting}) == 20  # a cursor each
    finally:
        service.close()


def test_c5_a_refusal_is_remembered_and_told_again() -> None:
    service = fresh()
    try:
        for _ in range(2):
            pending = begin(service, kind="regex", source="(?=a)b", trusted=True)
            assert pending.wait(60)
            with pytest.raises(GrammarError, match="look-ahead"):
                pending.cursor()
        assert service.counters().cache_hits == 1
    finally:
        service.close()


def test_c6_a_refused_grammar_is_its_requests_output_and_no_exception_of_the_core(service: Grammars) -> None:
    d = driver(service)
    bad = {"type": "array", "uniqueItems": True}
    d.submit([5], id="bad", request={"grammar": GrammarSpec(kind="json_schema", source=json.dumps(bad), trusted=True)})
    d.submit([5], id="good", max_tokens=4)
    d.finish()
    assert d.said["good"].finish == "length"
    error = d.said["bad"].error
    assert isinstance(error, GrammarError) and error.code == "invalid_json_schema" and "'uniqueItems'" in error.message
    d.assert_no_leak()


@pytest.mark.case("C-STRUCT-13")
def test_c2_a_bomb_never_holds_a_neighbours_step() -> None:
    """While a strangers' schema compiles for seconds, each step of the neighbour still gives its token."""
    service = fresh(limits=Limits(cpu_seconds=0.1, subschemas=10**6, source_bytes=10**8))
    try:
        begin(service, kind="json_schema", source='{"type": "boolean"}').wait(60)
        d = Driver(grammars=service, vocab_size=TOY.width, check=False, num_pages=1024)  # type: ignore[arg-type]
        d.submit([5, 6], id="neighbour", max_tokens=2000)
        bomb = GrammarSpec(kind="json_schema", source=json.dumps(bushy(6)))
        d.submit([7], id="bomb", request={"grammar": bomb})
        start = time.perf_counter()
        while "bomb" not in d.said and "neighbour" not in [n for n, s in d.said.items() if s.last]:
            d.step()
            assert time.perf_counter() - start < 30
        neighbour = d.said["neighbour"]
        assert len(neighbour.tokens) >= 20 and neighbour.steps == list(
            range(neighbour.steps[0], neighbour.steps[0] + len(neighbour.steps))
        )
        while "bomb" not in d.said:
            d.step()
            time.sleep(0.001)
            assert time.perf_counter() - start < 30
        assert isinstance(d.said["bomb"].error, GrammarError) and "took more than" in d.said["bomb"].error.message
    finally:
        service.close()


def test_c5_json_object_is_there_when_it_is_first_asked_for() -> None:
    service = Grammars(toy_vocabulary, EOS)  # a vocabulary of its own: what engines hold is kept by it
    try:
        service.warm()
        while len(service.cache) == 0:
            time.sleep(0.001)
        assert begin(service, kind="json_object", source="").wait(60)
        assert service.counters().cache_misses == 1 and service.counters().cache_hits == 1
        begin(service, kind="json_schema", source='{"type": "boolean"}').wait(60)
        assert service._workers.num_alive() == 1
        deadline = time.monotonic() + 60
        while service.vocabulary() not in xgrammar._compilers:  # loading it takes a second, which no request should wait for
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        service.close()


def test_s5_a_request_is_aborted_while_its_grammar_compiles(service: Grammars) -> None:
    d = driver(service)
    gate = threading.Event()
    original = service._make_vocabulary
    slow = fresh()
    slow._make_vocabulary = lambda: (gate.wait(30), original())[1]  # type: ignore[func-returns-value]
    try:
        d = driver(slow)
        d.submit([5], id="q", request={"grammar": spec("regex")})
        d.step()
        assert d.core.is_blocked
        d.core.abort("q")
        d.finish()
        assert d.said["q"].finish == "abort"
        d.assert_no_leak()
    finally:
        gate.set()
        slow.close()


def test_closing_fails_what_is_pending_and_what_comes() -> None:
    service = fresh()
    service.close()
    with pytest.raises(EngineClosedError):
        begin(service, kind="regex", source="a")


def test_without_an_end_token_no_grammar_is_taken() -> None:
    with pytest.raises(GrammarError, match="no end token"):
        begin(Grammars(lambda: TOY, None), kind="regex", source="a")


def test_c1_the_source_is_measured_before_anything(service: Grammars) -> None:
    with pytest.raises(GrammarError, match="at most 1000000"):
        begin(service, kind="regex", source="a" * 1_000_001)


def test_a5_dropped_keywords_come_with_the_output(service: Grammars) -> None:
    loose = {"type": "array", "items": {"enum": ["yes"]}, "uniqueItems": True, "maxItems": 2}
    d = driver(service)
    grammar = GrammarSpec(kind="json_schema", source=json.dumps(loose), strict=False, trusted=True)
    d.submit([5], id="q", request={"grammar": grammar}, max_tokens=64)
    d.finish()
    last = d.said["q"].last
    assert last is not None and last.dropped_keywords == (("", "uniqueItems"),)


def test_c6_masks_that_are_too_slow_end_their_request(service: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.runtime.engine.grammars.SLOW_FILL", -1.0)
    ready(service, spec("ebnf"))
    d = driver(service)
    d.submit([5], id="slow", request={"grammar": spec("ebnf")}, max_tokens=48)
    d.submit([5], id="other", max_tokens=20)
    d.finish()
    assert isinstance(d.said["slow"].error, GrammarError) and f"{MAX_SLOW_FILLS} masks" in d.said["slow"].error.message
    assert d.said["other"].finish == "length"


# --------------------------------------------------------------------------------------------------------------------- traps


def drawn(service: Grammars, grammar: GrammarSpec, **sampling: Any) -> Said:
    ready(service, grammar)
    d = driver(service, eos_ids=frozenset((EOS, EOS2)))
    sampling = {"max_tokens": 48, "temperature": 1.0, "seed": 1, "ignore_eos": False, **sampling}
    d.submit([5, 6], id="q", request={"grammar": grammar}, **sampling)
    return d.finish()["q"]


TRAPS: dict[str, dict[str, Any]] = {
    "min_tokens": {"min_tokens": 40},
    "ignore_eos": {"ignore_eos": True},
    "penalties": {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 5.0},
    "a bias on what is illegal": {"logit_bias": {BOS: 100.0, EOS: 100.0, EOS2: 100.0, TOY.width - 1: 100.0}},
    "top_k": {"top_k": 1},
}


@pytest.mark.case("C-STRUCT-06")
@pytest.mark.parametrize("name", list(SPECS))
@pytest.mark.parametrize("trap", TRAPS)
def test_m1_the_grammar_outranks(trap: str, name: str, service: Grammars) -> None:
    said = drawn(service, spec(name), **TRAPS[trap])
    check_text(name, said)
    assert said.last is not None and said.last.error is None
    assert not {BOS, EOS2, TOY.width - 1} & set(said.tokens) and EOS not in said.tokens[:-1]


def test_the_end_comes_at_once_with_the_tokenizers_own_eos(service: Grammars) -> None:
    said = drawn(service, spec("choices"))
    assert said.finish == "grammar" and said.tokens[-1] == EOS and said.usage.forced_tokens >= 1
    assert TOY.join(said.tokens[:-1]).decode() in json.loads(SPECS["choices"]["source"])


def test_j7_max_tokens_cuts_a_run(service: Grammars) -> None:
    ready(service, spec("ebnf"))
    for limit in (1, 2, 3):
        for jump in ("canonical", "off"):
            said = drawn(service, spec("ebnf", jump_forward=jump), max_tokens=limit)
            assert said.finish == "length" and len(said.tokens) == limit


def test_no_masked_id_is_among_the_top(service: Grammars) -> None:
    said = drawn(service, spec("choices", jump_forward="off"), logprobs="sampled", top_logprobs=5)
    for entry in said.logprobs:
        assert all(np.isfinite(p) for _, p in entry.top)
        assert sum(np.exp(p) for _, p in entry.top) <= 1 + 1e-6


@pytest.mark.parametrize("name", ["xgrammar", "llguidance", "flexible"])
def test_permissive_is_plain_constrained_sampling(name: str, service: Grammars) -> None:
    """J4: every token is drawn under the engine's plain mask, unless one alone is legal."""
    said = drawn(service, spec(name, jump_forward="permissive"))
    check_text(name, said)


def test_counters_are_in_the_stats() -> None:
    service = fresh()
    d = driver(service)
    before = d.core.stats()
    ready(service, spec("xgrammar"))
    assert d.core.stats().grammar_compile_seconds > before.grammar_compile_seconds == 0
    said = say(d, spec("xgrammar"), temperature=0.0)["0.0"]
    after = d.core.stats()
    assert after.grammar_fills > before.grammar_fills and after.grammar_fill_seconds > before.grammar_fill_seconds
    assert after.forced_tokens - before.forced_tokens == said.usage.forced_tokens > 0
    assert (before.grammar_cache_hits, after.grammar_cache_hits) == (0, 1)
    service.close()
