"""Stand-ins that tests share: a device that checks every read, and a grammar of a few tokens. No weights, no torch.

    ScriptedExecutor   logits = f(history), where the history is *read back from the pages*:

        slot of position p  ->  History(token p) -> History(token p-1) -> ... -> History(root of the salt)

A slot holds the one object that stands for "these tokens, in this order, under this salt". All rows of a step write before any
row reads, copies run before the forward, and each read asserts that slot p continues slot p-1. So a wrong match, a stale page,
an early free or a bad copy is found at the first read, exactly: histories are interned objects, not hashes.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.engine.compiling import GrammarCounters
from phloem.runtime.errors import GrammarDeadEnd
from phloem.runtime.request import GrammarSpec, Request, SamplingParams, TokenLogprob
from phloem.runtime.step import FUTURE, NO_SLOT, Row, RowFailure, Sampled, SampleRow, SampleSpec, StepPlan, StepResult

__all__ = [
    "CheckFailed",
    "History",
    "PatternCursor",
    "PatternGrammars",
    "ScriptedExecutor",
    "ScriptedTicket",
    "draw_token",
    "hashed_logits",
    "model_logprob",
    "random_pattern",
    "token_logprob",
]

MASK32 = 0xFFFFFFFF


class CheckFailed(AssertionError):
    """The device read a slot that does not hold what the row needs."""


class History:
    """A token after a history: interned, so equal histories are the same object."""

    __slots__ = ("children", "digest", "length", "parent", "token")

    def __init__(self, parent: History | None, token: int, digest: int) -> None:
        self.parent, self.token, self.digest = parent, token, digest
        self.length = 0 if parent is None else parent.length + 1
        self.children: dict[int, History] = {}

    def then(self, token: int) -> History:
        child = self.children.get(token)
        if child is None:
            child = self.children[token] = History(self, token, mix(self.digest, token))
        return child

    def tokens(self) -> list[int]:
        tokens, node = list[int](), self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]


def mix(a: int, b: int) -> int:
    """A 64-bit mix that does not depend on PYTHONHASHSEED."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x7F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x ^= x >> 29
    x = x * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 32)


def hashed_logits(history: History, width: int) -> list[float]:
    """The default model: a float in [0, 8) for each token, from the history's digest."""
    return [(mix(history.digest, t) & 0xFFFF) / 8192.0 for t in range(width)]


def draw_token(logits: Sequence[float], row: SampleRow, allowed: Callable[[int], bool]) -> int | None:
    """Gumbel-style draw that depends on (seed, sample, position) and the logits alone (M2); temperature 0: argmax."""
    best, best_score = None, -math.inf
    s, base = row.sampling, mix(mix(row.seed & MASK32, row.sample), row.position)
    for token, logit in enumerate(logits):
        if not allowed(token):
            continue
        score = logit + s.logit_bias.get(token, 0.0) if s.logit_bias else logit
        if s.temperature:
            u = ((mix(base, token) & 0xFFFFFF) + 0.5) / (1 << 24)
            score = score / s.temperature - math.log(-math.log(u))
        if score > best_score:
            best, best_score = token, score
    return best


def model_logprob(logits: Sequence[float], token: int, num_top: int) -> TokenLogprob:
    """Log-softmax of the raw logits (M4)."""
    return _logprob(dict(enumerate(logits)), token, num_top)


def _logprob(logits: dict[int, float], token: int, num_top: int) -> TokenLogprob:
    high = max(logits.values())
    z = high + math.log(sum(math.exp(x - high) for x in logits.values()))
    best = sorted(logits, key=lambda t: (-logits[t], t))[:num_top]
    return TokenLogprob(token, logits[token] - z, tuple((t, logits[t] - z) for t in best))


def token_logprob(
    logits: Sequence[float], token: int, sampling: SamplingParams, allowed: Callable[[int], bool]
) -> TokenLogprob | None:
    """Of the kind asked for: "sampled" is of the distribution really drawn from, 0.0 if one token is legal."""
    kind, num_top = sampling.logprobs, sampling.top_logprobs
    if kind is None:
        return None
    model = model_logprob(logits, token, num_top)
    if kind == "model":
        return model
    if sampling.temperature:
        sampled = _logprob({t: x / sampling.temperature for t, x in enumerate(logits) if allowed(t)}, token, num_top)
    else:
        sampled = TokenLogprob(token, 0.0, ((token, 0.0),) if num_top else ())
    return sampled if kind == "sampled" else TokenLogprob(token, model.logprob, model.top, sampled.logprob)


@dataclass(eq=False)
class ScriptedTicket:
    plan: StepPlan
    result: StepResult
    logits: dict[int, History] = field(default_factory=dict)  # row -> history that ends with its last token
    drawn: bool = False


class ScriptedExecutor:
    """An `Executor` in memory. In order: what is launched runs at once; the host learns of it in `collect`.

    logits:      f(history, width) -> floats; default `hashed_logits`.    salt: f(request id) -> what roots its history
                 (namespace, weights version), read at launch; rows of different salts must never share a slot.
    fail_next:   set it to an exception, and the next launch fails, and with it everything until `reset`.
    row_errors:  request id -> exception: its next draw fails alone.
    on_write:    called with (row, position, history) for each slot written.   Counts: computed, scratch, copied, drawn.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        width: int,
        *,
        logits: Callable[[History, int], Sequence[float]] = hashed_logits,
        salt: Callable[[str], Hashable] = lambda request_id: 0,
        on_write: Callable[[Row, int, History], None] | None = None,
    ) -> None:
        self.page_size, self.num_pages, self.width = page_size, num_pages, width
        self.f, self.salt, self.on_write = logits, salt, on_write
        self.pages: list[list[History | None]] = [[None] * page_size for _ in range(num_pages)]
        self.roots: dict[Hashable, History] = {}
        self.last: dict[int, int] = {}  # slot -> token drawn last
        self.fail_next: Exception | None = None
        self.broken: Exception | None = None
        self.row_errors: dict[str, Exception] = {}
        self.faults: list[CheckFailed] = []
        self.computed = self.scratch = self.copied = self.launches = self.drawn = 0
        self.closed = False

    # ------------------------------------------------------------------------------------------------------------ Executor

    def launch(self, plan: StepPlan) -> ScriptedTicket:
        self.launches += 1
        if self.fail_next is not None:
            self.broken, self.fail_next = self.fail_next, None
        ticket = ScriptedTicket(plan, StepResult(plan.step))
        try:
            self._check_plan(plan)
            if self.broken is not None:
                self._poison(plan)
                ticket.result.failed = self.broken
            else:
                self._forward(plan, ticket)
        except CheckFailed as fault:
            self.faults.append(fault)
            raise
        return ticket

    def sample(self, ticket: ScriptedTicket, spec: SampleSpec) -> None:
        self._require(not ticket.drawn, "sample was called twice for one ticket")
        ticket.drawn = True
        if ticket.result.failed is not None:
            return
        for row in spec.rows:
            self._draw(ticket, spec, row)

    def collect(self, ticket: ScriptedTicket) -> StepResult:
        return ticket.result

    def reset(self) -> None:
        self.broken = None

    def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------------------------------------------------------- device

    def _require(self, good: bool, what: str) -> None:
        if not good:
            fault = CheckFailed(what)
            self.faults.append(fault)
            raise fault

    def _check_plan(self, plan: StepPlan) -> None:
        sources, targets = [c.src for c in plan.copies], [c.dst for c in plan.copies]
        if set(sources) & set(targets) or len(set(targets)) != len(targets):
            raise CheckFailed("copies of one plan must commute")
        if len({row.slot for row in plan.rows}) != len(plan.rows) or len({row.request_id for row in plan.rows}) != len(
            plan.rows
        ):
            raise CheckFailed("two rows of one plan share a slot or a request")
        for row in plan.rows:
            if not len(row.tokens) or len(row.pages) * self.page_size < row.end or FUTURE in row.tokens[:-1]:
                raise CheckFailed(f"a malformed row: {row}")
            num_logits = row.end - row.logits_from
            if not row.start <= row.logits_from <= row.end or (
                row.targets and len(row.targets) not in (num_logits, num_logits - 1)
            ):
                raise CheckFailed(f"targets do not follow the logits: {row}")

    def _poison(self, plan: StepPlan) -> None:
        """Nothing that this step would write can be trusted."""
        poison = History(None, -2, 0)
        for copy in plan.copies:
            self.pages[copy.dst] = [poison] * self.page_size
        for row in plan.rows:
            for p in range(max(row.start, row.write_from), row.end):
                self.pages[row.pages[p // self.page_size]][p % self.page_size] = poison

    def _forward(self, plan: StepPlan, ticket: ScriptedTicket) -> None:
        size, pages = self.page_size, self.pages
        for copy in plan.copies:
            pages[copy.dst] = list(pages[copy.src])
            self.copied += 1
        ends: dict[int, History] = {}
        # A row may read what another row of the plan writes (R5): whoever writes before its start has an earlier start.
        for i in sorted(range(len(plan.rows)), key=lambda i: plan.rows[i].start):
            row = plan.rows[i]
            history = self._entry(row, row.start - 1) if row.start else self.root(self.salt(row.request_id))
            written = []
            for p, token in enumerate(row.tokens, row.start):
                history = history.then(self.last[row.slot] if token == FUTURE else token)
                written.append(history)
                self.computed += 1
                if p < row.write_from:
                    self.scratch += 1
                    continue
                pages[row.pages[p // size]][p % size] = history
                if self.on_write is not None:
                    self.on_write(row, p, history)
            ends[i] = history
            if row.targets:
                scored = []
                for target, at in zip(row.targets, written[row.logits_from - row.start :]):
                    scored.append(model_logprob(self.f(at, self.width), target, row.top_logprobs))
                ticket.result.scored[row.request_id] = scored
        for i, row in enumerate(plan.rows):  # all have written: now every row reads all that it attends to, scratch or not
            history = self.root(self.salt(row.request_id))
            for p in range(row.end):
                entry = self._entry(row, p)
                if entry.parent is not history:
                    raise CheckFailed(f"wrong read: {row.request_id} at {p} of {row.end}, step {plan.step}")
                history = entry
            if history is not ends[i]:
                raise CheckFailed(f"wrong read: {row.request_id} at its own {row.start}..{row.end}, step {plan.step}")
        ticket.logits = ends

    def root(self, salt: Hashable) -> History:
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = History(None, -1, zlib.crc32(repr(salt).encode()))
        return root

    def _entry(self, row: Row, p: int) -> History:
        entry = self.pages[row.pages[p // self.page_size]][p % self.page_size]
        if entry is None:
            raise CheckFailed(f"{row.request_id} reads position {p}, which nobody wrote")
        return entry

    # -------------------------------------------------------------------------------------------------------------- draws

    def _draw(self, ticket: ScriptedTicket, spec: SampleSpec, row: SampleRow) -> None:
        plan_row, history = ticket.plan.rows[row.row], ticket.logits[row.row]
        self._require(plan_row.logits_from < plan_row.end, "a draw from a row without logits")
        self._require(
            list(row.history[: history.length]) == history.tokens(), f"history of {row.request_id} is not what was computed"
        )
        error = self.row_errors.pop(row.request_id, None)
        if error is not None:
            ticket.result.failures.append(RowFailure(row.request_id, error))
            return
        logits = self.f(history, self.width)
        blocked, only = set(row.block), row.sampling.allowed_token_ids
        mask = None if row.mask is None or spec.masks is None else spec.masks[row.mask].view(np.uint32)

        def allowed(token: int) -> bool:
            legal = mask is None or bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))
            return legal and token not in blocked and (only is None or token in only)

        token = draw_token(logits, row, allowed)
        if token is None:
            ticket.result.failures.append(RowFailure(row.request_id, GrammarDeadEnd("no legal token is left.")))
            return
        self.drawn += 1
        if row.slot != NO_SLOT:
            self.last[row.slot] = token
        ticket.result.sampled.append(Sampled(row.request_id, token, token_logprob(logits, token, row.sampling, allowed)))


# ------------------------------------------------------------------------------------------------------------- toy grammar


class PatternCursor:
    """A finite pattern: an int is a forced token, a set a free choice. Done at its end."""

    dropped = 0

    def __init__(self, pattern: Sequence[int | frozenset[int]]) -> None:
        self.pattern, self.at = pattern, 0

    @property
    def done(self) -> bool:
        return self.at == len(self.pattern)

    def _legal(self) -> frozenset[int]:
        item = self.pattern[self.at]
        return frozenset((item,)) if isinstance(item, int) else item

    def fill(self, row: NDArray[np.int32]) -> None:
        row[:] = 0
        bits = row.view(np.uint32)
        for token in self._legal():
            bits[token // 32] |= np.uint32(1 << (token % 32))

    def accept(self, token: int) -> bool:
        if self.done or token not in self._legal():
            return False
        self.at += 1
        return True

    def forced(self) -> list[int]:
        run, at = list[int](), self.at
        while at < len(self.pattern):
            item = self.pattern[at]
            if not isinstance(item, int):
                break
            run.append(item)
            at += 1
        return run


@dataclass
class PatternGrammars:
    """A GrammarService over patterns: GrammarSpec.source names one. `delay`: polls before a cursor is ready; `broken`: names
    that fail to compile."""

    patterns: dict[str, Sequence[int | frozenset[int]]]
    eos_id: int | None = 0
    delay: int = 0
    broken: frozenset[str] = frozenset()
    cancelled: int = 0

    def counters(self) -> GrammarCounters:
        return GrammarCounters()

    def begin(self, request: Request) -> PendingPattern:
        assert isinstance(request.grammar, GrammarSpec)
        return PendingPattern(self, request.grammar.source, self.delay)


@dataclass(eq=False)
class PendingPattern:
    service: PatternGrammars
    name: str
    left: int

    def ready(self) -> bool:
        self.left -= 1
        return self.left < 0

    def cursor(self) -> PatternCursor:
        if self.name in self.service.broken:
            raise GrammarDeadEnd(f"pattern {self.name} does not compile.")
        return PatternCursor(self.service.patterns[self.name])

    def cancel(self) -> None:
        self.service.cancelled += 1


def random_pattern(rng: random.Random, vocabulary: int) -> list[Any]:
    return [
        rng.randrange(1, vocabulary) if rng.random() < 0.6 else frozenset(rng.sample(range(1, vocabulary), rng.randrange(1, 4)))
        for _ in range(rng.randrange(1, 24))
    ]
