"""docs/gpu.md names files and tests that exist, and claims no run that RESULTS.md does not have."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "gpu.md").read_text()


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\b((?:test_)?\w+\.py)\b", TEXT))
    there = {p.name for folder in ("python", "tests", "benchmarks") for p in (ROOT / folder).rglob("*.py")}
    assert named and named <= there, named - there


def test_no_gpu_figure_is_claimed_while_none_was_measured() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| –")]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    if rows:  # the record is empty
        assert "Nothing on this page has run on a GPU yet" in TEXT and "None of them is measured" in TEXT
        assert not re.search(r"H100|H200|A100|tok/s.*cuda", results), (
            "RESULTS.md has GPU figures; the record of docs/gpu.md has no run"
        )
