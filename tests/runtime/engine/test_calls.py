"""Calls: which arguments make which requests, which results have which shape, and which mistakes are told how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from phloem.runtime.engine.calls import MAX_N, Call, Verbs, check_timeout
from phloem.runtime.errors import CapacityError, InvalidRequestError, NumericalError, RequestTimeoutError
from phloem.runtime.request import OutputDelta, SamplingParams, TokenLogprob, Usage, WireError
from tests.runtime.engine.parts import ByteText


def verbs(policy: str = "prefix") -> Verbs:
    return Verbs(ByteText(), policy=policy)


def answer(call: Call, text: str = "ok", **last: Any) -> None:
    """What a core would send: the text a byte at a time, then the end."""
    for request, sink in call.entries():
        *first, final = text.encode()
        for token in first:
            sink.push(OutputDelta(request.id, token_ids=[token]))
        usage = Usage(prompt_tokens=len(request.token_ids), completion_tokens=len(first) + 1)
        sink.push(OutputDelta(request.id, token_ids=[final], usage=usage, **{"finish_reason": "length", **last}))


# ---- prompts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    ["abc", [97, 98, 99], (97, 98, 99), range(97, 100), np.array([97, 98, 99]), np.array([97, 98, 99], np.int32), [np.int64(97), 98, np.uint8(99)]],
)  # fmt: skip
def test_every_spelling_of_one_prompt_is_the_same_request(prompt: Any) -> None:
    call = verbs().generate(prompt, None)
    assert call.single
    (request,) = [request for request, _ in call.entries()]
    assert request.token_ids == (97, 98, 99)
    assert all(type(i) is int for i in request.token_ids)


def test_torch_tensors_of_ids_are_prompts() -> None:
    torch = pytest.importorskip("torch")
    for prompt in (torch.tensor([97, 98]), [torch.tensor(97), 98], torch.tensor([97, 98], dtype=torch.int32)):
        assert verbs().generate(prompt, None).entries()[0][0].token_ids == (97, 98)


@pytest.mark.parametrize("prompts", [["ab", "c"], [[97, 98], "c"], ([97, 98], [99]), [np.array([97, 98]), (99,)]])
def test_a_list_of_prompts_is_a_list_of_requests_in_order(prompts: Any) -> None:
    call = verbs().generate(prompts, None)
    assert not call.single
    assert [request.token_ids for request, _ in call.entries()] == [(97, 98), (99,)]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        ([[]], "prompt 0 of 1.*empty"),
        (np.array([], np.int64), "empty"),
        ([1, True], r"True \(a bool\) at position 1"),
        ([True, 1], r"True \(a bool\) at position 0"),
        ([1.0, 2.0], r"1.0 \(a float\)"),
        ([1, 2.5], r"2.5 \(a float\) at position 1"),
        ([1, None], r"None \(a NoneType\)"),
        ([1, "2"], r"'2' \(a str\)"),
        (np.array([1.0, 2.0]), r"1.0 \(a float\)"),
        (np.array([True, False]), r"True \(a bool\)"),
        ([np.bool_(True)], "integers"),
        ([np.float32(1)], "integers"),
        (np.array([[1, 2], [3, 4]]), "2 dimensions"),
        (b"bytes", "bytes"),
        (None, "NoneType"),
        (7, "int"),
        ({"prompt": "x"}, "dict"),
        ({1, 2}, "set"),
        (["a", b"b"], "prompt 1 of 2.*bytes"),
        (["a", 7], "prompt 1 of 2.*int"),
        (["a", {"b": 1}], "prompt 1 of 2.*dict"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_place(prompt: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"(?s){says}"):
        verbs().generate(prompt, None)


def test_an_empty_list_is_a_list_of_no_prompts() -> None:
    call = verbs().generate([], None)
    assert call.done() and call.entries() == [] and call.result() == []
    assert verbs().generate([], None, n=3).result() == []


def test_a_bad_prompt_in_a_list_can_be_returned_instead() -> None:
    call = verbs().generate(["a", "", [1.5], "b"], None, on_error="return", n=2)
    assert [request.token_ids for request, _ in call.entries()] == [(97,), (97,), (98,), (98,)]
    answer(call)
    good, empty, odd, last = call.result()
    assert [o.text for o in good + last] == ["ok"] * 4
    for output in empty + odd:
        assert output.finish_reason == "error" and output.text == "" and output.token_ids == []
        assert isinstance(output.error, InvalidRequestError)


# ---- sampling and the other arguments -----------------------------------------------------------------------------------


def test_sampling_may_be_left_out_a_mapping_or_one_a_prompt() -> None:
    v, cold = verbs(), SamplingParams(temperature=0)
    assert v.generate("a", None).entries()[0][0].sampling == SamplingParams()
    assert v.generate("a", {"temperature": 0}).entries()[0][0].sampling == cold
    mixed = v.generate(["a", "b"], [cold, {"max_tokens": 3}], n=2)
    assert [r.sampling for r, _ in mixed.entries()] == [cold, cold, SamplingParams(max_tokens=3), SamplingParams(max_tokens=3)]


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ("a", {"temprature": 0}, "temprature"),
        ("a", {"temperature": -1}, "temperature"),
        ("a", {"temperature": float("nan")}, "temperature"),
        ("a", 0.7, "sampling"),
        ("a", "greedy", "sampling"),
        ("a", [SamplingParams()], "sampling"),
        (["a", "b"], [SamplingParams()], "sampling"),
        (["a", "b"], [SamplingParams(), 3], "sampling"),
    ],
)
def test_bad_sampling_is_refused_by_name(prompt: Any, sampling: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        verbs().generate(prompt, sampling)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"n": MAX_N + 1}, "n"),
        ({"on_error": "ignore"}, "on_error"),
        ({"priority": 1}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"namespace": None}, "namespace"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        verbs().generate("a", None, **arguments)
    assert caught.value.param == param


def test_a_priority_needs_the_policy_that_reads_it() -> None:
    assert verbs("priority").generate("a", None, priority=3).entries()[0][0].priority == 3


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "3", True])
def test_a_timeout_is_seconds_above_zero(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        check_timeout(timeout)
    assert check_timeout(None) is None and check_timeout(2) == 2.0


def test_samples_share_a_group_and_differ_in_their_index() -> None:
    """S4, M2."""
    entries = verbs().generate(["a", "b"], None, n=3).entries()
    assert [r.sample for r, _ in entries] == [0, 1, 2, 0, 1, 2]
    groups = [r.group for r, _ in entries]
    assert len(set(groups[:3])) == len(set(groups[3:])) == 1 and groups[0] != groups[3]
    assert len({r.id for r, _ in entries}) == 6
    assert verbs().generate("a", None).entries()[0][0].group is None


def test_ids_are_unique_over_calls() -> None:
    v = verbs()
    ids = [r.id for _ in range(5) for r, _ in v.generate(["a", "b"], None, n=2).entries()]
    assert len(set(ids)) == len(ids) == 20


# ---- results ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "n", "shape"), [("a", 1, "ok"), ("a", 2, ["ok", "ok"]), (["a"], 1, ["ok"]), (["a", "b"], 2, [["ok", "ok"], ["ok", "ok"]])]
)  # fmt: skip
def test_the_shape_of_the_result_follows_the_arguments(prompt: Any, n: int, shape: Any) -> None:
    call = verbs().generate(prompt, None, n=n)
    assert not call.done()
    answer(call)
    assert call.done()

    def texts(result: Any) -> Any:
        return [texts(r) for r in result] if isinstance(result, list) else result.text

    assert texts(call.result()) == shape


def test_one_failure_of_a_list_is_raised_with_its_number() -> None:
    call = verbs().generate(["a", "b", "c"], None)
    (_, first), (second_request, second), (_, third) = call.entries()
    second.push(
        OutputDelta(second_request.id, finish_reason="error", error=WireError("NumericalError", "row is NaN", "logits"))
    )
    assert call.done(), "a call that is to raise waits for nobody"
    assert call.live_ids() == [call.entries()[0][0].id, call.entries()[2][0].id]
    with pytest.raises(NumericalError, match=r"prompt 1 of 3 .*row is NaN") as caught:
        call.result()
    assert caught.value.param == "logits"
    del first, third


def test_of_several_failures_the_first_prompts_is_raised() -> None:
    call = verbs().generate(["a", "b"], None)
    (_, first), (_, second) = call.entries()
    second.fail(CapacityError("too large"))
    first.fail(InvalidRequestError("too odd"))
    with pytest.raises(InvalidRequestError, match="prompt 0 of 2"):
        call.result()


def test_a_single_prompts_error_has_no_number() -> None:
    call = verbs().generate("a", None)
    call.entries()[0][1].fail(CapacityError("too large"))
    with pytest.raises(CapacityError, match=r"^too large$"):
        call.result()


def test_a_failed_sample_keeps_its_text_under_return() -> None:
    call = verbs().generate("a", None, on_error="return")
    ((request, sink),) = call.entries()
    sink.push(OutputDelta(request.id, token_ids=[104, 105]))
    sink.fail(CapacityError("gone"))
    sink.fail(CapacityError("again"))
    sink.push(OutputDelta(request.id, token_ids=[1], finish_reason="length"))
    output = call.result()
    assert (output.text, output.finish_reason, str(output.error)) == ("hi", "error", "gone")


def test_a_timeout_marks_the_unfinished_alone() -> None:
    for on_error in ("raise", "return"):
        call = verbs().generate(["a", "b"], None, on_error=on_error)  # type: ignore[arg-type]
        (done, done_sink), (late, late_sink) = call.entries()
        done_sink.push(OutputDelta(done.id, token_ids=[120], finish_reason="length"))
        late_sink.push(OutputDelta(late.id, token_ids=[121]))
        live = call.live_ids()
        late_sink.push(OutputDelta(late.id, finish_reason="abort"))
        call.time_out(0.5, live)
        if on_error == "raise":
            with pytest.raises(RequestTimeoutError, match="1 of 2 outputs"):
                call.result()
        else:
            finished, aborted = call.result()
            assert finished.error is None and finished.text == "x"
            assert isinstance(aborted.error, RequestTimeoutError) and isinstance(aborted.error, TimeoutError)
            assert (aborted.text, aborted.finish_reason) == ("y", "abort")


def test_a_stop_string_is_reported_to_the_client() -> None:
    call = verbs().generate("a", SamplingParams(stop="cd"))
    ((request, sink),) = call.entries()
    assert sink.push(OutputDelta(request.id, token_ids=[97, 98])) is None
    assert sink.push(OutputDelta(request.id, token_ids=[99])) is None
    assert sink.push(OutputDelta(request.id, token_ids=[100, 101])) == 4
    sink.push(OutputDelta(request.id, finish_reason="stop_string", usage=Usage(1, 0, 4, 0)))
    output = call.result()
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("ab", "stop_string", 4)


def test_streams_keep_deltas_and_tell_their_sample() -> None:
    rung: list[int] = []
    call = verbs().stream("generate", "a", None, n=2)
    call.listener = lambda: rung.append(1)
    answer(call, "xyz")
    assert [(d.index, d.text) for d in call.deltas] == [(0, "x"), (0, "y"), (0, "z"), (1, "x"), (1, "y"), (1, "z")]
    assert [d.finish_reason for d in call.deltas] == [None, None, "length"] * 2
    assert len(rung) >= 6 and call.stirred()
    with pytest.raises(InvalidRequestError, match="one prompt"):
        verbs().stream("generate", ["a", "b"], None)


@pytest.mark.parametrize("name", ["on_error", "progress"])
def test_a_stream_takes_only_what_means_something_to_it(name: str) -> None:
    for verb, prompt in (("generate", "a"), ("chat", [{"role": "user", "content": "hi"}])):
        with pytest.raises(TypeError, match=f"takes no {name}: it raises its error"):
            verbs().stream(verb, prompt, None, **{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["streaming", "temperature", "atomic"])
def test_unknown_arguments_are_named(name: str) -> None:
    hi = [{"role": "user", "content": "hi"}]
    for make in (
        lambda **o: verbs().generate("a", None, **o),
        lambda **o: verbs().chat(hi, None, **o),
        lambda **o: verbs().stream("generate", "a", None, **o),
        lambda **o: verbs().stream("chat", hi, None, **o),
    ):
        with pytest.raises(TypeError, match=f"no argument '{name}' here; a constraint takes json_schema"):
            make(**{name: True})  # type: ignore[no-untyped-call]


def test_without_a_stream_the_listener_hears_of_the_end_alone() -> None:
    rung: list[bool] = []
    call = verbs().generate(["a", "b"], None)
    call.listener = lambda: rung.append(call.done())
    answer(call, "xyz")
    assert rung and all(rung)


def test_progress_counts_ended_outputs() -> None:
    seen: list[tuple[int, int]] = []
    answer(verbs().generate(["a", "b"], None, n=2, progress=lambda done, total: seen.append((done, total))))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    seen.clear()
    verbs().generate(["a", "", "b"], None, on_error="return", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3)], "a bad prompt is counted once all are known"
    with pytest.raises(InvalidRequestError, match=r"progress is 5; expected a function"):
        verbs().generate("a", None, progress=5)  # type: ignore[arg-type]


# ---- chat and score -----------------------------------------------------------------------------------------------------


def test_chat_takes_one_conversation_or_a_list_of_them() -> None:
    hi, ho = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]
    one, many = verbs().chat(hi, None), verbs().chat([hi, ho], None)
    assert one.single and bytes(one.entries()[0][0].token_ids) == b"<user>hi<assistant>"
    assert not many.single and [bytes(r.token_ids) for r, _ in many.entries()] == [
        b"<user>hi<assistant>",
        b"<user>ho<assistant>",
    ]


@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, None, 3])
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="messages is a"):
        verbs().chat(messages, None)


def test_a_bad_message_of_a_list_says_which_conversation() -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt 1 of 2.*content is missing") as caught:
        verbs().chat([[{"role": "user", "content": "hi"}], [{"role": "user"}]], None)
    assert caught.value.param == "messages[0].content"
    with pytest.raises(InvalidRequestError, match="one conversation"):
        verbs().stream("chat", [[{"role": "user", "content": "hi"}]], None)


def scored(call: Call) -> None:
    for request, sink in call.entries():
        start = max(1, request.sampling.prompt_logprobs or 0)
        entries = [TokenLogprob(t, -float(t)) for t in request.token_ids[start:]]
        sink.push(OutputDelta(request.id, prompt_logprobs=entries, finish_reason="length"))


def test_scores_are_one_entry_a_position_from_the_one_asked_for() -> None:
    v = verbs()
    for start, expected in ((0, [None, -98.0, -99.0]), (1, [-98.0, -99.0]), (2, [-99.0])):
        call = v.score("abc", start, 0, "")
        assert call.entries()[0][0].sampling.max_tokens == 0
        scored(call)
        assert [e.logprob if e else None for e in v.scores(call, start)] == expected
    many = v.score(["abc", "de"], 1, 0, "")
    scored(many)
    assert [[e.logprob for e in one] for one in v.scores(many, 1)] == [[-98.0, -99.0], [-101.0]]


@pytest.mark.parametrize(("prompt", "start"), [("abc", 3), ("abc", -1), ("abc", 1.0), ("abc", True), (["abcd", "abc"], 3)])
def test_a_position_outside_the_prompt_is_refused(prompt: Any, start: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        verbs().score(prompt, start, 0, "")
    assert caught.value.param == "from_position"
