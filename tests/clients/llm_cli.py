"""The `llm` command: a model of extra-openai-models.yaml, a prompt, streamed and not, --schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL = sys.argv[1]
LLM = Path(sys.executable).with_name("llm")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(
            f"- model_id: phloem\n  model_name: default\n  api_base: {URL}/v1\n  supports_schema: true\n  supports_tools: true\n"
        )
        env = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

        def llm(*words: str) -> str:
            found = subprocess.run([str(LLM), *words], env=env, capture_output=True, text=True, timeout=300)
            assert found.returncode == 0, found.stderr[-2000:]
            return found.stdout.strip()

        ask = ("-m", "phloem", "Say hello.", "-o", "temperature", "0", "-o", "max_tokens", "10")
        assert llm(*ask) == llm(*ask, "--no-stream") != ""
        schema = json.dumps(
            {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": False}
        )
        answer = json.loads(llm("-m", "phloem", "Is water wet?", "--schema", schema, "-o", "max_tokens", "40"))
        assert isinstance(answer["yes"], bool)


main()
