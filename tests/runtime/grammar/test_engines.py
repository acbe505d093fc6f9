"""xgrammar and llguidance behind the protocol: masks by brute force, the laws of fork, rollback and replay, canonical runs."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.audit import route
from phloem.runtime.grammar.base import CompiledGrammar, Cursor, Limits, NotMine, backend
from phloem.runtime.grammar.engine_cursor import EngineCursor, Rules
from phloem.runtime.grammar.llguidance import _Matcher as LlMatcher
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.grammar.xgrammar import XGrammar, XGrammarGrammar
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.oracle import Oracle, bits_of, check_masks, toy_vocabulary

LIMITS = Limits()


def of_words(words: list[str]) -> str:
    return "root ::= " + " | ".join(json.dumps(word, ensure_ascii=False) for word in words)


FINITE = [
    ["yes", "no", "yester"], ["ab", "abab"], ["é", "éé", "aé", "ê"], ["a", "aa", "aaa", "aaaa"], ["true", "false", "trues"], ["中", "😀x"],
]  # fmt: skip


def make(engine: str, words: list[str], vocabulary: Vocabulary, mode: Any, open_end: bool = False) -> CompiledGrammar:
    if engine == "xgrammar":
        spec = GrammarSpec(kind="ebnf", source=of_words(words), jump_forward=mode, open_end=open_end)
    else:
        spec = GrammarSpec(kind="choices", source=json.dumps(words), jump_forward=mode, open_end=open_end)
    return backend(engine).compile(spec, vocabulary, LIMITS)


@pytest.mark.case("C-STRUCT-18")
@pytest.mark.parametrize("mode", ["canonical", "permissive"])
@pytest.mark.parametrize("words", FINITE, ids=lambda words: words[0])
@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])
def test_masks_equal_brute_force(engine: str, words: list[str], mode: str, toy: Vocabulary) -> None:
    """G1 over a finite language. llguidance's canonical masks may leave out spellings that its tokenizer never writes."""
    grammar = make(engine, words, toy, mode)
    oracle = Oracle([word.encode() for word in words], toy)
    exact = engine == "xgrammar" or mode == "permissive"
    texts = check_masks(grammar, oracle, paths=8, exact=exact)
    assert texts <= {word.encode() for word in words}


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])
def test_an_open_end_lets_in_what_cannot_continue(engine: str, toy: Vocabulary) -> None:
    words = ["ab", "abab", "ye"]
    grammar = make(engine, words, toy, "permissive", open_end=True)
    check_masks(grammar, Oracle([word.encode() for word in words], toy, open_end=True), paths=8)


JSON = {"type": "object", "properties": {"a": {"type": "integer"}, "ab": {"enum": ["yes", "no"]}}, "required": ["a", "ab"]}
CLOSED = {**JSON, "additionalProperties": False}


def json_grammar(engine: str, vocabulary: Vocabulary, mode: Any = "canonical") -> CompiledGrammar:
    spec = GrammarSpec(kind="json_schema", source=json.dumps(CLOSED), json_whitespace="spaced", jump_forward=mode)
    return backend(engine).compile(spec, vocabulary, LIMITS)


class Laws(RuleBasedStateMachine):
    """G2 and the protocol: a cursor is a function of what it accepted, whatever was done, undone or forked between."""

    engine = "xgrammar"
    grammars: dict[str, CompiledGrammar] = {}
    vocabulary = toy_vocabulary()

    @initialize(mode=st.sampled_from(["canonical", "permissive"]))
    def start(self, mode: str) -> None:
        key = f"{self.engine} {mode}"
        if key not in self.grammars:
            self.grammars[key] = json_grammar(self.engine, self.vocabulary, mode)
        self.grammar = self.grammars[key]
        self.cursor: Cursor = self.grammar.cursor()
        self.accepted: list[int] = []

    @precondition(lambda self: bits_of(self.cursor, self.vocabulary))
    @rule(choice=st.integers(0, 10**6))
    def accept(self, choice: int) -> None:
        legal = sorted(bits_of(self.cursor, self.vocabulary))
        token = legal[choice % len(legal)]
        assert self.cursor.accept(token)
        self.accepted.append(token)

    @rule(token=st.integers(-2, 330))
    def refuse(self, token: int) -> None:
        before = bits_of(self.cursor, self.vocabulary)
        if token not in before:
            assert not self.cursor.accept(token)
            assert bits_of(self.cursor, self.vocabulary) == before

    @rule(n=st.integers(0, 6))
    def roll_back(self, n: int) -> None:
        if n > len(self.accepted):
            with pytest.raises(ValueError, match="rollback"):
                self.cursor.rollback(n)
            return
        self.cursor.rollback(n)
        del self.accepted[len(self.accepted) - n :]

    @rule()
    def fork(self) -> None:
        other = self.cursor.fork()
        legal = sorted(bits_of(other, self.vocabulary))
        if legal:
            assert self.cursor.accept(legal[0])  # whoever goes on, the other stays
            self.cursor = other

    @invariant()
    def is_a_function_of_what_it_accepted(self) -> None:
        if not hasattr(self, "cursor"):
            return
        fresh = self.grammar.cursor()
        for token in self.accepted:
            assert fresh.accept(token)
        assert list(fresh.forced()) == list(self.cursor.forced())
        assert fresh.done == self.cursor.done and fresh.dropped == self.cursor.dropped
        assert bits_of(fresh, self.vocabulary) == bits_of(self.cursor, self.vocabulary)


class LlguidanceLaws(Laws):
    engine = "llguidance"


TestXgrammarLaws = Laws.TestCase
TestXgrammarLaws.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)
TestLlguidanceLaws = LlguidanceLaws.TestCase
TestLlguidanceLaws.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])
def test_runs_are_what_the_tokenizer_writes(engine: str, smollm2: Vocabulary) -> None:
    """J9: with every run taken, the ids are those of encoding the whole text."""
    grammar, rng = json_grammar(engine, smollm2), random.Random(3)
    row, forced = np.empty(smollm2.num_words, np.int32), 0
    for number in (1, 23, 456, 10**9):
        cursor, ids = grammar.cursor(), []
        wanted = smollm2.encode(f'{{"a": {number}, "ab": "{rng.choice(["yes", "no"])}"}}')
        while not cursor.done:
            run = list(cursor.forced())
            forced += len(run)
            for token in run or [wanted[len(ids)]]:
                cursor.fill(row)
                assert cursor.accept(token)
                ids.append(token)
        assert ids == wanted
    assert forced >= 4 * 6


def test_static_and_dynamic_xgrammar_agree(smollm2: Vocabulary) -> None:
    """F7: a request that starts on the dynamic grammar and one on the static see the same masks."""
    spec = GrammarSpec(kind="json_schema", source=json.dumps(CLOSED), json_whitespace="flexible")
    static = XGrammar(static_seconds=60).compile(spec, smollm2, LIMITS)
    dynamic = XGrammar(static_seconds=0).compile(spec, smollm2, LIMITS)
    a, b, rng = static.cursor(), dynamic.cursor(), random.Random(0)
    for _ in range(30):
        bits = bits_of(a, smollm2)
        assert bits == bits_of(b, smollm2) and list(a.forced()) == list(b.forced())
        if a.done:
            break
        token = rng.choice(sorted(bits))
        assert a.accept(token) and b.accept(token)


def test_a_late_static_grammar_serves_later_cursors(smollm2: Vocabulary) -> None:
    properties = {f"p{i}": {"type": "string", "maxLength": 40} for i in range(30)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "required": list(properties)}
    spec = GrammarSpec(kind="json_schema", source=json.dumps(schema))
    grammar = XGrammar(static_seconds=1e-6).compile(spec, smollm2, LIMITS)
    early = grammar.cursor()
    small = grammar.nbytes
    assert grammar.static_is_there(timeout=60)
    assert grammar.nbytes > small
    assert bits_of(early, smollm2) == bits_of(grammar.cursor(), smollm2)


@pytest.mark.parametrize(
    ("engine", "kind", "source"),
    [("xgrammar", "ebnf", 'root ::= "a'), ("xgrammar", "structural_tag", "{}"), ("llguidance", "lark", "start: nothing_here"), ("llguidance", "lark", "%%%")],
)  # fmt: skip
@pytest.mark.case("C-STRUCT-02")
def test_what_an_engine_refuses_is_an_error_and_never_no_constraint(
    engine: str, kind: Any, source: str, toy: Vocabulary
) -> None:
    with pytest.raises(GrammarError) as caught:
        backend(engine).compile(GrammarSpec(kind=kind, source=source), toy, LIMITS)
    assert caught.value.code == "invalid_grammar" and caught.value.param == kind and caught.value.status == 400


def test_each_engine_says_what_is_not_its_own(toy: Vocabulary) -> None:
    with pytest.raises(NotMine):
        backend("xgrammar").compile(GrammarSpec(kind="regex", source="a"), toy, LIMITS)
    with pytest.raises(NotMine):
        backend("llguidance").compile(GrammarSpec(kind="ebnf", source='root ::= "a"'), toy, LIMITS)


def test_a_run_that_the_engine_refuses_is_not_forced(toy: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.runtime.grammar.xgrammar.canonical_run", lambda *_: [toy.encode("z")[0]])
    grammar = make("xgrammar", ["yes", "yester"], toy, "canonical")
    assert isinstance(grammar, XGrammarGrammar)
    assert list(grammar.cursor().forced()) == [] and grammar.rejected_runs == 1


def test_a_dead_matcher_is_an_error_of_its_request(toy: Vocabulary) -> None:
    """C3: it compiles, and a mask is too much for the engine. The message is one line of it: no other tenant's schema."""

    class Dead:
        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None: ...
        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "\n  too many items\nand the schema"

    with pytest.raises(GrammarError, match=r"too complex to follow: too many items$"):
        EngineCursor(LlMatcher(Dead()), Rules(toy, True)).fill(np.empty(toy.num_words, np.int32))


@pytest.mark.parametrize("mode", ["canonical", "permissive"])
@pytest.mark.parametrize("engine", ["xgrammar", "llguidance"])
def test_behind_the_end_nothing_is_legal(engine: str, mode: str, toy: Vocabulary) -> None:
    cursor = make(engine, ["ab"], toy, mode).cursor()
    for token in toy.encode("ab"):
        assert cursor.accept(token)
    assert cursor.done and bits_of(cursor, toy) == set(toy.stop_ids) and not cursor.forced()
    assert cursor.accept(toy.stop_ids[1])
    assert cursor.done and bits_of(cursor, toy) == set() and not cursor.accept(toy.stop_ids[0])
    cursor.rollback(1)
    assert bits_of(cursor, toy) == set(toy.stop_ids)


def test_xgrammars_regexes_are_not_exact_so_it_gets_none(toy: Vocabulary) -> None:
    """0.2.9 skips what stands before a bounded repeat in an optional group. Once this fails, the audit may let patterns in again."""
    source = json.dumps({"type": "string", "pattern": r"^a(\.[0-9]{1,3})?b$"})
    cursor = backend("xgrammar").compile(GrammarSpec(kind="json_schema", source=source), toy, LIMITS).cursor()
    assert all(cursor.accept(token) for token in toy.encode('"a1b"')) and cursor.done
    assert "xgrammar" not in route(GrammarSpec(kind="json_schema", source=source), LIMITS).engines


WHOLE = [
    ("json_schema", '{"type": "string"}', b'"'), ("json_schema", '{"type": "string", "maxLength": 20}', b'"'),
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}', b'{"a":"'),
    ("json_schema", '{"type": "object", "additionalProperties": {"type": "integer"}}', b'{"'), ("json_object", "", b'{"'),
    ("ebnf", r'root ::= "\"" [^"]* "\""', b'"'), ("regex", '"[^"]*"', b'"'), ("regex", '".{0,9}"', b'"'),
]  # fmt: skip


@pytest.mark.case("C-STRUCT-05", "C-STRUCT-11")
@pytest.mark.parametrize(("kind", "source", "opening"), WHOLE, ids=[f"{n}-{k}" for n, (k, _, _) in enumerate(WHOLE)])
@pytest.mark.parametrize("engine", ["xgrammar", "llguidance", "token_fsm"])
def test_bytes_that_spell_a_surrogate_are_no_character(engine: str, kind: Any, source: str, opening: bytes) -> None:
    """UTF-8 does not know them: they would be shown as three U+FFFD, and count as one character of a length."""
    every = Vocabulary(
        [*(bytes([i]) for i in range(256)), b"</s>"],
        stop_ids=[256],
        special_ids=[256],
        width=257,
        encode=lambda text: list(text.encode()),
    )
    try:
        grammar = backend(engine).compile(GrammarSpec(kind=kind, source=source, jump_forward="off"), every, LIMITS)
    except NotMine:
        return
    for text, legal in {b"\xed\x9f\xbf": True, b"\xee\x80\x80": True, b"\xed\xa0\x80": False, b"\xed\xbf\xbf": False}.items():
        cursor = grammar.cursor()
        assert all(cursor.accept(byte) for byte in opening)
        assert all(cursor.accept(byte) for byte in text) == legal, text
