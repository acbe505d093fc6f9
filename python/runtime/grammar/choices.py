"""A fixed list of texts (F6). Canonical: a trie of the tokenizer's own ids of each, behind the prompt's last ids.

    choices ["yes", "yesterday", "no"]        1 --" yes"--> 2 (ends) --"terday"--> 3 (ends)
    behind the prompt's "Answer:"             1 --" no"---> 4 (ends)

Permissive: all spellings, by token_fsm over `dfa()`. Owns reading and checking the list.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import AuditReport, Limits, NotMine
from phloem.runtime.grammar.cursor import DEAD, ENDED, OVERRUN, StateCursor
from phloem.runtime.grammar.mask_rows import Row, row_of_ids
from phloem.runtime.grammar.vocabulary import MAX_TAIL, Vocabulary

__all__ = ["ChoiceGrammar", "ChoiceTrie", "checked_choices", "encode_behind", "read_choices"]

MAX_TRIES = 8


def read_choices(source: str) -> list[str]:
    """The list that a GrammarSpec of kind "choices" carries: JSON, strings only. Raises GrammarError."""
    try:
        listed = json.loads(source)
    except ValueError:
        listed = None
    if not isinstance(listed, list) or not all(isinstance(c, str) for c in listed):
        raise GrammarError("choices is no JSON list of strings; pass the texts to choose from.", param="choices")
    return listed


def checked_choices(choices: Sequence[str], limits: Limits) -> list[str]:
    """Each once, in order. Raises GrammarError for an empty list or text, NotMine beyond the limits."""
    if not choices:
        raise GrammarError("choices is empty; name at least one text.", param="choices")
    for i, text in enumerate(choices):
        if not text:
            raise GrammarError(f"choice {i} is empty; every choice needs a character.", param="choices")
    unique = list(dict.fromkeys(choices))
    try:
        size = sum(len(text.encode()) for text in unique)
    except UnicodeEncodeError as error:
        raise GrammarError(f"a choice holds half a surrogate pair; expected valid Unicode: {error}", param="choices") from None
    if len(unique) > limits.choices or size > limits.choice_bytes:
        raise NotMine(f"{len(unique)} choices of {size} bytes together")
    return unique


class ChoiceGrammar:
    """`CompiledGrammar` in canonical mode. A trie for each tail that comes up is made in `cursor` and kept."""

    def __init__(self, choices: Sequence[str], vocabulary: Vocabulary, report: AuditReport, open_end: bool) -> None:
        """choices: as `checked_choices` gives them. Raises GrammarError for one that the model can't spell."""
        self.choices = choices
        self.vocabulary, self.report, self.open_end = vocabulary, report, open_end
        self._tries: dict[tuple[int, ...], ChoiceTrie] = {}
        self.nbytes = MAX_TRIES * self._trie(()).nbytes  # once every trie is there

    def cursor(self, tail: Sequence[int] = ()) -> StateCursor:
        tail = tuple(tail)[-MAX_TAIL:]
        return StateCursor(self._trie(tail), tail)

    def _trie(self, tail: tuple[int, ...]) -> ChoiceTrie:
        trie = self._tries.get(tail)
        if trie is None:
            trie = ChoiceTrie(self.choices, tail, self.vocabulary, self.open_end)
            if len(self._tries) >= MAX_TRIES:
                self._tries.clear()
            self._tries[tail] = trie
        return trie


def encode_behind(tail: Sequence[int], text: bytes, vocabulary: Vocabulary) -> list[int] | None:
    """The tokenizer's ids of `text` behind these ids: behind as many of the last as stay what they are, else alone."""
    for k in range(len(tail), -1, -1):
        left = list(tail[len(tail) - k :])
        ids = vocabulary.encode_bytes(vocabulary.join(left) + text)
        if ids is not None and ids[:k] == left:
            return ids[k:]
    return None


class ChoiceTrie:
    """The `Automaton` of a list of choices behind one tail. State 1 is its root."""

    start = 1

    def __init__(self, choices: Sequence[str], tail: tuple[int, ...], vocabulary: Vocabulary, open_end: bool) -> None:
        self.vocabulary = vocabulary
        self._children: list[dict[int, int]] = [{}, {}]
        self._text: dict[int, bytes] = {}  # of the states where a choice ends
        for choice in choices:
            text = choice.encode()
            ids = encode_behind(tail, text, vocabulary)
            if ids is None:
                raise GrammarError(f"this model's tokenizer cannot spell the choice {choice!r}; leave it out.", param="choices")
            state = 1
            for token in ids:
                children = self._children[state]
                if token not in children:
                    self._children.append({})
                    children[token] = len(self._children) - 1
                state = children[token]
            self._text[state] = text
        self._sorted = sorted(self._text.values()) if open_end else None
        self._stops = frozenset(vocabulary.stop_ids)
        self._rows: dict[int, Row] = {}
        self.nbytes = 300 * len(self._children)

    def step(self, state: int, token: int) -> int:
        if state <= 0:
            return DEAD
        target = self._children[state].get(token)
        if target is not None:
            return target
        if state not in self._text:
            return DEAD
        return ENDED if token in self._stops else OVERRUN if self._is_open(state, token) else DEAD

    def fill(self, state: int, row: NDArray[np.int32]) -> None:
        if state <= 0:
            row.fill(0)
            return
        made = self._rows.get(state)
        if made is None:
            made = self._rows[state] = self._row(state)
        made.fill(row)

    def done(self, state: int) -> bool:
        return state < 0 or (state in self._text and not self._children[state])

    def forced(self, state: int, tail: tuple[int, ...]) -> tuple[int, ...]:
        run: list[int] = []
        while state > 0 and state not in self._text and len(self._children[state]) == 1:
            ((token, state),) = self._children[state].items()
            run.append(token)
        return tuple(run)

    def _row(self, state: int) -> Row:
        v, ids = self.vocabulary, set(self._children[state])
        if state in self._text:
            ids |= self._stops
            if self._sorted is not None:
                going_on = self._going_on(state)
                ids.update(i for i in v.text_ids if v.tokens[i][0] not in going_on)
        return row_of_ids(ids, v.num_words)

    def _is_open(self, state: int, token: int) -> bool:
        v = self.vocabulary
        if self._sorted is None or not 0 <= token < v.width or token in v.special_ids or not v.tokens[token]:
            return False
        return v.tokens[token][0] not in self._going_on(state)

    def _going_on(self, state: int) -> set[int]:
        """Bytes that continue the text of a complete state towards a longer choice, however it is spelled."""
        assert self._sorted is not None
        text = self._text[state]
        found: set[int] = set()
        for i in range(bisect_left(self._sorted, text), len(self._sorted)):
            longer = self._sorted[i]
            if not longer.startswith(text):
                break
            found.update(longer[len(text) : len(text) + 1])
        return found
