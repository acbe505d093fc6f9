"""How a byte-level BPE cuts text into words before it merges, by the name that a GGUF file gives (`tokenizer.ggml.pre`).

    "in 2024!"  --smollm-->  "in" " " "2" "0" "2" "4" "!"  --BPE-->  ids

The name is not decoration: a converter that ignores `smollm` merges "2024" into tokens which the model never saw in
training. So a name that is not in the table is an error, never a default. The patterns are those of the models' own
tokenizer.json files; where a name is shared, llama.cpp's table of names is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from phloem.runtime.errors import UnsupportedModelError

__all__ = ["PreTokenizer", "pre_tokenizer_named"]

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_PUNCTUATION = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_PUNCTUATION}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PUNCTUATION}"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """patterns: each splits further what those before it left.   ignore_merges: a whole word of the vocabulary is one
    token, however its merges would go.   adds_bos: what holds where the file does not say."""

    patterns: Sequence[str]
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_GROUPS: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer(_DEFAULT), "default"),
    (PreTokenizer([_GPT2]), "gpt-2 gpt2 phi-2 mpt olmo exaone4 trillion mellum gigachat a.x-4.0"),
    (PreTokenizer([r"\p{N}", _GPT2]), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (PreTokenizer([_LLAMA3], ignore_merges=True, adds_bos=True), "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral lfm2"),
    (PreTokenizer([_LLAMA3]), "smaug-bpe dbrx chatglm-bpe"),
    (PreTokenizer([_LLAMA3], ignore_merges=True), "glm4"),
    (PreTokenizer([_QWEN2]), "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open kormo grok-2"),
    (PreTokenizer([_QWEN35]), "qwen35"),
    (PreTokenizer([_TEKKEN], ignore_merges=True, adds_bos=True), "tekken"),
    (PreTokenizer([_GPT4O]), "gpt-4o llama4 kanana2 minimax-m2"),
)
_BY_NAME = {name: pre for pre, names in _GROUPS for name in names.split()}


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """The pre-tokenizer that a GGUF file calls `name`. Raises UnsupportedModelError, with the names there are."""
    found = _BY_NAME.get(name)
    if found is None:
        raise UnsupportedModelError(
            f"tokenizer.ggml.pre is {name!r}, a pre-tokenizer that Phloem does not know; guessing would tokenise text otherwise "
            f"than in training. Known: {', '.join(sorted(_BY_NAME))}. Use the model's directory with tokenizer.json instead.",
            param="tokenizer.ggml.pre",
        )
    return found
