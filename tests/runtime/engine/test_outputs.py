"""Deltas: nothing is said twice, a delta is of one version of the weights, and the last one says how it ended."""

from __future__ import annotations

import pytest

from phloem.runtime.engine.outputs import final_deltas, new_deltas, refusal
from phloem.runtime.errors import CapacityError
from phloem.runtime.request import Request, TokenLogprob
from tests.runtime.scheduler.test_sequence import lp, make


def test_each_token_is_said_once() -> None:
    q = make(logprobs=True)
    assert new_deltas(q, 0) == []
    q.accept(5, lp(5))
    (delta,) = new_deltas(q, 0)
    assert (delta.token_ids, delta.logprobs) == ([5], [lp(5)])
    assert new_deltas(q, 0) == []
    q.accept(6, lp(6))
    q.finish = "length"
    (delta,) = final_deltas(q, 0)
    assert delta.token_ids == [6] and delta.finish_reason == "length"
    assert delta.usage is not None and (delta.usage.prompt_tokens, delta.usage.completion_tokens) == (3, 2)


def test_tokens_of_two_versions_come_in_two_deltas() -> None:
    """rl W6: the spans show under which weights each token was drawn."""
    q = make()
    for version in (0, 0, 1, 2, 2):
        q.version = version
        q.accept(5, None)
    q.finish = "length"
    deltas = final_deltas(q, 7)
    assert [(d.weights_version, len(d.token_ids), d.finish_reason) for d in deltas] == [
        (0, 2, None),
        (1, 1, None),
        (2, 2, "length"),
    ]


@pytest.mark.parametrize("finish", ["abort", "error", "stop_string"])
def test_no_token_comes_with_an_end_from_outside(finish: str) -> None:
    """S5, S6."""
    q = make()
    q.accept(5, None)
    q.finish = finish  # type: ignore[assignment]
    (delta,) = final_deltas(q, 3)
    assert delta.token_ids == [] and delta.finish_reason == finish
    assert delta.usage is not None and delta.usage.completion_tokens == 0


def test_prompt_logprobs_come_as_they_are_known() -> None:
    q = make(prompt_logprobs=0)
    q.score(1, lp(6))
    (delta,) = new_deltas(q, 0)
    assert delta.prompt_logprobs == [TokenLogprob(6, -1.0)] and delta.token_ids == []
    q.score(2, lp(7))
    q.accept(9, None)
    (delta,) = new_deltas(q, 0)
    assert delta.prompt_logprobs == [lp(7)] and delta.token_ids == [9]


def test_a_refusal_carries_its_error() -> None:
    delta = refusal(Request(id="x", token_ids=(1, 2)), CapacityError("too big", param="token_ids"), 4)
    assert delta.error is not None and (delta.error.name, delta.error.param) == ("CapacityError", "token_ids")
    assert delta.finish_reason == "error" and delta.weights_version == 4
    assert delta.usage is not None and delta.usage.prompt_tokens == 2
