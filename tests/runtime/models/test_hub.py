"""org/name: the local cache is asked first, and a network that is not there is an error that says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models import hub
from phloem.runtime.models.loader import open_model
from tests.tiny_models import tiny_config, write_hf


@pytest.mark.parametrize(
    "name, yes",
    [
        ("org/name", True),
        ("a-b/c_d.e-1", True),
        ("name", False),
        ("./x", False),
        ("../x", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("a b/c", False),
    ],
)
def test_what_looks_like_a_repository(name: str, yes: bool) -> None:
    assert hub.is_repository(name) is yes


def fake_hub(monkeypatch: pytest.MonkeyPatch, local: Path | None, remote: Path | Exception) -> list[bool]:
    """snapshot_download that finds `local` in the cache and `remote` in the network. Returns the local_files_only of each call."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls: list[bool] = []

    def snapshot_download(name: str, *, allow_patterns: list[str], local_files_only: bool = False, **_: Any) -> str:
        assert name == "org/tiny" and not any(p.endswith(".bin") for p in allow_patterns)
        calls.append(local_files_only)
        if local_files_only:
            if local is None:
                raise LocalEntryNotFoundError("not cached")
            return str(local)
        if isinstance(remote, Exception):
            raise remote
        return str(remote)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def test_the_cache_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config())
    calls = fake_hub(monkeypatch, tmp_path, OSError("no network"))
    opened = open_model("org/tiny")
    assert opened.name == "org/tiny" and opened.path == tmp_path and calls == [True]


def test_then_the_hub_also_to_complete_an_interrupted_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_hf(tmp_path / "whole", tiny_config())
    write_hf(tmp_path / "part", tiny_config())
    (tmp_path / "part" / "model.safetensors").unlink()
    write_hf(tmp_path / "shards", tiny_config(), shards=3)
    (tmp_path / "shards" / "model-00002-of-00003.safetensors").unlink()
    for local in (None, tmp_path / "part", tmp_path / "shards"):
        calls = fake_hub(monkeypatch, local, tmp_path / "whole")
        assert open_model("org/tiny").path == tmp_path / "whole" and calls == [True, False]


def test_a_name_that_the_hub_would_not_take_is_our_error_too() -> None:
    with pytest.raises(ModelLoadError, match=r"a--b/c: .*Check the name"):
        open_model("a--b/c")


def test_a_hub_out_of_reach_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, None, OSError("Network is unreachable\nand more"))
    with pytest.raises(ModelLoadError, match=r"org/tiny: not in the local cache.*Network is unreachable\).*give a directory"):
        open_model("org/tiny")
