"""What a trainer, or whoever runs a server, asks of a running core: stand still, change the weights, hand memory back (rl W, Z).

    pause(policy) ──> stands still: nothing runs, nothing is launched, new requests queue ──> unpause(version) ──> goes on
                            │  swap, suspend, resume are for here

policy, of what is in flight:   finish   started requests end first, under the old weights; then it stands still
                                abort    all end now, queued ones too             recompute   tokens are kept, their KV is not
                                continue both are kept: what goes on under other weights says so (kv_mixed)
Sans-IO like the core, and called between two of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from phloem.runtime.cache.radix import Node
from phloem.runtime.errors import ConfigError, EngineBusyError, EngineSuspendedError, InvalidRequestError, StaleVersionError

if TYPE_CHECKING:
    from phloem.runtime.engine.core import EngineCore

__all__ = ["Control", "InFlight", "Standing"]

InFlight = Literal["finish", "abort", "recompute", "continue"]
MAX_REMEMBERED = 1024  # prefixes that a suspended engine can warm again


@dataclass(frozen=True, slots=True)
class Standing:
    """How the engine stands. still: paused, and nothing is left in flight."""

    version: int
    still: bool
    pausing: bool
    suspended: bool
    live: int


class Control:
    """Part of one EngineCore. `paused`: the core plans nothing.   `suspended`: nor does it take requests."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.paused = self.suspended = False
        self._pausing = False  # "finish" has been asked for, and started requests still run
        self._then: tuple[int | None] | None = None  # commit this version once they have ended
        self._prefixes: list[list[int]] = []  # token ids of what was hottest, when suspended

    # ---- standing still ------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """The core's next step has something to settle here."""
        return self._pausing or self._then is not None

    def standing(self) -> Standing:
        core = self._core
        return Standing(core.scheduler.version, self.paused, self._pausing, self.suspended, core.num_live)

    def pause(self, policy: InFlight | None = None) -> bool:
        """True: it stands still now. False: started requests end first. Raises EngineBusyError without a policy while any lives."""
        if policy is not None and policy not in get_args(InFlight):
            raise InvalidRequestError(
                f"policy is {policy!r}; expected 'finish', 'abort', 'recompute' or 'continue'.", param="in_flight"
            )
        core = self._core
        if policy is None and core.num_live:
            names = ", ".join(core.live_ids(8))
            raise EngineBusyError(
                f"{core.num_live} requests are under way ({names}); say what is to become of them: in_flight="
                "'finish', 'abort', 'recompute' or 'continue'."
            )
        core.land()  # may find a failed forward; its sequences are waiting then, and follow
        scheduler = core.scheduler
        if policy == "finish" and scheduler.any_started():
            scheduler.gate = self._pausing = True
            return False
        for q in sorted([*scheduler.running, *scheduler.waiting], key=lambda q: q.rank):
            if policy == "abort":
                scheduler.finish(q, "abort")
            elif policy == "recompute" and q.state == "running":
                scheduler.preempt(q)
        self.paused, self._pausing = True, False
        return True

    def unpause(self, version: int | None = None) -> int:
        """Go on; under a new version of the weights if one is given. The version that holds now.

        Raises StaleVersionError, and stands still, for one that is not newer; EngineSuspendedError while memory is handed back.
        """
        self._ensure_awake()
        if version is not None:
            self.check_version(version)
        if self._then is not None:  # a commit that waited for started requests: this one is it, whoever came first
            now, (waiting,) = self._core.scheduler.version, self._then
            version = max(now + 1, version or 0, waiting or 0)
            self._then = None
        if version is not None:
            self._core.scheduler.change_weights(version)
        self.paused = self._pausing = self._core.scheduler.gate = False
        return self._core.scheduler.version

    def commit(self, policy: InFlight | None = None, version: int | None = None) -> bool:
        """The weights have changed, or will have once started requests have ended ("finish"). True: the version has moved."""
        self._ensure_awake()
        if version is not None:
            self.check_version(version)
        if not self.pause(policy):
            self._then = (version,)
            return False
        self.unpause(self._core.scheduler.version + 1 if version is None else version)
        return True

    def drained(self) -> None:
        """From the core's step: no started request is left behind a closed gate."""
        if self._then is not None:
            self._pausing = False
            self.unpause()
        else:
            self.paused, self._pausing = True, False

    def check_version(self, version: int) -> None:
        now = self._core.scheduler.version
        if isinstance(version, bool) or not isinstance(version, int) or version <= now:
            raise StaleVersionError(f"version is {version!r}; the weights are at version {now}, and versions only grow.")

    # ---- weights -------------------------------------------------------------------------------------------------------

    def begin_update(
        self, staging: str = "full", partial: bool = False, promised: Mapping[str, Iterable[int]] | None = None
    ) -> None:
        self._weights().begin(staging, partial, promised)

    def load_weights(self, named: Iterable[tuple[str, Any]]) -> None:
        """Tensors of the update under way. With staging "none" the engine must stand still: they are written over what is served."""
        self._weights().load(named)

    def load_path(self, path: str) -> None:
        """Tensors from a folder or file of safetensors that this process can read."""
        self._weights().load_path(path)

    def load_bytes(self, blobs: Iterable[bytes]) -> None:
        """Tensors from safetensors in memory."""
        self._weights().load_bytes(blobs)

    def weight_values(self, name: str, count: int) -> list[float]:
        """The first values of a tensor as it is served."""
        values: list[float] = self._weights().read(name).flatten()[:count].tolist()
        return values

    def forget_update(self) -> None:
        self._weights().forget()

    def finish_update(self, version: int | None = None) -> int:
        """Everything has come: serve it, under the next version. The engine stands still, and goes on with it."""
        self._ensure_still("an update ends")
        now = self._core.scheduler.version + 1 if version is None else version
        self.check_version(now)
        weights = self._weights()
        model = weights.finish()
        if model is not None:
            self._core.executor.serve(model)  # type: ignore[attr-defined]
            weights.serve(model)
        return now if self.suspended else self.unpause(now)

    def digest(self) -> str:
        digest: str = self._weights().digest()
        return digest

    def read_weight(self, name: str) -> Any:
        return self._weights().read(name)

    def weight_names(self) -> dict[str, tuple[int, ...]]:
        names: dict[str, tuple[int, ...]] = self._weights().names
        return names

    # ---- memory --------------------------------------------------------------------------------------------------------

    def suspend(self, weights: bool = False) -> int:
        """Hand the pool's memory back, and with `weights` theirs: bytes that are free now. The engine stands still; idempotent."""
        if self.suspended:
            return 0
        self._ensure_still("suspending")
        core, scheduler = self._core, self._core.scheduler
        release = getattr(core.executor, "discard_kv", None)
        if release is None:
            raise ConfigError("this engine's device cannot hand its KV pool back; close the engine instead.", param="suspend")
        if weights:
            self._weights().ensure_discardable()
        for q in list(scheduler.running):
            scheduler.preempt(q)
        self._prefixes = self._hottest()
        scheduler.cache.reset()
        scheduler.queue.rebuild()
        freed: int = release()
        if weights:
            freed += self._weights().discard()
        self.suspended = True
        return freed

    def resume(self) -> list[list[int]]:
        """Take the memory again and go on. Token ids of the prefixes that were cached, hottest first; idempotent."""
        if not self.suspended:
            return []
        self._core.executor.restore_kv()  # type: ignore[attr-defined]
        self.suspended = False
        self.unpause()
        prefixes, self._prefixes = self._prefixes, []
        return prefixes

    def _hottest(self) -> list[list[int]]:
        """Every cached path to a leaf under the weights served, the one used last first."""
        tree, version = self._core.scheduler.cache.tree, self._core.scheduler.version
        leaves = [
            node for node in tree.nodes() if node.pages and not node.children and self._is_common(tree.path(node), version)
        ]
        leaves.sort(key=lambda node: -node.used)
        paths = (b"".join(node.tokens for node in tree.path(leaf)) for leaf in leaves[:MAX_REMEMBERED])
        return [np.frombuffer(path, np.int32).tolist() for path in paths]

    def _is_common(self, path: list[Node], version: int) -> bool:
        """Of the namespace that all share: an adapter's prefixes are asked for again by those who know it."""
        root = path[0].parent if path else None
        return root is not None and root.name == ("", version)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _ensure_still(self, what: str) -> None:
        if not self.paused:
            raise EngineBusyError(f"{what} needs an engine that stands still: pause it first.")

    def _ensure_awake(self) -> None:
        if self.suspended:
            raise EngineSuspendedError("the engine's memory was handed back; resume() first.")

    def _weights(self) -> Any:
        weights = getattr(self._core.executor, "weights", None)
        if weights is None:
            raise ConfigError("this engine was made without weights that can change.", param="weights")
        return weights
