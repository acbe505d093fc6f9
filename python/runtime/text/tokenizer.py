"""Text to ids and back, for one model. Built from a GGUF file's metadata or a directory; thin over `tokenizers`.

    raw prompt   "<|im_start|>user"  --encode-->                       [1, 4093]        markup is parsed
    user's text  "<|im_start|>user"  --encode(parse_special=False)-->  [44, 108, …]     no spelling becomes control

*Control tokens* are the added tokens marked special and those that the chat template writes itself (`<think>`); other
added tokens, such as runs of blanks, are ordinary text. BOS stands once: where the tokenizer adds it and the text already
spells it, it is not doubled. Owns ids, spellings and end ids; knows nothing of messages (chat.py) or of stopping (stop.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import tokenizers

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.text.detokenizer import Detokenizer
from phloem.runtime.text.gguf_tokenizer import parts_from_gguf
from phloem.runtime.text.hf_tokenizer import parts_from_directory
from phloem.runtime.text.parts import TokenizerParts, component_json, with_components
from phloem.runtime.text.pieces import ByteRules, rules_of_decoder
from phloem.runtime.text.template import literal_text

__all__ = ["Tokenizer"]

MAX_ID = 2**31 - 1


class Tokenizer:
    """bos_id, eos_id, pad_id, unk_id: the tokenizer's own, None if it has none.   vocab_size: ids it gives a text.
    eos_ids: all that the model ends with (the tokenizer's, and generation_config's list).
    special_ids: hidden by skip_special_tokens.   control_ids: those, and other markup of the template.
    named_tokens: "bos_token", "eos_token", … -> spelling, as chat templates see them.   templates: by name.
    """

    def __init__(self, parts: TokenizerParts, *, width: int | None = None) -> None:
        """width: rows of the model's output layer; ids from vocab_size up to it are padding and have no text."""
        self._parts = parts
        self._backend = parts.backend
        self._components = component_json(parts.backend)
        self._rules = rules_of_decoder(self._components["decoder"], parts.source)
        self._added = parts.backend.get_added_tokens_decoder()
        self.vocab_size = max(parts.backend.get_vocab_size(), len(parts.tokens or ()), *(i + 1 for i in self._added), 0)
        self.width = width
        self.bos_id, self.eos_id = parts.id_of("bos_token"), parts.id_of("eos_token")
        self.pad_id, self.unk_id = parts.id_of("pad_token"), parts.id_of("unk_token")
        self.eos_ids = parts.eos_ids
        self.named_tokens: Mapping[str, str] = parts.named
        self.templates: Mapping[str, str] = parts.templates
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.control_ids = self.special_ids | self._written_by_templates()
        self._plain = self._copy_without_control(self._components)
        self._renumbered = self._renumbering()

    @classmethod
    def from_gguf_metadata(
        cls, metadata: Mapping[str, Any], *, width: int | None = None, source: str = "the GGUF file"
    ) -> Tokenizer:
        """metadata: GGUF keys -> Python values. Raises ModelLoadError, or UnsupportedModelError naming what is unknown."""
        return cls(parts_from_gguf(metadata, source), width=width)

    @classmethod
    def from_directory(cls, path: str | Path, *, width: int | None = None) -> Tokenizer:
        """tokenizer.json, tokenizer_config.json and their like. Raises ModelLoadError, UnsupportedModelError."""
        return cls(parts_from_directory(Path(path)), width=width)

    # -- text to ids ---------------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`.

        add_special_tokens: add BOS (and EOS) as the tokenizer does by default; a BOS that the text spells is not doubled.
        parse_special: spellings of control tokens become those tokens. False for text that a user wrote.
        Raises InvalidRequestError if `text` is not a string of valid Unicode.
        """
        if not parse_special:
            return self._encode_plain(text, add_special_tokens)
        ids = _encode(self._backend, text, add_special_tokens)
        if add_special_tokens and self._adds_bos and ids[:2] == [self.bos_id, self.bos_id]:
            del ids[0]
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Ids of text that goes on behind other tokens: no BOS, no blank put in front, no control tokens."""
        return self._without_control(self._continuation, text, add_special_tokens=False)

    def encode_run(self, text: str, at_start: bool) -> list[int]:
        """Ids of a stretch of plain text between two control tokens, as encoding the whole would give them."""
        if at_start or not self._prefixes_first_only:
            return self._encode_plain(text, False)
        return self._without_control(self._continuation, text, add_special_tokens=False)

    def _encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._without_control(self._plain, text, add_special_tokens)

    def _without_control(self, encoder: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        ids = self._renumber(_encode(encoder, text))
        if not self.control_ids.isdisjoint(ids):
            # The model's own vocabulary reaches a control token from plain text: a word of it is spelled like one.
            ids = self._renumber(_encode(self._scrubbed(encoder), text))
            assert self.control_ids.isdisjoint(ids), "plain text became a control token"
        return self._surround(ids) if add_special_tokens else ids

    def _renumber(self, ids: list[int]) -> list[int]:
        return [self._renumbered.get(i, i) for i in ids] if self._renumbered else ids

    def _surround(self, ids: list[int]) -> list[int]:
        before, after = self._added_around
        return [*before, *ids, *after]

    @cached_property
    def _added_around(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts before and behind a text."""
        # A probe that some vocabulary lacks gives no ids to look for.
        encode = self._backend.encode
        probe = next((c for c in ("a", "0", " ", "\n") if encode(c, add_special_tokens=False).ids), "")
        bare, full = encode(probe, add_special_tokens=False).ids, encode(probe, add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise AssertionError("the post-processor changes ids instead of adding some")

    def _written_by_templates(self) -> set[int]:
        """Added tokens, not marked special, that a chat template writes: `<think>`, `<tool_call>`. Never a run of blanks."""
        found = set()
        for template in self.templates.values():
            named = {i for i, token in self._added.items() if token.content in template and not token.content.isspace()}
            if named - self.special_ids:
                literals = literal_text(template)
                found |= {i for i in named if self._added[i].content in literals}
        return found

    @cached_property
    def _adds_bos(self) -> bool:
        return self._added_around[0][-1:] == [self.bos_id]

    def _copy_without_control(self, components: Mapping[str, Any]) -> tokenizers.Tokenizer:
        copy = with_components(self._backend.model, {**components, "post_processor": None})
        copy.add_tokens([token for i, token in sorted(self._added.items()) if i not in self.control_ids])
        return copy

    def _renumbering(self) -> dict[int, int]:
        """The copy numbers added tokens beyond the model's vocabulary from its end: the copy's id -> the real one."""
        kept = {i: token.content for i, token in self._added.items() if i not in self.control_ids}
        pairs = ((self._plain.token_to_id(content), i) for i, content in kept.items())
        return {copied: i for copied, i in pairs if copied is not None and copied != i}

    @cached_property
    def _prefixes_first_only(self) -> bool:
        """Whether a blank is put before a text but not before what follows a control token."""
        return '"prepend_scheme": "first"' in json.dumps(self._components["pre_tokenizer"])

    @cached_property
    def _continuation(self) -> tokenizers.Tokenizer:
        changed = {**self._components}
        changed["normalizer"] = _without_prefix(self._components["normalizer"])
        changed["pre_tokenizer"] = _without_prefix(self._components["pre_tokenizer"])
        return self._plain if changed == self._components else self._copy_without_control(changed)

    def _scrubbed(self, encoder: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
        """A copy of `encoder` whose model cannot spell a control token. Made when one is first needed: 0.2 s."""
        if encoder not in self._scrubbed_copies:
            control = {self._added[i].content for i in self.control_ids}
            self._scrubbed_copies[encoder] = _scrub(encoder, control)
        return self._scrubbed_copies[encoder]

    @cached_property
    def _scrubbed_copies(self) -> dict[tokenizers.Tokenizer, tokenizers.Tokenizer]:
        return {}

    # -- ids to text ---------------------------------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, bytes that are no UTF-8 as U+FFFD. Ids past the vocabulary are padding and have no text.

        Raises InvalidRequestError for what is no id of the model.
        """
        checked = self.check_ids(ids)
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(checked) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True, continuation: bool = False) -> Detokenizer:
        """continuation: the text goes on behind other text, so a blank at its start is kept (SentencePiece drops it
        at the start of a text only)."""
        pieces = self._visible_pieces if skip_special_tokens else self._pieces
        if continuation:
            return Detokenizer(pieces)
        if self._rules.metaspace is None:
            return Detokenizer(pieces, self._rules.strip_blanks)
        hidden = self.special_ids if skip_special_tokens else frozenset()

        def first_piece(token_id: int) -> bytes | None:
            token = self.id_to_token(token_id)
            return None if token is None or token_id in hidden else self._rules.piece(token, first=True)

        return Detokenizer(pieces, self._rules.strip_blanks, first_piece)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes that a token stands for, empty for padding. Raises InvalidRequestError for what is no id."""
        (checked,) = self.check_ids([token_id])
        return self._pieces[checked] if checked < len(self._pieces) else b""

    def id_to_token(self, token_id: int) -> str | None:
        """The spelling in the vocabulary ("Ġworld"), None for padding."""
        (checked,) = self.check_ids([token_id])
        # The backend's word for an added token is its normalized spelling: "▁wow" for "wow" where a prefix is put.
        if self._parts.tokens is not None and checked not in self._added:
            return self._parts.tokens[checked] if checked < len(self._parts.tokens) else None
        return self._backend.id_to_token(checked)

    def token_to_id(self, token: str) -> int | None:
        """The id with this spelling in the vocabulary."""
        return self._backend.token_to_id(token)

    def check_ids(self, ids: Iterable[int], param: str = "token_ids") -> list[int]:
        """`ids` as plain integers. Raises InvalidRequestError, blaming `param`, unless all are ids of the model."""
        limit = self.width if self.width is not None else MAX_ID + 1
        try:
            checked = [index(i) for i in ids]
        except TypeError:
            raise InvalidRequestError(f"{param} holds something that is no integer; expected token ids.", param=param) from None
        if checked and (min(checked) < 0 or max(checked) >= limit):
            bad = next(i for i in checked if not 0 <= i < limit)
            raise InvalidRequestError(f"{param} holds {bad}; expected token ids from 0 to {limit - 1}.", param=param)
        return checked

    @cached_property
    def _pieces(self) -> list[bytes]:
        spelled: list[str | None] = [None] * self.vocab_size
        if self._parts.tokens is not None:
            spelled[: len(self._parts.tokens)] = self._parts.tokens
        else:
            for token, i in self._backend.get_vocab(with_added_tokens=True).items():
                spelled[i] = token
        pieces = self._rules.table(spelled)
        for i in self._added:
            # Byte-level decoders of the library read an added "é" as the byte E9; it stands for what it spells.
            spelling = self._backend.id_to_token(i) or ""
            pieces[i] = spelling.encode() if self._rules.byte_level else self._rules.piece(spelling)
        return pieces

    @cached_property
    def _visible_pieces(self) -> list[bytes]:
        visible = list(self._pieces)
        for i in self.special_ids:
            visible[i] = b""
        return visible

    @property
    def control_tokens(self) -> dict[str, tokenizers.AddedToken]:
        """Spelling -> the added token, with its lstrip and rstrip flags, of every control token."""
        return {self._added[i].content: self._added[i] for i in sorted(self.control_ids)}

    @property
    def plain_added(self) -> list[str]:
        """Spellings of the added tokens that are ordinary text."""
        return [self._added[i].content for i in sorted(self._added) if i not in self.control_ids]

    @property
    def byte_rules(self) -> ByteRules:
        return self._rules


def _encode(encoder: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    try:
        return encoder.encode(text, add_special_tokens=add_special_tokens).ids
    except TypeError:
        if not isinstance(text, str):
            raise InvalidRequestError(f"text to encode is a {type(text).__name__}; expected a str.", param="prompt") from None
        at = next((n for n, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
        raise InvalidRequestError(
            f"text to encode holds half a surrogate pair at character {at}; expected valid Unicode.", param="prompt"
        ) from None


def _without_prefix(component: Any) -> Any:
    """A normalizer or pre-tokenizer, as JSON, that puts no blank in front of a text."""
    if not isinstance(component, dict):
        return component
    kind = component.get("type")
    if kind == "Prepend":
        return None
    if kind == "Sequence":
        key = "normalizers" if "normalizers" in component else "pretokenizers"
        return {**component, key: [s for step in component[key] if (s := _without_prefix(step)) is not None]}
    if kind == "Metaspace":
        return {**component, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**component, "add_prefix_space": False}
    return component


def _scrub(encoder: tokenizers.Tokenizer, control: set[str]) -> tokenizers.Tokenizer:
    whole = json.loads(encoder.to_str())
    model = whole["model"]

    def renamed(token: str) -> str:
        return f"\U0010fffd{token}" if token in control else token

    if isinstance(model["vocab"], dict):
        model["vocab"] = {renamed(token): i for token, i in model["vocab"].items()}
        if "merges" in model:
            pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if a + b not in control and a not in control and b not in control]
    else:
        model["vocab"] = [[renamed(token), score] for token, score in model["vocab"]]
    return tokenizers.Tokenizer.from_str(json.dumps(whole))
