"""`phloem models`: what can be served without a download, what a model is, where it lies; fetch one, or drop one. Loads no weights.

list ─ the embedded one, and what lies in huggingface_hub's cache       show ─ headers and sizes       path ─ the file or folder
pull ─ a snapshot of org/name, of what is read alone                    rm   ─ a snapshot of the cache, and nothing else
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from phloem.cli.session import one_line_errors
from phloem.runtime.errors import ModelLoadError

__all__ = ["register"]

MODEL = typer.Argument(help="A directory, a .gguf file or org/name; none: the embedded model.")
REPOSITORY = typer.Argument(help="org/name, as on the hub.")


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="The models on this machine: list, show, path, pull, rm.", no_args_is_help=True, rich_markup_mode=None
    )
    for name, command in (("list", models), ("show", show), ("path", path), ("pull", pull), ("rm", rm)):
        group.command(name)(one_line_errors(command))
    app.add_typer(group, name="models")


def models() -> None:
    """The embedded model and those of the cache: name, MiB, where."""
    from phloem.runtime.models.embedded import EMBEDDED_NAME, find_embedded

    embedded = find_embedded()
    rows = [(f"{EMBEDDED_NAME} (embedded)", embedded.stat().st_size, str(embedded))]
    rows += [(repo.repo_id, repo.size_on_disk, str(repo.repo_path)) for repo in sorted(_cached(), key=lambda r: str(r.repo_id))]
    width = max(len(name) for name, _, _ in rows)
    for name, size, where in rows:
        print(f"{name:{width}}  {size / 2**20:8.0f} MiB  {where}")


def show(model: Annotated[str | None, MODEL] = None) -> None:
    """What its headers tell. Of org/name the cache is asked first, then the hub."""
    from phloem.runtime.engine.build import load_tokenizer
    from phloem.runtime.models.loader import open_model

    opened = open_model(model)
    shape, tokenizer = opened.config, load_tokenizer(opened)
    for name, value in {
        "name": opened.name, "path": opened.path, "architecture": shape.architecture, "layers": shape.num_layers, "hidden": shape.hidden,
        "heads": f"{shape.num_heads}, of KV {shape.num_kv_heads}", "vocabulary": shape.vocabulary, "context": shape.max_context,
        "weights": f"{opened.file_bytes / 2**20:.0f} MiB", "KV a token": f"{shape.kv_bytes_per_token_f32} bytes in f32",
        "chat templates": ", ".join(sorted(tokenizer.templates)) or "none",
    }.items():  # fmt: skip
        print(f"{name:15} {value}")


def path(model: Annotated[str | None, MODEL] = None) -> None:
    """The file or folder that would be served."""
    from phloem.runtime.models.loader import open_model

    print(open_model(model).path)


def pull(name: Annotated[str, REPOSITORY]) -> None:
    """Fetch what is not there yet of a model's configuration, tokenizer and safetensors."""
    from phloem.runtime.models import hub

    print(hub.find(_repository(name)))


def rm(name: Annotated[str, REPOSITORY]) -> None:
    """Drop every revision of one model from the cache. Files elsewhere are never touched."""
    from huggingface_hub import scan_cache_dir

    wanted = _repository(name)
    found = next((repo for repo in _cached() if repo.repo_id == wanted), None)
    if found is None:
        raise ModelLoadError(f"{name} is not in the cache; `phloem models list` shows what is.", param="model")
    scan_cache_dir().delete_revisions(*(revision.commit_hash for revision in found.revisions)).execute()
    print(f"{name}: {found.size_on_disk / 2**20:.0f} MiB freed")


def _repository(name: str) -> str:
    from phloem.runtime.models.hub import is_repository

    if not is_repository(name):
        raise ModelLoadError(f"{re.sub(r'[^ -~]', '?', name)[:80]}: expected org/name.", param="model")
    return name


def _cached() -> Iterator[Any]:
    """Models that a download has put into the cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        yield from (repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions)
    except CacheNotFound:
        return
