"""Factories for engine processes of tests: the real core over the scripted device, started without torch in half a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from phloem.runtime.config import Hardware, make_config, resolve
from phloem.runtime.engine import wire
from phloem.runtime.engine.child import Made, Report
from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.errors import ConfigError, ModelLoadError
from phloem.runtime.step import StepPlan
from tests.fakes import ScriptedExecutor, ScriptedTicket

SCRIPTED = "tests.runtime.engine.child_parts:scripted"
WIDTH = 128


class Paused(ScriptedExecutor):
    """pause: seconds a step takes.   dies_at: the launch that raises what no step may raise.   broken: no reset helps."""

    pause = 0.0
    dies_at = 0
    breaks_at = 0

    def launch(self, plan: StepPlan) -> ScriptedTicket:
        time.sleep(self.pause)
        if self.breaks_at and self.launches + 1 >= self.breaks_at:
            self.fail_next = RuntimeError("the device is gone")
        return super().launch(plan)

    def reset(self) -> None:
        if self.breaks_at:
            raise RuntimeError("no device to reset")
        super().reset()


def scripted(options: Mapping[str, Any], report: Report) -> Made:
    """options: fields of EngineConfig, and: pause, breaks_at, fails ("model", "memory", "bug"), load_seconds."""
    own = dict(options)
    pause, breaks_at = own.pop("pause", 0.0), own.pop("breaks_at", 0)
    fails, seconds = own.pop("fails", None), own.pop("load_seconds", 0.0)
    config = make_config(None, **{"kv_tokens": 1024, "page_size": 4, "seed": 1, **own})
    report.stage("the weights")
    report.opened(wire.Opened(None, None, WIDTH, "scripted", "scripted", "scripted", ["Scripted"], {"temperature": 0.5}))
    time.sleep(seconds)
    if fails == "model":
        raise ModelLoadError("nowhere: no such file or directory.", param="model")
    if fails == "memory":
        raise ConfigError("the KV pool has no room for one page.", param="kv_memory")
    if fails == "bug":
        raise ZeroDivisionError("one over nought")
    resolved = resolve(
        config, Hardware(cores=1, memory_bytes=2**30), model_context=512, kv_bytes_per_token_f32=4, weight_bytes=0
    )
    executor = Paused(config.page_size, resolved.num_pages, WIDTH)
    executor.pause, executor.breaks_at = pause, breaks_at
    settings = CoreSettings(
        page_size=config.page_size,
        num_pages=resolved.num_pages,
        max_context=resolved.max_context,
        vocab_size=WIDTH,
        width=WIDTH,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        policy=config.policy,
        cache_enabled=config.cache_mode == "on",
        eos_ids=frozenset({0}),
        seed=config.seed,
    )
    report.stage("weights 50%")
    return Made(EngineCore(settings, executor), resolved, WIDTH, "abcd1234", "scripted", lambda: None)  # type: ignore[arg-type]
