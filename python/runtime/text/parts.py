"""What every source of a tokenizer (a GGUF file, a directory) boils down to, and how a component of one is changed.

    gguf_tokenizer.py ─┐
                       ├─> TokenizerParts ─> Tokenizer
    hf_tokenizer.py ───┘

Knows the `tokenizers` library and no file format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import models, processors

__all__ = ["TokenizerParts", "component_json", "post_processor_adding", "with_components"]

COMPONENTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """backend: encodes, its added tokens and post-processor set.   named: "bos_token", "eos_token", … -> spelling.
    eos_ids: every id that the model itself ends with.   templates: chat templates by name, "default" the usual one.
    tokens: id -> spelling where the source lists it (a GGUF may spell two ids alike); None asks the backend.
    source: for messages.
    """

    backend: tokenizers.Tokenizer
    named: Mapping[str, str]
    eos_ids: frozenset[int]
    templates: Mapping[str, str] = field(default_factory=dict)
    tokens: list[str] | None = None
    source: str = "the tokenizer"

    def id_of(self, name: str) -> int | None:
        spelling = self.named.get(name)
        return None if spelling is None else self.backend.token_to_id(spelling)


def component_json(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The normalizer, pre-tokenizer, post-processor and decoder as the JSON of a tokenizer.json. Cheap: no vocabulary."""
    skeleton = tokenizers.Tokenizer(models.BPE())
    for name in COMPONENTS:
        setattr(skeleton, name, getattr(backend, name))
    parsed = json.loads(skeleton.to_str())
    return {name: parsed[name] for name in COMPONENTS}


def with_components(model: models.Model, components: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A tokenizer over `model`, which is shared and not copied, with the components given as JSON and no added tokens."""
    skeleton = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    built = tokenizers.Tokenizer.from_str(json.dumps({**skeleton, **components}))
    result = tokenizers.Tokenizer(model)
    for name in COMPONENTS:
        setattr(result, name, getattr(built, name))
    return result


def post_processor_adding(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> processors.PostProcessor | None:
    """Puts these tokens (spelling, id) before and behind a text. By JSON, since a spelling may hold the short form's `:`."""
    added = dict(pair for pair in (bos, eos) if pair is not None)
    if not added:
        return None
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    single = [{"SpecialToken": {"id": bos[0], "type_id": 0}}] if bos is not None else []
    single = [*single, text, *([{"SpecialToken": {"id": eos[0], "type_id": 0}}] if eos is not None else [])]
    special = {spelling: {"id": spelling, "ids": [i], "tokens": [spelling]} for spelling, i in added.items()}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    component = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    built: processors.PostProcessor = with_components(models.BPE(), {"post_processor": component}).post_processor
    return built
