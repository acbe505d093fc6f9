"""`from phloem import rl`: the rollout engine and what a loss wants of its Samples.

rl.RolloutEngine · rl.group_advantages(batch, rewards) · rl.token_logprobs(logits, batch.tensors()) · rl.trl
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phloem.runtime.request import Support
    from phloem.runtime.rl.engine import Handle, RolloutEngine, RolloutStats
    from phloem.runtime.rl.programs import Environment, to_sample
    from phloem.runtime.rl.sample import RolloutBatch, RolloutTensors, Sample, Span, group_advantages
    from phloem.runtime.rl.session import Session
    from phloem.runtime.rl.support import support_mask, token_logprobs
    from phloem.runtime.rl.update import Update
    from phloem.runtime.rl.verify import Verification

__all__ = [
    "Environment",
    "Handle",
    "RolloutBatch",
    "RolloutEngine",
    "RolloutStats",
    "RolloutTensors",
    "Sample",
    "Session",
    "Span",
    "Support",
    "Update",
    "Verification",
    "group_advantages",
    "support_mask",
    "to_sample",
    "token_logprobs",
]

_HOME = {
    **dict.fromkeys(("Handle", "RolloutEngine", "RolloutStats"), "engine"),
    **dict.fromkeys(("RolloutBatch", "RolloutTensors", "Sample", "Span", "group_advantages"), "sample"),
    **dict.fromkeys(("support_mask", "token_logprobs"), "support"),
    **dict.fromkeys(("Environment", "to_sample"), "programs"),
    "Session": "session",
    "Update": "update",
    "Verification": "verify",
}


def __getattr__(name: str) -> Any:
    if name == "Support":
        from phloem.runtime.request import Support

        return Support
    if name == "trl":
        return importlib.import_module(f"phloem.runtime.rl.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"phloem.runtime.rl.{_HOME[name]}"), name)
    raise AttributeError(f"module 'phloem.rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "trl"})
