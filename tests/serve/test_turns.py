"""Turns: thoughts told apart from what is said, in a stream and as a whole alike (W5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.runtime.serve.turns import PlainTurn, Said, Spoken, ThinkingTurn, Thoughts
from tests.serve.serving import CHATML, events, scripted_server


def read(pieces: list[str], opened: bool = False) -> tuple[str, str]:
    turn = ThinkingTurn(PlainTurn(), opened, None)
    said: list[Said] = [s for piece in pieces for s in turn.push(piece)] + turn.end()
    thoughts = "".join(s.text for s in said if isinstance(s, Thoughts))
    spoken = "".join(s.text for s in said if isinstance(s, Spoken))
    message = turn.message()
    assert message.content == spoken and (message.reasoning_content if thoughts else "") == thoughts
    return thoughts, spoken


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nhm\n</think>\n\nhello", False, ("hm", "hello")),
        ("hm\n</think>\n\nhello", True, ("hm", "hello")),
        ("hello <think>", False, ("", "hello <think>")),
        ("<thinner>", False, ("", "<thinner>")),
        ("<think>a </thin b\n\nc", False, ("a </thin b\n\nc", "")),
        ("<think></think>x", False, ("", "x")),
        ("", False, ("", "")),
        ("<thi", False, ("", "<thi")),
        ("<think>a\n\nb</think>\nc\n", False, ("a\n\nb", "c\n")),
    ],
)
def test_thoughts_are_told_apart(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert read([text], opened) == expected
    assert read(list(text), opened) == expected, "letter by letter"


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "\n", "a", " ", "</thi"]), max_size=12),
    st.booleans(),
    st.data(),
)
def test_w5_however_the_text_is_cut_it_reads_the_same(parts: list[str], opened: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert read(pieces, opened) == read([text], opened)


MARKS = ("<think>", "</think>")
A_STRING = {
    "type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("opening", "said", "thoughts"),
    [
        ("<think>\n", '{"not": yet}</think>{"a": "b"}', '{"not": yet}'),
        ("<think>\n", 'hm</think>{"a": "</think>"}', "hm"),  # inside a string the mark is text
        ("", '<think>hm</think>{"a": "b"}', "hm"),
        ("", '{"a": "<think>"}', None),  # whoever may think need not
        ("<think>\n\n</think>\n\n", '{"a": "b"}', None),  # thinking is off: the prompt is past it
    ],
)
def test_a_constraint_holds_from_behind_the_thoughts_on(opening: str, said: str, thoughts: str | None) -> None:
    template = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n" + opening) + "{# </think> #}"
    server = scripted_server(template=template, words=MARKS, opening=opening)
    try:
        asked = {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": A_STRING}},
            "json_whitespace": "spaced",
        }
        content = said.partition("</think>")[2] if thoughts else said
        choice = server.chat(said, **asked).json()["choices"][0]
        assert choice["message"]["content"] == content and choice["finish_reason"] == "stop"
        assert choice["message"].get("reasoning_content") == thoughts
        deltas = [e["choices"][0]["delta"] for e in events(server.chat(said, stream=True, **asked).text)[:-1]]
        assert "".join(d.get("content", "") for d in deltas) == content
        assert "".join(d.get("reasoning_content", "") for d in deltas) == (thoughts or "")
        alone = server.chat(said, separate_reasoning=False, **asked).json()["choices"][0]["message"]["content"]
        assert alone == said
        noise = server.chat(messages=[{"role": "user", "content": "x"}], max_tokens=40, temperature=1.0, seed=1, **asked)
        text = noise.json()["choices"][0]["message"]["content"] or ""
        assert not text or text.startswith('{"a": "')
        server.assert_idle()
    finally:
        server.close()


def test_separate_reasoning_over_the_wire() -> None:
    server = scripted_server(template=CHATML + "{# </think> #}")
    try:
        said = "<think>\nhm\n</think>\n\nhello"
        whole = server.chat(said).json()["choices"][0]["message"]
        assert (whole["content"], whole["reasoning_content"], whole["reasoning"]) == ("hello", "hm", "hm")
        deltas = [e["choices"][0]["delta"] for e in events(server.chat(said, stream=True).text)[:-1]]
        assert "".join(d.get("content", "") for d in deltas) == "hello"
        assert (
            "".join(d.get("reasoning_content", "") for d in deltas) == "".join(d.get("reasoning", "") for d in deltas) == "hm"
        )
        assert server.chat(said, separate_reasoning=False).json()["choices"][0]["message"]["content"] == said
        assert server.chat(said, include_reasoning=False).json()["choices"][0]["message"]["content"] == said
        assert server.chat(said, include_reasoning=False, separate_reasoning=True).status_code == 400
        server.assert_idle()
    finally:
        server.close()
