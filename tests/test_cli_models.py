"""`phloem models`: the embedded model and a cache of the hub's shape; only what lies in the cache can be dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from phloem.cli import app
from phloem.runtime.models import hub


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["models", *words])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One model of two files, as a download leaves it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _cache_manager

    for module in (constants, _cache_manager):
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--tiny"
    snapshot = folder / "snapshots" / ("a" * 40)
    for made in (folder / "blobs", folder / "refs", snapshot):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    for name, size in (("config.json", 10), ("model.safetensors", 3 << 20)):
        (folder / "blobs" / name).write_bytes(b"x" * size)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    return folder


def test_list_has_the_embedded_model_and_the_cache(cache: Path) -> None:
    lines = call("list").stdout.splitlines()
    assert len(lines) == 2
    assert "(embedded)" in lines[0] and lines[0].endswith(".gguf")
    assert lines[1].split() == ["org/tiny", "3", "MiB", str(cache)]


def test_list_without_a_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import _cache_manager

    monkeypatch.setattr(_cache_manager, "HF_HUB_CACHE", str(cache / "none"))
    assert len(call("list").stdout.splitlines()) == 1


def test_path_and_show_of_the_embedded_model() -> None:
    where = call("path").stdout.strip()
    assert Path(where).is_file() and where.endswith(".gguf")
    told = dict(line.split(maxsplit=1) for line in call("show").stdout.splitlines())
    assert told["layers"] == "30" and told["architecture"] == "LlamaForCausalLM" and told["path"] == where


def test_pull_says_where_it_lies(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache / "snapshots" / ("a" * 40)
    asked = []
    monkeypatch.setattr(hub, "find", lambda name: asked.append(name) or snapshot)
    assert call("pull", "org/tiny").stdout.strip() == str(snapshot) and asked == ["org/tiny"]


def test_rm_drops_a_snapshot_of_the_cache_and_nothing_else(cache: Path) -> None:
    for bad in ("../../etc", str(cache), "org/other", "tiny", "."):
        refused = call("rm", bad)
        assert refused.exit_code == 1 and len(refused.stderr.splitlines()) == 1, refused.output
    assert cache.exists()
    dropped = call("rm", "org/tiny")
    assert dropped.exit_code == 0 and dropped.stdout == "org/tiny: 3 MiB freed\n"
    assert not cache.exists() and cache.parent.exists()
