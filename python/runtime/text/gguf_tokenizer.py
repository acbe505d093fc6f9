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
from tokenizers import AddedToken, decoders, models, normalizers, processors

from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.text.parts import TokenizerParts
from phloem.runtime.text.pretokenizers import pre_tokenizer_named

__all__ = ["parts_from_gguf"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "separator": "sep_token"}
_END_KEYS = ("eos", "eot", "eom")  # end of sequence, of turn, of message: a GGUF's word for generation_config's list
_SPACE = "▁"


def parts_from_gguf(metadata: Mapping[str, Any], source: str = "the GGUF file") -> TokenizerParts:
    """Raises ModelLoadError if a key is missing or inconsistent, UnsupportedModelError for another kind of tokenizer."""
    kind = _get(metadata, "model", str, source)
    tokens = _get(metadata, "tokens", list, source)
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelLoadError(f"{source}: {len(tokens)} tokens but {len(types)} token types; expected one a token.")
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


def _get(metadata: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if kind is list and isinstance(value, Sequence) and not isinstance(value, str):
        value = list(value)
    if not isinstance(value, kind) or not value:
        raise ModelLoadError(
            f"{source}: tokenizer.ggml.{key} is missing or not a {kind.__name__}; without it there is no tokenizer."
        )
    return value


def _token_id(metadata: Mapping[str, Any], key: str, size: int, source: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}_token_id")
    if value is None or int(value) == 0xFFFFFFFF:  # the format's "none"
        return None
    if not 0 <= int(value) < size:
        raise ModelLoadError(f"{source}: tokenizer.ggml.{key}_token_id is {value}; the file lists {size} tokens.")
    return int(value)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tuple[tokenizers.Tokenizer, bool]:
    pre = pre_tokenizer_named(metadata.get("tokenizer.ggml.pre") or "default")
    merges = []
    for rule in _get(metadata, "merges", list, source):
        left, space, right = rule.partition(" ")
        if not (left and space and right):
            raise ModelLoadError(f"{source}: the merge {rule!r} is not two tokens separated by a blank.")
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as e:  # the library raises bare Exceptions; its text names the token that a merge lacks
        raise ModelLoadError(f"{source}: its merges and tokens do not fit together: {e}") from e
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], source: str) -> tokenizers.Tokenizer:
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces") or metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise UnsupportedModelError(
            f"{source}: its SentencePiece model normalises text before encoding; Phloem has no code for that."
        )
    scores = _get(metadata, "scores", list, source)
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{source}: {len(tokens)} tokens but {len(scores)} scores; expected one a token.")
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
    want = {
        "bos": bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "eos": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    pair = []
    for key, wanted in want.items():
        if wanted and ids[key] is None:
            if f"tokenizer.ggml.add_{key}_token" in metadata:
                raise ModelLoadError(f"{source}: add_{key}_token is set, but there is no tokenizer.ggml.{key}_token_id to add.")
            want[key] = False
        elif wanted:
            pair.append((tokens[ids[key] or 0], ids[key]))
    if not pair:
        return
    bos, eos = (tokens[ids[key] or 0] if want[key] else None for key in ("bos", "eos"))
    backend.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        special_tokens=pair,
    )


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in metadata.items():
        if key == "tokenizer.chat_template" and value:
            found["default"] = str(value)
        elif key.startswith("tokenizer.chat_template.") and value:
            found[key.removeprefix("tokenizer.chat_template.")] = str(value)
    return found
