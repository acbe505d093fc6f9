"""Phloem's own engine: regular languages as automata over tokens, every mask a row made beforehand.

    regex, scalar schema, choices --> byte DFA (byte_dfa.py) --x token trie--> rows of the branching states

A state whose text can go on in one way only lies inside a chain (F5): it holds no row until a model is asked to choose there,
and its bytes become a canonical run. A token is legal if its bytes lead to a state from which the vocabulary can spell an
end (F4): no mask leads into a dead end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import AuditReport, CompiledGrammar, Limits, MaskMode, NotMine, mask_mode
from phloem.runtime.grammar.byte_dfa import START, ByteDfa, dfa_of_texts
from phloem.runtime.grammar.choices import ChoiceGrammar, checked_choices, read_choices
from phloem.runtime.grammar.cursor import DEAD, ENDED, OVERRUN, StateCursor
from phloem.runtime.grammar.forced import canonical_run, whole_characters
from phloem.runtime.grammar.mask_rows import Row, row_of_words, token_edges, wide_masks
from phloem.runtime.grammar.regex_dfa import dfa_of_regex
from phloem.runtime.grammar.regex_syntax import parse_regex
from phloem.runtime.grammar.scalars import scalar_of_schema
from phloem.runtime.grammar.vocabulary import MAX_TAIL, Vocabulary
from phloem.runtime.request import GrammarSpec

__all__ = ["FsmGrammar", "TokenFsm"]

MAX_MEMO, BATCH = 4_096, 32
WIDE = 64  # outgoing bytes; only the time to make the row depends on it


class TokenFsm:
    """`GrammarBackend`. kinds: regex; choices (source: a JSON list of strings); json_schema whose root is a scalar."""

    name, version = "token_fsm", "1"

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> CompiledGrammar:
        """Raises GrammarError for what is refused everywhere, NotMine for what is too large or of another kind (F3, F6)."""
        mode = mask_mode(spec)
        if spec.kind == "regex":
            return self.regex(spec.source, vocabulary, limits, mode, spec.open_end)
        if spec.kind == "choices":
            return self.choices(read_choices(spec.source), vocabulary, limits, mode, spec.open_end)
        if spec.kind != "json_schema":
            raise NotMine(f"token_fsm does not take {spec.kind}")
        scalar = scalar_of_schema(spec.source)
        if isinstance(scalar, list):
            return self.choices(scalar, vocabulary, limits, mode, spec.open_end)
        return FsmGrammar(scalar, vocabulary, self._report(mode), spec.open_end, "json_schema")

    def regex(
        self, pattern: str, vocabulary: Vocabulary, limits: Limits, mode: MaskMode = "canonical", open_end: bool = False
    ) -> FsmGrammar:
        dfa = dfa_of_regex(parse_regex(pattern, limits), limits)
        wide = int((dfa.num_edges > limits.wide_edges).sum())
        if wide * vocabulary.width > limits.fsm_cells:
            raise NotMine(f"{wide} of its states allow most of the vocabulary")
        return FsmGrammar(dfa, vocabulary, self._report(mode), open_end, "regex")

    def choices(
        self,
        choices: Sequence[str],
        vocabulary: Vocabulary,
        limits: Limits,
        mode: MaskMode = "canonical",
        open_end: bool = False,
    ) -> CompiledGrammar:
        texts = checked_choices(choices, limits)
        if mode == "canonical":
            return ChoiceGrammar(texts, vocabulary, self._report(mode), open_end)
        dfa = dfa_of_texts(text.encode() for text in texts)
        return FsmGrammar(dfa, vocabulary, self._report(mode), open_end, "choices")

    def _report(self, mode: MaskMode) -> AuditReport:
        return AuditReport(backend=self.name, version=self.version, mask_mode=mode)


class FsmGrammar:
    """`CompiledGrammar` and the `Automaton` of its cursors. Rows of chain states are added as they are asked for."""

    start = START

    def __init__(self, dfa: ByteDfa, vocabulary: Vocabulary, report: AuditReport, open_end: bool, param: str) -> None:
        """Raises GrammarError if nothing matches, or if the vocabulary can spell nothing that does."""
        if dfa.is_empty:
            raise GrammarError("nothing can match: the constraint allows no text at all. Loosen it.", param=param)
        self.dfa, self.vocabulary, self.report, self.open_end = dfa, vocabulary, report, open_end
        self.alive = _spellable(dfa, vocabulary)
        if not self.alive[START]:
            raise GrammarError("this model's tokenizer cannot spell any text that matches. Loosen it.", param=param)
        self._alive = self.alive.tolist()
        self._accept = dfa.accept.tolist()
        self._rows: list[Row | None] = [None] * dfa.num_states
        # Complete, and no text token goes on (G3). What open_end adds continues nothing.
        self._final = [False] * dfa.num_states
        self._runs: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self._stops = frozenset(vocabulary.stop_ids)
        self._never = vocabulary.special_ids.union(vocabulary.stop_ids)
        branching = (dfa.num_edges != 1) | dfa.accept
        self._branching = branching.tolist()  # not: has a row. One that was asked for in a chain forbids no run there
        self._add_rows(np.nonzero(branching & self.alive)[0].tolist())
        self.nbytes = dfa.table.nbytes + sum(row.nbytes for row in self._rows if row is not None) + 100 * dfa.num_states

    def cursor(self, tail: Sequence[int] = ()) -> StateCursor:
        canonical = self.report.mask_mode == "canonical"
        return StateCursor(self, tuple(tail)[-MAX_TAIL:] if canonical else ())

    # -------------------------------------------------------------------------------------------------------- automaton

    def step(self, state: int, token: int) -> int:
        if state <= 0 or not 0 <= token < self.vocabulary.width:
            return DEAD
        if token in self._never:
            return ENDED if token in self._stops and self._accept[state] else DEAD
        data = self.vocabulary.tokens[token]
        if not data:
            return DEAD
        target = self.dfa.walk(state, data)
        if target and self._alive[target]:
            return target
        if self.open_end and self._accept[state] and not self.dfa.walk(state, data[:1]):
            return OVERRUN
        return DEAD

    def fill(self, state: int, row: NDArray[np.int32]) -> None:
        if state <= 0:
            row.fill(0)
        else:
            self.row(state).fill(row)

    def done(self, state: int) -> bool:
        return state < 0 or self._final[state]

    def forced(self, state: int, tail: tuple[int, ...]) -> tuple[int, ...]:
        """Canonical runs and lone legal tokens, one behind the other, until the model has a choice."""
        if state <= 0 or self._final[state]:
            return ()
        if self._branching[state] and self.row(state).sole < 0:  # the usual case
            return ()
        if self.report.mask_mode != "canonical":
            tail = ()
        run = self._runs.get((state, tail))
        if run is None:
            run = tuple(self._forced(state, tail))
            if len(self._runs) >= MAX_MEMO:
                self._runs.clear()
            self._runs[state, tail] = run
        return run

    # -------------------------------------------------------------------------------------------------------- making it

    def row(self, state: int) -> Row:
        """The mask of a state, whatever is pending."""
        row = self._rows[state]
        if row is None:
            self._add_rows([state])
            row = self._rows[state]
            assert row is not None
        return row

    def chain(self, state: int) -> tuple[bytes, int]:
        """The bytes that must come next, and the state behind them (F5)."""
        dfa, out = self.dfa, bytearray()
        while not self._accept[state] and dfa.num_edges[state] == 1:
            byte = dfa.following(state).bit_length() - 1
            out.append(byte)
            state = dfa.walk(state, bytes((byte,)))
        return bytes(out), state

    def _forced(self, state: int, tail: tuple[int, ...]) -> list[int]:
        run: list[int] = []
        while not self._final[state]:
            piece = self._canonical(state, tail) if self.report.mask_mode == "canonical" else []
            if not piece:
                sole = self.row(state).sole
                if sole < 0:
                    break
                piece = [sole]
            for token in piece:
                state = self.step(state, token)
            run += piece
            tail = (*tail, *piece)[-MAX_TAIL:]
        return run

    def _canonical(self, state: int, tail: tuple[int, ...]) -> list[int]:
        data, end = self.chain(state)
        whole = whole_characters(data)
        if not whole:
            return []
        if whole < len(data):
            data, end = data[:whole], self.dfa.walk(state, data[:whole])
        following = self.dfa.following(end)
        run = canonical_run(tail, data, lambda byte: bool(following >> byte & 1), self.vocabulary)
        for token in run:  # a token may stop where the vocabulary can't go on (F4): then nothing is forced
            state = self.step(state, token)
            if state <= 0:
                return []
        return run

    def _add_rows(self, states: Sequence[int]) -> None:
        wide = [s for s in states if self.dfa.num_edges[s] > WIDE]
        narrow = [s for s in states if self.dfa.num_edges[s] <= WIDE]
        for some in (wide[i : i + BATCH] for i in range(0, len(wide), BATCH)):
            self._pack(some, wide_masks(self.dfa, self.vocabulary.trie, some, self.alive, self.vocabulary.num_words * 32))
        for some in (narrow[i : i + BATCH] for i in range(0, len(narrow), BATCH)):
            at, ids, ends = token_edges(self.dfa, self.vocabulary.trie, some)
            keep = self.alive[ends]
            legal = np.zeros((len(some), self.vocabulary.num_words * 32), np.bool_)
            legal[at[keep], ids[keep]] = True
            self._pack(some, legal)

    def _pack(self, states: Sequence[int], legal: NDArray[np.bool_]) -> None:
        """legal: [states, bits], text tokens only."""
        v = self.vocabulary
        words = np.packbits(legal, axis=1, bitorder="little").view(np.int32)
        for i, state in enumerate(states):
            if self._accept[state]:
                self._final[state] = not words[i].any()
                words[i] |= v.stop_mask
                if self.open_end:
                    following = self.dfa.following(state)
                    others = [b for b in range(256) if not following >> b & 1]
                    words[i] |= np.bitwise_or.reduce(v.starts[others], axis=0)
            self._rows[state] = row_of_words(words[i])


def _spellable(dfa: ByteDfa, vocabulary: Vocabulary) -> NDArray[np.bool_]:
    """[states]: an accepting state can be reached from here over whole tokens (F4)."""
    usable = np.zeros(dfa.table.shape[1], np.bool_)
    usable[dfa.classes[sorted(vocabulary.spelled)]] = True
    alive = dfa.accept.copy()
    if usable[(dfa.table != DEAD).any(0)].all():
        alive[1:] = True  # single bytes spell everything
        return alive
    # First over single bytes, which settles nearly all; then over the tokens of what is left, until nothing changes.
    back: list[list[int]] = [[] for _ in range(dfa.num_states)]
    for column in np.nonzero(usable)[0]:
        for s in np.nonzero(dfa.table[:, column])[0].tolist():
            back[dfa.table[s, column]].append(s)
    _close(alive, back, np.nonzero(alive)[0].tolist())
    left = [s for s in range(1, dfa.num_states) if not alive[s]]
    back = [[] for _ in range(dfa.num_states)]
    for begin in range(0, len(left), BATCH):
        some = left[begin : begin + BATCH]
        at, _, ends = token_edges(dfa, vocabulary.trie, some)
        for i, end in np.unique(np.stack([at, ends.astype(np.int64)]), axis=1).T.tolist():
            back[end].append(some[i])
    _close(alive, back, np.nonzero(alive)[0].tolist())
    return alive


def _close(alive: NDArray[np.bool_], back: list[list[int]], todo: list[int]) -> None:
    while todo:
        for s in back[todo.pop()]:
            if not alive[s]:
                alive[s] = True
                todo.append(s)
