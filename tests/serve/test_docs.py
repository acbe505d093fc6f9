"""docs/server.md says what the server does: its tables are generated from it, and current."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tables_are_current() -> None:
    found = importlib.util.spec_from_file_location("server_docs", ROOT / "scripts" / "server_docs.py")
    assert found is not None and found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    page = (ROOT / "docs" / "server.md").read_text()
    assert page == script.rendered(page), "run: python scripts/server_docs.py"
    assert "| `temperature` |" in page and "`--max-queue`" in page and "`/v1/chat/completions`" in page
