"""A tiny trainer: a two-layer Llama of 96 ids and engines over it. float32, random weights, nothing of anyone's."""

from __future__ import annotations

from typing import Any

import torch

from phloem import rl

VOCABULARY, EOS = 96, 2


def tiny_module(seed: int = 0, family: str = "llama", **changes: Any) -> Any:
    """A transformers module, in training mode as a trainer has it. scale: of its random weights, so that draws are peaked."""
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0,
        "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    dtype = fields.pop("dtype", torch.float32)
    torch.manual_seed(seed)
    kinds = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
    config = getattr(transformers, f"{kinds[family]}Config")(**fields)
    module = getattr(transformers, f"{kinds[family]}ForCausalLM")(config)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim == 2:
                p.mul_(3.0 if "embed" in name or "lm_head" in name else 4.0)
            elif "bias" in name:
                p.normal_(0, 0.3)
    return module.to(dtype)


def attach(module: Any, **options: Any) -> rl.RolloutEngine:
    options.setdefault("kv_tokens", 4096)
    options.setdefault("threads", 1)
    return rl.RolloutEngine.attach(module, **options)


def fields_of(sample: rl.Sample) -> tuple[Any, ...]:
    """What must be equal, bit for bit, whatever ran beside it."""
    return (
        sample.output_ids,
        sample.logprobs_sampled,
        sample.logprobs_model,
        sample.support_logmass,
        sample.support,
        sample.forced,
        sample.finish,
    )


def nudge(module: Any, seed: int = 0, scale: float = 0.02) -> None:
    """A step of an optimizer that knows nothing: every weight moves a little, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * scale)


def text_tokenizer(folder: Any) -> Any:
    """96 one-character tokens, of which 0 to 2 are special."""
    import json

    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{chr(33 + i): 3 + i for i in range(93)}}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
