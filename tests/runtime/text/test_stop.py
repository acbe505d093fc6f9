"""The first stop to complete, the least text held back; compared with a search of the whole text after each character."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phloem.runtime.text.stop import StopMatcher


def simple(tokens: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None, int | None]:
    """(text before the stop, the stop, tokens it took), by looking at every end of the whole text."""
    text = ""
    for count, token in enumerate(tokens, start=1):
        for char in token:
            text += char
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and count >= min_tokens:
                longest = max(ending, key=len)
                return text[: -len(longest)], longest, count
    return text, None, None


def held_by_rule(text: str, stops: list[str]) -> str:
    """The longest end of `text` that is a proper prefix of a stop."""
    ends = [text[n:] for n in range(len(text))]
    return next((end for end in ends if any(stop.startswith(end) and stop != end for stop in stops)), "")


def run(matcher: StopMatcher, tokens: list[str]) -> list[str]:
    deltas = []
    for count, token in enumerate(tokens, start=1):
        deltas.append(matcher.push(token, count))
        if matcher.matched is not None:
            return deltas
    return [*deltas, matcher.flush()]


letters = st.text(alphabet="ab\n", max_size=5)
stops_of_letters = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=1000, deadline=None)
@given(tokens=st.lists(letters, max_size=12), stops=stops_of_letters, min_tokens=st.integers(0, 8))
@example(tokens=["a", "a", "b"], stops=["aab", "ab"], min_tokens=0)
@example(tokens=["aba", "bab"], stops=["ababab"], min_tokens=0)
@example(tokens=["aa", "ab"], stops=["aaab", "b"], min_tokens=2)
def test_agrees_with_searching_the_whole_text(tokens: list[str], stops: list[str], min_tokens: int) -> None:
    text, stop, count = simple(tokens, stops, min_tokens)
    for order in (stops, stops[::-1]):
        matcher = StopMatcher(order, min_tokens=min_tokens)
        assert "".join(run(matcher, tokens)) == text
        assert (matcher.matched, matcher.matched_tokens) == (stop, count)
        kept = StopMatcher(order, min_tokens=min_tokens, keep_stop=True)
        assert "".join(run(kept, tokens)) == text + (stop or "")


@settings(max_examples=500, deadline=None)
@given(tokens=st.lists(letters, max_size=12), stops=stops_of_letters)
def test_holds_no_more_than_what_could_still_become_a_stop(tokens: list[str], stops: list[str]) -> None:
    matcher, seen, sent = StopMatcher(stops), "", ""
    for count, token in enumerate(tokens, start=1):
        seen += token
        sent += matcher.push(token, count)
        if matcher.matched is not None:
            return
        assert matcher.held == held_by_rule(seen, stops)
        assert sent + matcher.held == seen


@pytest.mark.case("C-STOP-02")
@pytest.mark.parametrize("stops", [["\nZZZ", "\n\n\n\n@"], ["a!", "ab!"]])
def test_text_that_only_begins_like_a_stop_is_not_lost(stops: list[str]) -> None:
    tokens = ["one\n", "\n", "\n", "two", "\nZZ", "\nab", "a", "\n\n\n"]
    matcher = StopMatcher(stops)
    assert "".join(run(matcher, tokens)) == "".join(tokens)
    assert matcher.matched is None


@pytest.mark.case("C-STOP-05")
@pytest.mark.parametrize(
    "stops, matched",
    [(["<<<END>>>", "<<<END>>>\n"], "<<<END>>>"), (["END", "<<<END"], "<<<END"), (["<<<END>>>\nrest", "END>>>"], "END>>>")],
)
def test_first_to_complete_then_earliest_start_whatever_the_order(stops: list[str], matched: str) -> None:
    text = "hello <<<END>>>\nrest"
    for order in (stops, stops[::-1]):
        for tokens in ([text], list(text), ["hello <<", "<END", ">>>\n", "rest"]):
            matcher = StopMatcher(order)
            assert "".join(run(matcher, tokens)) == text[: text.index(matched)]
            assert matcher.matched == matched


@pytest.mark.case("C-STOP-12")
@pytest.mark.parametrize("length", [1, 5, 15, 23])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_a_stop_is_found_across_any_number_of_tokens(length: int, start: int) -> None:
    text = "9 8 7 6 5 4 3 2 1 0 9 8 7 z end"
    stop = text[start : start + length]
    matcher = StopMatcher([stop])
    assert "".join(run(matcher, list(text))) == text[: text.index(stop)]
    assert matcher.matched_tokens == text.index(stop) + length


@pytest.mark.case("C-STOP-13")
@pytest.mark.parametrize("tokens", [["xW", "ord"], ["x", " Word"], ["(Wo", "rd"], ["x\n", "W", "o", "r", "d"]])
def test_a_stop_is_text_however_it_is_tokenised(tokens: list[str]) -> None:
    matcher = StopMatcher(["Word"])
    whole = "".join(tokens)
    assert "".join(run(matcher, [*tokens, " tail"])) == whole[: -len("Word")]


@pytest.mark.case("C-STOP-08")
def test_a_stop_that_never_begins_holds_nothing() -> None:
    matcher = StopMatcher(["ABCDEFGHIJ"])
    for count, token in enumerate(["The", " quick", " brown", " fox"], start=1):
        assert matcher.push(token, count) == token


@pytest.mark.case("C-SAMP-10")
def test_a_stop_before_min_tokens_stays_text_and_one_that_completes_at_it_ends() -> None:
    matcher = StopMatcher(["a"], min_tokens=3)
    assert run(matcher, ["a", "ba", "cad"]) == ["a", "ba", "c"]
    assert matcher.matched_tokens == 3
    across = StopMatcher(["abc"], min_tokens=3)
    assert "".join(run(across, ["a", "b", "c"])) == "", "it may begin before"


def test_nothing_leaves_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb", 1) == "a"
    assert matcher.push("c", 2) == ""
    assert matcher.flush() == ""


def test_no_stops_pass_everything() -> None:
    assert run(StopMatcher([]), ["a", "b"]) == ["a", "b", ""]


def test_characters_that_mean_something_in_a_regex() -> None:
    for char in "^]-[\\.*$\x00\n":
        matcher = StopMatcher([char, char + "z"])
        assert "".join(run(matcher, ["ab", f"c{char}d"])) == "abc"


def test_long_stops_cost_their_length_only_when_met() -> None:
    """32 stops of 16 k characters, and text that keeps almost matching them: linear, by counting comparisons."""
    stops = ["a" * 16_000 + f"{n:02}" for n in range(32)]
    matcher = StopMatcher(stops)
    assert matcher.push("b" * 10_000, 1) == "b" * 10_000
    assert sum(len(p.fail) for group in matcher._by_first.values() for p in group) == 32, "no table was built"
    text = "".join(matcher.push("a" * 100 + "b", n) for n in range(2, 102))
    assert text == ("a" * 100 + "b") * 100
    assert matcher.push("a" * 16_000 + "07", 200) == ""
    assert matcher.matched == stops[7]
