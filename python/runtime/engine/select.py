"""Which of some texts a model finds likeliest behind a prompt: every option's log-probability, in one tree-shaped pass (K1–K3).

    prompt "Answer: "   options "yes", "no", "nope"
    ids    Answer | :          <- k: the first position where some option differs from the prompt's own ids (K1)
                  :  " yes"
                  :  " no"              options that others begin with cost nothing: their path is part of a longer one
                  :  " n" "ope"         a row a maximal path, all leasing the prompt's pages (K2)

Pure: ids in, paths out; logprobs in, a Selection out. The engines run the paths as prompts whose logprobs are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import TokenLogprob

if TYPE_CHECKING:
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["ChoiceScores", "Method", "Plan", "Selection", "plan_choices"]

Method = Literal["token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized", "sum"]
MAX_CHOICES = 4096


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """scores: one a choice, higher is better.   tokens, logprobs: of each choice, from the first position where the choices
    and the prompt part: log P(token | all before it), raw model distribution.   method: that made the scores.
    """

    scores: list[float]
    logprobs: list[list[float]]
    tokens: list[list[int]]
    method: Method


@dataclass(frozen=True, slots=True)
class Selection(ChoiceScores):
    """choice: the best of the choices, the first of several equals.   index: its place among them."""

    choice: str
    index: int


class Plan:
    """What has to be computed for a list of choices, and what the scores make of it.

    start: position of the first scored token.   paths: prompts to score from `start` on.   alone: prompts to score from 1 on,
    for the unconditional method only.
    """

    def __init__(
        self, choices: list[str], ids: list[list[int]], start: int, method: Method, bos: int | None, eos: int | None
    ) -> None:
        self.choices, self.method, self.start = choices, method, start
        self.tokens = [one[start:] for one in ids]
        self._stops = self._that_others_continue() if method == "sum" and eos is not None else set[int]()
        wanted = [(*one, eos) if i in self._stops and eos is not None else tuple(one) for i, one in enumerate(ids)]
        self._path_of = _covered_by(wanted)
        kept = sorted(set(self._path_of))
        self.paths = [list(wanted[i]) for i in kept]
        self._path_of = [kept.index(i) for i in self._path_of]
        self.alone: list[list[int]] = []
        self._has_bos = bos is not None
        if method == "unconditional_likelihood_normalized":
            self.alone = [[*([] if bos is None else [bos]), *tokens] for tokens in self.tokens]

    def _that_others_continue(self) -> set[int]:
        """Choices that are the beginning of another: their probability includes that of stopping there (K3)."""
        found = set[int]()
        for i, one in enumerate(self.tokens):
            if any(len(other) > len(one) and other[: len(one)] == one for other in self.tokens):
                found.add(i)
        return found

    def scores(
        self, paths: Sequence[Sequence[TokenLogprob | None]], alone: Sequence[Sequence[TokenLogprob | None]]
    ) -> ChoiceScores:
        """paths, alone: logprobs of self.paths from `start` on, and of self.alone from position 0 on."""
        logprobs, scores = [], []
        for i, tokens in enumerate(self.tokens):
            row = [_value(entry) for entry in paths[self._path_of[i]]]
            own = row[: len(tokens)]
            logprobs.append(own)
            if self.method == "sum":
                scores.append(sum(own) + (row[len(tokens)] if i in self._stops else 0.0))
            elif self.method == "unconditional_likelihood_normalized":
                entries = alone[i][1:] if self._has_bos else alone[i]  # the first token of all has no logprob: 0
                scores.append(_mean([a - _value(b) for a, b in zip(own, entries)]))
            else:
                scores.append(_mean(own))
        return ChoiceScores(scores, logprobs, self.tokens, self.method)

    def select(self, found: ChoiceScores) -> Selection:
        index = _greedy(found.logprobs) if self.method == "greedy_token_selection" else found.scores.index(max(found.scores))
        return Selection(found.scores, found.logprobs, found.tokens, found.method, self.choices[index], index)


def plan_choices(tokenizer: Tokenizer, prompt: Any, choices: Sequence[str], method: Method, prompt_ids: Sequence[int]) -> Plan:
    """prompt: as the caller gave it; text is tokenised anew with each choice.   prompt_ids: its own ids.

    Raises InvalidRequestError for a list of choices that is none, holds an empty one, or is too long.
    """
    if method not in get_args(Method):
        raise InvalidRequestError(
            f"method is {method!r}; expected one of {', '.join(map(repr, get_args(Method)))}.", param="method"
        )
    if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence) or not all(isinstance(c, str) for c in choices):
        raise InvalidRequestError("choices is not a list of strings.", param="choices")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(f"choices has {len(choices)} entries; expected 1 to {MAX_CHOICES}.", param="choices")
    if "" in choices:
        raise InvalidRequestError("choices holds an empty string, which has no probability. Leave it out.", param="choices")
    own = list(prompt_ids)
    ids = [_joint(tokenizer, prompt, own, choice) for choice in choices]
    start = min(_common(own, one) for one in ids)
    return Plan(list(choices), ids, start, method, tokenizer.bos_id, tokenizer.eos_id)


def _joint(tokenizer: Tokenizer, prompt: Any, own: list[int], choice: str) -> list[int]:
    """Ids of prompt and choice as the tokenizer writes them together (K1)."""
    if isinstance(prompt, str) and tokenizer.encode(choice, False) == tokenizer.encode(choice, False, parse_special=False):
        joint = tokenizer.encode(prompt + choice)
        if len(joint) > _common(own, joint):  # else: a tokenizer that swallowed the choice
            return joint
    return [*own, *tokenizer.encode_continuation(choice)]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _covered_by(wanted: list[tuple[int, ...]]) -> list[int]:
    """For each sequence, the index of one that begins with it and is no beginning of a longer one."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = [0] * len(wanted)
    last = -1
    for i in reversed(order):  # sorted, a sequence is followed by those that it begins
        if last < 0 or wanted[last][: len(wanted[i])] != wanted[i]:
            last = i
        found[i] = last
    return found


def _greedy(logprobs: list[list[float]]) -> int:
    """Column by column the best next token; a shorter choice goes on with its own mean."""
    rows = [[*row, *[_mean(row)] * (max(map(len, logprobs)) - len(row))] for row in logprobs]
    left = list(range(len(rows)))
    for column in range(len(rows[0])):
        best = max(rows[i][column] for i in left)
        left = [i for i in left if rows[i][column] == best]
        if len(left) == 1:
            break
    return left[0]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _value(entry: TokenLogprob | None) -> float:
    """Position 0 of a prompt has no logprob; nothing comes before it."""
    return 0.0 if entry is None else entry.logprob
