"""A tokenizer from a GGUF file's metadata: a mapping of keys to Python values, however it was read.

    tokenizer.ggml.model   "gpt2": byte-level BPE, words cut as tokenizer.ggml.pre says     (pretokenizers.py)
                           "llama": SentencePiece BPE, merges by score, bytes as <0xNN>
    tokenizer.ggml.tokens, token_type, scores, merges, *_token_id, add_bos_token, add_space_prefix, chat_template

Knows no file layout and no tensors. Checked against llama.cpp's ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.text.parts import TokenizerParts, post_processor_adding
from phloem.runtime.text.pretokenizers import pre_tokenizer_named

__all__ = ["parts_from_gguf"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "separator": "sep_token"}
_END_KEYS = ("eos", "eot", "eom")  # end of sequence, of turn, of message: a GGUF's word for generation_config's list
_SPACE = "▁"


def parts_from_gguf(metadata: Mapping[str, Any], source: str = "the GGUF file") -> TokenizerParts:
    """Raises ModelLoadError if a key is missing or inconsistent, UnsupportedModelError for another kind of tokenizer."""
    kind = _string(metadata, "model", source)
    tokens: list[str] = _list(metadata, "tokens", str, source)
    types = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list(metadata, "token_type", int, source, len(tokens))
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, tokens, source)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, tokens, types, source), True
    else:
        raise UnsupportedModelError(
            f"{source}: tokenizer.ggml.model is {kind!r}; Phloem reads 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE).",
            param="tokenizer.ggml.model",
        )
    special = [t for t, y in zip(tokens, types) if y in (CONTROL, UNKNOWN)]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t, y in zip(tokens, types) if y == USER_DEFINED])

    ids = {key: _token_id(metadata, key, len(tokens), source) for key in (*_NAMED, *_END_KEYS)}
    named = {name: tokens[i] for key, name in _NAMED.items() if (i := ids[key]) is not None}
    _set_post_processor(backend, metadata, adds_bos, ids, tokens, source)
    return TokenizerParts(
        backend=backend,
        named=named,
        eos_ids=frozenset(i for key in _END_KEYS if (i := ids[key]) is not None),
        templates=_templates(metadata),
        tokens=tokens,
        source=source,
    )


def _string(metadata: Mapping[str, Any], key: str, source: str) -> str:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, str) or not value:
        raise ModelLoadError(f"{source}: tokenizer.ggml.{key} is missing or not a string; without it there is no tokenizer.")
    return value


def _list(
    metadata: Mapping[str, Any], key: str, item: type | tuple[type, ...], source: str, size: int | None = None
) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)) or not value:
        raise ModelLoadError(f"{source}: tokenizer.ggml.{key} is missing or not a list; without it there is no tokenizer.")
    if not all(isinstance(v, item) for v in value):
        wrong = next(v for v in value if not isinstance(v, item))
        raise ModelLoadError(f"{source}: tokenizer.ggml.{key} holds {wrong!r}, of another type than the list should have.")
    if size is not None and len(value) != size:
        raise ModelLoadError(f"{source}: {size} tokens but {len(value)} entries in tokenizer.ggml.{key}; expected one a token.")
    return list(value)


def _token_id(metadata: Mapping[str, Any], key: str, size: int, source: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is None or value == 0xFFFFFFFF:  # the format's "none"
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise ModelLoadError(f"{source}: tokenizer.ggml.{key}_token_id is {value}; the file lists {size} tokens.")
    return value


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tuple[tokenizers.Tokenizer, bool]:
    pre = pre_tokenizer_named(str(metadata.get("tokenizer.ggml.pre") or "default"))
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for rule in _list(metadata, "merges", str, source):
        left, _, right = rule.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:  # the library would panic, or drop it
            raise ModelLoadError(
                f"{source}: the merge {rule!r} does not join two of its tokens to a third. The file is damaged."
            )
        merges.append((left, right))
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], source: str) -> tokenizers.Tokenizer:
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces") or metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModelError(
            f"{source}: its SentencePiece model normalises text before encoding; Phloem has no code for that."
        )
    scores: list[float] = _list(metadata, "scores", (int, float), source, len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((t for t, y in zip(tokens, types) if y == UNKNOWN), None)
    bytes_known = sum(1 for y in types if y == BYTE) == 256
    model = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(tokens, types, scores, vocab),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=bytes_known,
    )
    backend = tokenizers.Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_by_score(
    tokens: list[str], types: Sequence[int], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores best; as ranked merges: every split of every piece, best first.

    Control, unknown and byte pieces are never joined: text that spells one stays text.
    """
    joinable = [y not in (CONTROL, UNKNOWN, BYTE) for y in types]
    order = sorted((i for i, ok in enumerate(joinable) if ok and len(tokens[i]) > 1), key=lambda i: (-scores[i], i))
    merges: list[tuple[str, str]] = []
    for i in order:
        piece, splits = tokens[i], []
        for cut in range(1, len(piece)):
            left, right = vocab.get(piece[:cut]), vocab.get(piece[cut:])
            if left is not None and right is not None and joinable[left] and joinable[right]:
                splits.append((left, right))
        merges.extend((tokens[left], tokens[right]) for left, right in sorted(splits))
    return merges


def _set_post_processor(
    backend: tokenizers.Tokenizer,
    metadata: Mapping[str, Any],
    adds_bos: bool,
    ids: Mapping[str, int | None],
    tokens: list[str],
    source: str,
) -> None:
    def end(key: str, by_default: bool) -> tuple[str, int] | None:
        token_id = ids[key]
        if not metadata.get(f"tokenizer.ggml.add_{key}_token", by_default):
            return None
        if token_id is not None:
            return tokens[token_id], token_id
        if f"tokenizer.ggml.add_{key}_token" in metadata:
            raise ModelLoadError(f"{source}: add_{key}_token is set, but there is no tokenizer.ggml.{key}_token_id to add.")
        return None

    post_processor = post_processor_adding(end("bos", adds_bos), end("eos", False))
    if post_processor is not None:
        backend.post_processor = post_processor


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" and value:
            found["default"] = str(value)
        elif key.startswith("tokenizer.chat_template.") and value:
            found[key.removeprefix("tokenizer.chat_template.")] = str(value)
    return found
