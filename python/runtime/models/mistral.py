"""Mistral: Llama with a sliding window in every layer, which is in ModelConfig.windows, so in each layer's AttentionSpec."""

from __future__ import annotations

from phloem.runtime.models.llama import Llama

__all__ = ["Mistral"]


class Mistral(Llama):
    """Same tensors, same forward."""
