"""RolloutEngine: rollouts from the weights that a trainer trains, in its process. A facade over engine.sync; all is Requests and Control.

    attach(module) ─► shared storage ─┐                                  ┌─ rollout(ids, sampling, n) ─► RolloutBatch
    RolloutEngine(path) ─► its own ───┴─► client ─ core ─ executor ──────┼─ training() / commit() / update()      who writes
                                                                         └─ suspend() / resume()
One gate: forwards read, `training` and `update` write; the core stands still while they do. `rollout` steps in the caller's thread,
`submit` adds one thread. No subprocess, socket, signal handler or atexit.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Unpack

from torch import Tensor, nn

from phloem.runtime.backends import create_backend
from phloem.runtime.config import make_config
from phloem.runtime.engine.build import EngineOptions, Parts, assemble, build, detect_hardware
from phloem.runtime.engine.calls import check_timeout
from phloem.runtime.engine.constraint import GrammarOptions, grammar_spec, without_ignored_stops
from phloem.runtime.engine.control import InFlight
from phloem.runtime.engine.sync import Engine
from phloem.runtime.errors import (
    EngineBusyError,
    EngineSuspendedError,
    InvalidRequestError,
    RequestTimeoutError,
    StaleVersionError,
    UncommittedWeightsError,
)
from phloem.runtime.request import GrammarSpec, Request, SamplingParams, Support, TokenLogprob
from phloem.runtime.rl.collect import SampleSink
from phloem.runtime.rl.programs import Environment, roll_programs
from phloem.runtime.rl.requests import Rollouts, as_sampling
from phloem.runtime.rl.sample import RolloutBatch
from phloem.runtime.rl.share import Attached, Share, ensure_module
from phloem.runtime.rl.tokens import as_tokenizer
from phloem.runtime.rl.update import Update
from phloem.runtime.rl.verify import Verification, verify_module
from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["Handle", "RolloutEngine", "RolloutStats"]


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """shared_bytes: read from the trainer's storage; copied_bytes: kept beside it, and copied: name -> why.

    commit_seconds: what the last commit took.   engine: the counters of the engine itself.
    """

    version: int
    label: str
    shared_bytes: int
    copied_bytes: int
    copied: Mapping[str, str]
    commit_seconds: float
    engine: Any


class Handle:
    """A submitted rollout. Ends in one RolloutBatch, whatever happens to it."""

    def __init__(self, engine: RolloutEngine, rollouts: Rollouts) -> None:
        self._engine, self._rollouts = engine, rollouts

    @property
    def done(self) -> bool:
        return self._rollouts.done()

    def result(self, timeout: float | None = None) -> RolloutBatch:
        """Wait for it. Raises RequestTimeoutError (it goes on), or the first Sample's error under on_error="raise"."""
        seconds = check_timeout(timeout)
        if not self._rollouts.wait(seconds):
            raise RequestTimeoutError(f"the rollout was not done after timeout={seconds} s; it goes on.", param="timeout")
        return self._rollouts.batch()

    def cancel(self) -> None:
        """Abort what is unfinished: those Samples end as "abort", with what they have."""
        self._engine._client.abort(self._rollouts.live_ids())


class RolloutEngine:
    """See the module's drawing.

    model: a checkpoint as for Engine (None: the embedded one), with weights of the engine's own, changed by `update`.
    staging: "full" keeps a second buffer, so that a failed update leaves the old weights served; "none" writes in place.
    options: as for Engine.   May be used from several threads; not in a forked child (EngineClosedError).
    """

    def __init__(
        self, model: str | None = None, *, staging: Literal["full", "none"] = "full", on_load: Callable[[str], None] | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:  # fmt: skip
        self._set_up(build(make_config(model, **options), on_load), staging, None)

    @classmethod
    def attach(
        cls, module: nn.Module, *, tokenizer: Any = None, share: Share = "auto", staging: Literal["full", "none"] = "full",
        **options: Unpack[EngineOptions],
    ) -> RolloutEngine:  # fmt: skip
        """An engine over a live module's weights.

        share: "auto" reads the module's own storage where it can, "require" raises where it cannot, "copy" never does; a copied
        module is read anew at each commit.   tokenizer: of transformers or tokenizers, a directory, or None: ids alone, without
        grammars and stop strings.   dtype: computes in it; other than the Parameters' is a copy.   options: as for Engine.
        Fused parts are re-homed (share.py): do it before torch.compile. Raises WeightLayoutError with every offender.
        """
        if share not in ("auto", "require", "copy"):
            raise InvalidRequestError(f"share is {share!r}; expected 'auto', 'require' or 'copy'.", param="share")
        dtype = options.pop("dtype", None)
        attached = Attached.examine(ensure_module(module), share, None if dtype in (None, "auto") else dtype)
        config = make_config(None, **options)
        name = "cpu" if config.device == "auto" else config.device
        backend = create_backend(name, threads=config.threads or detect_hardware().cores)
        found = as_tokenizer(tokenizer, attached.config.vocabulary)
        parts = assemble(config, backend, lambda resolved: attached.pack(backend, resolved, share), attached.opened, found)
        self = cls.__new__(cls)
        self._set_up(parts, staging, attached)
        return self

    @classmethod
    def from_parts(cls, parts: Parts) -> RolloutEngine:
        """Over ready-made parts: tests use fakes."""
        self = cls.__new__(cls)
        self._set_up(parts, "full", None)
        return self

    def _set_up(self, parts: Parts, staging: Literal["full", "none"], attached: Attached | None) -> None:
        self._core: Any = parts.core
        self._engine = Engine.from_parts(parts)
        self._client = self._engine._client
        self._attached, self._staging = attached, staging
        self._text = parts.text
        self._numbers = itertools.count()
        self._writer: str = ""  # what holds the gate
        self._thread: threading.Thread | None = None
        self._guard = threading.Lock()
        self._commit_seconds = 0.0
        self.label = ""
        self.tokenizer = parts.tokenizer
        self.resolved = parts.resolved

    # ---- rollouts ------------------------------------------------------------------------------------------------------

    def rollout(
        self, prompts: Any, sampling: Any = None, n: int = 1, *,
        seed: int | None = None, group_ids: Sequence[int | str] | None = None, deadline: float | None = None, min_groups: int | None = None,
        max_staleness: int | None = None, on_error: Literal["raise", "return"] = "raise", off_policy: bool = False,
        **constraint: Unpack[GrammarOptions],
    ) -> RolloutBatch:  # fmt: skip
        """n Samples of each prompt, in order, none missing; in the caller's thread.

        prompts: lists of token ids, or Samples to go on with where they are partial (the others come back as they are).
        seed: all draws follow from it (None: one is drawn, and reported).   group_ids: one a prompt; by default adjacent equal
        prompts are a group.   deadline: seconds, min_groups: complete groups, after which the rest comes back partial.
        max_staleness: refuse to go on with what began so many versions ago.   off_policy: allow penalties and logit_bias, which no
        trainer recomputes.   constraint: GrammarOptions, for every Sample's output.
        rollout(program, args, n): n runs of a program of the language for each of `args` (mappings of its arguments, or tuples), a Sample
        for each branch that drew (rl T4); its gens say how they draw, the batch's `values` what the runs returned.
        Raises the requests' errors, UncommittedWeightsError, EngineBusyError inside `training` or `update`, EngineSuspendedError.
        """
        if isinstance(prompts, Environment):
            given = {
                "group_ids": group_ids,
                "deadline": deadline,
                "min_groups": min_groups,
                "max_staleness": max_staleness,
                **constraint,
            }
            for name, value in given.items():
                if value is not None:
                    raise InvalidRequestError(f"{name} says nothing to a program: its gens and its body do.", param=name)
            self._ensure_readable()
            return roll_programs(
                self, prompts, sampling, n, secrets.randbits(63) if seed is None else seed, on_error, off_policy
            )
        rollouts = self._prepare(
            prompts, sampling, n, _spec(constraint), seed, group_ids, max_staleness, on_error, off_policy, min_groups
        )
        self._ensure_readable()
        seconds = check_timeout(deadline)
        started = time.monotonic()
        try:
            self._client.submit(rollouts.entries(), atomic=on_error == "raise")
            self._client.run(rollouts.enough, None if seconds is None else started + seconds)
        finally:
            self._client.abandon(rollouts.live_ids())
        return rollouts.batch()

    def submit(
        self, prompts: Any, sampling: SamplingParams | Mapping[str, Any] | None = None, n: int = 1, *,
        seed: int | None = None, group_ids: Sequence[int | str] | None = None, max_staleness: int | None = None,
        on_error: Literal["raise", "return"] = "raise", off_policy: bool = False, **constraint: Unpack[GrammarOptions],
    ) -> Handle:  # fmt: skip
        """`rollout`, run by a thread of the engine's: the same Samples, from `handle.result()`. Inside `training` it waits its turn."""
        rollouts = self._prepare(
            prompts, sampling, n, _spec(constraint), seed, group_ids, max_staleness, on_error, off_policy, None
        )
        self._ensure_committed()
        self._ensure_thread()
        self._client.submit(rollouts.entries(), atomic=on_error == "raise")
        return Handle(self, rollouts)

    async def arollout(
        self, prompts: Any, sampling: SamplingParams | Mapping[str, Any] | None = None, n: int = 1, **options: Any
    ) -> RolloutBatch:
        """`rollout`, awaited. Cancelled, it aborts."""
        handle = self.submit(prompts, sampling, n, **options)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        handle._rollouts.on_done(lambda: _told(loop, ended))
        try:
            await ended.wait()
        except asyncio.CancelledError:
            handle.cancel()
            raise
        return handle._rollouts.batch()

    def open_session(
        self, prompt_ids: Sequence[int] | None = None, *, messages: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None, template: str | None = None, seed: int | None = None, ttl: float = 600.0,
    ) -> Any:  # fmt: skip
        """A conversation as a list of ids that only grows (rl T1): give its first ids, or messages for the chat template."""
        from phloem.runtime.rl.session import Session

        return Session.open(self, prompt_ids, messages, tools, template, seed, ttl)

    # ---- score and verify ----------------------------------------------------------------------------------------------

    def score(
        self, sequences: Sequence[Sequence[int]], *, from_position: int | Sequence[int] = 1, temperature: float = 1.0,
        support: Sequence[Sequence[Support | None]] | None = None,
    ) -> list[list[TokenLogprob]]:  # fmt: skip
        """Both logprobs of given ids, through the path that decodes: one list a sequence, one entry a position from `from_position` on.

        from_position: 1 or more, one for all or one a sequence.   support: for each of those positions what could be drawn
        (None: everything). Equal to a rollout's logprobs bit for bit, given its temperature and supports.
        """
        self._ensure_readable()
        starts = [from_position] * len(sequences) if isinstance(from_position, int) else list(from_position)
        if len(starts) != len(sequences) or (support is not None and len(support) != len(sequences)):
            raise InvalidRequestError("from_position and support need one entry a sequence.", param="from_position")
        sinks = []
        for i, ids in enumerate(sequences):
            if not 1 <= starts[i] < len(ids):
                raise InvalidRequestError(
                    f"from_position is {starts[i]} for sequence {i} of {len(ids)} ids; expected 1 to {len(ids) - 1}.",
                    param="from_position",
                )
            sampling = SamplingParams(max_tokens=0, temperature=temperature, logprobs="both", prompt_logprobs=starts[i])
            supports = () if support is None else tuple(support[i])
            request = Request(id=self._name(), token_ids=tuple(int(t) for t in ids), sampling=sampling, supports=supports)
            sinks.append(SampleSink(request, i, self.version))
        try:
            self._client.submit([(s.request, s) for s in sinks], atomic=True)
            self._client.run(lambda: all(s.over for s in sinks))
        finally:
            self._client.abandon([s.request.id for s in sinks if not s.over])
        for s in sinks:
            if s.sample is not None and s.sample.error is not None:
                raise s.sample.error
        return [s.prompt_logprobs for s in sinks]

    def verify(
        self, batch: RolloutBatch | None = None, *, tokens: int = 64, tol: float | None = None, autocast: Any = None, pad_id: int = 0,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> Verification:  # fmt: skip
        """Compare rollouts with the attached module's own forward, and audit the sharing.

        batch: Samples to compare; None draws some of `tokens` tokens.   autocast: a context manager around the module's forward, the
        one that training uses.   tol: MismatchError, with the worst token, where a logprob differs by more.
        """
        attached = self._need_module("verify")
        self._ensure_readable()
        attached.audit()
        if batch is None:
            starts = prompts if prompts is not None else [[1], [min(2, self.resolved.max_context)]]
            batch = self.rollout(starts, SamplingParams(max_tokens=tokens, ignore_eos=True), seed=0)
        return verify_module(attached.module, batch, tol=tol, autocast=autocast, pad_id=pad_id)

    def digest(self) -> str:
        """A checksum of the weights served: equal weights, equal digest, shared or copied."""
        digest: str = self._control("digest")
        return digest

    def state_dict(self) -> dict[str, Tensor]:
        """The weights served, float32, under a checkpoint's names."""
        return {name: self._control("read_weight", name) for name in self._control("weight_names")}

    def explain(self, ids: Sequence[int]) -> Any:
        """How much of these ids the cache would give under the current weights (engine R9)."""
        return self._engine.explain(list(ids))

    # ---- weights -------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Of the weights served. It only grows."""
        version: int = self._core.weights_version
        return version

    @contextlib.contextmanager
    def training(self, in_flight: InFlight = "finish", version: int | None = None) -> Iterator[None]:
        """Weights may move inside: no forward of the engine's runs. A clean exit commits; after an exception nothing is committed.

        in_flight: what becomes of requests under way (rl W6); by default they end first.
        """
        self._need_module("training")
        self._stand_still(in_flight, "training")
        moved = False
        try:
            yield
            moved = True
        finally:
            self._go_on(lambda: self._commit_still(version) if moved else None)

    def commit(self, version: int | None = None, in_flight: InFlight | None = None, label: str = "") -> int:
        """The module's weights have changed: serve them, under the next version or the one given. Moves no data if they are shared.

        The version held already is a no-op if nothing changed, StaleVersionError if something did. in_flight: as for `training`;
        None raises EngineBusyError while requests are under way. Raises WeightLayoutError if sharing was lost.
        """
        attached = self._attached
        if attached is not None and version is not None and version == self.version:
            attached.audit()
            if attached.changed() or (not attached.is_shared and self._differs(attached)):
                raise StaleVersionError(
                    f"version {version} is what is served, and the weights have changed since. Commit a newer one."
                )
            self.label = label or self.label
            return version
        self._stand_still(in_flight, "commit")
        self._go_on(lambda: self._commit_still(version))
        self.label = label or self.label
        return self.version

    @contextlib.contextmanager
    def update(
        self, version: int | None = None, in_flight: InFlight = "finish", partial: bool = False,
        names: Mapping[str, Sequence[int]] | None = None,
    ) -> Iterator[Update]:  # fmt: skip
        """Load other weights: `u.load(named)`, any number of calls; all or nothing (rl W4). Rollouts of this thread must wait.

        With staging="full" requests in flight go on under the old weights while tensors arrive, and `in_flight` applies at the end,
        between two steps. partial: names that do not come keep their values.   names: for staging="none", every name and shape, first.
        """
        if self._writer:
            raise EngineBusyError(f"an update cannot begin inside {self._writer}.")
        self._control("begin_update", self._staging, partial, names)
        in_place = self._staging == "none"
        if in_place:
            self._stand_still(in_flight, "update")
        self._writer = "update"
        u = Update(lambda some: self._control("load_weights", some))
        try:
            yield u
            self._writer = ""
            if not in_place:
                self._stand_still(in_flight, "update")
            u.version = self._control("finish_update", version)
        except BaseException:
            self._control("forget_update")
            if self._core.control("standing").still and not self._core.control("standing").suspended:
                self._control("unpause")
            raise
        finally:
            self._writer = ""

    # ---- memory and life -----------------------------------------------------------------------------------------------

    def suspend(self, what: set[str] | frozenset[str] = frozenset({"kv"}), *, in_flight: InFlight = "finish") -> int:
        """Hand the KV pool's memory back; the bytes that are free now. Idempotent. `{"kv", "weights"}`: theirs too, of copies.

        Token ids of what was cached stay. While suspended everything that would run raises EngineSuspendedError.
        """
        what = frozenset(what)
        if "kv" not in what or not what <= {"kv", "weights"}:
            raise InvalidRequestError(f"suspend takes {{'kv'}} or {{'kv', 'weights'}}, not {sorted(what)}.", param="what")
        if "weights" in what and self._attached is not None and self._attached.is_shared:
            raise InvalidRequestError("these weights are the trainer's own; only copies can be handed back.", param="what")
        if self._core.control("standing").suspended:
            return 0
        self._stand_still(in_flight, "suspend")
        self._writer = ""
        try:
            freed: int = self._control("suspend", "weights" in what)
        except BaseException:
            self._control("unpause")
            raise
        return freed

    def resume(self, warm: int = 0) -> int:
        """Take the memory again. warm: so many of the prefixes that were cached last are computed anew. Idempotent; their number."""
        prefixes = self._control("resume")[:warm]
        if prefixes:
            sampling = SamplingParams(max_tokens=0)
            sinks = [
                SampleSink(Request(id=self._name(), token_ids=tuple(ids), sampling=sampling), i, 0)
                for i, ids in enumerate(prefixes)
            ]
            self._client.submit([(s.request, s) for s in sinks], atomic=False)
            self._client.run(lambda: all(s.over for s in sinks))
        return len(prefixes)

    def pause(self, in_flight: InFlight = "finish") -> None:
        """Stand still until `unpause`; what is submitted meanwhile waits."""
        self._stand_still(in_flight, "pause")
        self._writer = ""

    def unpause(self) -> None:
        self._control("unpause")

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End what is under way: all of it, or the requests named. Their Samples end as "abort", with the tokens they have."""
        self._client.abort(self._core.live_ids(1 << 30) if ids is None else ids)
        if self._thread is None:
            with contextlib.suppress(EngineBusyError):
                self._control("standing")

    def flush(self) -> int:
        """Forget every cached prefix; pages freed. Never needed after a commit."""
        return self._engine.flush()

    def check(self) -> None:
        self._engine.check()

    def stats(self) -> RolloutStats:
        a = self._attached
        return RolloutStats(
            self.version, self.label, a.shared_bytes if a else 0, a.copied_bytes if a else 0, dict(a.copied) if a else {},
            self._commit_seconds, self._engine.stats(),
        )  # fmt: skip

    def close(self) -> None:
        """Free the pool and what was copied; the module stays as it is. May be called again."""
        self._engine.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        what = type(self._attached.module).__name__ if self._attached else self._engine.config.model or "embedded model"
        return f"<phloem.RolloutEngine {what}, weights at version {self.version}>"

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        return f"rl{next(self._numbers)}"

    def _control(self, verb: str, *args: Any) -> Any:
        self._client.ensure_usable()
        future = self._client.call("control", verb, *args)
        self._client.run(future.done)
        return future.result()

    def _need_module(self, what: str) -> Attached:
        if self._attached is None:
            raise InvalidRequestError(
                f"{what} needs a module: RolloutEngine.attach(module). This engine has weights of its own.", param="module"
            )
        return self._attached

    def _prepare(
        self, prompts: Any, sampling: Any, n: int, spec: GrammarSpec | None, seed: int | None, group_ids: Sequence[int | str] | None,
        max_staleness: int | None, on_error: str, off_policy: bool, min_groups: int | None,
    ) -> Rollouts:  # fmt: skip
        self._client.ensure_usable()
        params = without_ignored_stops(as_sampling(sampling, off_policy), spec)
        if params.stop and not isinstance(self.tokenizer, Tokenizer):
            raise InvalidRequestError("stop strings need a tokenizer: pass tokenizer= to attach.", param="stop")
        collector = self._text.collector if params.stop else None
        return Rollouts.of(
            prompts, params, n, spec, seed, group_ids, on_error=on_error, min_groups=min_groups, version=self.version,
            max_staleness=max_staleness, name=self._name, collector=collector,
        )  # fmt: skip

    def _ensure_committed(self) -> None:
        if self._attached is not None and not self._writer and self._attached.changed():
            raise UncommittedWeightsError(
                "the module's weights have changed since the last commit: new tokens would mix with keys and values of the old ones. "
                "Change them inside `with engine.training():`, or call engine.commit()."
            )

    def _ensure_readable(self) -> None:
        self._client.ensure_usable()
        if self._writer:
            raise EngineBusyError(f"inside {self._writer} nothing can run: the weights may be moving. Leave the block first.")
        if self._core.control("standing").suspended:
            raise EngineSuspendedError("the engine's memory was handed back; call resume() first.")
        self._ensure_committed()

    def _ensure_thread(self) -> None:
        with self._guard:
            if self._thread is None:
                # The client alone: a forgotten engine can still be collected, and its finalizer ends the thread.
                self._thread = threading.Thread(target=self._client.serve, name="phloem-rollouts", daemon=True)
                self._thread.start()

    def _stand_still(self, in_flight: InFlight | None, what: str) -> None:
        if self._writer:
            raise EngineBusyError(f"{what} cannot begin inside {self._writer}.")
        if not self._control("pause", in_flight):
            core = self._core
            self._client.run(lambda: core.control("standing").still)
        self._writer = what

    def _go_on(self, last: Callable[[], None]) -> None:
        """`last` while it stands still; whatever comes of it, the engine goes on."""
        try:
            last()
        finally:
            self._writer = ""
            standing = self._core.control("standing")
            if standing.still and not standing.suspended:
                self._control("unpause")

    def _commit_still(self, version: int | None) -> None:
        started, attached = time.perf_counter(), self._attached
        if attached is not None and not attached.is_shared:
            self._control("begin_update", "full", False, None)
            try:
                for pair in attached.tensors():
                    self._control("load_weights", [pair])
                self._control("finish_update", version)
            except BaseException:
                self._control("forget_update")
                raise
        else:
            if attached is not None:
                attached.audit()
            self._control("unpause", self.version + 1 if version is None else version)
            if attached is not None:
                attached.committed()
        self._commit_seconds = time.perf_counter() - started

    def _differs(self, attached: Attached) -> bool:
        return any(not _same(self._control("read_weight", name), tensor) for name, tensor in attached.tensors())


def _same(one: Tensor, other: Tensor) -> bool:
    return bool((one == other.float()).all())


def _told(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(ended.set)


def _spec(constraint: Mapping[str, Any]) -> GrammarSpec | None:
    spec = grammar_spec(**constraint)
    if spec is not None and spec.open_end:
        raise InvalidRequestError("open_end drops tokens that were drawn; a rollout keeps every one of them.", param="open_end")
    return spec
