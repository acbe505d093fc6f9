"""Qwen3: Llama with an RMSNorm on each q and k head before RoPE, and a head_dim of its own."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from phloem.runtime.backends.base import BatchLike, Ops
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.llama import Llama
from phloem.runtime.models.weights import Parameters, Rule, part, rule

__all__ = ["Qwen3"]


class Qwen3(Llama):
    """parameters, positions: as for Llama."""

    WEIGHTS: ClassVar[tuple[Rule, ...]] = (
        *Llama.WEIGHTS,
        rule(
            "layers.{i}.q_norm",
            part("model.layers.{i}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight", ("head_dim",)),
            "vector",
        ),
        rule(
            "layers.{i}.k_norm",
            part("model.layers.{i}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight", ("head_dim",)),
            "vector",
        ),
    )

    def __init__(self, config: ModelConfig, parameters: Parameters, positions: int) -> None:
        super().__init__(config, parameters, positions)
        self.head_norms = [
            (parameters.vector(f"layers.{i}.q_norm"), parameters.vector(f"layers.{i}.k_norm")) for i in range(config.num_layers)
        ]

    def forward(self, ops: Ops, batch: BatchLike) -> Tensor:
        x = ops.embed(batch, self.embedding)
        for i, (layer, (q_norm, k_norm)) in enumerate(zip(self.layers, self.head_norms)):
            h = ops.rms_norm(x, layer.attention_norm, self.eps)
            h = ops.attention(batch, ops.linear(h, layer.qkv, layer.qkv_bias), i, layer.spec, q_norm, k_norm)
            x = ops.linear(h, layer.output, layer.output_bias, residual=x)
            if (
                i == self.num_layers - 1
            ):  # beyond here only rows whose logits are wanted matter: no later layer reads the others
                x = ops.logit_rows(batch, x)
            h = ops.rms_norm(x, layer.mlp_norm, self.eps)
            x = ops.linear(ops.gated_linear(h, layer.gate_up), layer.down, residual=x)
        x = ops.rms_norm(x, self.norm, self.eps)
        return ops.linear(x, self.head)
