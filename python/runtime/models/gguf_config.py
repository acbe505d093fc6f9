"""ModelConfig from GGUF metadata: keys such as `llama.block_count`. Same refusals as config.json's reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.layers.rope import RopeConfig
from phloem.runtime.models.config import ModelConfig, check_num_layers
from phloem.runtime.models.registry import GGUF_ARCHITECTURES

__all__ = ["config_from_gguf"]

# What llama.cpp computes otherwise when these are there; we have no code for it.
_REFUSED = (
    "expert_count", "attention.logit_softcapping", "attn_logit_softcapping", "final_logit_softcapping", "attention.scale",
    "residual_scale", "embedding_scale", "logit_scale", "attention.clamp_kqv", "attention.max_alibi_bias", "rope.scaling.alpha",
    "rope.scaling.yarn_log_multiplier", "attention.sliding_window_pattern", "attention.causal",
)  # fmt: skip


def config_from_gguf(
    metadata: Mapping[str, Any],
    source: str,
    *,
    tied: bool,
    vocabulary: int,
    qkv_bias: bool,
    output_bias: bool,
    rope_factors: tuple[float, ...],
) -> ModelConfig:
    """tied, vocabulary, biases and rope_factors come from the tensors that the file has: GGUF says them in no other way."""
    named = metadata.get("general.architecture")
    if named not in GGUF_ARCHITECTURES:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{source}: GGUF architecture {named!r} is not supported. Phloem runs {known}.", param="general.architecture"
        )
    architecture = GGUF_ARCHITECTURES[named]

    def get(key: str, kind: type[int] | type[float], default: float | None = None) -> Any:
        value = metadata.get(f"{named}.{key}", default)
        # bool is an int, and float keys may hold an int
        if value is None or isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise ModelLoadError(
                f"{source}: {named}.{key} is {value!r}; expected {'an integer' if kind is int else 'a number'}.", param=key
            )
        return kind(value)

    for key in _REFUSED:
        value = metadata.get(f"{named}.{key}")
        if value and not (key == "attention.causal" and value is True):
            raise UnsupportedModelError(f"{source}: {named}.{key} is {value!r}, which Phloem has no code for.", param=key)
    if metadata.get(f"{named}.attention.causal") is False:
        raise UnsupportedModelError(f"{source}: {named}.attention.causal is false; Phloem runs causal models.")
    hidden, heads, layers = get("embedding_length", int), get("attention.head_count", int), get("block_count", int)
    if heads < 1:
        raise ModelLoadError(f"{source}: {heads} attention heads; expected a positive number.")
    check_num_layers(layers, source)
    head_dim = get("attention.key_length", int, hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, int, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{source}: {named}.{key} is {get(key, int)}, heads have {head_dim} dimensions; Phloem needs both equal."
            )
    context = get("context_length", int)
    window = get("attention.sliding_window", int, 0)
    return ModelConfig(
        architecture=architecture,
        hidden=hidden,
        intermediate=get("feed_forward_length", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocabulary=vocabulary,
        norm_eps=get("attention.layer_norm_rms_epsilon", float),
        max_context=context,
        rope=_rope(metadata, named, get, context, rope_factors, head_dim, source),
        tied=tied,
        windows=(window,) * layers,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos_ids=_ids(metadata, "bos"),
        eos_ids=_ids(metadata, "eos", "eot", "eom"),
    ).check(source)


def _rope(
    metadata: Mapping[str, Any], named: str, get: Any, context: int, factors: tuple[float, ...], head_dim: int, source: str
) -> RopeConfig:
    if factors and len(factors) != head_dim // 2:
        raise ModelLoadError(f"{source}: rope_freqs.weight has {len(factors)} numbers; expected {head_dim // 2}.")
    theta = get("rope.freq_base", float, 10_000.0)
    kind = metadata.get(f"{named}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(
            f"{source}: rope type {kind!r} is not supported. Phloem has 'none', 'linear', 'yarn' and a rope_freqs tensor.",
            param="rope_type",
        )
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"):
        if metadata.get(f"{named}.{key}") not in (None, 1.0):
            raise UnsupportedModelError(
                f"{source}: {named}.{key} is {metadata[f'{named}.{key}']!r}; Phloem knows 1.0 only.", param=key
            )
    # Before rope.scaling.*, a linear factor stood in rope.scale_linear.
    factor = get("rope.scaling.factor", float, metadata.get(f"{named}.rope.scale_linear", 1.0))
    if not factor > 0:
        raise ModelLoadError(f"{source}: {named}.rope.scaling.factor is {factor}; expected a positive number.")
    if f"{named}.rope.scaling.type" not in metadata and factor != 1.0:
        kind = "linear"
    if kind == "yarn":
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_context=get("rope.scaling.original_context_length", int, context),
            beta_fast=get("rope.scaling.yarn_beta_fast", float, 32.0),
            beta_slow=get("rope.scaling.yarn_beta_slow", float, 1.0),
            factors=factors,
        )
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor, factors=factors)
    return RopeConfig(theta=theta, factors=factors)


def _ids(metadata: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))
