"""SpecBuilder, through the core: grammars, forced runs in one row, logprobs of what was forced. J3, J6, J8, M1, S4."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.runtime.errors import GrammarDeadEnd
from phloem.runtime.request import GrammarSpec
from tests.drive import Driver, Said
from tests.fakes import PatternGrammars

FREE = frozenset(range(1, 60))
PATTERNS: dict[str, Any] = {
    "mixed": [5, 6, FREE, 7, 8, 9, FREE, FREE, 10, 11],
    "forced": [5, 6, 7],
    "free": [FREE, FREE, FREE],
    "dead": [5, frozenset()],
}


def run(name: str, jump: str, overlap: bool, *, device: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Driver, Said]:
    d = Driver(grammars=PatternGrammars(PATTERNS), overlap=overlap, device=device, page_size=4)
    spec = GrammarSpec(kind="regex", source=name, jump_forward=jump)  # type: ignore[arg-type]
    return d, d.run([1, 2, 3], request={"grammar": spec}, **kwargs)


@pytest.mark.parametrize("name", ["mixed", "forced", "free"])
@pytest.mark.parametrize("logprobs", [None, "model", "sampled", "both"])
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 7, 10, 11, 30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_jump_on_is_jump_off(name: str, logprobs: str | None, max_tokens: int, temperature: float) -> None:
    """J3: ids, finish, logprobs and usage, with and without overlap."""
    said = []
    for jump in ("off", "canonical"):
        for overlap in (False, True):
            kwargs = {"max_tokens": max_tokens, "temperature": temperature, "seed": 5, "ignore_eos": False}
            if logprobs is not None:
                kwargs |= {"logprobs": logprobs, "top_logprobs": 2}
            d, out = run(name, jump, overlap, **kwargs)
            said.append((out.tokens, out.finish, out.logprobs, out.usage))
            assert len(out.logprobs) == (len(out.tokens) if logprobs else 0)
            d.assert_no_leak()
    assert said[0] == said[1] == said[2] == said[3]


def test_a_forced_run_is_one_row() -> None:
    """J6: a run at the start joins the prompt; overlap off, the drawn token and its run are one row."""
    d, said = run("mixed", "canonical", False, max_tokens=30)
    assert said.finish == "grammar" and len(said.tokens) == 11
    assert d.core.stats().steps == 3, "three drawn tokens; the last one's run and EOS cost no forward"
    _, off = run("mixed", "off", False, max_tokens=30)
    assert off.tokens == said.tokens


def test_a_pattern_without_a_choice_costs_no_forward_unless_logprobs_are_asked_for() -> None:
    """J8."""
    d, said = run("forced", "canonical", False, max_tokens=30)
    assert said.tokens == [5, 6, 7, 0] and said.finish == "grammar" and d.device.computed == 0
    d, said = run("forced", "canonical", False, max_tokens=30, logprobs=True)
    assert said.tokens == [5, 6, 7, 0] and len(said.logprobs) == 4 and d.device.computed > 0
    assert d.device.drawn == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_an_empty_mask_fails_that_request_alone(overlap: bool) -> None:
    """M1."""
    d = Driver(grammars=PatternGrammars(PATTERNS), overlap=overlap)
    other = d.submit([4, 5, 6], max_tokens=6)
    said = d.run([1, 2, 3], request={"grammar": GrammarSpec(kind="regex", source="dead")}, max_tokens=5)
    assert isinstance(said.error, GrammarDeadEnd) and said.error.status == 500
    d.finish()
    assert d.said[other].finish == "length"
    d.assert_no_leak()


def test_a_grammar_engine_that_raises_fails_that_request_alone() -> None:
    class Broken(PatternGrammars):
        pass

    d = Driver(grammars=Broken(PATTERNS))
    other = d.submit([4, 5, 6], max_tokens=6)
    name = d.submit([1, 2, 3], request={"grammar": GrammarSpec(kind="regex", source="free")}, max_tokens=5)
    q = d.core._live[name]
    d.step()
    assert q.cursor is not None

    def explode(row: object) -> None:
        raise ValueError("inside the engine")

    q.cursor.fill = explode  # type: ignore[method-assign]
    d.finish()
    assert "inside the engine" in str(d.said[name].error) and d.said[other].finish == "length"
    d.assert_no_leak()


def test_a_grammar_outranks_min_tokens() -> None:
    """M1: the end that the pattern demands is emitted."""
    _, said = run("free", "canonical", False, max_tokens=9, min_tokens=8, ignore_eos=False)
    assert said.finish == "grammar" and len(said.tokens) == 4 and said.tokens[-1] == 0


def test_while_a_grammar_compiles_its_request_waits_without_pages() -> None:
    """C6, S5."""
    grammars = PatternGrammars(PATTERNS, delay=5, broken=frozenset(("bad",)))
    d = Driver(grammars=grammars)
    name = d.submit([1, 2, 3], request={"grammar": GrammarSpec(kind="regex", source="free")}, max_tokens=5)
    bad = d.submit([1, 2, 3], request={"grammar": GrammarSpec(kind="regex", source="bad")}, max_tokens=5)
    gone = d.submit([1, 2, 3], request={"grammar": GrammarSpec(kind="regex", source="free")}, max_tokens=5)
    assert d.core.is_blocked
    d.step()
    assert d.core.stats().pages_free == 256 and d.core.stats().waiting == 3
    d.core.abort(gone)
    d.finish()
    assert d.said[gone].finish == "abort" and grammars.cancelled == 1
    assert d.said[name].finish == "grammar" and isinstance(d.said[bad].error, GrammarDeadEnd)
    d.assert_no_leak()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["mixed", "free", "forced"])
@pytest.mark.parametrize("logprobs", [None, "both"])
def test_samples_of_a_group_have_a_cursor_each(overlap: bool, name: str, logprobs: Any) -> None:
    d = Driver(grammars=PatternGrammars(PATTERNS, delay=1), overlap=overlap, page_size=4)
    spec = GrammarSpec(kind="regex", source=name)
    kwargs: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 3, "logprobs": logprobs}
    names = [d.submit([1, 2, 3, 4, 5], request={"grammar": spec, "group": "g", "sample": i}, **kwargs) for i in range(4)]
    d.finish()
    for i, each in enumerate(names):
        alone = Driver(grammars=PatternGrammars(PATTERNS)).run(
            [1, 2, 3, 4, 5], request={"grammar": spec, "sample": i}, **kwargs
        )
        assert (d.said[each].tokens, d.said[each].logprobs) == (alone.tokens, alone.logprobs)
    d.assert_no_leak()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_token_is_not_leased_when_a_sequence_waits_for_its_scores(overlap: bool) -> None:
    """P3: a run that ends the request is known to its last token, which has no slot, though the tree may have a page of it."""
    d = Driver(grammars=PatternGrammars(PATTERNS), overlap=overlap, page_size=1)
    d.run([1, 2, 3, 5, 6, 7, 9], max_tokens=2)
    spec = GrammarSpec(kind="regex", source="forced")
    said = d.run([1, 2, 3], request={"grammar": spec}, max_tokens=3, logprobs=True)
    assert said.tokens == [5, 6, 7] and len(said.logprobs) == 3
    d.assert_no_leak()
