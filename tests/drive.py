"""An EngineCore over the scripted device, and what its deltas said: `with_core(...)`, then `run(ids)`, `submit`, `step`, `finish`.

Every step is followed by `core.check()`; a delta after the last one, or a fault of the device, is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.errors import PhloemError, from_wire
from phloem.runtime.request import OutputDelta, Request, SamplingParams, TokenLogprob, Usage
from tests.fakes import PatternGrammars, ScriptedExecutor

__all__ = ["Driver", "Said"]

EOS = 0


@dataclass
class Said:
    """What the deltas said of one request. steps: of each token, the step that emitted it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    last: OutputDelta | None = None

    @property
    def finish(self) -> str | None:
        return self.last.finish_reason if self.last else None

    @property
    def usage(self) -> Usage:
        assert self.last is not None and self.last.usage is not None
        return self.last.usage

    @property
    def error(self) -> PhloemError:
        assert self.last is not None and self.last.error is not None, self.last
        e = self.last.error
        return from_wire(e.name, e.message, e.param, e.code)


class Driver:
    """kwargs: fields of CoreSettings. Defaults: pages of 4, a pool of 256, 64 ids, one of them EOS."""

    def __init__(
        self,
        *,
        grammars: PatternGrammars | None = None,
        device: dict[str, Any] | None = None,
        check: bool = True,
        **settings: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "page_size": 4, "num_pages": 256, "max_context": 4096, "vocab_size": 64, "max_running": 16,
            "max_step_tokens": 64, "eos_ids": frozenset((EOS,)), "seed": 0,
        }  # fmt: skip
        defaults |= settings
        defaults.setdefault("width", defaults["vocab_size"])
        self.settings = CoreSettings(**defaults)
        s = self.settings
        options: dict[str, Any] = {"salt": self._salt, **(device or {})}
        self.device = ScriptedExecutor(s.page_size, s.num_pages, s.width, **options)
        self.core = EngineCore(s, self.device, grammar=grammars)
        self.said: dict[str, Said] = {}
        self.namespaces: dict[str, str] = {}
        self.steps = self.count = 0
        self.checks = check

    def _salt(self, request_id: str) -> tuple[str, int]:
        return self.namespaces.get(request_id, ""), self.core.weights_version

    # -- requests

    def request(
        self, ids: Sequence[int], *, id: str | None = None, request: dict[str, Any] | None = None, **sampling: Any
    ) -> Request:
        sampling.setdefault("temperature", 0.0)
        sampling.setdefault("ignore_eos", True)
        self.count += 1
        return Request(id=id or f"q{self.count}", token_ids=tuple(ids), sampling=SamplingParams(**sampling), **(request or {}))

    def add(self, request: Request) -> str:
        self.namespaces[request.id] = request.namespace
        self.core.add(request)
        return request.id

    def submit(self, ids: Sequence[int], **kwargs: Any) -> str:
        return self.add(self.request(ids, **kwargs))

    def run(self, ids: Sequence[int], **kwargs: Any) -> Said:
        """One request, to its end; others go on meanwhile."""
        name = self.submit(ids, **kwargs)
        while name not in self.said or self.said[name].last is None:
            self.step()
        return self.said[name]

    # -- the loop

    def step(self, now: float | None = None) -> list[OutputDelta]:
        self.steps += 1
        deltas = self.core.step(float(self.steps) if now is None else now)
        self.hear(deltas)
        if self.checks:
            self.core.check()
        self.assert_sound()
        return deltas

    def hear(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            said = self.said.setdefault(delta.request_id, Said())
            assert said.last is None, "S6: a delta after the last one"
            said.tokens += delta.token_ids
            said.steps += [self.steps] * len(delta.token_ids)
            said.logprobs += delta.logprobs
            said.prompt_logprobs += delta.prompt_logprobs
            if delta.finish_reason is not None:
                said.last = delta

    def assert_sound(self) -> None:
        assert not self.device.faults, self.device.faults[0]
        if self.core.last_violation is not None:
            raise self.core.last_violation

    def finish(self, limit: int = 100_000) -> dict[str, Said]:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "no progress"
        return self.said

    def assert_idle(self) -> None:
        """P2 at rest: all pages free or in the tree, nothing pinned, all slots free."""
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.pages_live) == (0, 0, 0)
        assert stats.pages_free + stats.pages_tree == self.settings.num_pages
        assert len(self.core.scheduler.slots) == self.settings.max_running
        self.core.check()

    def assert_no_leak(self) -> None:
        self.assert_idle()
        self.core.flush()
        assert self.core.stats().pages_free == self.settings.num_pages and not self.core.scheduler.cache.tree.roots
