"""What a scripted model says: which text answers which request, and a device that draws it. No weights, no KV, no randomness.

    {"mark": ["7", "3"]}   gen "mark", first and second time        the device draws the text token by token, then EOS,
    fn(record, prompt)     of any gen                               as far as the masks of its grammar allow

The engine above is the real one: tree, scheduler, grammars, forced runs. Only the numbers are missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phloem.lang.backend import Job, Record
from phloem.lang.ir import Select, short
from phloem.runtime.errors import PhloemError, ProgramError
from phloem.runtime.executor.base import Ticket
from phloem.runtime.request import TokenLogprob
from phloem.runtime.step import Row, RowFailure, Sampled, SampleRow, SampleSpec, StepPlan, StepResult
from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Script", "ScriptedDevice"]

Answer = Callable[[Record, str], Any]
LIKELY, UNLIKELY = -0.01, -9.0
"""Logprobs of the scripted choice's tokens and of all others. The former grow along the choice, so that the longer of two that begin
alike can win by its mean too."""


@dataclass(frozen=True, slots=True)
class _Score:
    """winner: ids of the prompt with the scripted choice. None: scored without the prompt."""

    winner: tuple[int, ...] | None
    start: int


class Script:
    """Texts by name of gen or select: a text for every time, or a list of one a time, in the order of submission. Or a function."""

    def __init__(self, source: Mapping[str | None, Any] | Answer, tokenizer: Tokenizer) -> None:
        self._source, self._tokenizer = source, tokenizer
        self._used: dict[str | None, int] = {}
        self._chosen: dict[tuple[Any, ...], str] = {}  # of a select whose paths are several requests

    def answer(self, job: Job) -> bytes | _Score | None:
        """What the job's request gets. Raises ProgramError where the script says nothing for it."""
        record = job.record
        if record.kind == "warm":
            return None
        if record.kind == "gen":
            return self._text(record).encode()
        place = (record.program, record.branch, record.ordinal)
        if place not in self._chosen:
            self._chosen[place] = self._text(record)
        return self._score(job, self._chosen[place])

    def _score(self, job: Job, text: str) -> _Score:
        plan, node = job.slot.plan, job.record.source
        assert isinstance(node, Select)
        if text not in plan.choices:
            raise self._bad(job.record, f"chooses {text!r}, which is none of {node.choices!r}")
        path = job.request.token_ids
        if path not in plan.paths:
            return _Score(None, 0)
        # What stands before the choices, the winner's own tokens, and that it does not go on (Q4's `sum`).
        end = () if self._tokenizer.eos_id is None else (self._tokenizer.eos_id,)
        return _Score((*path[: plan.start], *plan.tokens_of(text), *end), plan.start)

    def _text(self, record: Record) -> str:
        if callable(self._source):
            value = self._source(record, self._tokenizer.decode(record.request.token_ids, skip_special_tokens=False))
        elif record.name not in self._source:
            raise self._bad(record, f"says nothing; it has {', '.join(map(repr, self._source))}")
        else:
            value = self._source[record.name]
        if isinstance(value, (list, tuple)) and not callable(self._source):
            used = self._used.get(record.name, 0)
            self._used[record.name] = used + 1
            if used >= len(value):
                raise self._bad(record, f"has {len(value)} texts, and this is time {used + 1}")
            value = value[used]
        return _text_of(value)

    @staticmethod
    def _bad(record: Record, what: str) -> ProgramError:
        return ProgramError(f"the script for {record.name!r} ({short(record.at)}) {what}.")


def _text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump_json"):
        return str(value.model_dump_json())
    return json.dumps(value, ensure_ascii=False)


@dataclass(eq=False, slots=True)
class _Ticket:
    plan: StepPlan
    result: StepResult


class ScriptedDevice:
    """Follows executor.base.Executor. Says what `texts` has for a request, token by token as the tokenizer writes it, then EOS."""

    def __init__(self, tokenizer: Tokenizer, *, page_size: int, num_pages: int, width: int) -> None:
        self.page_size, self.num_pages, self.width = page_size, num_pages, width
        self._tokenizer = tokenizer
        self.texts: dict[str, bytes | _Score | None] = {}
        self.forwards = 0

    def launch(self, plan: StepPlan) -> _Ticket:
        self.forwards += bool(plan.rows)
        ticket = _Ticket(plan, StepResult(plan.step))
        for row in plan.rows:
            if row.targets:
                ticket.result.scored[row.request_id] = self._scored(row)
        return ticket

    def sample(self, ticket: Ticket, spec: SampleSpec) -> None:
        assert isinstance(ticket, _Ticket)
        for row in spec.rows:
            try:
                token = self._next(spec, row)
            except PhloemError as error:
                ticket.result.failures.append(RowFailure(row.request_id, error))
                continue
            asked = row.sampling.logprobs is not None
            top = ((token, 0.0),) if row.sampling.top_logprobs else ()
            ticket.result.sampled.append(Sampled(row.request_id, token, TokenLogprob(token, 0.0, top, 0.0) if asked else None))

    def collect(self, ticket: Ticket) -> StepResult:
        assert isinstance(ticket, _Ticket)
        return ticket.result

    def reset(self) -> None:
        pass

    def close(self) -> None:
        self.texts.clear()

    def _scored(self, row: Row) -> list[TokenLogprob]:
        score = self.texts.get(row.request_id)
        found = []
        for at, target in enumerate(row.targets, row.logits_from + 1):
            logprob = 0.0  # of a forced run
            if isinstance(score, _Score):
                logprob = -1.0
                if score.winner is not None:
                    on = at < len(score.winner) and score.winner[at] == target
                    logprob = LIKELY / (1 + at - score.start) if on else UNLIKELY
            found.append(TokenLogprob(target, logprob))
        return found

    def _next(self, spec: SampleSpec, row: SampleRow) -> int:
        text = self.texts.get(row.request_id)
        assert isinstance(text, bytes), "a draw for a request that has no text"
        so_far = b"".join(self._tokenizer.token_bytes(i) for i in row.history[row.num_prompt :])
        legal = _legal(spec, row)
        if not text.startswith(so_far):
            raise ProgramError(
                f"the scripted text {text.decode()!r} breaks its constraint, which forced {so_far.decode(errors='replace')!r}."
            )
        rest = text[len(so_far) :]
        if not rest:
            ends = [i for i in self._ends(row) if legal(i)]
            if ends:
                return ends[0]
            raise ProgramError(f"the scripted text {text.decode()!r} is over, and its constraint wants more.")
        for token in self._candidates(rest):
            if legal(token):
                return token
        raise ProgramError(
            f"the scripted text {text.decode()!r} breaks its constraint: {rest.decode(errors='replace')[:40]!r} cannot follow {so_far.decode(errors='replace')!r}."
        )

    def _ends(self, row: SampleRow) -> list[int]:
        own = self._tokenizer.eos_id
        return [*([] if own is None else [own]), *sorted(self._tokenizer.eos_ids), *row.sampling.stop_token_ids]

    def _candidates(self, rest: bytes) -> Sequence[int]:
        """The token that the tokenizer writes next, then shorter beginnings of the rest, the longest first."""
        text = rest.decode(errors="ignore")
        written = self._tokenizer.encode_continuation(text)[:1] if text else []
        if written and not rest.startswith(self._tokenizer.token_bytes(written[0])):
            written = []
        return [*written, *(i for n in range(min(len(rest), 16), 0, -1) if (i := self._by_bytes.get(rest[:n])) is not None)]

    @property
    def _by_bytes(self) -> dict[bytes, int]:
        found: dict[bytes, int] | None = getattr(self, "_table", None)
        if found is None:
            tokens = {i: self._tokenizer.token_bytes(i) for i in range(self._tokenizer.vocab_size)}
            found = self._table = {b: i for i, b in reversed(tokens.items()) if b and i not in self._tokenizer.control_ids}
        return found

    _table: dict[bytes, int]


def _legal(spec: SampleSpec, row: SampleRow) -> Callable[[int], bool]:
    mask = None if row.mask is None or spec.masks is None else spec.masks[row.mask].view(np.uint32)
    only = row.sampling.allowed_token_ids
    blocked = set(row.block)

    def legal(token: int) -> bool:
        if token in blocked or (only is not None and token not in only):
            return False
        return mask is None or bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))

    return legal
