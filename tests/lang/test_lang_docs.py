"""The guide's programs run, and the table of SGLang's names tells no name that is not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import phloem as ph
import phloem.lang as sgl

DOCS = Path(__file__).parents[2] / "docs"


def test_the_programs_of_the_guide_run(idle_engine: ph.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "lang.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 4
    names: dict[str, Any] = {"__name__": "guide"}
    ph.set_default_backend(idle_engine)
    try:
        for number, block in enumerate(blocks):
            # `from __future__ import annotations` of this file must not reach the programs: they are a reader's own.
            exec(compile(block, f"docs/lang.md block {number}", "exec", dont_inherit=True), names)
    finally:
        ph.set_default_backend(None)
    names["backend"].close()
    assert "gen ticket" in capsys.readouterr().out


def test_the_names_of_the_table_exist() -> None:
    table = (DOCS / "lang-from-sglang.md").read_text(encoding="utf-8").split("## What differs")[0]
    run_names = {"run", "run_batch", "bind", "trace", "cache"}
    for name in ("function", "gen", "gen_int", "gen_string", "select", "system", "user", "assistant", "tool", "role", "set_default_backend", "flush_cache",
                 "get_server_info", "global_config", "RuntimeEndpoint", "OpenAI", "token_length_normalized", "greedy_token_selection",
                 "unconditional_likelihood_normalized"):  # fmt: skip
        assert re.search(rf"`@?{name}\b", table) and hasattr(sgl, name), name
    for name in (
        "fork",
        "copy",
        "var_scope",
        "get_var",
        "set_var",
        "text",
        "messages",
        "sync",
        "error",
        "get_meta_info",
        "text_iter",
    ):
        assert hasattr(ph.State, name), name
    for name in run_names:
        assert hasattr(ph.Program, name)
    for name in ("REGEX_INT", "REGEX_FLOAT", "REGEX_BOOL", "REGEX_STR"):
        assert name in table and hasattr(sgl.ir, name)


@pytest.mark.parametrize("name", ["Anthropic", "LiteLLM", "VertexAI", "image", "video"])
def test_what_there_is_not_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(sgl, name)
