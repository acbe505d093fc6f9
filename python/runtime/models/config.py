"""ModelConfig: what a checkpoint says of its shape and arithmetic, checked. From config.json, transformers 4 and 5 spellings.

Whatever would change the arithmetic and is not known here is refused by name (UnsupportedModelError), never defaulted away.
The other spelling, GGUF metadata, is read by `gguf_config`; tensors are `weights`' business.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.layers.rope import RopeConfig
from phloem.runtime.models.quantised import stored_format
from phloem.runtime.models.registry import ARCHITECTURES

__all__ = ["ModelConfig", "check_num_layers", "config_from_hf", "token_ids"]

MAX_LAYERS = 4096  # more is damage, and a list of that length would fill the memory before the missing tensors are noticed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """vocabulary: rows of the embedding, so the width of the logits; the tokenizer may know fewer ids (padding).

    windows: one a layer; a token sees itself and window - 1 before it, 0 is all.   tied: the head is the embedding.
    qkv_bias, output_bias: of the attention's projections.   qk_norm: each q and k head is normalised before RoPE.
    max_context: positions the model was made for.   eos_ids: the config's own; generation_config and tokenizer add theirs.
    """

    architecture: str
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    norm_eps: float
    max_context: int
    rope: RopeConfig
    tied: bool = False
    windows: tuple[int, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token_f32(self) -> int:
        """K and V of one token, all layers, in float32."""
        return 2 * self.num_layers * self.kv_width * 4

    def check(self, source: str) -> ModelConfig:
        """Itself. Raises ModelLoadError if the numbers contradict each other, UnsupportedModelError if no kernel has them."""
        for name in (
            "hidden",
            "intermediate",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocabulary",
            "max_context",
        ):
            if not 1 <= getattr(self, name) < 2**31:
                raise ModelLoadError(f"{source}: {name} is {getattr(self, name)}; expected a positive number.", param=name)
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{source}: {self.num_heads} attention heads are not a multiple of {self.num_kv_heads} KV heads."
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"{source}: head_dim is {self.head_dim}; rotary positions need an even one.")
        if not (math.isfinite(self.norm_eps) and self.norm_eps > 0):
            raise ModelLoadError(f"{source}: the norms' epsilon is {self.norm_eps}; expected a positive number.")
        if len(self.windows) != self.num_layers or min(self.windows) < 0:
            raise ModelLoadError(f"{source}: {len(self.windows)} attention windows for {self.num_layers} layers.")
        self._check_rope(source)
        return self

    def _check_rope(self, source: str) -> None:
        rope = self.rope
        positive = {"theta": rope.theta, "factor": rope.factor}
        if rope.kind == "yarn":
            positive |= {"original context": rope.original_context, "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        for name, value in positive.items():
            if not (math.isfinite(value) and value > 0):
                raise ModelLoadError(
                    f"{source}: the rotary positions' {name} is {value}; expected a positive number.", param=name
                )
        if rope.kind == "yarn" and rope.theta == 1.0:
            raise ModelLoadError(
                f"{source}: the rotary positions' theta is 1.0, under which yarn has no wavelengths.", param="theta"
            )


def check_num_layers(num_layers: int, source: str) -> int:
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelLoadError(f"{source}: it has {num_layers} layers; expected 1 to {MAX_LAYERS}.", param="num_layers")
    return num_layers


_MAX_FLOAT = sys.float_info.max  # JSON has integers that no float holds


class _Fields:
    """config.json's fields, typed: a wrong type is an error that names file and field."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"{self.source}: {name} is missing; expected an integer.", param=name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(f"{self.source}: {name} is {value!r}; expected an integer.", param=name)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if (
            value is None
            or isinstance(value, bool)
            or not isinstance(value, int | float)
            or not -_MAX_FLOAT <= value <= _MAX_FLOAT
        ):
            raise ModelLoadError(f"{self.source}: {name} is {value!r}; expected a number.", param=name)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelLoadError(f"{self.source}: {name} is {value!r}; expected true or false.", param=name)
        return value


def config_from_hf(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """config.json of transformers 4 or 5. Raises UnsupportedModelError, or ModelLoadError for a malformed field."""
    architecture = _architecture(raw, source)
    _refuse_what_we_lack(raw, source)
    fields = _Fields(raw, source)
    hidden, heads, layers = (
        fields.integer("hidden_size"),
        fields.integer("num_attention_heads"),
        check_num_layers(fields.integer("num_hidden_layers"), source),
    )
    is_qwen2, is_qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    if heads < 1 or (raw.get("head_dim") is None and hidden % heads and not is_qwen3):
        raise ModelLoadError(
            f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is absent."
        )
    # Mistral's kv default is 8 in transformers' class, but every published config spells it out; we ask for the same.
    kv_heads = fields.integer("num_key_value_heads", None if architecture == "MistralForCausalLM" else heads)
    max_context = fields.integer("max_position_embeddings")
    bias = fields.flag("attention_bias", False) if not is_qwen2 else False
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", 128 if is_qwen3 else hidden // heads),
        vocabulary=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_context=max_context,
        rope=_rope(raw, max_context, source),
        tied=fields.flag("tie_word_embeddings", False),
        windows=_windows(fields, architecture, layers),
        qkv_bias=is_qwen2 or bias,
        output_bias=bias,
        qk_norm=is_qwen3,
        bos_ids=token_ids(raw.get("bos_token_id"), source, "bos_token_id"),
        eos_ids=token_ids(raw.get("eos_token_id"), source, "eos_token_id"),
    ).check(source)


def token_ids(value: Any, source: str, name: str) -> tuple[int, ...]:
    """None, an id, or a list of ids, as a tuple."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ModelLoadError(f"{source}: {name} is {value!r}; expected a token id or a list of them.", param=name)
    return tuple(ids)


def _architecture(raw: Mapping[str, Any], source: str) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(
            f"{source}: architectures is {names!r}; expected a list with one of {known}.", param="architectures"
        )
    if names[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(
            f"{source}: architecture {names[0]!r} is not supported. Phloem runs {known}.", param="architectures"
        )
    return str(names[0])


def _refuse_what_we_lack(raw: Mapping[str, Any], source: str) -> None:
    stored_format(raw, source)
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise UnsupportedModelError(f"{source}: hidden_act {act!r} is not supported; Phloem has 'silu'.", param="hidden_act")
    if raw.get("mlp_bias"):
        raise UnsupportedModelError(f"{source}: mlp_bias is true; Phloem's gated layers have no bias.", param="mlp_bias")


def _windows(fields: _Fields, architecture: str, layers: int) -> tuple[int, ...]:
    raw, source = fields.raw, fields.source
    kinds = raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise ModelLoadError(f"{source}: layer_types is {kinds!r}; expected a list of names, one a layer.", param="layer_types")
    if architecture in ("LlamaForCausalLM", "MistralForCausalLM"):
        if kinds is not None and set(kinds) != {"full_attention"}:
            raise UnsupportedModelError(
                f"{source}: {architecture} with layer_types {sorted(set(kinds))} is not supported.", param="layer_types"
            )
        if architecture == "LlamaForCausalLM":
            return (0,) * layers
        # Absent is 4096 in transformers' MistralConfig; null is no window.
        return (fields.integer("sliding_window", 0) if "sliding_window" in raw else 4096,) * layers
    window = fields.integer("sliding_window", 0) if "sliding_window" in raw else 4096
    window = window if fields.flag("use_sliding_window", False) else 0
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise ModelLoadError(
                f"{source}: layer_types must name full_attention or sliding_attention for each of {layers} layers."
            )
        if "sliding_attention" in kinds and not window:
            raise ModelLoadError(
                f"{source}: layer_types has sliding_attention, but use_sliding_window or sliding_window is off."
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = fields.integer("max_window_layers", 28)
    return tuple(window if i >= first else 0 for i in range(layers))


_ROPE_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip


def _rope(raw: Mapping[str, Any], max_context: int, source: str) -> RopeConfig:
    """rope_theta + rope_scaling (transformers 4: "type" or "rope_type"), or rope_parameters, which holds both (5)."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ModelLoadError(f"{source}: rope_parameters is {given!r}; expected an object.", param="rope_parameters")
    if any(isinstance(value, dict) for value in given.values()):
        raise UnsupportedModelError(
            f"{source}: rope_parameters differ by layer type; Phloem has one for all layers.", param="rope_parameters"
        )
    kind = given.get("rope_type", given.get("type", "default")) or "default"
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        known = ", ".join(repr(k) for k in _ROPE_KEYS)
        raise UnsupportedModelError(f"{source}: rope type {kind!r} is not supported. Phloem has {known}.", param="rope_type")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(
            f"{source}: partial_rotary_factor {partial!r} is not supported; Phloem rotates whole heads."
        )
    unknown = set(given) - _ROPE_KEYS[kind] - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = {name for name in unknown if given[name] is not None}
    # A default rope may carry leftovers such as "factor": 1.0 that transformers ignores too; one that would scale is a mistake.
    if unknown and not (kind == "default" and unknown <= {"factor"} and given["factor"] == 1.0):
        raise UnsupportedModelError(
            f"{source}: rope type {kind!r} with {', '.join(sorted(unknown))} is not supported.", param="rope_parameters"
        )
    fields = _Fields(given, source)
    theta = fields.number("rope_theta", _Fields(raw, source).number("rope_theta", 10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    # Stored beside the scaling, this one wins in transformers; without either, the original context is the present one.
    original = raw.get("original_max_position_embeddings", given.get("original_max_position_embeddings"))
    original = _Fields({"original_max_position_embeddings": original}, source).integer(
        "original_max_position_embeddings", max_context
    )
    if not 1 <= original < 2**31:
        raise ModelLoadError(
            f"{source}: original_max_position_embeddings is {original}; expected a positive number.",
            param="original_max_position_embeddings",
        )
    if kind == "yarn" and given.get("factor") is None:
        factor = max_context / original
    else:
        factor = fields.number("factor")
    if not factor > 0:
        raise ModelLoadError(f"{source}: rope factor {factor}; expected a positive number.", param="factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "llama3":
        low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
        if not 0 < low < high:
            raise ModelLoadError(f"{source}: low_freq_factor {low} and high_freq_factor {high}; expected 0 < low < high.")
        return RopeConfig(
            theta=theta, kind="llama3", factor=factor, original_context=original, low_freq_factor=low, high_freq_factor=high
        )
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        attention_factor=None if given.get("attention_factor") is None else fields.number("attention_factor"),
        beta_fast=fields.number("beta_fast", 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 1.0) or 1.0,
        mscale=fields.number("mscale", 0.0),
        mscale_all_dim=fields.number("mscale_all_dim", 0.0),
        truncate=fields.flag("truncate", True),
    )
