"""docs/grammar.md says what the audit does: its tables are generated from it, and current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_tables_are_current() -> None:
    place = ROOT / "scripts" / "grammar_docs.py"
    found = importlib.util.spec_from_file_location("grammar_docs", place)
    assert found is not None and found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    page = (ROOT / "docs" / "grammar.md").read_text()
    assert page == script.rendered(page), "run: python scripts/grammar_docs.py"
    assert "**400**" in page
