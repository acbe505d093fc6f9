"""org/name: a snapshot in huggingface_hub's cache, downloaded if it is not there. The library is imported when it is needed."""

from __future__ import annotations

import re
from pathlib import Path

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.safetensors_file import INDEX, SINGLE, read_json

__all__ = ["find", "is_repository"]

# What the loader and the tokenizer read; never pickles, and no other framework's copies.
FILES = ["*.json", "model*.safetensors", "*.jinja", "tokenizer.model"]


def is_repository(name: str) -> bool:
    """Does this look like org/name?"""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(("./", "../"))


def find(name: str) -> Path:
    """The folder of the snapshot: the local cache first, then the hub. Raises ModelLoadError that says what failed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        try:
            folder = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
            if _is_complete(folder):
                return folder
        except LocalEntryNotFoundError:
            pass
        return Path(snapshot_download(name, allow_patterns=FILES))
    except (OSError, ValueError) as error:  # every failure of the library and of the network is one of the two
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(
            f"{name}: not in the local cache, and the hub could not be asked ({reason}). Check the name and the network, or give a directory.",
            param="model",
        ) from error


def _is_complete(folder: Path) -> bool:
    """An interrupted download leaves a snapshot without some of its weights; then the hub is asked for the rest."""
    if not (folder / "config.json").exists():
        return False
    if not (folder / INDEX).exists():
        return (folder / SINGLE).exists()
    shards = set(read_json(folder / INDEX).get("weight_map", {}).values())
    return all((folder / shard).exists() for shard in shards)
