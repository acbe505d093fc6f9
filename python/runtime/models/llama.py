"""Llama 2 and 3, SmolLM2, and what is built like them: RMSNorm, RoPE, grouped queries, gated SiLU."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from phloem.runtime.backends.base import AttentionSpec, BatchLike, Ops, RopeTable
from phloem.runtime.layers.rope import rope_table
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.weights import Extra, Parameters, Rule, extra, part, rule

__all__ = ["Llama"]

_HF, _GGUF = "model.layers.{i}", "blk.{i}"


class Llama:
    """parameters: as WEIGHTS names them.   positions: rows of the rotary table, so the longest context."""

    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        rule("embedding", part("model.embed_tokens.weight", "token_embd.weight", ("vocabulary", "hidden")), "table", shard=0),
        rule(
            "layers.{i}.attention_norm",
            part(f"{_HF}.input_layernorm.weight", f"{_GGUF}.attn_norm.weight", ("hidden",)),
            "vector",
        ),
        rule(
            "layers.{i}.qkv",
            [
                part(f"{_HF}.self_attn.q_proj.weight", f"{_GGUF}.attn_q.weight", ("q_width", "hidden"), heads="num_heads"),
                part(f"{_HF}.self_attn.k_proj.weight", f"{_GGUF}.attn_k.weight", ("kv_width", "hidden"), heads="num_kv_heads"),
                part(f"{_HF}.self_attn.v_proj.weight", f"{_GGUF}.attn_v.weight", ("kv_width", "hidden")),
            ],
            shard=0,
        ),
        rule(
            "layers.{i}.qkv_bias",
            [
                part(f"{_HF}.self_attn.q_proj.bias", f"{_GGUF}.attn_q.bias", ("q_width",), heads="num_heads"),
                part(f"{_HF}.self_attn.k_proj.bias", f"{_GGUF}.attn_k.bias", ("kv_width",), heads="num_kv_heads"),
                part(f"{_HF}.self_attn.v_proj.bias", f"{_GGUF}.attn_v.bias", ("kv_width",)),
            ],
            "vector",
            shard=0,
            when="qkv_bias",
        ),
        rule(
            "layers.{i}.output",
            part(f"{_HF}.self_attn.o_proj.weight", f"{_GGUF}.attn_output.weight", ("hidden", "q_width")),
            shard=1,
        ),
        rule(
            "layers.{i}.output_bias",
            part(f"{_HF}.self_attn.o_proj.bias", f"{_GGUF}.attn_output.bias", ("hidden",)),
            "vector",
            when="output_bias",
        ),
        rule(
            "layers.{i}.mlp_norm",
            part(f"{_HF}.post_attention_layernorm.weight", f"{_GGUF}.ffn_norm.weight", ("hidden",)),
            "vector",
        ),
        rule(
            "layers.{i}.gate_up",
            [
                part(f"{_HF}.mlp.gate_proj.weight", f"{_GGUF}.ffn_gate.weight", ("intermediate", "hidden")),
                part(f"{_HF}.mlp.up_proj.weight", f"{_GGUF}.ffn_up.weight", ("intermediate", "hidden")),
            ],
            "gated",
            shard=0,
        ),
        rule(
            "layers.{i}.down",
            part(f"{_HF}.mlp.down_proj.weight", f"{_GGUF}.ffn_down.weight", ("hidden", "intermediate")),
            shard=1,
        ),
        rule("norm", part("model.norm.weight", "output_norm.weight", ("hidden",)), "vector"),
        rule("head", part("lm_head.weight", "output.weight", ("vocabulary", "hidden")), "table", shard=0, unless="tied"),
    )
    EXTRAS: ClassVar[tuple[Extra, ...]] = (
        extra("model.layers.{i}.self_attn.rotary_emb.inv_freq"),  # a buffer old exports kept; the config gives it again
        extra("", "rope_freqs.weight"),  # read with the config: part of the rotary table
        extra("lm_head.weight", equals="model.embed_tokens.weight", when="tied"),  # an export that spelled the tie out
    )

    def __init__(self, config: ModelConfig, parameters: Parameters, positions: int) -> None:
        rope = rope_table(config.rope, config.head_dim, positions)
        self.num_layers, self.width, self.eps = config.num_layers, config.vocabulary, config.norm_eps
        self.embedding, self.norm = parameters.matrix("embedding"), parameters.vector("norm")
        self.head = self.embedding if config.tied else parameters.matrix("head")
        self.layers = [_Layer(config, parameters, i, _spec(config, rope, window)) for i, window in enumerate(config.windows)]

    def forward(self, ops: Ops, batch: BatchLike) -> Tensor:
        """Logits [L, width] of the batch's logit rows."""
        x = ops.embed(batch, self.embedding)
        for i, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.attention_norm, self.eps)
            h = ops.attention(batch, ops.linear(h, layer.qkv, layer.qkv_bias), i, layer.spec)
            x = ops.linear(h, layer.output, layer.output_bias, residual=x)
            if (
                i == self.num_layers - 1
            ):  # beyond here only rows whose logits are wanted matter: no later layer reads the others
                x = ops.logit_rows(batch, x)
            h = ops.rms_norm(x, layer.mlp_norm, self.eps)
            x = ops.linear(ops.gated_linear(h, layer.gate_up), layer.down, residual=x)
        x = ops.rms_norm(x, self.norm, self.eps)
        return ops.linear(x, self.head)


def _spec(config: ModelConfig, rope: RopeTable, window: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        rope=rope,
        window=window,
        norm_eps=config.norm_eps if config.qk_norm else 0.0,
    )


class _Layer:
    def __init__(self, config: ModelConfig, parameters: Parameters, i: int, spec: AttentionSpec) -> None:
        self.spec = spec
        self.attention_norm = parameters.vector(f"layers.{i}.attention_norm")
        self.qkv = parameters.matrix(f"layers.{i}.qkv")
        self.qkv_bias = parameters.optional_vector(f"layers.{i}.qkv_bias")
        self.output = parameters.matrix(f"layers.{i}.output")
        self.output_bias = parameters.optional_vector(f"layers.{i}.output_bias")
        self.mlp_norm = parameters.vector(f"layers.{i}.mlp_norm")
        self.gate_up = parameters.matrix(f"layers.{i}.gate_up")
        self.down = parameters.matrix(f"layers.{i}.down")
