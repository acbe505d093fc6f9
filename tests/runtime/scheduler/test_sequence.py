"""Sequence: how far it may go, what it still has to score, and how it ends."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import pytest

from phloem.runtime.errors import GrammarDeadEnd
from phloem.runtime.request import GrammarSpec, Request, SamplingParams, TokenLogprob
from phloem.runtime.scheduler.sequence import Sequence
from tests.fakes import PatternCursor


@dataclass(frozen=True)
class Ends:
    ids: frozenset[int] = frozenset((0,))
    grammar_eos: int | None = 0


def make(pattern: list[Any] | None = None, max_tokens: int = 8, jump: str = "canonical", **sampling: Any) -> Sequence:
    grammar = GrammarSpec(kind="regex", source="x", jump_forward=jump) if pattern is not None else None  # type: ignore[arg-type]
    request = Request(id="q", token_ids=(5, 6, 7), sampling=SamplingParams(**sampling), grammar=grammar)
    q = Sequence(request, array("i", request.token_ids), max_tokens, 0, Ends())
    if pattern is not None:
        q.cursor = PatternCursor(pattern)
    return q


def lp(token: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0)


def test_the_goal_includes_a_draw_in_flight_unless_it_is_the_last() -> None:
    """S1, P3: the last token drawn needs no slot."""
    q = make(max_tokens=2)
    assert q.goal() == 3
    q.drawing = True
    assert q.goal() == 4
    assert q.accept(9, None) is None
    assert q.goal() == 4
    assert q.accept(9, None) == "length"
    assert bytes(q.key) == array("i", q.tokens).tobytes()


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({}, 0, "eos"),
        ({"ignore_eos": True}, 0, None),
        ({"ignore_eos": True, "stop_token_ids": [0]}, 0, "stop_token"),
        ({"stop_token_ids": [4, 0]}, 0, "eos"),
        ({"stop_token_ids": [4]}, 4, "stop_token"),
        ({}, 4, None),
    ],
)
def test_what_ends_it(sampling: dict[str, Any], token: int, reason: str | None) -> None:
    assert make(**sampling).accept(token, None) == reason


def test_the_whole_forced_run_is_taken_and_eos_appended() -> None:
    """J3, J8."""
    q = make([1, 2, frozenset((3, 4)), 5, 6])
    assert q.advance() is None and q.tokens[3:] == [1, 2]
    assert q.accept(4, None) == "grammar" and q.tokens[3:] == [1, 2, 4, 5, 6, 0]
    q.emitted = q.num_new
    assert q.num_forced() == 5
    q.emitted = 3
    assert q.num_forced() == 2, "only what is delivered counts"


def test_the_run_is_cut_at_max_tokens() -> None:
    """J7."""
    q = make([1, 2, 3, 4], max_tokens=3)
    assert q.advance() == "length" and q.tokens[3:] == [1, 2, 3]
    q = make([1, 2, 3], max_tokens=3)
    assert q.advance() == "grammar" and q.tokens[3:] == [1, 2, 3], "no room for EOS: omitted, and still called grammar"


def test_with_jump_off_the_same_tokens_count_as_forced() -> None:
    """J3."""
    q = make([1, frozenset((2, 3)), 4], jump="off")
    assert q.advance() is None and q.num_new == 0
    assert q.accept(1, None) is None and q.accept(3, None) is None and q.accept(4, None) == "grammar"
    q.emitted = q.num_new
    assert q.tokens[3:] == [1, 3, 4, 0] and q.num_forced() == 3


def test_a_stop_token_inside_a_run_ends_it_there() -> None:
    q = make([frozenset((1, 2)), 4, 5, 6, frozenset((1, 2))], stop_token_ids=[5])
    assert q.accept(1, None) == "stop_token" and q.tokens[3:] == [1, 4, 5]


def test_an_illegal_token_is_a_dead_end() -> None:
    with pytest.raises(GrammarDeadEnd):
        make([frozenset((1, 2))]).accept(3, None)


def test_forced_tokens_wait_for_their_logprobs() -> None:
    """J7, M4: of a run they are the row's; nothing is emitted without its logprob, and later tokens wait behind it."""
    q = make([frozenset((1, 2)), 3, 4, frozenset((1, 2))], logprobs="both")
    q.accept(1, lp(1))
    assert q.num_ready() == 1 and q.first_wanted() == 4 and q.last_wanted() == 5 and q.cache_limit() == 3
    q.score(5, lp(4))
    assert q.num_ready() == 1, "out of turn: ignored"
    q.score(4, lp(3))
    q.score(5, lp(4))
    assert q.num_ready() == 3 and q.first_wanted() is None and q.cache_limit() == 5
    assert q.logprobs[1] == TokenLogprob(3, -1.0, (), 0.0), "the sampled logprob of a certain token is 0"
    q = make([3, 4, frozenset((1, 2))], logprobs="sampled", top_logprobs=1)
    q.advance()
    assert q.num_ready() == 2 and q.logprobs == [TokenLogprob(t, 0.0, ((t, 0.0),)) for t in (3, 4)], "known without a forward"


def test_prompt_logprobs_limit_what_the_cache_may_give() -> None:
    q = make(prompt_logprobs=2)
    assert (q.first_wanted(), q.last_wanted(), q.cache_limit()) == (2, 2, 1)
    q.score(2, lp(7))
    assert q.prompt_logprobs == [lp(7)] and q.first_wanted() is None and q.cache_limit() == 2
    assert make(prompt_logprobs=0).cache_limit() == 0, "position 0 has no logprob"


def test_a_sequence_that_only_waits_for_scores_draws_no_more() -> None:
    q = make([1, 2], logprobs=True)
    assert q.advance() == "grammar"
    q.ending = "grammar"
    assert not q.may_draw() and q.goal() == q.last_wanted() == 5
