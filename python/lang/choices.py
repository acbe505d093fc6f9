"""select: which texts are scored, from which token, and what the scores make of it (Q1-Q5). The engine's own machinery, on a state's tokens.

    held "Answer: "   choices "yes" "no"    ->  encoded jointly with what is held; scored from the first token where any differs (Q2)

Pure: a line in, prompts out; logprobs in, Scores out.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from phloem.runtime.engine.select import ChoiceScores, Method, Plan
from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import Output

if TYPE_CHECKING:
    from phloem.lang.ir import Select
    from phloem.lang.line import Line

__all__ = [
    "ChoiceScore", "Scores", "Scoring", "check_method", "greedy_token_selection", "sum_of_logprobs", "token_length_normalized",
    "unconditional_likelihood_normalized",
]  # fmt: skip

token_length_normalized: Method = "token_length_normalized"
greedy_token_selection: Method = "greedy_token_selection"
unconditional_likelihood_normalized: Method = "unconditional_likelihood_normalized"
sum_of_logprobs: Method = "sum"


def check_method(method: Any) -> Method:
    """Raises InvalidRequestError."""
    if method not in get_args(Method):
        raise InvalidRequestError(
            f"choices_method is {method!r}; expected one of {', '.join(map(repr, get_args(Method)))}.", param="choices_method"
        )
    found: Method = method
    return found


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """Of one choice.   token_ids, logprobs: from the first token where the choices part.   scores: by method; the unconditional one only
    where it was asked for.   probability: softmax of `sum` over the distinct choices.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    scores: dict[str, float]
    probability: float


@dataclass(slots=True)
class Scores:
    """Q5. per_choice: in the order of the caller's list, duplicates included.   index: the one chosen."""

    per_choice: list[ChoiceScore]
    method: Method
    best: int
    sums: list[float]  # of the distinct choices
    distinct: list[int]  # their first places in the caller's list
    index: int = field(default=0)

    def pick(self, temperature: float, seed: int) -> int:
        """The best, or above temperature 0 one drawn by softmax(sum / T)."""
        if not temperature:
            return self.best
        top = max(self.sums)
        weights = [math.exp((s - top) / temperature) for s in self.sums]
        return random.Random(seed).choices(self.distinct, weights)[0]


class Scoring:
    """prompts: (ids, position to score from), one request each."""

    def __init__(self, node: Select[Any], line: Line) -> None:
        line.prepare_choice()
        base = line.ids()
        own = [*base, *line.held_ids()]
        tokenizer = line.markup.tokenizer
        self.choices = list(dict.fromkeys(node.choices))
        self.place = [self.choices.index(c) for c in node.choices]
        self.method = node.method
        ids = [[*base, *line.joint(choice)] for choice in self.choices]
        start = min(min(_common(own, one) for one in ids), min(len(one) - 1 for one in ids))
        self._plan = Plan(self.choices, ids, start, node.method, tokenizer.bos_id, tokenizer.eos_id)
        self._sum = (
            self._plan if node.method == "sum" else Plan(self.choices, ids, start, "sum", tokenizer.bos_id, tokenizer.eos_id)
        )
        self.start = start
        # The paths of `sum` are those of every method, and one token more where a choice begins another.
        self.paths = [tuple(path) for path in self._sum.paths]
        self.alone = [tuple(one) for one in self._plan.alone]
        self.prompts = [(path, start) for path in self.paths] + [(one, 0) for one in self.alone]
        self.own = tuple(own)

    def tokens_of(self, choice: str) -> list[int]:
        """Ids of a choice, from the first that is scored."""
        return self._plan.tokens[self.choices.index(choice)]

    def scores(self, outputs: Sequence[Output]) -> Scores:
        """outputs: of `prompts`, in order."""
        rows = [(output.prompt_logprobs or [])[self.start :] for output in outputs[: len(self.paths)]]
        alone = [output.prompt_logprobs or [] for output in outputs[len(self.paths) :]]
        total = self._sum.scores(rows, [])
        found: dict[str, ChoiceScores] = {"sum": total}
        for method in ("token_length_normalized", "greedy_token_selection"):
            found[method] = ChoiceScores([_mean(r) for r in total.logprobs], total.logprobs, total.tokens, method)
        if self.method == "unconditional_likelihood_normalized":
            by_path = dict(zip(self.paths, rows))
            own = [next(row for path, row in by_path.items() if path[: len(p)] == tuple(p)) for p in self._plan.paths]
            found[self.method] = self._plan.scores(own, alone)
        best = self._plan.select(found[self.method]).index
        top = max(total.scores)
        weights = [math.exp(s - top) for s in total.scores]
        per_choice = [
            ChoiceScore(
                self.choices[i], total.tokens[i], total.logprobs[i], {m: found[m].scores[i] for m in found}, weights[i] / sum(weights)
            )
            for i in self.place
        ]  # fmt: skip
        distinct = [self.place.index(i) for i in range(len(self.choices))]
        return Scores(per_choice, self.method, distinct[best], total.scores, distinct)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
