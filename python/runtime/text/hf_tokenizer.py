"""A tokenizer from a model's directory, as transformers lays one out.

    tokenizer.json             the tokenizer itself
    tokenizer_config.json      named tokens, added tokens, add_bos_token, chat_template
    special_tokens_map.json    named tokens of older models        added_tokens.json    added tokens of older models
    chat_template.jinja, additional_chat_templates/*.jinja         chat_template.json   templates in files of their own
    generation_config.json     eos_token_id: a number or a list    config.json          the same, where the former is missing

A directory without tokenizer.json goes through transformers, which is imported only then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.text.parts import TokenizerParts, post_processor_adding

__all__ = ["parts_from_directory"]

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def parts_from_directory(path: Path) -> TokenizerParts:
    """Raises ModelLoadError if files are missing or do not agree, with what to do."""
    config = _read(path / "tokenizer_config.json")
    old_map = _read(path / "special_tokens_map.json")
    file = path / "tokenizer.json"
    if file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises bare Exceptions
            raise ModelLoadError(f"{file} cannot be read as a tokenizer: {e}") from e
    else:
        backend = _through_transformers(path)
    # Saved by some trainers; a prompt must never be cut or filled behind the caller's back.
    backend.no_truncation()
    backend.no_padding()

    named = {name: value for name in NAMES if (value := config.get(name, old_map.get(name))) is not None}
    extra = (
        config.get("extra_special_tokens", config.get("additional_special_tokens", old_map.get("additional_special_tokens")))
        or []
    )
    extra = list(extra.values()) if isinstance(extra, Mapping) else extra
    _add_tokens(backend, config, _read(path / "added_tokens.json"), [*named.values(), *extra], str(path))
    spelled = {name: _added_token(value).content for name, value in named.items()}
    if "add_bos_token" in config or "add_eos_token" in config:
        _set_post_processor(backend, config, spelled)
    return TokenizerParts(
        backend=backend,
        named=spelled,
        eos_ids=_eos_ids(path, backend, spelled),
        templates=_templates(path, config),
        source=str(path),
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ModelLoadError(f"{path} is not JSON: {e}") from e
    if not isinstance(parsed, dict):
        raise ModelLoadError(f"{path} holds a {type(parsed).__name__}; expected an object.")
    return parsed


def _through_transformers(path: Path) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as e:
        raise ModelLoadError(
            f"{path} has no tokenizer.json. Add one, or install transformers, which can convert what is there: pip install transformers"
        ) from e
    try:
        converted = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as e:
        raise ModelLoadError(f"{path} has no tokenizer.json, and transformers cannot load a tokenizer from it: {e}") from e
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelLoadError(
            f"{path} has no tokenizer.json, and its {type(converted).__name__} is not built on the tokenizers library. "
            "Convert it to a tokenizer.json."
        )
    return backend


def _added_token(value: Any, special: bool = True) -> AddedToken:
    """From the forms that the files use: a spelling, or an object with flags."""
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        flags = {name: bool(value[name]) for name in _FLAGS if name in value}
        return AddedToken(value["content"], **{"special": special, "normalized": not special, **flags})
    raise ModelLoadError(f"a special token is {value!r}; expected its spelling, or an object with 'content'.")


def _add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], older: Mapping[str, Any], named: Iterable[Any], source: str
) -> None:
    """What the configuration adds to tokenizer.json, in the order of the ids, then named tokens that it lacks."""
    listed = {int(i): _added_token(token, special=False) for i, token in (config.get("added_tokens_decoder") or {}).items()}
    for spelling, i in older.items():
        listed.setdefault(int(i), _added_token(spelling, special=False))
    present = {i: repr(token) for i, token in backend.get_added_tokens_decoder().items()}
    for i, token in sorted(listed.items()):
        if present.get(i) != repr(token):
            # Set singly: the library gives ids in the order of addition, so a wrong one shows at the first token.
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != i:
            raise ModelLoadError(
                f"{source}: tokenizer_config.json puts {token.content!r} at id {i}, tokenizer.json at "
                f"{backend.token_to_id(token.content)}. The two files are not of one tokenizer."
            )
    special = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    for value in named:
        token = _added_token(value)
        if not special.get(token.content):
            backend.add_special_tokens([token])


def _set_post_processor(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    def end(name: str) -> tuple[str, int] | None:
        spelling = named.get(f"{name}_token") if config.get(f"add_{name}_token") else None
        token_id = backend.token_to_id(spelling) if spelling is not None else None
        return (spelling, token_id) if spelling is not None and token_id is not None else None

    backend.post_processor = post_processor_adding(end("bos"), end("eos"))


def _eos_ids(path: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> frozenset[int]:
    found = set()
    if "eos_token" in named and (own := backend.token_to_id(named["eos_token"])) is not None:
        found.add(own)
    for name in ("generation_config.json", "config.json"):
        value = _read(path / name).get("eos_token_id")
        if value is not None:
            found.update(int(i) for i in (value if isinstance(value, list) else [value]))
            break
    return frozenset(found)


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A file of its own comes before the configuration, as in transformers."""
    found: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        if not all(
            isinstance(t, Mapping) and isinstance(t.get("name"), str) and isinstance(t.get("template"), str) for t in value
        ):
            raise ModelLoadError(
                f'{path / "tokenizer_config.json"}: chat_template is a list; expected entries such as {{"name": "default", "template": "..."}}.'
            )
        found.update({t["name"]: t["template"] for t in value})
    elif isinstance(value, Mapping):
        found.update({str(name): str(template) for name, template in value.items()})
    legacy = _read(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found
