"""What the core draws becomes text, ends where it must, and loses nothing on the way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phloem.runtime.engine.collect import Collector
from phloem.runtime.errors import EngineDeadError, NumericalError
from phloem.runtime.request import (
    Delta,
    FinishReason,
    Output,
    OutputDelta,
    Request,
    SamplingParams,
    TokenLogprob,
    Usage,
    WireError,
)
from phloem.runtime.text.pieces import byte_level_alphabet
from phloem.runtime.text.tokenizer import Tokenizer

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """Id = byte; 256 is the special `<eos>`, 257 the two characters "ab"."""
    alphabet = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    return Tokenizer.from_gguf_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": [*alphabet, "<eos>", "ab"],
            "tokenizer.ggml.token_type": [1] * 256 + [3, 1],
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.eos_token_id": EOS,
        }
    )


TOKENIZER = byte_tokenizer()


def collector(prompt: str = "p", **sampling: Any) -> Collector:
    request = Request(id="r", token_ids=tuple(prompt.encode()), sampling=SamplingParams(**sampling), sample=3)
    return Collector(request, TOKENIZER)


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -float(token_id))


def delta(ids: list[int] | str = "", finish: FinishReason | None = None, **rest: Any) -> OutputDelta:
    ids = list(ids.encode()) if isinstance(ids, str) else ids
    return OutputDelta("r", token_ids=ids, finish_reason=finish, **rest)


def feed(target: Collector, deltas: list[OutputDelta]) -> tuple[list[Delta], Output]:
    shown = [piece for d in deltas if (piece := target.push(d)) is not None]
    assert target.output is not None
    return shown, target.output


def run(text: str | list[int], finish: FinishReason = "length", **sampling: Any) -> tuple[list[Delta], Output]:
    """One token a delta, the last with the finish, until the collector has a stop; then the core's last word."""
    ids = list(text.encode()) if isinstance(text, str) else text
    target = collector(**sampling)
    shown = []
    for n, token in enumerate(ids, start=1):
        last = n == len(ids)
        piece = target.push(delta([token], finish if last else None, usage=Usage(1, 0, n, 0) if last else None))
        shown += [piece] if piece is not None else []
        if target.stopped_at is not None and not last:
            surplus = target.push(delta([120], "stop_string", usage=Usage(1, 0, n, 0)))
            shown += [surplus] if surplus is not None else []
            break
    assert target.output is not None
    return shown, target.output


# -- text ----------------------------------------------------------------------------------------------------------------


def test_text_and_tokens_go_together() -> None:
    shown, output = run("hi!")
    assert [(d.text, d.token_ids, d.finish_reason) for d in shown] == [
        ("h", [104], None),
        ("i", [105], None),
        ("!", [33], "length"),
    ]
    assert (output.text, output.token_ids, output.finish_reason) == ("hi!", [104, 105, 33], "length")
    assert {d.index for d in shown} == {3}
    assert shown[-1].usage == output.usage == Usage(1, 0, 3, 0)


@pytest.mark.case("C-STOP-06", "C-STOP-08")
@pytest.mark.parametrize("text", ["a😀b", "👨‍👩‍👧‍👦", "🇩🇪", "가나다라", "क्ष", "e\u0301"])
def test_no_delta_is_empty_and_none_breaks_a_character(text: str) -> None:
    shown, output = run(text)
    assert "".join(d.text for d in shown) == output.text == text
    assert all(d.text for d in shown)
    assert [i for d in shown for i in d.token_ids] == output.token_ids == list(text.encode())


def test_an_unfinished_character_at_the_end_is_shown_as_such() -> None:
    shown, output = run(list("a😀".encode())[:-1])
    assert output.text == "a\ufffd"
    assert [d.text for d in shown] == ["a", "\ufffd"]


def test_a_last_delta_without_tokens_ends_the_request() -> None:
    shown, output = feed(collector(max_tokens=0), [delta(finish="length", usage=Usage(1, 0, 0, 0))])
    assert (output.text, output.token_ids) == ("", [])
    assert [d.finish_reason for d in shown] == ["length"]


# -- how it ended ----------------------------------------------------------------------------------------------------------


def test_eos_counts_and_is_not_shown() -> None:
    _, output = run([104, EOS], "eos")
    assert (output.text, output.token_ids, output.stop_reason) == ("h", [104, EOS], None)
    assert output.usage.completion_tokens == 2
    _, visible = run([104, EOS], "eos", skip_special_tokens=False)
    assert visible.text == "h<eos>"


def test_a_stop_token_counts_and_is_hidden_like_a_stop_string() -> None:
    _, output = run("hi", "stop_token", stop_token_ids=[105])
    assert (output.text, output.token_ids, output.stop_reason) == ("h", [104, 105], 105)
    for shown in ({"keep_stop": True}, {"skip_special_tokens": False}):
        assert run("hi", "stop_token", stop_token_ids=[105], **shown)[1].text == "hi"


def test_the_same_token_is_shown_where_it_did_not_end_the_output() -> None:
    assert run("hih", "length", stop_token_ids=[105], min_tokens=3)[1].text == "hih"


@pytest.mark.parametrize("finish", ["length", "abort", "grammar", "eos"])
@pytest.mark.case("C-STOP-02")
def test_held_text_is_given_at_the_end_whatever_ended_it(finish: FinishReason) -> None:
    ids = [*b"line\nZZ", *([EOS] if finish == "eos" else [])]
    shown, output = run(ids, finish, stop=["\nZZZ"])
    assert output.text == "".join(d.text for d in shown) == "line\nZZ"
    assert (output.finish_reason, output.stop_reason) == (finish, None)


def test_an_error_keeps_the_text_so_far() -> None:
    wire = WireError("NumericalError", "row is not finite")
    shown, output = feed(collector(stop=["ix"]), [delta("hi"), delta(finish="error", error=wire)])
    assert (output.text, output.finish_reason) == ("hi", "error")
    assert isinstance(output.error, NumericalError) and output.error.message == "row is not finite"
    assert shown[-1].finish_reason == "error"


def test_an_error_is_one_whatever_the_core_calls_the_end() -> None:
    _, output = feed(collector(), [delta("h", "abort", error=WireError("GrammarDeadEnd", "none left"))])
    assert output.finish_reason == "error"


def test_fail_ends_a_request_whose_engine_is_gone() -> None:
    target = collector("pp", stop=["ix"])
    target.push(delta("hi"))
    last = target.fail(EngineDeadError("gone"))
    assert (last.text, last.finish_reason) == ("i", "error")
    assert target.output is not None
    assert (target.output.text, target.output.usage) == ("hi", Usage(2, 0, 2, 0))
    assert isinstance(target.output.error, EngineDeadError)


# -- stop strings ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("C-STOP-05")
@pytest.mark.parametrize("stops, matched", [(["<<<END>>>", "<<<END>>>\n"], "<<<END>>>"), (["END", "<<<END"], "<<<END")])
def test_the_output_ends_at_the_token_that_completes_the_stop(stops: list[str], matched: str) -> None:
    for order in (stops, stops[::-1]):
        shown, output = run("hello <<<END>>>\nrest", stop=order)
        assert output.text == "".join(d.text for d in shown) == "hello "
        assert (output.finish_reason, output.stop_reason) == ("stop_string", matched)
        ended = "hello <<<END>>>"[: "hello <<<END>>>".index(matched) + len(matched)]
        assert output.token_ids == list(ended.encode())
        assert output.usage.completion_tokens == len(ended)


def test_the_stop_stays_when_asked() -> None:
    shown, output = run("a.b", stop=["."], keep_stop=True)
    assert output.text == "".join(d.text for d in shown) == "a."


def test_what_the_ending_token_holds_behind_the_stop_is_cut() -> None:
    _, output = run([104, 257, 104], stop=["a"])
    assert (output.text, output.token_ids) == ("h", [104, 257])
    assert run([104, 257, 104], stop=["a"], keep_stop=True)[1].text == "ha"


def test_tokens_behind_the_stop_reach_neither_output_nor_usage() -> None:
    target = collector(stop=["c"], logprobs=True)
    first = target.push(delta("abcd", logprobs=[logprob(i) for i in b"abcd"]))
    assert target.stopped_at == 3
    assert first is not None and (first.text, first.token_ids, first.finish_reason) == ("ab", [97, 98, 99], None)
    assert target.push(delta("ef", logprobs=[logprob(i) for i in b"ef"])) is None
    last = target.push(delta([103], "abort", logprobs=[logprob(103)], usage=Usage(1, 1, 7, 5)))
    assert last is not None and (last.text, last.token_ids, last.logprobs, last.finish_reason) == ("", [], [], "stop_string")
    output = target.output
    assert output is not None
    assert (output.text, output.token_ids) == ("ab", [97, 98, 99])
    assert output.logprobs == [logprob(i) for i in b"abc"]
    assert output.usage == Usage(1, 1, 3, 3)
    assert target.num_dropped == 4


def test_a_stop_in_the_last_delta_beats_its_finish() -> None:
    endings: list[tuple[FinishReason, list[int]]] = [("length", [*b"ab"]), ("eos", [*b"ab", EOS])]
    for finish, ids in endings:
        _, output = run(ids, finish, stop=["b"])
        assert (output.text, output.token_ids, output.finish_reason) == ("a", [97, 98], "stop_string")


@pytest.mark.parametrize("ending", ["error", "fail"])
def test_a_failure_behind_the_stop_changes_nothing(ending: str) -> None:
    target = collector(stop=["b"])
    target.push(delta("ab"))
    if ending == "fail":
        target.fail(EngineDeadError("gone"))
    else:
        target.push(delta("x", "error", error=WireError("NumericalError", "of a token that is dropped")))
    assert target.output is not None
    assert (target.output.finish_reason, target.output.error, target.output.text) == ("stop_string", None, "a")


def test_a_stop_may_hold_the_replacement_of_an_unfinished_character() -> None:
    _, output = run(list("a😀".encode())[:-1], stop=["\ufffd"])
    assert (output.text, output.finish_reason) == ("a", "stop_string")


@pytest.mark.case("C-STOP-12")
def test_a_stop_never_needs_characters_of_the_prompt() -> None:
    target = collector("the END", stop=["END.", "D"])
    _, output = feed(target, [delta(". x", "length")])
    assert (output.text, output.finish_reason) == (". x", "length")


@pytest.mark.case("C-STOP-13")
@pytest.mark.parametrize("text, before", [("xW tail", "x"), ("x W tail", "x "), ("(W tail", "("), ("x\nW tail", "x\n")])
def test_a_stop_is_compared_as_text(text: str, before: str) -> None:
    assert run(text, stop=["W"])[1].text == before


@pytest.mark.case("C-STOP-08")
def test_a_stop_that_never_occurs_changes_no_delta() -> None:
    text = "The quick brown fox: ABC"
    with_stop, without = (run(text, stop=stop)[0] for stop in (["ABCDEFGHIJ"], []))
    assert [d.text for d in with_stop] == [*(d.text for d in without[:-3]), "ABC"]


@pytest.mark.case("C-STOP-03")
@pytest.mark.parametrize("stop", [[], None, ["X" * 10_000], ["\0"], list("VWXYZ")])
def test_stops_that_do_not_occur_leave_the_text_alone(stop: Any) -> None:
    assert run("plain", stop=stop)[1].text == "plain"


@pytest.mark.case("C-SAMP-10")
@pytest.mark.parametrize("min_tokens, text", [(0, "b"), (1, "b"), (2, "b"), (3, "bab"), (4, "bab"), (5, None), (6, None)])
def test_a_stop_before_min_tokens_stays_text(min_tokens: int, text: str | None) -> None:
    _, output = run("bababx", stop=["a"], min_tokens=min_tokens)
    if text is None:  # none completes so late
        assert (output.text, output.finish_reason) == ("bababx", "length")
    else:
        assert (output.text, output.finish_reason) == (text, "stop_string")
        assert output.usage.completion_tokens >= min_tokens


# -- logprobs --------------------------------------------------------------------------------------------------------------


def test_logprobs_are_one_a_token_and_stay_with_their_tokens() -> None:
    ids = list("a😀".encode())
    target = collector(logprobs=True)
    shown, output = feed(target, [delta([i], "length" if i == ids[-1] else None, logprobs=[logprob(i)]) for i in ids])
    assert [d.logprobs for d in shown] == [[logprob(i) for i in d.token_ids] for d in shown]
    assert output.logprobs == [logprob(i) for i in ids]
    assert run("ab")[1].logprobs is None


@pytest.mark.parametrize("start, nones", [(0, 1), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_prompt_logprobs_are_aligned_with_the_prompt(start: int, nones: int) -> None:
    scored = [logprob(i) for i in range(nones, 4)]
    target = collector("abcd", prompt_logprobs=start, max_tokens=0)
    halves = [delta(prompt_logprobs=scored[:1]), delta(prompt_logprobs=scored[1:], finish="length")]
    _, output = feed(target, halves)
    assert output.prompt_logprobs == [None] * nones + scored
    assert collector().push(delta(finish="length")) is not None


def test_prompt_logprobs_of_a_request_cut_short_stay_aligned() -> None:
    target = collector("abcd", prompt_logprobs=0)
    _, output = feed(target, [delta(prompt_logprobs=[logprob(1)]), delta(finish="abort")])
    assert output.prompt_logprobs == [None, logprob(1), None, None]


def test_seed_and_weights_version_are_reported() -> None:
    _, output = feed(collector(), [delta("a", "length", seed=7, weights_version=2)])
    assert (output.seed, output.weights_version) == (7, 2)


# -- SentencePiece ---------------------------------------------------------------------------------------------------------


def test_the_first_blank_behind_a_prompt_is_text() -> None:
    """SentencePiece drops a blank at the start of a text, and an output is no start: prompt + text must be the whole."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "h", "▁h"]
    tokenizer = Tokenizer.from_gguf_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -4.0, -1.0],
        }
    )
    for prompt, text in (((1, 5), " h"), ((1,), "h"), ((), "h")):
        target = Collector(Request(id="r", token_ids=prompt), tokenizer)
        _, output = feed(target, [delta([5], "length")])
        assert output.text == text
        assert tokenizer.decode([*prompt, 5]) == tokenizer.decode(prompt) + text


# -- any chunks give the same ----------------------------------------------------------------------------------------------

outputs = st.lists(st.sampled_from([*b"ab\nE", 257, *"é😀".encode()]), min_size=1, max_size=14)


@settings(max_examples=500, deadline=None)
@given(
    ids=outputs,
    sizes=st.lists(st.integers(0, 4), max_size=14),
    stops=st.lists(st.text(alphabet="ab\né", min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    keep=st.booleans(),
    finish=st.sampled_from(["length", "eos", "abort"]),
)
@example(ids=[97, 98], sizes=[2], stops=["b"], min_tokens=0, keep=False, finish="length")
def test_chunks_of_any_size_give_one_output(
    ids: list[int], sizes: list[int], stops: list[str], min_tokens: int, keep: bool, finish: FinishReason
) -> None:
    ids = [*ids, EOS] if finish == "eos" else ids
    sampling: dict[str, Any] = {"stop": stops, "min_tokens": min_tokens, "keep_stop": keep, "logprobs": True, "max_tokens": 100}
    alone, chunked = collector(**sampling), collector(**sampling)
    singles = [delta([i], finish if n == len(ids) else None, logprobs=[logprob(i)]) for n, i in enumerate(ids, start=1)]
    chunks, at = [], 0
    for size in [*sizes, len(ids)]:
        part = ids[at : at + size]
        chunks.append(delta(part, finish if at + size >= len(ids) else None, logprobs=[logprob(i) for i in part]))
        at += size
        if at >= len(ids):
            break
    (some, one), (others, other) = feed(alone, singles), feed(chunked, chunks)
    assert one == other
    for shown, output in ((some, one), (others, other)):
        assert "".join(d.text for d in shown) == output.text
        assert [i for d in shown for i in d.token_ids] == output.token_ids
        assert all(d.text for d in shown[:-1])
        assert [d.finish_reason for d in shown] == [None] * (len(shown) - 1) + [output.finish_reason]
        assert output.logprobs == [logprob(i) for i in output.token_ids]
        assert output.token_ids == ids[: len(output.token_ids)]


def test_deltas_after_the_last_or_of_another_request_are_our_own_fault() -> None:
    target = collector()
    with pytest.raises(AssertionError, match="other"):
        target.push(OutputDelta("other"))
    target.push(delta("a", "length"))
    with pytest.raises(AssertionError, match="after its last"):
        target.push(delta("b"))
