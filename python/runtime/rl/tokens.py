"""Whatever a trainer calls its tokenizer, as Phloem's own."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from phloem.runtime.errors import ConfigError
from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["as_tokenizer"]


def as_tokenizer(tokenizer: Any, width: int) -> Tokenizer | None:
    """tokenizer: Phloem's, one of transformers or `tokenizers`, a directory with tokenizer.json, or None. width: of the logits.

    Raises ConfigError for anything else, ModelLoadError for files that are none.
    """
    if tokenizer is None or isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, (str, Path)):
        return Tokenizer.from_directory(tokenizer, width=width)
    with tempfile.TemporaryDirectory(prefix="phloem-tokenizer-") as folder:
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        elif hasattr(tokenizer, "save") and hasattr(tokenizer, "get_vocab_size"):
            tokenizer.save(str(Path(folder) / "tokenizer.json"))
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps({}))
        else:
            raise ConfigError(
                f"tokenizer is a {type(tokenizer).__name__}; expected one of transformers or tokenizers, a directory, or None.",
                param="tokenizer",
            )
        return Tokenizer.from_directory(folder, width=width)
