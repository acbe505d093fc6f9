"""The embedded GGUF as a float32 transformers folder: the same numbers for peers that do not read GGUF, and for oracles.

usage: convert_gguf.py GGUF OUTDIR        needs torch, transformers >= 5, accelerate, gguf, safetensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def main(gguf: str, out: str) -> None:
    source, target = Path(gguf).resolve(), Path(out)
    target.mkdir(parents=True, exist_ok=True)
    meta = {k: f.contents() for k, f in GGUFReader(str(source)).fields.items() if k.startswith("tokenizer.")}
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    weights = {k: v.detach().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}  # tied
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    config = model.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "pretraining_tp", "transformers_version"):
        config.pop(key, None)
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "dtype": "float32", "rms_norm_eps": 1e-5}
    config |= {"tie_word_embeddings": True, "rope_theta": 100000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2, do_sample=False).save_pretrained(str(target))
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # transformers ignores the pre-tokenizer that the file names: "smollm" takes every digit alone, then byte-level BPE.
    assert meta["tokenizer.ggml.pre"] == "smollm"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.chat_template = meta["tokenizer.chat_template"]
    tokenizer.save_pretrained(str(target))


if __name__ == "__main__":
    main(*sys.argv[1:3])
