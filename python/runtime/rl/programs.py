"""Programs as environments (rl T4): what a branch of a run drew, as a Sample. Knows a protocol, and imports nothing of the language.

    trajectory.ids   [ system … user … | drawn EOS | tool text | drawn ]       prompt: what stands before the first draw
    loss_mask                            1 1 1 1     0 0 0       1 1           output: up to the last drawn id

An id counts where it was drawn, in the place where it was drawn: one that is not on the path any more (a stop string cut from the
text inside a token, a retry, a second sample) would be a draw that nobody trains on, so `to_sample` raises and names the gen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import OutputDelta, Request
from phloem.runtime.rl.collect import SampleSink
from phloem.runtime.rl.requests import MAX_N, as_sampling
from phloem.runtime.rl.sample import RolloutBatch, Sample, Span

if TYPE_CHECKING:
    from phloem.runtime.rl.engine import RolloutEngine

__all__ = ["Environment", "roll_programs", "to_sample"]

_COLUMNS = ("logprobs_sampled", "logprobs_model", "support", "support_logmass", "forced", "loss_mask")
_NOT_DRAWN: dict[str, Any] = {
    "logprobs_sampled": 0.0, "logprobs_model": 0.0, "support": None, "support_logmass": 0.0, "forced": False, "loss_mask": 0,
}  # fmt: skip


class Draw(Protocol):
    """One gen. attempt: of its retries.   num_samples: its n."""

    request_id: str
    name: str | None
    at: str
    attempt: int
    num_samples: int


class Trajectory(Protocol):
    """One branch of one run: the ids of its path, and the gens on it, first to last."""

    place: int
    sample: int
    branch: tuple[int, ...]
    ids: tuple[int, ...]
    draws: tuple[Any, ...]
    value: Any
    error: BaseException | None


@runtime_checkable
class Environment(Protocol):
    """What `rollout` takes in place of prompts: a program of phloem.lang, or anything that runs on an engine and says what it drew."""

    def rollouts(
        self, engine: Any, args: Sequence[Any], n: int, seed: int, tap: Any, on_error: Literal["raise", "return"]
    ) -> Sequence[Trajectory]: ...


class _Tee:
    """A sink before a sink: ours keeps the numbers, the program's goes on as it would."""

    __slots__ = ("_ours", "_then")

    def __init__(self, ours: SampleSink, then: Any) -> None:
        self._ours, self._then = ours, then

    def push(self, delta: OutputDelta) -> int | None:
        self._ours.push(delta)
        stopped: int | None = self._then.push(delta)
        return stopped

    def fail(self, error: Exception) -> None:
        self._ours.fail(error)
        self._then.fail(error)


class Tap:
    """Makes a rollout's request of each gen, and keeps what it drew. drawn: request id -> the sink, which has its Sample."""

    def __init__(self, engine: RolloutEngine, off_policy: bool) -> None:
        self._engine, self._off_policy = engine, off_policy
        self.drawn: dict[str, SampleSink] = {}

    def rewrite(self, request: Request) -> Request:
        """T4: both logprobs, stop strings kept, no open end. Raises InvalidRequestError for what no trainer recomputes (L5)."""
        plain = msgspec.structs.replace(request.sampling, keep_stop=True, prompt_logprobs=None, top_logprobs=0)
        grammar = request.grammar
        if grammar is not None and grammar.open_end:
            grammar = msgspec.structs.replace(grammar, open_end=False)
        return msgspec.structs.replace(request, sampling=as_sampling(plain, self._off_policy), grammar=grammar)

    def sink(self, request: Request, then: Any) -> _Tee:
        collector = self._engine._text.collector(request) if request.sampling.stop else None
        ours = self.drawn[request.id] = SampleSink(request, 0, self._engine.version, collector=collector)
        return _Tee(ours, then)


def roll_programs(
    engine: RolloutEngine, program: Environment, args: Any, n: int, seed: int, on_error: Literal["raise", "return"], off_policy: bool
) -> RolloutBatch:  # fmt: skip
    """n runs of `program` for each of `args`: a Sample for each branch that drew; runs of the same arguments are a group."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_N:
        raise InvalidRequestError(f"n is {n!r}; expected an integer from 1 to {MAX_N}.", param="n")
    if isinstance(args, (str, Mapping)) or not isinstance(args, Sequence) or not args:
        raise InvalidRequestError(
            "a rollout of a program takes a list of its arguments: mappings of names, or tuples.", param="args"
        )
    tap = Tap(engine, off_policy)
    samples, values, counts = list[Sample](), list[Any](), dict[int, int]()
    for found in program.rollouts(engine._engine, list(args), n, seed, tap, on_error):
        try:
            sample = _failed(found.error) if found.error is not None else to_sample(found, tap.drawn)
        except InvalidRequestError as error:
            if on_error == "raise":
                raise
            sample = _failed(error)
        index = counts.get(found.place, 0)
        counts[found.place] = index + 1
        sample.group_id, sample.sample_index = found.place, index
        samples.append(sample)
        values.append(found.value)
    return RolloutBatch(samples, {"output_tokens": sum(sum(s.loss_mask) for s in samples)}, values)


def to_sample(found: Trajectory, drawn: Mapping[str, Any]) -> Sample:
    """The branch as one Sample. drawn: request id -> what has that gen's Sample as `.sample`.

    Raises InvalidRequestError, naming the gen, where a drawn id is not on the path, or temperatures differ.
    """
    if not found.draws:
        raise InvalidRequestError("this run drew no token, so there is nothing to train on: it has no gen.", param="program")
    ids = list(found.ids)
    columns: dict[str, Any] = {name: [] for name in _COLUMNS}
    first = at = len(drawn[found.draws[0].request_id].sample.prompt_ids)
    spans, last, mixed = list[Span](), Sample(prompt_ids=[]), False
    for i, draw in enumerate(found.draws):
        turn: Sample = drawn[draw.request_id].sample
        if draw.attempt or draw.num_samples > 1:
            what = "was tried again, and kept by its check" if draw.attempt else f"drew n={draw.num_samples} at once"
            raise _left(draw, f"it {what}. Give such ids a branch of their own: fork, and let the reward choose")
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.output_ids)
        if i == len(found.draws) - 1 and end > len(ids):
            ids += turn.output_ids[len(ids) - start :]  # nothing was appended behind it: the token that ended it
        if start < at or ids[:start] != turn.prompt_ids or ids[start:end] != turn.output_ids:
            raise _left(draw, "what stands there now is not what it drew. A token that ended it must be followed by itself (as a "
                              "template's closing is), and a stop string must end with a token")  # fmt: skip
        if i and turn.temperature != last.temperature:
            raise InvalidRequestError(
                f"{draw.at}: gen {draw.name!r} was drawn at temperature {turn.temperature}, another of its path at {last.temperature}; a Sample "
                "carries one.", param="temperature",
            )  # fmt: skip
        for name, values in columns.items():
            values += [_NOT_DRAWN[name]] * (start - at)
            values += getattr(turn, name)
        spans += [Span(s.start + start - first, s.end + start - first, s.version) for s in turn.spans]
        at, last, mixed = end, turn, mixed or turn.kv_mixed
    return Sample(
        prompt_ids=ids[:first], output_ids=ids[first:at], finish=last.finish, spans=tuple(spans), kv_mixed=mixed, seed=last.seed,
        version_at_submit=drawn[found.draws[0].request_id].sample.version_at_submit, temperature=last.temperature,
        cached_tokens=drawn[found.draws[0].request_id].sample.cached_tokens, partial=last.partial, **columns,
    )  # fmt: skip


def _left(draw: Draw, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{draw.at}: ids that gen {draw.name!r} drew are not on its path: {why}.", param="program", code="drawn_ids_left"
    )


def _failed(error: BaseException) -> Sample:
    made = error if isinstance(error, Exception) else RuntimeError(str(error))
    return Sample(prompt_ids=[], finish="error", error=made)
