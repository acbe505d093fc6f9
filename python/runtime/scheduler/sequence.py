"""One request's mutable life inside the engine: its tokens, how far they are computed, and when it ends.

    tokens   [ prompt ................ | drawn | forced run .... ]        grammar cursors accept as tokens come
    computed  ^^^^^^^^^^^^^^              committed rows
    scheduled ^^^^^^^^^^^^^^^^^^^^^^^     launched or planned rows, or cached; len(tokens) + 1 while a draw is in flight (S1)

    waiting -> running -> done            preempted: running -> waiting; it keeps tokens, cursor, draws in flight (S3)

Knows nothing of pages (that is its Grant) nor of other sequences, except the siblings that wait for its prompt (S4).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.cache.prefix import Grant
from phloem.runtime.errors import GrammarDeadEnd
from phloem.runtime.request import FinishReason, Request, Support, TokenLogprob, WireError
from phloem.runtime.step import Under

__all__ = ["Cursor", "Ending", "Sequence"]


class Cursor(Protocol):
    """One sequence's place in a grammar (structured.md §1). Complete, for what the engine needs of it."""

    @property
    def done(self) -> bool:
        """Complete, and nothing but a stop token may follow. Read before `fill`."""

    @property
    def dropped(self) -> int:
        """How many of the last accepted tokens are no part of the value: 1 behind one that open_end let in (G7), else 0."""

    def fill(self, row: NDArray[np.int32]) -> None:
        """Overwrite all ceil(width / 32) words: bit t is set iff accept(t) would return True."""

    def accept(self, token: int) -> bool:
        """False: illegal, and nothing has changed."""

    def forced(self) -> Seq[int]:
        """The pending run, consumed by `accept`; empty: the model chooses."""


class Ending(Protocol):
    """What ends the sequences of one engine. `ids`: the model's own end tokens; `grammar_eos`: appended by J8."""

    @property
    def ids(self) -> frozenset[int]: ...
    @property
    def grammar_eos(self) -> int | None: ...


class Sequence:
    """See the module's drawing. Identity is the object: ids may be used again once a request has ended."""

    def __init__(self, request: Request, tokens: array[int], max_tokens: int, seed: int, ending: Ending) -> None:
        s = request.sampling
        self.request, self.max_tokens, self.seed, self._ending = request, max_tokens, seed, ending
        self.rank = (0, 0)  # (priority, arrival): the order of preemption and of resuming; given by the scheduler
        self.tokens: list[int] = tokens.tolist()
        self.key = bytearray(tokens.tobytes())  # the same as int32 bytes: what the tree compares
        self.num_prompt = len(self.tokens) - request.num_output
        self.need_pages = 0  # never more than so many (P3)
        self.state: Literal["waiting", "running", "done"] = "waiting"
        self.finish: FinishReason | None = None
        self.error: WireError | None = None
        self.served_before = 0  # tokens served when it arrived: the clock of ageing (S2)
        self.arrived_at = 0.0
        # admission
        self.started = False  # admitted or drawn once: it is resumed, not queued
        self.queued = False  # stands in the waiting queue
        self.siblings: list[Sequence] = []  # wait for this leader's prompt
        self.leader: Sequence | None = None
        # progress
        self.grant: Grant | None = None
        self.slot = -1
        self.scheduled = self.computed = self.in_flight = 0
        self.high = 0  # positions below have been computed, or were cached at first admission: computing them again is rework
        self.drawing = False  # a draw is in flight: the next token is FUTURE
        self.row_step = 0  # the last plan in which it has a row
        self.cached_tokens: int | None = None  # prompt tokens not computed for it; None until first admitted
        self.preempted = False
        self.kv_mixed = False  # its KV is of more than one version of the weights
        # output
        self.cursor: Cursor | None = None
        self.compiling = False  # its cursor is not there yet
        self.jump = request.grammar is not None and request.grammar.jump_forward != "off"
        self.keeps_logprobs = s.logprobs is not None
        self.version = 0  # of the weights; the scheduler keeps it current when it hands over tokens
        before = request.num_output  # drawn by an earlier request, which this one goes on with (rl L9)
        self.versions: list[int] = [0] * before  # under which each output token was drawn
        self.logprobs: list[TokenLogprob | None] = [None] * before if s.logprobs is not None else []  # one an output token
        self.forced_at: list[int] = []  # indices in the output
        self.emitted = before
        self.num_dropped = 0  # drawn, and no part of the output: the token that ended an open-ended value (G7)
        self.unscored: deque[int] = deque()  # positions of forced tokens whose logprobs rows still have to give
        self.ending: FinishReason | None = None  # it ends so once these are known
        self.prompt_from = self.num_prompt if s.prompt_logprobs is None else max(1, s.prompt_logprobs)
        self.prompt_logprobs: list[TokenLogprob] = []  # of positions prompt_from - len(...) on; emptied as they are emitted
        ends: dict[int, FinishReason] = dict.fromkeys(s.stop_token_ids, "stop_token")
        if not s.ignore_eos:
            ends.update(dict.fromkeys(ending.ids, "eos"))
        self.ends = ends

    # ---------------------------------------------------------------------------------------------------- how far it is

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt

    def goal(self) -> int:
        """Tokens that may be scheduled now: the known ones, and FUTURE unless it is the last by length."""
        if self.ending is not None:
            return self.last_wanted()
        known = len(self.tokens)
        return known + 1 if self.drawing and known + 1 - self.num_prompt < self.max_tokens else known

    def may_draw(self) -> bool:
        return self.ending is None and self.num_new < self.max_tokens

    def first_wanted(self) -> int | None:
        """Position of the first known token whose logprob a row has to give; the logits are those one before it."""
        if self.prompt_from < self.num_prompt:
            return self.prompt_from
        return self.unscored[0] if self.unscored else None

    def last_wanted(self) -> int:
        return self.unscored[-1] if self.unscored else self.num_prompt - 1

    def cache_limit(self) -> int:
        """Tokens that may come from the cache: the last one is computed for its logits (R4), and so are those of logprobs."""
        wanted = self.first_wanted()
        return len(self.tokens) - 1 if wanted is None else min(len(self.tokens), wanted) - 1

    # ------------------------------------------------------------------------------------------------------- new tokens

    def replay(self) -> None:
        """Bring the cursor to where the output of an earlier request left it."""
        if self.cursor is not None:
            for at, token in enumerate(self.tokens[self.num_prompt :]):
                if self.cursor.forced():
                    self.forced_at.append(at)
                self._follow(token)

    def accept(self, token: int, logprob: TokenLogprob | None) -> FinishReason | None:
        """A drawn token, and the forced run behind it. How the sequence ends with it, if it does."""
        if self.cursor is not None:
            if self.cursor.forced():
                self.forced_at.append(self.num_new)  # with jump off the run comes through one-bit masks (J3)
            self._follow(token)
            if self.cursor.dropped:
                self.num_dropped += 1
                return "grammar"  # without the EOS of J8: the model drew something else, and its place holds no other token
        self._append(token, logprob)
        if self.cursor is None:
            reason = self.ends.get(token) if self.ends else None
            return reason or ("length" if self.num_new >= self.max_tokens else None)
        return self.advance()

    def advance(self) -> FinishReason | None:
        """Take the whole forced run (J3), cut at max_tokens (J7). Also once when the cursor comes: a run at the start (J6)."""
        cursor, reason = self.cursor, self._how_it_ends()
        if reason is None and cursor is not None and self.jump:
            run = list(cursor.forced())[: self.max_tokens - self.num_new]
            for token in run:
                self._follow(token)
                self._append_forced(token)
                if token in self.ends:
                    break
            if run:
                reason = self._how_it_ends()
        return reason

    def _how_it_ends(self) -> FinishReason | None:
        room, last = self.num_new < self.max_tokens, self.tokens[-1]
        if self.cursor is not None and self.cursor.done:
            eos = self._ending.grammar_eos
            if room and eos is not None and (not self.num_new or (last != eos and last not in self._ending.ids)):
                self._append_forced(eos)  # J8: ids end as the tokenizer expects
            return "grammar"
        if not room:
            return "length"
        return self.ends.get(last) if self.num_new else None

    def _follow(self, token: int) -> None:
        if self.cursor is None or not self.cursor.accept(token):
            raise GrammarDeadEnd(
                f"the grammar does not allow token {token}, which its own mask let through. Please report this."
            )

    def _append(self, token: int, logprob: TokenLogprob | None) -> None:
        self.tokens.append(token)
        self.versions.append(self.version)
        self.key += token.to_bytes(4, "little")
        if self.keeps_logprobs:
            self.logprobs.append(logprob)

    def _append_forced(self, token: int) -> None:
        s, logprob = self.request.sampling, None
        self.forced_at.append(self.num_new)
        if s.logprobs == "sampled":  # one legal token: it is certain
            logprob = certain(token, s.top_logprobs)
        elif s.logprobs is not None:
            self.unscored.append(len(self.tokens))
        self._append(token, logprob)

    # ---------------------------------------------------------------------------------------------------------- logprobs

    def score(self, position: int, logprob: TokenLogprob) -> None:
        """The logprob of a known token, from the logits before it. Those already known are left as they are."""
        if position == self.prompt_from < self.num_prompt:
            self.prompt_logprobs.append(logprob)
            self.prompt_from += 1
        elif self.unscored and position == self.unscored[0]:
            self.unscored.popleft()
            if self.request.sampling.logprobs == "both":
                logprob = TokenLogprob(logprob.token_id, logprob.logprob, logprob.top, 0.0, logprob.logmass, logprob.support)
            self.logprobs[position - self.num_prompt] = logprob
            self.versions[position - self.num_prompt] = self.version  # recomputed under other weights, perhaps

    def drawn_from(self, position: int) -> Under | None:
        """What a known token was drawn from: one token if it was forced; in a prompt, what the request says (rl L2, L4)."""
        temperature, supports = self.request.sampling.temperature, self.request.supports
        if position >= self.num_prompt:
            return Under(temperature, Support("ids", self.tokens[position].to_bytes(4, "little")))
        if supports is None:
            return None
        at = position - max(1, self.request.sampling.prompt_logprobs or 0)
        return Under(temperature, supports[at] if at < len(supports) else None)

    def num_ready(self) -> int:
        """Output tokens that can be emitted: those whose logprobs, if asked for, are known."""
        return self.unscored[0] - self.num_prompt if self.unscored else self.num_new

    def num_forced(self) -> int:
        """Forced tokens among those emitted."""
        return bisect_left(self.forced_at, self.emitted)


def certain(token: int, num_top: int) -> TokenLogprob:
    return TokenLogprob(token, 0.0, ((token, 0.0),) if num_top else ())
