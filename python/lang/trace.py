"""What a run asked and what came back, as JSON lines; and a backend that answers from such a file (U9).

run.trace.save("a.jsonl")        one header, then a line a request: where it stands in the program, Request, Output
ph.Replay("a.jsonl")             the same program on it gives the same values, without a model; a request that differs raises
                                 ReplayMismatch with the first token that does, and the line of its gen
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from phloem.lang.backend import Capabilities, Job, Record, TextPrompt
from phloem.lang.ir import located, short
from phloem.runtime.errors import InvalidRequestError, PhloemError, ReplayMismatch, from_wire
from phloem.runtime.request import Output, OutputDelta, Request, WireError
from phloem.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from phloem.lang.run import Run

__all__ = ["Replay", "Trace", "fingerprint"]

VERSION = 1
_PROBE = "The quick  brown fox,\n\tjumps — 東京 12345 <|im_end|> it's x_y[0]; naïve café"


class Entry(msgspec.Struct, kw_only=True):
    """One line. `rank`: in which order requests ended, None for one that never did."""

    kind: str
    at: str
    name: str | None
    branch: tuple[int, ...]
    ordinal: int
    attempt: int
    program: int
    request: Request
    output: dict[str, Any] | None = None
    error: WireError | None = None
    num_unfed: int = 0
    num_dropped: int = 0
    emulated: str = ""
    messages: list[dict[str, Any]] | None = None
    partial: str = ""
    text: str = ""
    rank: int | None = None

    @property
    def place(self) -> tuple[Any, ...]:
        return (self.kind, self.program, self.branch, self.ordinal, self.attempt)


class Trace:
    """The requests of a run. `entries`: one each, in order of submission."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run

    @property
    def entries(self) -> list[Entry]:
        records: list[Record] = self._run.records
        order = {id(r): i for i, r in enumerate(sorted((r for r in records if r.output is not None), key=lambda r: r.ended))}
        return [_entry(record, order.get(id(record))) for record in records]

    def save(self, path: str | Path) -> None:
        """JSON lines: every Request and Output, positions, seeds, weights version."""
        run = self._run
        backend = run._session.backend
        tokenizer = backend.tokenizer
        header = {
            "phloem_trace": VERSION,
            "program": run.program.name,
            "seed": run.seed,
            "backend": backend.name,
            "tokenizer": None if tokenizer is None else fingerprint(tokenizer),
            "max_context": backend.max_context,
            "page_size": backend.page_size,
        }
        encode = msgspec.json.encode
        Path(path).write_bytes(b"\n".join([encode(header), *(encode(entry) for entry in self.entries), b""]))


def _entry(record: Record, rank: int | None) -> Entry:
    output, error = record.output, None
    if output is not None and output.error is not None:
        e = output.error
        error = (
            WireError(type(e).__name__, e.message, e.param, e.code)
            if isinstance(e, PhloemError)
            else WireError("PhloemError", str(e))
        )
        output = msgspec.structs.replace(output, error=None)
    prompt = record.prompt
    return Entry(
        kind=record.kind, at=record.at, name=record.name, branch=record.branch, ordinal=record.ordinal, attempt=record.attempt,
        program=record.program, request=record.request, output=None if output is None else msgspec.to_builtins(output), error=error,
        num_unfed=record.num_unfed, num_dropped=record.num_dropped, emulated=record.emulated,
        messages=None if prompt is None else [dict(m) for m in prompt.messages], partial="" if prompt is None else prompt.partial,
        text="" if prompt is None else prompt.text, rank=rank,
    )  # fmt: skip


def fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that read and write alike, as far as a probe and the control tokens tell."""
    parts = (
        tokenizer.vocab_size,
        tokenizer.encode(_PROBE, False, False),
        sorted(tokenizer.control_tokens),
        sorted(tokenizer.eos_ids),
        sorted(tokenizer.templates.items()),
    )
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:16]


class Replay:
    """A backend that answers from a saved trace, in the order in which requests ended there.

    tokenizer: of the model that was traced; None for the embedded model's, or a scripted run's. Raises InvalidRequestError for a file that
    is no trace, or a tokenizer that is another.
    """

    self_driven = False

    def __init__(self, path: str | Path, tokenizer: Tokenizer | None = None) -> None:
        lines = Path(path).read_bytes().splitlines()
        try:
            header = json.loads(lines[0])
            self.entries = [msgspec.json.decode(line, type=Entry) for line in lines[1:] if line.strip()]
            if header["phloem_trace"] != VERSION:
                raise ValueError(f"version {header['phloem_trace']}")
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"{path} is no trace of this version of phloem: {error}.", param="path") from None
        self.name = f"replay of {Path(path).name}"
        self.seed: int | None = header["seed"]
        self.tokenizer = _tokenizer(header["tokenizer"], tokenizer)
        self.capabilities = Capabilities(tokens=header["tokenizer"] is not None)
        self.max_context: int | None = header["max_context"]
        self.kv_tokens: int | None = None
        self.page_size: int = header["page_size"]
        self._left: dict[tuple[Any, ...], deque[Entry]] = {}
        for entry in self.entries:
            self._left.setdefault(entry.place, deque()).append(entry)
        self._pending: list[tuple[Job, Entry]] = []

    def lang_backend(self) -> Replay:
        """A fresh one: each run reads the trace from its start."""
        made = Replay.__new__(Replay)
        made.__dict__.update(self.__dict__)
        made._left, made._pending = {place: deque(entries) for place, entries in self._left.items()}, []
        return made

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            try:
                self._pending.append((job, self._entry(job)))
            except ReplayMismatch as error:
                job.fail(error)

    def _entry(self, job: Job) -> Entry:
        record = job.record
        if record.kind == "warm":  # a hint: the trace may have been made with others
            same = [
                e
                for e in self._left.get((record.kind, record.program, record.branch, record.ordinal, 0), ())
                if e.request.token_ids == record.request.token_ids
            ]
            if same:
                self._left[same[0].place].remove(same[0])
                return same[0]
            return Entry(
                kind="warm", at=record.at, name=None, branch=record.branch, ordinal=record.ordinal, attempt=0, program=record.program,
                request=record.request, output=_empty(record.request), rank=-1,
            )  # fmt: skip
        place = (record.kind, record.program, record.branch, record.ordinal, record.attempt)
        left = self._left.get(place)
        if not left:
            raise located(
                ReplayMismatch(
                    f"the trace has no request at this place of the program ({record.kind}, branch {record.branch})."
                ),
                record.at,
                record.name,
            )
        same = [entry for entry in left if _difference(entry, record) is None]
        if same:
            left.remove(same[0])
            return same[0]
        why = _difference(left[0], record)
        raise located(
            ReplayMismatch(f"this request is not the one that was traced ({short(left[0].at)}): {why}"), record.at, record.name
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        gone = [(job, entry) for job, entry in self._pending if job.request.id in ids]
        self._pending = [(job, entry) for job, entry in self._pending if job.request.id not in ids]
        for job, entry in gone:
            _deliver(job, entry, aborted=True)

    def wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        while not done():
            if not self._pending:
                raise ReplayMismatch("the program waits for more than was traced.")
            # What was aborted there would be aborted here, once whatever made the program do it has come.
            last = len(self.entries)
            job, entry = min(
                self._pending,
                key=lambda pair: (
                    pair[1].output is None or pair[1].output["finish_reason"] == "abort",
                    last if pair[1].rank is None else pair[1].rank,
                ),
            )
            self._pending.remove((job, entry))
            _deliver(job, entry)
        return True

    def hold(self, name: str, token_ids: Sequence[int], namespace: str) -> None: ...
    def release(self, names: Sequence[str]) -> None: ...
    def flush(self) -> int:
        return 0

    def info(self) -> dict[str, Any]:
        return {"backend": self.name, "entries": len(self.entries)}


def _tokenizer(wanted: str | None, given: Tokenizer | None) -> Tokenizer | None:
    if wanted is None:
        return None
    if given is not None:
        if fingerprint(given) != wanted:
            raise InvalidRequestError("the tokenizer is not that of the model that was traced.", param="tokenizer")
        return given
    from phloem.lang.testing import byte_tokenizer
    from phloem.runtime.models.embedded import find_embedded
    from phloem.runtime.models.gguf import GgufFile

    scripted = byte_tokenizer()
    if fingerprint(scripted) == wanted:
        return scripted
    file = GgufFile(find_embedded())
    embedded = Tokenizer.from_gguf_metadata(file.metadata, source=str(file.path))
    if fingerprint(embedded) == wanted:
        return embedded
    raise InvalidRequestError(
        "this trace is of another model than the embedded one; pass tokenizer=, that of the model that was traced.",
        param="tokenizer",
    )


def _difference(entry: Entry, record: Record) -> str | None:
    """In words; None where the requests are the same but for their hints."""
    ours, theirs = record.request, entry.request
    if ours.token_ids != theirs.token_ids:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids)) if a != b),
            min(len(ours.token_ids), len(theirs.token_ids)),
        )
        a, b = (list(ids[at : at + 1]) for ids in (ours.token_ids, theirs.token_ids))
        return f"its prompt differs from token {at} on: {a[0] if a else 'the end'} instead of {b[0] if b else 'the end'}."
    for name in ("sampling", "grammar", "namespace", "sample"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return f"its {name} differs: {_what_differs(a, b)}."
    prompt = record.prompt
    if isinstance(prompt, TextPrompt) and ([dict(m) for m in prompt.messages], prompt.partial, prompt.text) != (
        entry.messages,
        entry.partial,
        entry.text,
    ):
        return "its messages differ."
    return None


def _what_differs(a: Any, b: Any) -> str:
    if isinstance(a, msgspec.Struct) and type(a) is type(b):
        fields = [f for f in a.__struct_fields__ if getattr(a, f) != getattr(b, f)]
        return ", ".join(f"{f} {_short(getattr(a, f))} instead of {_short(getattr(b, f))}" for f in fields)
    return f"{_short(a)} instead of {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


def _empty(request: Request) -> dict[str, Any]:
    usage = {"prompt_tokens": len(request.token_ids), "cached_tokens": len(request.token_ids)}
    return {"text": "", "token_ids": [], "finish_reason": "length", "usage": usage}


def _deliver(job: Job, entry: Entry, aborted: bool = False) -> None:
    if entry.output is None:
        reason = "abort" if aborted else "error"
        error = None if aborted else WireError("ReplayMismatch", "this request had not ended when the trace was saved")
        job.push(OutputDelta(job.request.id, finish_reason=reason, error=error))  # type: ignore[arg-type]
        return
    output = msgspec.convert(entry.output, Output)
    if entry.error is not None:
        job.fail(from_wire(entry.error.name, entry.error.message, entry.error.param, entry.error.code))
    elif job.prompt is not None:
        job.end(output)
    else:
        scored = [p for p in output.prompt_logprobs or () if p is not None]
        job.push(
            OutputDelta(
                job.request.id, list(output.token_ids), list(output.logprobs or ()), scored, "abort" if aborted else output.finish_reason, output.usage,
                output.seed, output.weights_version, None, output.dropped_keywords,
            )
        )  # fmt: skip
    # What was drawn behind a stop string is chance, and not told anew.
    job.record.num_unfed, job.record.emulated = entry.num_unfed, entry.emulated
