"""The door: P3's arithmetic against the definition, and that every refusal says the numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime.engine.door import check_request, pages_needed
from phloem.runtime.errors import CapacityError, ContextLengthError, InvalidRequestError, RequestError
from phloem.runtime.request import Request, SamplingParams


@dataclass
class Limits:
    page_size: int = 16
    num_pages: int = 8
    max_context: int = 100
    vocab_size: int = 10


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.integers(1, 150),
    max_tokens=st.one_of(st.none(), st.integers(0, 150)),
    size=st.sampled_from((1, 4, 16)),
    pages=st.integers(1, 40),
    context=st.integers(1, 140),
)
def test_what_is_taken_fits_and_what_fits_is_taken(
    prompt: int, max_tokens: int | None, size: int, pages: int, context: int
) -> None:
    """P3: slots are needed for the prompt and all tokens drawn but the last."""
    limits = Limits(size, pages, context)
    request = Request(id="q", token_ids=(1,) * prompt, sampling=SamplingParams(max_tokens=max_tokens))
    asked = 1 if max_tokens is None else max_tokens
    slots = prompt + max(asked - 1, 0)
    fits = prompt + asked <= context and slots <= size * pages
    try:
        tokens, granted = check_request(request, limits)
    except (ContextLengthError, CapacityError) as error:
        assert not fits
        assert {str(prompt)} <= set(re.findall(r"\d+", str(error))), "the numbers are in the message"
        return
    assert fits and len(tokens) == prompt
    assert granted == (max_tokens if max_tokens is not None else granted)
    assert prompt + granted <= context and pages_needed(prompt, granted, size) <= pages
    if max_tokens is None:
        assert granted == 128 or prompt + granted == context or prompt + granted == size * pages + 1, (
            "as much as there is room for"
        )


@pytest.mark.parametrize("bad", [(10,), (-1,), (0, 3, 99), (2**31,), ("x",), (None,), (0.5,)])
def test_ids_outside_the_vocabulary_are_refused_with_their_position(bad: tuple[object, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_request(Request(id="q", token_ids=bad), Limits())  # type: ignore[arg-type]
    assert caught.value.param == "token_ids" and caught.value.status == 400
    if bad == (0, 3, 99):
        assert "99" in str(caught.value) and "position 2" in str(caught.value) and "0 to 9" in str(caught.value)


def test_the_last_position_can_be_scored_and_none_beyond() -> None:
    def check(position: int) -> None:
        check_request(Request(id="q", token_ids=(1, 2, 3), sampling=SamplingParams(prompt_logprobs=position)), Limits())

    check(0)
    check(2)
    with pytest.raises(RequestError, match="3"):
        check(3)
    check_request(Request(id="q", token_ids=(1,), sampling=SamplingParams(prompt_logprobs=0)), Limits())
