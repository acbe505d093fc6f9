"""One branch of a program: what it recorded, what of that is done, and what each node asks of the engine. No waiting, no I/O.

    queue: ["Rate it: ", Slot(gen mark), RoleClose, …]     worked off in order (K3); a gen or select makes jobs and stops it until they end
    line:  what stands on the path so far                  a fork point hands a copy of it to its children

A `Slot` is one recorded gen or select: it becomes a value or an error, once. `Path` decides nothing about time: session.py does.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import msgspec

from phloem.lang import choices as scoring
from phloem.lang.backend import Job, Record
from phloem.lang.ir import Gen, Plain, RoleClose, RoleOpen, Select, Special, checked_sampling, short
from phloem.lang.line import Line, kept_ids
from phloem.runtime.engine.constraint import without_ignored_stops
from phloem.runtime.errors import (
    Cancelled,
    CheckFailed,
    IncompleteOutput,
    InvalidRequestError,
    PhloemError,
    ProgramError,
    from_wire,
)
from phloem.runtime.request import GrammarSpec, Output, Request, SamplingParams
from phloem.runtime.text.markup import Message

if TYPE_CHECKING:
    from phloem.lang.budget import Limits
    from phloem.lang.session import Session

__all__ = ["ForkPoint", "Path", "Slot", "text_of"]


class Slot:
    """One recorded gen or select of one path.

    value, error: once `done`.   outputs: one a sample, of the accepted attempt.   selection: of a select.   text: what stands for the value.
    waiters: called once when done.
    """

    __slots__ = (
        "attempt", "done", "error", "jobs", "limits", "line", "node", "ordinal", "outputs", "path", "plan", "raised", "selection", "streaming", "text", "value",
        "waiters", "wanted",
    )  # fmt: skip

    def __init__(self, node: Gen[Any] | Select[Any] | None, path: Path, value: Any = None, done: bool = False) -> None:
        self.node, self.path, self.value, self.done = node, path, value, done
        self.error: PhloemError | None = None
        self.raised = False
        self.outputs: list[Output] = []
        self.jobs: list[Job] = []
        self.wanted = 0
        self.selection: scoring.Scores | None = None
        self.plan: scoring.Scoring | None = None
        self.text = ""
        self.ordinal = self.attempt = 0
        self.line: Line | None = None  # of an attempt with feedback
        self.limits: Limits | None = None
        self.streaming = False
        self.waiters: list[Callable[[], None]] | None = None

    def read(self) -> Any:
        """Of a slot that is done. Raises its error: a fresh copy, so that frames of an earlier reader are not kept alive."""
        if self.error is not None:
            self.raised = True
            raise self.error.with_traceback(None)
        return self.value


class ForkPoint:
    """Where children leave. line: what they all begin with, once the parent is there; cut once, by the first that needs it."""

    __slots__ = ("_cut", "children", "line")

    def __init__(self) -> None:
        self.line: Line | None = None
        self.children: list[Path] = []
        self._cut = False

    def take(self) -> Line:
        assert self.line is not None
        if not self._cut and len(self.children) > 1:
            self._cut = True
            with suppress(
                InvalidRequestError
            ):  # a template may refuse an incomplete conversation: each child checks what it makes of it
                self.line.cut()
        made = self.line.copy()
        made.journal = []
        if made.opened is not None:
            made.opened.inherited = True
        return made


class Path:
    __slots__ = (
        "active", "branch", "busy", "closed", "control_text", "error", "final", "known", "lease", "line", "num_children", "ordinal", "origin",
        "owner", "parent_request", "queue", "run", "session", "waiters",
    )  # fmt: skip

    def __init__(
        self, session: Session, run: Any, branch: tuple[int, ...], line: Line | None, origin: ForkPoint | None = None
    ) -> None:
        """run: the Run whose program this is.   origin: the fork that it waits for."""
        self.session, self.run, self.branch, self.line, self.origin = session, run, branch, line, origin
        self.queue: deque[Any] = deque()
        self.busy: Slot | None = None
        self.ordinal = 0
        self.num_children = 0
        self.error: PhloemError | None = None
        self.closed = self.active = self.final = self.control_text = False
        self.lease: str | None = None  # the hold on what is committed (K2)
        self.known = 0  # tokens of the line that our own requests have left in the tree
        self.parent_request: str | None = None
        self.owner: Any = None  # the group that answers for its errors
        self.waiters: list[Callable[[], None]] | None = None

    @property
    def idle(self) -> bool:
        return self.busy is None and not self.queue

    # ---- working off the queue ------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """As far as it goes without waiting. Jobs go to the session's outbox; a failure fails the path."""
        if self.line is None:
            assert self.origin is not None
            if self.origin.line is None or self.error is not None:
                return
            self.line = self.origin.take()
        if self.error is not None:
            self.fail(self.error, None)
        while self.queue and self.busy is None:
            item = self.queue.popleft()
            try:
                self._step(item, self.line)
            except PhloemError as error:
                self.fail(error, item if isinstance(item, Slot) else None, getattr(item, "at", None))

    def _step(self, item: Any, line: Line) -> None:
        if isinstance(item, str):
            if self.control_text:
                line.control(item)
            else:
                line.literal(item)
                if line.markup.spellings.search(item):
                    self.run.warn_control(item)
        elif isinstance(item, Slot):
            self._begin(item, line)
        elif isinstance(item, RoleOpen):
            line.open(item.role, item.at)
        elif isinstance(item, RoleClose):
            line.close(item.role)
        elif isinstance(item, ForkPoint):
            item.line = line
            self.line = line.copy()
            for child in item.children:
                child.parent_request, child.known = self.parent_request, self.known
                self.session.touch(child)
        elif isinstance(item, Plain):
            line.literal(item.text)
        elif isinstance(item, Special):
            if len(line.markup.control_pieces(item.text)) != 1 or isinstance(line.markup.control_pieces(item.text)[0], str):
                raise InvalidRequestError(
                    f"special({item.text!r}) is not exactly one control token of this model.", param="special"
                )
            line.control(item.text)
        elif callable(item):
            item(self, line)

    def fail(self, error: PhloemError, slot: Slot | None, at: str | None = None) -> None:
        """This path goes no further: what it recorded and has not done fails too."""
        self.locate(error, slot, at)
        if self.error is None:
            self.error = error
            self.run.failed.append(self)
            if self.owner is not None:
                self.owner.failures += 1
        if slot is not None:
            self.end(slot, error)
        self.busy = None
        queue, self.queue = self.queue, deque()
        for item in queue:
            ending = item if isinstance(item, Slot) else getattr(item, "slot", None)
            if ending is not None:
                self.end(ending, self.error)
            elif isinstance(item, ForkPoint):
                for child in item.children:
                    child.fail(self.error, None)
                    self.session.settle(child)

    def locate(self, error: PhloemError, slot: Slot | None, at: str | None = None) -> None:
        """U5: where it happened, said once."""
        if error.request_id is None and slot is not None and slot.jobs:
            error.request_id = slot.jobs[0].request.id
        if error.branch is None:
            error.branch = self.branch
            error.name = error.name or (slot.node.name if slot is not None and slot.node is not None else None)
            if self.line is not None and error.prompt_tail is None:
                error.prompt_tail = _tail(self.line)
        where = at or (slot.node.at if slot is not None and slot.node is not None else None)
        if error.at is None and where:
            error.at = where
        if error.at and not str(error).startswith(short(error.at)):
            inside = f", branch {'.'.join(map(str, error.branch))}" if error.branch else ""
            named = f" {error.name!r}" if error.name else ""
            error.args = (f"{short(error.at)}{named}{inside}: {error.message}",)

    def end(self, slot: Slot, error: PhloemError | None = None) -> None:
        if slot.done:
            return
        slot.error, slot.done, slot.line = error, True, None
        if self.busy is slot:
            self.busy = None
        waiters, slot.waiters = slot.waiters, None
        for wake in waiters or ():
            wake()

    def cancel(self, error: PhloemError) -> None:
        """End what is under way, and record nothing more."""
        if self.busy is not None:
            self.session.abort(self.busy.jobs)
        if not self.idle:
            self.fail(error, self.busy)
        self.close()

    def close(self) -> None:
        """K2: the lease goes."""
        self.closed = True
        if self.lease is not None:
            self.session.release(self.lease)
            self.lease = None
            self.run.leased.discard(self)
        self.session.settle(self)

    # ---- a gen or select begins -----------------------------------------------------------------------------------------

    def _begin(self, slot: Slot, line: Line) -> None:
        slot.ordinal = self.ordinal
        self.ordinal += 1
        self.busy = slot
        if slot.limits is not None:
            slot.limits.check_open()
        if isinstance(slot.node, Select):
            self._begin_select(slot, slot.node, line)
        else:
            assert slot.node is not None
            self._begin_gen(slot, slot.node, line)

    def seed(self, slot: Slot) -> int:
        """K4: of the run's seed, the branch, the ordinal and the attempt; of nothing that timing could change."""
        key = f"{self.run.seed}/{'.'.join(map(str, self.branch))}/{slot.ordinal}/{slot.attempt}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1

    def _begin_gen(self, slot: Slot, node: Gen[Any], line: Line) -> None:
        if node.tools:
            from phloem.lang import tools

            tools.offer(node, line)
        ids = line.ready()
        if not ids and self.session.backend.capabilities.tokens:
            raise InvalidRequestError("nothing stands before this gen; append some text first.", param="prompt")
        given = {**self.run.defaults, **node.sampling}
        drawn = given.pop("seed", None)
        if slot.limits is not None:
            given["max_tokens"] = slot.limits.bound_tokens(given.get("max_tokens"), node.n)
        grammar = node.grammar
        if node.tools:
            grammar, _, hides = tools.bind(node, line.markup.tokenizer)
            given["skip_special_tokens"] = hides and given.get("skip_special_tokens", True)
        sampling = copy(without_ignored_stops(checked_sampling(given), grammar))
        msgspec.structs.force_setattr(sampling, "seed", self.seed(slot) if drawn is None else drawn)
        group = self.session.new_id("g") if node.n > 1 else None
        timeout = node.timeout
        slot.jobs, slot.outputs, slot.wanted = [], [], node.n
        for sample in range(node.n):
            request = Request(
                id=self.session.new_id("p"), token_ids=ids, sampling=sampling, grammar=grammar, namespace=self.run.namespace, group=group, sample=sample,
                parent=self.parent_request, hold=self._holds(sample), priority=node.priority,
            )  # fmt: skip
            record = Record(
                "gen",
                request,
                node.at,
                node.name,
                self.branch,
                slot.ordinal,
                slot.attempt,
                self.run.number,
                self._prompt(line),
                node,
            )
            self.session.send(record, slot, timeout)

    def _prompt(self, line: Line) -> Any:
        return line.prompt() if not self.session.backend.capabilities.tokens else None  # type: ignore[attr-defined]

    def _holds(self, sample: int) -> bool:
        """K2. Not where the path ends with this gen anyway."""
        return sample == 0 and self.session.backend.capabilities.hold and not (self.final and not self.queue)

    def _begin_emulated(self, slot: Slot, node: Select[Any], line: Line) -> None:
        """Z1, where the user said emulate=True: the backend draws one of the choices under a constraint; there are no scores."""
        can = self.session.backend.capabilities
        texts = list(dict.fromkeys(node.choices))
        if "choices" in can.grammars:
            spec = GrammarSpec(kind="choices", source=json.dumps(texts, ensure_ascii=False), trusted=True)
        else:
            spec = GrammarSpec(kind="json_schema", source=json.dumps({"enum": texts}, ensure_ascii=False), trusted=True)
        seed = node.sampling.get("seed")
        sampling = SamplingParams(
            temperature=node.sampling.get("temperature", 0.0), seed=self.seed(slot) if seed is None else seed
        )
        ids = line.ready()
        slot.plan, slot.jobs, slot.outputs, slot.wanted = None, [], [], 1
        request = Request(
            id=self.session.new_id("p"), token_ids=ids, sampling=sampling, grammar=spec, namespace=self.run.namespace
        )
        record = Record(
            "gen", request, node.at, node.name, self.branch, slot.ordinal, 0, self.run.number, self._prompt(line), node
        )
        record.emulated = f"select by {spec.kind}"
        self.session.send(record, slot, node.timeout)

    def _finish_emulated(self, slot: Slot, node: Select[Any], line: Line) -> None:
        text, spec = self._trim(slot.jobs[0], line)[1], slot.jobs[0].request.grammar
        assert spec is not None
        try:
            choice = text if spec.kind == "choices" else json.loads(text)
            index = node.choices.index(choice)
        except ValueError:
            raise IncompleteOutput(
                f"{_short(text)} is none of the choices; the backend did not keep to its constraint."
            ) from None
        slot.value, slot.text = node.values[index], node.choices[index]
        line.literal(node.choices[index])
        self.parent_request = slot.jobs[0].request.id

    def _begin_select(self, slot: Slot, node: Select[Any], line: Line) -> None:
        if not self.session.backend.capabilities.prompt_logprobs:
            self._begin_emulated(slot, node, line)
            return
        plan = slot.plan = scoring.Scoring(node, line)
        slot.jobs, slot.outputs, slot.wanted = [], [], 0
        if not plan.prompts:  # one choice and nothing to compare would still be scored: there is always a path
            raise AssertionError("a select without paths")
        timeout = node.timeout
        slot.wanted = len(plan.prompts)
        for ids, start in plan.prompts:
            sampling = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=start)
            request = Request(id=self.session.new_id("p"), token_ids=ids, sampling=sampling, namespace=self.run.namespace, parent=self.parent_request)  # fmt: skip
            record = Record(
                "score", request, node.at, node.name, self.branch, slot.ordinal, 0, self.run.number, self._prompt(line), node
            )
            self.session.send(record, slot, timeout)

    # ---- and ends -------------------------------------------------------------------------------------------------------

    def finish(self, slot: Slot) -> None:
        """Its jobs have all ended."""
        if slot.done or self.closed:
            return
        assert self.line is not None
        slot.outputs = [job.output for job in slot.jobs if job.output is not None]
        try:
            for job in slot.jobs:
                if job.output is not None:  # else: another has failed already
                    self._check_output(job)
            if isinstance(slot.node, Select):
                self._finish_select(slot, slot.node, self.line)
            else:
                assert slot.node is not None
                if not self._finish_gen(slot, slot.node, self.line):
                    return  # another attempt is under way
        except PhloemError as error:
            self.session.abort(slot.jobs)
            self.fail(error, slot)
            return
        self.end(slot)

    def _check_output(self, job: Job) -> None:
        output = job.output
        assert output is not None
        if job.aborted is not None:
            raise job.aborted
        if output.error is not None:
            raise _copied(output.error)
        if output.finish_reason == "abort":
            raise Cancelled("the request was aborted by somebody else, or the engine is being closed.")

    def _hold_moved(self, slot: Slot) -> None:
        old, request = self.lease, slot.jobs[0].request
        self.lease = request.id if request.hold else None
        (self.run.leased.discard if self.lease is None else self.run.leased.add)(self)
        self.parent_request = request.id
        if old is not None:
            self.session.release(old)

    def _finish_gen(self, slot: Slot, node: Gen[Any], line: Line) -> bool:
        self._hold_moved(slot)
        if slot.limits is not None:
            slot.limits.spend(sum(len(o.token_ids) for o in slot.outputs))
        drawn = [self._trim(job, line) for job in slot.jobs]
        try:
            values = [self._value(slot, node, job, text) for job, (_, text, _) in zip(slot.jobs, drawn)]
            value = values if node.n > 1 else values[0]
            complaint = _complaint(node, value)
        except IncompleteOutput as error:
            if slot.attempt >= node.retries:
                raise
            complaint = error.message
        if complaint is not None:
            if slot.attempt >= node.retries:
                raise CheckFailed(
                    f"the value {_short(drawn[0][1])} failed its check after {slot.attempt + 1} attempts: {complaint}"
                )
            self._retry(slot, node, line, drawn[0], complaint)
            return False
        if slot.line is not None and node.keep == "dialogue":
            self.line = line = slot.line
        ids, text, rest = drawn[0]
        line.draw(ids, text[: len(text) - len(rest)] if rest else text, rest, node.name, node.at)
        job = slot.jobs[0]
        self.known = len(job.request.token_ids) + min(len(ids), len(slot.outputs[0].token_ids) - job.record.num_unfed)
        slot.value, slot.text = value, text
        return True

    def _value(self, slot: Slot, node: Gen[Any], job: Job, text: str) -> Any:
        assert job.output is not None
        if node.tools:
            from phloem.lang.tools import bind

            assert self.line is not None
            return bind(node, self.line.markup.tokenizer)[1](text, job.output.token_ids)
        return node.shape.value(job.output, text)

    def _trim(self, job: Job, line: Line) -> tuple[tuple[int, ...], str, str]:
        """What of an output stays on the path (X5, X6): ids, the text of the value, and the end of it that no whole token covers."""
        output = job.output
        assert output is not None
        ids, text, rest = tuple(output.token_ids), output.text, ""
        if self.session.backend.capabilities.tokens:
            tokenizer = line.markup.tokenizer
            reason = output.finish_reason
            if ids and (reason in ("eos", "stop_token") or (reason == "grammar" and ids[-1] in tokenizer.control_ids)):
                sampling = job.request.sampling
                if sampling.keep_stop or not sampling.skip_special_tokens:
                    text = text.removesuffix(line.markup.spelling(ids[-1]))
                ids = ids[:-1]
            elif reason == "stop_string":
                hidden = job.request.sampling.skip_special_tokens
                continues = any(i not in tokenizer.special_ids for i in job.request.token_ids)
                count, rest = kept_ids(line.markup, ids, text, hidden=hidden, continues=continues)
                ids = ids[:count]
        job.record.num_dropped += len(output.token_ids) - len(ids) + output.usage.dropped_tokens
        return ids, text, rest

    def _retry(self, slot: Slot, node: Gen[Any], line: Line, drawn: tuple[tuple[int, ...], str, str], complaint: str) -> None:
        """U7: once more, from the state before the gen; with feedback, behind what was wrong with it."""
        slot.attempt += 1
        again = line
        if node.feedback:
            again = (slot.line or line).copy()
            ids, text, rest = drawn
            again.draw(ids, text[: len(text) - len(rest)] if rest else text, rest, node.name, node.at)
            opened = again.opened
            if opened is not None:
                again.close(opened.role)
                again.add_message(Message("user", (complaint,)), node.at)
                again.open(opened.role, node.at, opened.extra)
            else:
                again.literal(f"\n({complaint})\n")
            slot.line = again
        self._begin_gen(slot, node, again)

    def _finish_select(self, slot: Slot, node: Select[Any], line: Line) -> None:
        if slot.plan is None:
            self._finish_emulated(slot, node, line)
            return
        seed = node.sampling.get("seed")
        scores = slot.plan.scores(slot.outputs)
        index = scores.pick(node.sampling.get("temperature", 0.0), self.seed(slot) if seed is None else seed)
        scores.index = index
        for job in slot.jobs:
            job.record.selection = scores
        slot.selection, slot.value, slot.text = scores, node.values[index], node.choices[index]
        line.literal(node.choices[index])
        self.parent_request = slot.jobs[0].request.id


def _complaint(node: Gen[Any], value: Any) -> str | None:
    if node.check is None:
        return None
    try:
        verdict = node.check(value)
    except Exception as error:
        return str(error) or type(error).__name__
    if verdict is None or verdict is True:
        return None
    return verdict if isinstance(verdict, str) else "That is not acceptable. Try again."


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or value is None:
        return str(value).lower() if isinstance(value, bool) else "null"
    if isinstance(value, (int, float)):
        return str(value)
    return msgspec.json.encode(value, enc_hook=lambda v: v.model_dump() if hasattr(v, "model_dump") else str(v)).decode()


def _tail(line: Line) -> str:
    try:
        return line.text()[-60:]
    except PhloemError:
        return ""


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "…")


def _copied(error: Exception) -> PhloemError:
    if isinstance(error, PhloemError):
        made = from_wire(type(error).__name__, error.message, error.param, error.code)
        made.__cause__ = error.__cause__
        return made
    made = ProgramError(f"the backend failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
