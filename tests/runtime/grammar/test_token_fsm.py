"""Masks equal brute force, bit for bit; cursors are functions of what they accepted; nothing leads into a dead end."""

from __future__ import annotations

import itertools
import json
import random
import re

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Cursor, Limits, NotMine
from phloem.runtime.grammar.token_fsm import FsmGrammar, TokenFsm
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.request import GrammarSpec
from tests.runtime.grammar.oracle import BOS, EOS, EOS2, Oracle, bits_of, check_masks, check_place, toy_vocabulary

FSM = TokenFsm()


def words(pattern: str, alphabet: str, longest: int) -> set[bytes]:
    """The language by Python's `re`, over a few characters; the pattern must not match anything longer."""
    texts = ("".join(t) for n in range(longest + 1) for t in itertools.product(alphabet, repeat=n))
    return {t.encode() for t in texts if re.fullmatch(pattern, t)}


LANGUAGES = [
    ("ab(ab)?", words("ab(ab)?", "ab", 5)),
    ("(yes|no|yester)", {b"yes", b"no", b"yester"}),
    ("[ab]{0,4}", words("[ab]{0,4}", "ab", 4)),
    ("(a|aab|b)b?", words("(a|aab|b)b?", "ab", 5)),
    (r"-?(0|[12])(\.[05]{1,2})?", words(r"-?(0|[12])(\.[05]{1,2})?", "-012.5", 5)),
    ("x{1,5}y?", words("x{1,5}y?", "xy", 6)),
    ("é{1,3}|aé", words("é{1,3}|aé", "éa", 3)),
    ("[é-ë]{2}", {(a + b).encode() for a in "éêë" for b in "éêë"}),
    ("(中|😀|ä)x?", words("(中|😀|ä)x?", "中😀äx", 2)),
    ("", {b""}),
    ("<eos>|<end>x", {b"<eos>", b"<end>x"}),  # the spelling of a special token is text, byte by byte (G6)
]


@pytest.mark.parametrize("mode", ["canonical", "permissive"])
@pytest.mark.parametrize("open_end", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize(("pattern", "language"), LANGUAGES, ids=[p or "empty" for p, _ in LANGUAGES])
def test_masks_equal_brute_force(pattern: str, language: set[bytes], mode: str, open_end: bool, toy: Vocabulary) -> None:
    """G1, G6, G7; §9.5. Every id, padding and negative ones included, at each step of random walks."""
    grammar = FSM.regex(pattern, toy, Limits(), mode, open_end)  # type: ignore[arg-type]
    check_masks(grammar, Oracle(language, toy, open_end), paths=4)


@pytest.mark.case("C-STRUCT-18")
def test_every_text_of_the_language_is_reached(toy: Vocabulary) -> None:
    """0 false rejects: walking every spelling reaches exactly the language."""
    for pattern, language in LANGUAGES[:6]:
        grammar = FSM.regex(pattern, toy, Limits(), "permissive")
        reached: set[bytes] = set()
        todo: list[tuple[Cursor, bytes]] = [(grammar.cursor(), b"")]
        while todo:
            cursor, text = todo.pop()
            for token in bits_of(cursor, toy):
                if token in toy.stop_ids:
                    reached.add(text)
                else:
                    after = cursor.fork()
                    assert after.accept(token)
                    todo.append((after, text + toy.tokens[token]))
        assert reached == language


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("ab(ab)?", "abab"), (r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", "0.5"), ("a.{4}", "abcde"), ("a.{4}", "a\x00END")],
)
def test_a_match_may_go_on(pattern: str, text: str, toy: Vocabulary) -> None:
    """F2: the two texts that outlines-core 0.2.14 cannot reach, and the two that its work-around swallows."""
    cursor = FSM.regex(pattern, toy, Limits(), "permissive").cursor()
    for byte in text.encode():
        assert cursor.accept(next(i for i in toy.text_ids if toy.tokens[i] == bytes((byte,))))
    assert cursor.accept(EOS)
    assert cursor.done


def test_all_stop_ids_are_legal_when_complete_and_never_before(toy: Vocabulary) -> None:
    cursor = FSM.regex("[ab]{1,2}", toy, Limits()).cursor()
    assert not {EOS, EOS2, BOS} & bits_of(cursor, toy)
    assert cursor.accept(toy.encode("a")[0])
    assert {EOS, EOS2} <= bits_of(cursor, toy)
    assert not cursor.done
    after = cursor.fork()
    assert after.accept(EOS2)
    assert after.done
    assert bits_of(after, toy) == set()
    assert not after.accept(EOS)
    assert cursor.accept(toy.encode("b")[0])
    assert cursor.done


class TestDeadEnds:
    """F4: a vocabulary that can't spell some byte."""

    def test_no_mask_leads_to_a_state_that_cannot_end(self) -> None:
        v = toy_vocabulary(missing=b"sq", merges=["y e", "t r"], extra=[b"sx", b"qa", b"nq"])
        language = {b"yes", b"yet", b"sxe", b"sya", b"nqa", b"nqb", b"aqa", b"cqz", b"yeq"}
        for mode in ("canonical", "permissive"):
            grammar = FSM.regex("yes|yet|sxe|sya|nqa|nqb|aqa|cqz|yeq", v, Limits(), mode)  # type: ignore[arg-type]
            texts = check_masks(grammar, Oracle(language, v), paths=30)
            assert texts == {b"yet", b"sxe", b"nqa", b"nqb", b"aqa"}

    def test_a_language_that_cannot_be_spelled_is_refused(self) -> None:
        v = toy_vocabulary(missing=b"q", merges=[])
        with pytest.raises(GrammarError, match="cannot spell"):
            FSM.regex("aq|q+", v, Limits())

    def test_complete_with_continuations_that_cannot_be_spelled_is_done(self) -> None:
        v = toy_vocabulary(missing=b"q", merges=[])
        cursor = FSM.regex("aq?", v, Limits()).cursor()
        check_place(cursor, b"", Oracle({b"a", b"aq"}, v))
        assert cursor.accept(v.encode("a")[0])
        assert cursor.done

    def test_nothing_matches(self, toy: Vocabulary) -> None:
        with pytest.raises(GrammarError, match="nothing can match"):
            FSM.regex(r"a[^\s\S]", toy, Limits())


class TestOpenEnd:
    """G7: a token that cannot continue the value ends it, and is no part of it."""

    def test_a_foreign_token_ends_the_value(self, toy: Vocabulary) -> None:
        cursor = FSM.regex("[12]{1,3}", toy, Limits(), open_end=True).cursor()
        one, comma = toy.encode("1")[0], toy.encode(",")[0]
        assert not cursor.accept(comma)
        assert cursor.accept(one)
        assert not cursor.done
        assert cursor.accept(comma)
        assert cursor.done and cursor.dropped == 1
        assert bits_of(cursor, toy) == set()
        cursor.rollback(1)
        assert cursor.dropped == 0 and cursor.accept(one)

    def test_a_token_that_begins_as_the_value_may_go_on_does_not(self, toy: Vocabulary) -> None:
        cursor = FSM.regex("1[23]?", toy, Limits(), open_end=True).cursor()
        assert cursor.accept(toy.encode("1")[0])
        assert not cursor.accept(toy.encode("20")[0])  # "2" may follow, "20" may not
        assert cursor.accept(toy.encode("x")[0])


def test_choices_of_both_modes_equal_brute_force(toy: Vocabulary) -> None:
    """F6 permissive: all spellings. Canonical is a subset, tested in test_choices.py."""
    texts = ["yes", "yester", "no", "noé", "😀"]
    for open_end in (False, True):
        grammar = FSM.choices(texts, toy, Limits(), "permissive", open_end)
        check_masks(grammar, Oracle([t.encode() for t in texts], toy, open_end), paths=6)


class TestSize:
    """F3: what is too large is left to another engine, quickly and by that name."""

    @pytest.mark.parametrize("pattern", ["(a|b)*a(a|b){18}", "a{1,3000}", "(" + "a?" * 2000 + ")", "(.{1,60}|x.{1,60}){1,40}"])
    def test_too_many_states(self, pattern: str, toy: Vocabulary) -> None:
        with pytest.raises(NotMine):
            FSM.regex(pattern, toy, Limits())

    def test_too_many_wide_states_for_the_vocabulary(self, toy: Vocabulary) -> None:
        FSM.regex(".{1,40}", toy, Limits(fsm_cells=40 * toy.width))
        with pytest.raises(NotMine, match="40 of its states"):
            FSM.regex(".{1,40}", toy, Limits(fsm_cells=40 * toy.width - 1))

    def test_chains_hold_no_rows(self, toy: Vocabulary) -> None:
        """F5. They get one only where a model is asked to choose."""
        grammar = FSM.regex("q{300}[ab]", toy, Limits())
        assert sum(row is not None for row in grammar._rows) == 2
        cursor = grammar.cursor()
        assert list(cursor.forced()) == toy.encode("q" * 300)

    def test_nbytes_counts_whole_rows(self, smollm2: Vocabulary) -> None:
        assert FSM.regex(".{1,20}", smollm2, Limits()).nbytes > 20 * smollm2.num_words * 4


def test_kinds_that_are_not_ours(toy: Vocabulary) -> None:
    for kind in ("ebnf", "lark", "structural_tag", "json_object"):
        with pytest.raises(NotMine):
            FSM.compile(GrammarSpec(kind=kind, source="x"), toy, Limits())  # type: ignore[arg-type]


@pytest.mark.parametrize("jump", ["canonical", "permissive", "off"])
def test_compile_takes_every_kind_it_says(jump: str, toy: Vocabulary) -> None:
    for kind, source, language in (
        ("regex", "a|b", {b"a", b"b"}),
        ("choices", json.dumps(["a", "b", "a"]), {b"a", b"b"}),
        ("json_schema", '{"type": "boolean"}', {b"true", b"false"}),
    ):
        spec = GrammarSpec(kind=kind, source=source, jump_forward=jump)  # type: ignore[arg-type]
        grammar = FSM.compile(spec, toy, Limits())
        assert grammar.report.backend == "token_fsm"
        assert grammar.report.mask_mode == ("permissive" if jump == "permissive" else "canonical")
        check_masks(grammar, Oracle(language, toy), exact=False)


# ------------------------------------------------------------------------------------------------------------- the laws


def snapshot(cursor: Cursor, v: Vocabulary) -> tuple[bool, tuple[int, ...], frozenset[int]]:
    return cursor.done, tuple(cursor.forced()), frozenset(bits_of(cursor, v))


class CursorLaws(RuleBasedStateMachine):
    """G2: a cursor is what its accepted ids make of it, through any accepts, refusals, rollbacks and forks."""

    cursors: Bundle[tuple[Cursor, list[int]]] = Bundle("cursors")

    @initialize(which=st.integers(0, 5))
    def compile(self, which: int) -> None:
        v = self.v = TOY
        self.tail = tuple(v.encode(['{"', "x", "", "a"][which % 4]))
        if which == 5:
            self.grammar = FSM.choices(["yes", "yester", "yesterno", "abab", "aé"], v, Limits())
        else:
            pattern = [
                "(abab){1,3}c?|x",
                r'\{"a": [12]{1,4}(, "bcd": (true|false))?\}',
                "é[a-c]*é",
                "[ab]+xxxx",
                "(😀|中){2,4}the",
            ][which]
            self.grammar = FSM.regex(pattern, v, Limits(), "permissive" if which == 3 else "canonical")
        self.alive: list[tuple[Cursor, list[int]]] = []

    @rule(target=cursors)
    def begin(self) -> tuple[Cursor, list[int]]:
        made: tuple[Cursor, list[int]] = (self.grammar.cursor(self.tail), [])
        self.alive.append(made)
        return made

    @rule(it=cursors, data=st.data())
    def accept(self, it: tuple[Cursor, list[int]], data: st.DataObject) -> None:
        cursor, ids = it
        legal = sorted(bits_of(cursor, self.v))
        if legal:
            token = data.draw(st.sampled_from(legal))
            assert cursor.accept(token)
            ids.append(token)

    @rule(it=cursors, token=st.integers(-3, 330))
    def refuse(self, it: tuple[Cursor, list[int]], token: int) -> None:
        cursor, ids = it
        legal, before = bits_of(cursor, self.v), snapshot(cursor, self.v)
        if cursor.accept(token):
            assert token in legal
            ids.append(token)
        else:
            assert token not in legal
            assert snapshot(cursor, self.v) == before

    @rule(it=cursors, n=st.integers(-1, 9))
    def rollback(self, it: tuple[Cursor, list[int]], n: int) -> None:
        cursor, ids = it
        if not 0 <= n <= len(ids):
            before = snapshot(cursor, self.v)
            with pytest.raises(ValueError, match="cannot undo"):
                cursor.rollback(n)
            assert snapshot(cursor, self.v) == before
        else:
            cursor.rollback(n)
            del ids[len(ids) - n :]

    @rule(target=cursors, it=cursors)
    def fork(self, it: tuple[Cursor, list[int]]) -> tuple[Cursor, list[int]]:
        made = (it[0].fork(), list(it[1]))
        self.alive.append(made)
        return made

    @rule(it=consumes(cursors))
    def forget(self, it: tuple[Cursor, list[int]]) -> None:
        self.alive = [other for other in self.alive if other is not it]

    @invariant()
    def replaying_gives_the_same(self) -> None:
        for cursor, ids in getattr(self, "alive", []):
            fresh = self.grammar.cursor(self.tail)
            for token in ids:
                assert fresh.accept(token)
            assert snapshot(fresh, self.v) == snapshot(cursor, self.v)


TOY = toy_vocabulary()
CursorLaws.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestCursorLaws = CursorLaws.TestCase


def test_eight_interleaved_equal_eight_alone(toy: Vocabulary) -> None:
    """§7: one compiled grammar, a cursor each."""
    grammar = FSM.regex("([ab]{1,6}xxxx|yes(ter)?)+", toy, Limits())

    def walk(cursor: Cursor, seed: int) -> list[int]:
        rng, ids = random.Random(seed), []
        while len(ids) < 20 and not cursor.done:
            ids.append(rng.choice(sorted(bits_of(cursor, toy))))
            assert cursor.accept(ids[-1])
        return ids

    alone = [walk(grammar.cursor(), seed) for seed in range(8)]
    rngs, cursors = [random.Random(s) for s in range(8)], [grammar.cursor() for _ in range(8)]
    together: list[list[int]] = [[] for _ in range(8)]
    for _ in range(20):
        for rng, cursor, ids in zip(rngs, cursors, together):
            if not cursor.done:
                ids.append(rng.choice(sorted(bits_of(cursor, toy))))
                assert cursor.accept(ids[-1])
    assert together == alone


def test_what_is_forced_does_not_depend_on_what_was_asked_before(toy: Vocabulary) -> None:
    """A mask made inside a chain, where some other tail forbade the run, once ended all later runs from there."""
    for pattern in ("ab(ab)?", "(yes|no|yester)", "x{1,5}y?", "aabb(a|b)", "yesyesno(x|y)"):
        fresh, used = (FSM.regex(pattern, toy, Limits(), "canonical") for _ in range(2))
        states = [s for s in range(1, used.dfa.num_states) if used.alive[s]]
        for state in states:
            used.row(state)
        tails = [(), *((i,) for i in range(toy.width) if i not in toy.special_ids)]
        assert [fresh.forced(s, t) for s in states for t in tails] == [used.forced(s, t) for s in states for t in tails]
        assert any(fresh.forced(s, ()) for s in states)


def test_fill_overwrites_a_row_of_a_larger_array(smollm2: Vocabulary) -> None:
    """G4: rows of one int32 array, each the whole width."""
    grammar: FsmGrammar = FSM.regex("[ab]+|1", smollm2, Limits())
    masks = np.full((3, smollm2.num_words), -1, np.int32)
    cursor = grammar.cursor()
    cursor.fill(masks[1])
    assert (masks[0] == -1).all() and (masks[2] == -1).all()
    legal = {i for i in smollm2.text_ids if re.fullmatch(rb"[ab]+|1", smollm2.tokens[i])}
    assert set(np.flatnonzero(np.unpackbits(masks[1].view(np.uint8), bitorder="little")).tolist()) == legal
