"""Which class runs which architecture. A new model is a file and a line here.

The value is "module:Class" inside this package. A GGUF file names architectures more coarsely: its word maps onto the
architecture whose config it is read as (Mistral's files say "llama").
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from phloem.runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from phloem.runtime.models.weights import Architecture

__all__ = ["ARCHITECTURES", "GGUF_ARCHITECTURES", "architecture_named"]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama:Llama",
    "MistralForCausalLM": "mistral:Mistral",
    "Qwen2ForCausalLM": "qwen2:Qwen2",
    "Qwen3ForCausalLM": "qwen3:Qwen3",
}
GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def architecture_named(name: str, source: str) -> type[Architecture]:
    """The model class. Raises UnsupportedModelError that names the architecture and those there are."""
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"{source}: architecture {name!r} is not supported. Phloem runs {known}.", param="architectures"
        )
    module, _, attribute = ARCHITECTURES[name].partition(":")
    found = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
    return cast("type[Architecture]", found)
