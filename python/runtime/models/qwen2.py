"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows in the upper layers if the config turns them on. Both stand in
ModelConfig (`qkv_bias`, `windows`)."""

from __future__ import annotations

from phloem.runtime.models.llama import Llama

__all__ = ["Qwen2"]


class Qwen2(Llama):
    """Same table, same forward."""
