"""A list of texts, spelled as the tokenizer spells them behind the prompt."""

from __future__ import annotations

import json

import pytest

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Cursor, Limits, NotMine
from phloem.runtime.grammar.choices import encode_behind, read_choices
from phloem.runtime.grammar.token_fsm import TokenFsm
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.oracle import EOS, bits_of

FSM = TokenFsm()


def outputs(cursor: Cursor, v: Vocabulary) -> set[tuple[int, ...]]:
    """Every sequence of ids, without stop ids."""
    found: set[tuple[int, ...]] = set()
    todo: list[tuple[Cursor, tuple[int, ...]]] = [(cursor, ())]
    while todo:
        at, ids = todo.pop()
        for token in bits_of(at, v):
            if token in v.stop_ids:
                found.add(ids)
            else:
                after = at.fork()
                assert after.accept(token)
                todo.append((after, (*ids, token)))
    return found


def test_canonical_outputs_are_the_encodings(toy: Vocabulary) -> None:
    """F6. Each choice once, however often it is listed."""
    texts = ["yes", "yester", "no", "abab", "ab", "no", "aé", "<eos>"]
    grammar = FSM.choices(texts, toy, Limits())
    assert outputs(grammar.cursor(), toy) == {tuple(toy.encode(t)) for t in texts}


def test_stop_ids_only_where_a_choice_ends(toy: Vocabulary) -> None:
    cursor = FSM.choices(["xy", "xyq"], toy, Limits()).cursor()
    assert list(cursor.forced()) == toy.encode("xy")
    for token in toy.encode("xy"):
        assert not set(toy.stop_ids) & bits_of(cursor, toy)
        assert cursor.accept(token)
    assert bits_of(cursor, toy) == {*toy.stop_ids, *toy.encode("q")}
    assert not cursor.done
    assert cursor.accept(toy.encode("q")[0])
    assert cursor.done and not cursor.forced()


def test_choices_are_encoded_behind_the_prompts_tail(smollm2: Vocabulary) -> None:
    """F6: after "Answer:" the choice " yes" is one token; behind a blank that re-encodes, alone."""
    behind = smollm2.encode("Answer:")
    grammar = FSM.choices([" yes", " no"], smollm2, Limits())
    expected = {tuple(smollm2.encode("Answer:" + t)[len(behind) :]) for t in (" yes", " no")}
    assert outputs(grammar.cursor(smollm2.tail(behind)), smollm2) == expected
    blank = smollm2.encode("Answer: ")
    assert smollm2.encode("Answer: yes")[: len(blank)] != blank
    alone = FSM.choices(["yes", "no"], smollm2, Limits())
    assert outputs(alone.cursor(smollm2.tail(blank)), smollm2) == {tuple(smollm2.encode(t)) for t in ("yes", "no")}


def test_encode_behind_prefers_the_longest_context_that_stays(toy: Vocabulary) -> None:
    assert encode_behind(toy.encode("ye"), b"s", toy) == toy.encode("s")
    assert encode_behind(toy.encode("xa"), b"q", toy) == toy.encode("q")
    assert encode_behind([], b"\xff", toy) is None


def test_open_end(toy: Vocabulary) -> None:
    """G7: bytes that lead to a longer choice, however that is spelled, are not foreign."""
    cursor = FSM.choices(["yes", "yester"], toy, Limits(), open_end=True).cursor()
    assert not cursor.accept(toy.encode("x")[0])
    assert cursor.accept(toy.encode("yes")[0])
    assert not cursor.accept(toy.encode("t")[0])
    assert toy.encode("x")[0] in bits_of(cursor, toy)
    assert not {i for i in bits_of(cursor, toy) if toy.tokens[i][:1] == b"t"}
    assert cursor.accept(toy.encode("x")[0])
    assert cursor.done and cursor.dropped == 1


@pytest.mark.parametrize(
    ("choices", "message"), [([], "is empty"), (["a", ""], "choice 1 is empty"), (["\ud800"], "surrogate"), (["aq"], None)]
)
def test_bad_lists(choices: list[str], message: str | None, toy: Vocabulary) -> None:
    if message is None:
        FSM.choices(choices, toy, Limits())
        return
    with pytest.raises(GrammarError, match=message) as caught:
        FSM.choices(choices, toy, Limits())
    assert caught.value.param == "choices" and caught.value.status == 400


@pytest.mark.parametrize("source", ["x", "{}", '["a", 1]', '"a"', "null"])
def test_a_source_that_is_no_list(source: str) -> None:
    with pytest.raises(GrammarError, match="no JSON list"):
        read_choices(source)


def test_a_choice_that_cannot_be_spelled(smollm2: Vocabulary) -> None:
    broken = Vocabulary(
        smollm2.tokens, stop_ids=smollm2.stop_ids, special_ids=smollm2.special_ids, width=smollm2.width, encode=lambda text: []
    )
    with pytest.raises(GrammarError, match="cannot spell the choice 'no'"):
        FSM.choices(["no"], broken, Limits())


def test_more_than_the_limits_are_left_to_another_engine(toy: Vocabulary) -> None:
    many = [f"a{i}" for i in range(4096)]
    FSM.choices(many, toy, Limits())
    for mode in ("canonical", "permissive"):
        with pytest.raises(NotMine):
            FSM.choices([*many, "b"], toy, Limits(), mode)  # type: ignore[arg-type]
        with pytest.raises(NotMine):
            FSM.choices(["x" * 65_537], toy, Limits(), mode)  # type: ignore[arg-type]


def test_a_forced_choice_is_one_run(toy: Vocabulary) -> None:
    cursor = FSM.choices(["yesterxyz"], toy, Limits()).cursor()
    assert list(cursor.forced()) == toy.encode("yesterxyz")
    assert not cursor.accept(EOS)


def test_read_choices_keeps_order_and_characters() -> None:
    assert read_choices(json.dumps(["é", "a\n", "😀"])) == ["é", "a\n", "😀"]
