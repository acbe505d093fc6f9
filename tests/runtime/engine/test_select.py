"""`select` and `score_choices`: the boundary, one pass for all choices, the four scorers; equal to scoring one by one."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

import phloem
from phloem.runtime.engine.select import Plan, plan_choices
from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import TokenLogprob

PROMPT = "The capital of France is"
CHOICES = [" Paris", " London", " Paris, of course", " Rome"]


def entries(*values: float | None) -> list[TokenLogprob | None]:
    return [None if value is None else TokenLogprob(0, value) for value in values]


def plan(ids: list[list[int]], start: int, method: Any, bos: int | None = None, eos: int | None = 9) -> Plan:
    return Plan([f"c{i}" for i in range(len(ids))], ids, start, method, bos, eos)


def test_k1_the_boundary_is_where_any_choice_parts_from_the_prompt(engine: phloem.Engine) -> None:
    """Behind "Answer: ", " yes" is one token: the blank belongs to it, for every choice."""
    t, prompt = engine.tokenizer, "Answer: "
    own = t.encode(prompt)
    made = plan_choices(t, prompt, ["yes", "1"], "sum", own)
    assert made.start == len(own) - 1
    assert [t.decode(tokens) for tokens in made.tokens] == [" yes", " 1"]
    assert made.paths[0][: made.start] == own[: made.start]


def test_k2_choices_that_others_begin_with_are_no_paths() -> None:
    made = plan([[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 5]], 1, "token_length_normalized")
    assert made.paths == [[1, 2, 3, 4], [1, 5]]
    found = made.scores([entries(-1, -2, -3), entries(-4)], [])
    assert found.logprobs == [[-1], [-1, -2], [-1, -2, -3], [-4]]
    assert found.scores == [-1, -1.5, -2, -4]


def test_k2_the_prompt_is_computed_once(idle_engine: phloem.Engine) -> None:
    prompt = PROMPT * 20
    size = len(idle_engine.tokenizer.encode(prompt))
    before = idle_engine.stats()
    idle_engine.select(prompt, CHOICES)
    after = idle_engine.stats()
    rest = sum(len(idle_engine.tokenizer.encode(c)) + 1 for c in CHOICES)
    computed = after.prefill_tokens - before.prefill_tokens + after.scratch_tokens - before.scratch_tokens
    page = idle_engine.config.page_size
    assert computed <= size + rest + page * len(CHOICES)


@pytest.mark.parametrize("prompt", [PROMPT, [504, 3575, 282]], ids=["text", "ids"])
def test_scores_equal_solo_requests(idle_engine: phloem.Engine, prompt: Any) -> None:
    found = idle_engine.score_choices(prompt, CHOICES, method="sum")
    own = idle_engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    for choice, tokens, logprobs in zip(CHOICES, found.tokens, found.logprobs):
        idle_engine.flush()
        alone = idle_engine.score([*own, *tokens], len(own))
        assert [entry.logprob for entry in alone if entry is not None] == logprobs, choice
    with_stop = idle_engine.score([*own, *found.tokens[0], idle_engine.tokenizer.eos_id], len(own))
    assert found.scores[0] == sum(e.logprob for e in with_stop if e is not None)  # " Paris" is how another one begins
    assert found.scores[1] == sum(found.logprobs[1])


def test_k3_scorers() -> None:
    ids = [[0, 1, 2], [0, 3], [0, 4, 5, 6]]
    rows = [entries(-1, -2), entries(-1.2), entries(-0.5, -9, -1)]

    def chosen(method: Any, alone: Any = ()) -> tuple[int, list[float]]:
        made = plan(ids, 1, method)
        found = made.scores([rows[i] for i in _order(made, ids)], alone)
        return made.select(found).index, found.scores

    assert chosen("token_length_normalized") == (1, [-1.5, -1.2, -3.5])
    assert chosen("sum") == (1, [-3, -1.2, -10.5])
    assert chosen("greedy_token_selection")[0] == 2
    alone = [entries(None, -5), entries(None), entries(None, -1, -1)]
    assert chosen("unconditional_likelihood_normalized", alone) == (0, [(-1 + 3) / 2, -1.2, (-0.5 - 8 + 0) / 3])


def _order(made: Plan, ids: list[list[int]]) -> list[int]:
    return [ids.index(path) for path in made.paths]


def test_k3_greedy_goes_on_with_its_own_mean_and_the_first_of_equals_wins() -> None:
    made = plan([[0, 1], [0, 1, 2], [0, 1, 3]], 1, "greedy_token_selection")
    assert made.paths == [[0, 1, 2], [0, 1, 3]]
    found = made.scores([entries(-1, -2), entries(-1, -0.5)], [])
    assert made.select(found).index == 2  # in the second column -1, its own mean, stands against -2 and -0.5
    equal = plan([[0, 7], [0, 8]], 1, "sum")
    assert equal.select(equal.scores([entries(-1), entries(-1)], [])).index == 0


def test_k3_with_a_bos_the_first_term_counts() -> None:
    made = plan([[0, 1], [0, 2]], 1, "unconditional_likelihood_normalized", bos=5)
    assert made.alone == [[5, 1], [5, 2]]
    found = made.scores([entries(-1), entries(-2)], [entries(None, -3), entries(None, -9)])
    assert found.scores == [2, 7] and made.select(found).index == 1


def test_the_model_knows_its_capital(engine: phloem.Engine) -> None:
    for method in ("token_length_normalized", "greedy_token_selection", "sum"):
        selection = engine.select(PROMPT, [" London", " Paris", " Rome"], method=method)
        assert selection.choice == " Paris" and selection.index == 1
        assert len(selection.scores) == 3 and all(math.isfinite(score) for score in selection.scores)
    assert engine.select(PROMPT, CHOICES, method="unconditional_likelihood_normalized").method.startswith("unconditional")


def test_one_choice_and_duplicates(engine: phloem.Engine) -> None:
    assert engine.select(PROMPT, [" Rome"]).index == 0
    twice = engine.select(PROMPT, [" Rome", " Rome"])
    assert twice.index == 0 and twice.scores[0] == twice.scores[1]


@pytest.mark.parametrize(
    ("choices", "options", "param"),
    [("yes", {}, "choices"), ([], {}, "choices"), (["a", ""], {}, "choices"), ([1], {}, "choices"), (["a"], {"method": "best"}, "method")],
)  # fmt: skip
def test_bad_arguments_are_named(engine: phloem.Engine, choices: Any, options: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.select(PROMPT, choices, **options)
    assert caught.value.param == param


def test_a_choice_that_spells_a_special_token_stays_text(engine: phloem.Engine) -> None:
    found = engine.score_choices(PROMPT, ["<|im_end|>", " Paris"])
    assert not engine.tokenizer.control_ids.intersection(found.tokens[0])


def test_async_select_is_the_same() -> None:
    async def main() -> tuple[Any, Any]:
        async with phloem.AsyncEngine(kv_tokens=1024) as engine:
            return await engine.select(PROMPT, CHOICES), await engine.score_choices(PROMPT, CHOICES)

    selection, scores = asyncio.run(main())
    assert selection.scores == scores.scores and selection.choice == " Paris"
