"""Programs as environments of a rollout (rl T4): runs of a program, and what each branch drew, as plain data. `rl` imports nothing of this.

    run ── fork ─┬─ branch 0   ids [ literal | drawn | markup | drawn ]   draws: the requests behind the drawn parts, first to last
                 └─ branch 1   a Trajectory each; what they share is computed once, and stands in both

Every gen is sent as `tap` rewrites it (both logprobs, whole stop strings), and `tap` hears what comes back. Chat templates only append.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from phloem.lang.backend import EngineBackend, Job, Record, as_backend
from phloem.lang.batch import _Batch, _call
from phloem.lang.ir import caller
from phloem.lang.path import Path
from phloem.lang.run import Program, Run
from phloem.runtime.request import OutputDelta, Request

__all__ = ["Trajectory", "rollouts"]


class Sink(Protocol):
    def push(self, delta: OutputDelta) -> int | None: ...
    def fail(self, error: Exception) -> None: ...


class Tap(Protocol):
    """Of the rollout engine: what a gen must ask for, and who listens."""

    def rewrite(self, request: Request) -> Request: ...
    def sink(self, request: Request, then: Sink) -> Sink: ...


@dataclass(frozen=True, slots=True)
class Draw:
    """One gen of a branch. attempt: of `retries`, num_samples: its `n`; only the first attempt of one sample is a draw from the policy."""

    request_id: str
    name: str | None
    at: str
    attempt: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One branch of one run. place: of its arguments in the batch; sample: which of the n runs.   value: what the body returned."""

    place: int
    sample: int
    branch: tuple[int, ...]
    ids: tuple[int, ...]
    draws: tuple[Draw, ...]
    value: Any
    error: BaseException | None


class _Backend(EngineBackend):
    """The engine, with a tap on every gen; remembers which paths drew."""

    tap: Tap
    paths: dict[Path, None]

    @classmethod
    def over(cls, engine: Any, tap: Tap) -> _Backend:
        base = as_backend(engine)
        assert isinstance(base, EngineBackend)
        made = cls(**{f.name: getattr(base, f.name) for f in fields(base) if not f.name.startswith("_")})
        made.tap, made.paths = tap, {}
        return made

    def prepare(self, job: Job) -> None:
        self.paths[job.slot.path] = None
        if job.record.kind == "gen":
            job.rewrite(self.tap.rewrite(job.request), self.tokenizer)

    def submit(self, jobs: Sequence[Job]) -> None:
        entries = [(job.request, self.tap.sink(job.request, job) if job.record.kind == "gen" else job) for job in jobs]
        self.client.submit(entries, atomic=False)


class _Rollouts(_Batch):
    """n runs of each item, with seeds of their own: of the rollout's seed and the sample's index alone (rl L8)."""

    n: int
    base: int

    def _make(self, number: int) -> tuple[Run[Any], tuple[Any, ...], dict[str, Any]]:
        self.seed = _seed_of(self.base, number % self.n)
        return super()._make(number)


def rollouts(
    program: Program[Any, Any], engine: Any, args: Sequence[Any], n: int, seed: int, tap: Tap, on_error: Literal["raise", "return"]
) -> list[Trajectory]:  # fmt: skip
    """n runs of `program` for each of `args` (mappings, or tuples of positional ones), on `engine`, in the caller's thread.

    Trajectories in order of args, sample and branch. Under on_error="return" a run that failed gives one, with its error.
    """
    backend = _Backend.over(engine, tap)
    options: dict[str, Any] = {"backend": backend, "history": "append"}
    calls = [_call(program, item, options, i, caller()) for i, item in enumerate(args) for _ in range(n)]
    made = _Rollouts(program, calls, options, None, on_error)
    made.n, made.base = n, seed
    for _ in made.on_a_loop() if program.is_async else made.on_greenlets():
        pass
    found = list[Trajectory]()
    for number, run in enumerate(made.runs):
        assert run is not None
        place, sample, error = number // n, number % n, run.error()
        if error is not None:
            found.append(Trajectory(place, sample, (), (), (), None, error))
            continue
        chains = {path: _chain(path, run.records) for path in backend.paths if path.run is run}
        inner = {record.request.id for chain in chains.values() for record in chain[:-1]}
        ends = set[str]()
        for path, chain in sorted(chains.items(), key=lambda item: item[0].branch):
            if not chain or path.line is None or chain[-1].request.id in inner or chain[-1].request.id in ends:
                continue  # it goes on in a branch, which has all of it
            ends.add(chain[-1].request.id)
            draws = tuple(Draw(r.request.id, r.name, r.at, r.attempt, _num_samples(r)) for r in chain)
            found.append(Trajectory(place, sample, path.branch, tuple(path.line.all_ids()), draws, run.value, None))
        if not ends:
            found.append(Trajectory(place, sample, (), (), (), run.value, None))
    return found


def _chain(path: Path, records: Sequence[Record]) -> list[Record]:
    """The gens that stand on this path, first to last: each request knows the one before it, through forks too."""
    by_id = {r.request.id: r for r in records}
    chain, at = list[Record](), path.parent_request
    while at is not None and at in by_id:
        record = by_id[at]
        retried = bool(chain) and (chain[-1].branch, chain[-1].ordinal) == (record.branch, record.ordinal)
        if record.kind == "gen" and not retried:  # of the attempts of a gen the last one stands
            chain.append(record)
        at = record.request.parent
    return chain[::-1]


def _num_samples(record: Record) -> int:
    return int(getattr(record.source, "n", 1))


def _seed_of(seed: int, sample: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=8).digest(), "big") >> 1
