"""Small random checkpoints: transformers directories and GGUF files, written without transformers. No weights of anyone's.

write_hf(folder, tiny_config("qwen3", tie_word_embeddings=True))      config.json + model.safetensors (or shards)
write_gguf(path, tiny_config("llama"), kinds={"ffn_down": Q8_0})      the same tensors under GGUF's names
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json of a two-layer model: 64 wide, 4 q and 2 kv heads of 16 (Qwen3: of 32), 96 ids. `None` removes a field."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "qwen3":
        config["head_dim"] = 32
    if family == "mistral":
        config["sliding_window"] = None
    config.update(changes)
    return config


def tiny_tensors(config: Mapping[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights under transformers' names. Large enough that a mistake in RoPE, a bias or a norm moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    family = config["model_type"]
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim") or width // heads

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * math.sqrt(2 / columns)).to(dtype)

    def vector(size: int, around: float = 0.0) -> Tensor:
        return (torch.randn(size, generator=generator) * 0.3 + around).to(dtype)

    out = {"model.embed_tokens.weight": matrix(vocabulary, width) * 4, "model.norm.weight": vector(width, 1)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        out[f"{at}.input_layernorm.weight"] = vector(width, 1)
        out[f"{at}.post_attention_layernorm.weight"] = vector(width, 1)
        for name, rows, columns in (
            ("q", heads * dim, width),
            ("k", kv_heads * dim, width),
            ("v", kv_heads * dim, width),
            ("o", width, heads * dim),
        ):
            out[f"{at}.self_attn.{name}_proj.weight"] = matrix(rows, columns)
            if config.get("attention_bias") or (family == "qwen2" and name != "o"):
                out[f"{at}.self_attn.{name}_proj.bias"] = vector(rows)
        if family == "qwen3":
            out[f"{at}.self_attn.q_norm.weight"], out[f"{at}.self_attn.k_norm.weight"] = vector(dim, 1), vector(dim, 1)
        for name, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
            out[f"{at}.mlp.{name}_proj.weight"] = matrix(rows, columns)
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(vocabulary, width)
    return out


def write_hf(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, *, shards: int = 0) -> Path:
    """config.json and safetensors; shards > 0: that many files and an index. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tiny_tensors(config) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None or k == "sliding_window"}))
    if not shards:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file(
            {name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file, metadata={"format": "pt"}
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


_GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """model.layers.1.mlp.up_proj.weight -> blk.1.ffn_up.weight"""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[rest]}.{kind}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem] + f".{kind}"


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to q and k of Llama: the halves of each head, alternating."""
    return np.ascontiguousarray(
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    *,
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """A GGUF file by the `gguf` package's writer. kinds: tensor name without block and suffix, or "*" -> "q8_0", "f16" ….

    metadata: more keys (without the architecture's prefix if they start with ".").   extra: more float32 tensors.
    """
    import gguf
    from gguf.quants import quantize

    family = "llama" if config["model_type"] == "mistral" else str(config["model_type"])
    tensors = tiny_tensors(config) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        name = family + key if key.startswith(".") else key
        adder = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        adder(name, value)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            values = interleave(values, config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        to = gguf_name(name)
        short = to.split(".")[2] if to.startswith("blk.") else to.split(".")[0]
        kind = "f32" if values.ndim == 1 else (kinds or {}).get(short, (kinds or {}).get("*", "f32"))
        number = gguf.GGMLQuantizationType[kind.upper()]
        data = values if kind == "f32" else quantize(values, number)
        writer.add_tensor(to, data, raw_dtype=None if kind in ("f32", "f16") else number)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_tokenizer(folder: Path) -> Path:
    """tokenizer.json of 256 bytes and an end token (id 256), for shapes without a vocabulary of their own. Returns the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder
