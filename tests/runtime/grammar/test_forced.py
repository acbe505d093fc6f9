"""The canonical run is what the tokenizer writes, whatever text comes behind it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime.grammar.base import Cursor, Limits
from phloem.runtime.grammar.forced import canonical_run, whole_characters
from phloem.runtime.grammar.token_fsm import TokenFsm
from phloem.runtime.grammar.vocabulary import Vocabulary
from tests.runtime.grammar.oracle import toy_vocabulary

FSM = TokenFsm()
TOY = toy_vocabulary()


def nothing(byte: int) -> bool:
    return False


def anything(byte: int) -> bool:
    return True


def test_a_run_is_cut_where_unseen_text_could_merge(toy: Vocabulary) -> None:
    """J9: "ye" may become "yes", "yester"."""
    spelled = toy.encode("ab")
    assert canonical_run((), b"ab", nothing, toy) == spelled
    assert canonical_run((), b"xab", lambda b: b == ord("a"), toy) == toy.encode("x")  # "abab" is a token
    assert canonical_run((), b"xab", lambda b: b == ord("z"), toy) == toy.encode("xab")
    assert canonical_run((), b"ye", anything, toy) == []


def test_a_seam_that_re_tokenises_is_left_to_the_model(toy: Vocabulary) -> None:
    tail = tuple(toy.encode("ye"))
    assert canonical_run(tail, b"s!", nothing, toy) == []
    assert canonical_run((), b"s!", nothing, toy) == toy.encode("s!")
    # Longer left context that does not re-encode is shortened, as long as one id of it is left.
    odd = (toy.encode("y")[0], toy.encode("e")[0], toy.encode("x")[0])
    assert canonical_run(odd, b"q", nothing, toy) == toy.encode("q")


def test_no_run_ends_inside_a_character(toy: Vocabulary) -> None:
    """§7. The cut may fall inside one."""
    run = canonical_run((), "x中".encode(), lambda b: b == 0x61, toy_vocabulary(extra=[b"\xada"]))
    assert run == toy.encode("x")
    assert canonical_run((), b"x\xe4\xb8", nothing, toy) == []  # not whole characters: nothing to encode


@pytest.mark.parametrize("text", ["", "a", "é", "aé", "中", "😀x", "x😀", "ab中é"])
def test_whole_characters(text: str) -> None:
    data = text.encode()
    for cut in range(len(data) + 1):
        whole = whole_characters(data[:cut])
        data[:whole].decode()
        assert cut - whole < 4
        assert all(len(c.encode()) > cut - whole for c in text if cut - whole and data[whole : whole + 1] == c.encode()[:1])
    assert whole_characters(data) == len(data)


def follow_canonically(cursor: Cursor, ids: list[int], text: str) -> int:
    """Feed the tokenizer's own ids. Every run must be theirs. How many were forced."""
    at = forced = 0
    while at < len(ids):
        run = list(cursor.forced())
        assert run == ids[at : at + len(run)], f"forced {run} where the tokenizer writes {ids[at:]} in {text!r}"
        forced += len(run)
        for token in ids[at : at + max(1, len(run))]:
            assert cursor.accept(token), f"token {token} of {text!r} is refused"
        at += max(1, len(run))
    return forced


def test_runs_are_prefixes_of_the_tokenizers_own_ids(smollm2: Vocabulary) -> None:
    """J9, §9.7 on a real tokenizer: whatever the model chooses at the free places, canonically spelled."""
    rng = random.Random(5)
    names = ["Ann", "Bob Lee", "x", "Zoë", "a b  c", "naïve 中文", "😀", "12", "  ", "don't"]
    pattern = r'\{"name": "[^"\\]{1,16}", "age": (?:0|[1-9][0-9]{0,2}), "member": (?:true|false), "since": "[0-9]{4}-[0-9]{2}-[0-9]{2}"\}'
    grammar = FSM.regex(pattern, smollm2, Limits())
    total = forced = 0
    for prompt in ("", "Answer:", "Answer: ", "{", "Say it in JSON:\n", 'x = "'):
        tail = smollm2.tail(smollm2.encode(prompt))
        for _ in range(25):
            text = (
                f'{{"name": "{rng.choice(names)}", "age": {rng.randrange(1000)}, "member": {rng.choice(["true", "false"])}, '
                f'"since": "{rng.randrange(1000, 3000)}-{rng.randrange(10, 99)}-{rng.randrange(10, 99)}"}}'
            )
            joint = smollm2.encode(prompt + text)
            if joint[: len(smollm2.encode(prompt))] != smollm2.encode(prompt):
                continue  # the prompt's own end re-tokenises: there is no canonical continuation
            ids = joint[len(smollm2.encode(prompt)) :]
            forced += follow_canonically(grammar.cursor(tail), ids, text)
            total += len(ids)
    assert total > 1000
    assert forced / total > 0.4, f"{forced} of {total} tokens were forced"


def test_the_start_merges_with_the_prompt(smollm2: Vocabulary) -> None:
    """F6, J9: the tail is what the first forced token may merge with."""
    grammar = FSM.regex('[{]"answer": (yes|no)}', smollm2, Limits())
    behind_newline = grammar.cursor(smollm2.tail(smollm2.encode("JSON:\n")))
    assert list(behind_newline.forced()) == smollm2.encode('JSON:\n{"answer":')[len(smollm2.encode("JSON:\n")) :]
    blank = smollm2.encode("JSON:\n ")
    joint = smollm2.encode('JSON:\n {"answer": yes}')
    assert joint[: len(blank)] != blank  # " {" is one token, so the seam re-tokenises
    assert list(grammar.cursor(smollm2.tail(blank)).forced()) == []


PARTS = ["ab", "abab", "yes", "yester", "a", "é", "aé", "中", "12", "0.5", "x", '{"', '": 1', "}"]


@settings(max_examples=150, deadline=None)
@given(
    segments=st.lists(
        st.one_of(st.sampled_from(PARTS), st.lists(st.sampled_from(PARTS), min_size=2, max_size=3, unique=True)), max_size=6
    ),
    picks=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    prompt=st.sampled_from(["", "a", "x", "ye", "ab"]),
)
def test_runs_of_random_templates_are_canonical(segments: list[str | list[str]], picks: list[int], prompt: str) -> None:
    """Literal stretches and choices in any order, over a vocabulary whose tokens straddle them."""
    escape = lambda s: "".join("\\" + c if c in '{}."' else c for c in s)  # noqa: E731
    pattern = "".join(escape(s) if isinstance(s, str) else "(" + "|".join(map(escape, s)) + ")" for s in segments)
    text = "".join(s if isinstance(s, str) else s[pick % len(s)] for s, pick in zip(segments, picks))
    before, joint = TOY.encode(prompt), TOY.encode(prompt + text)
    if joint[: len(before)] == before:
        cursor = FSM.regex(pattern, TOY, Limits()).cursor(TOY.tail(before))
        follow_canonically(cursor, joint[len(before) :], text)
