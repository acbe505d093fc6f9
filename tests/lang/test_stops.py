"""A stop phrase of several tokens leaves nothing of itself in the state."""

from __future__ import annotations

import pytest

import phloem
from phloem.lang import State, function, gen

PROMPT = "List: one, two,"


@pytest.mark.case("C-STOP-11")
@pytest.mark.parametrize("at", [4, 9, 12])
def test_a_stop_phrase_is_cut_from_the_text_and_from_what_follows(idle_engine: phloem.Engine, at: int) -> None:
    """The variable ends before the phrase; the next gen answers as to a prompt that never had it, whatever of the phrase was computed."""
    greedy = phloem.SamplingParams(max_tokens=30, temperature=0)
    free = idle_engine.generate(PROMPT, greedy)
    phrase = idle_engine.tokenizer.decode(free.token_ids[at : at + 3])
    kept = free.text[: free.text.index(phrase)]
    assert kept and len(idle_engine.tokenizer.encode(phrase)) == 3

    @function
    def program(s: State) -> None:
        s += PROMPT + gen("a", stop=phrase, max_tokens=30) + " NEXT" + gen("b", max_tokens=5)

    manual = idle_engine.generate(PROMPT + kept + " NEXT", phloem.SamplingParams(max_tokens=5, temperature=0))
    for compiled in (True, False):
        run = program.run(backend=idle_engine, temperature=0, compile=compiled)
        assert run["a"] == kept and run["b"] == manual.text
        assert run.text() == PROMPT + kept + " NEXT" + manual.text
