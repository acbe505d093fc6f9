"""Starts `phloem serve` and lets schemathesis loose on its own description of itself; fails on any 5xx and on replies outside it.

    make fuzz          schemathesis lives in build/fuzz, an environment of its own; FUZZ_EXAMPLES=2000 asks for more

Afterwards the server must still answer, and hold no request.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

KEY, USER = "fuzz-admin-key", "fuzz-user-key"


def get(url: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    asked = urllib.request.Request(url, data, {"content-type": "application/json", "authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=60) as reply:
        return json.load(reply)


def ready_url(file: Path, server: subprocess.Popen[bytes]) -> str:
    """From the ready line."""
    deadline = time.monotonic() + 300
    while not (file.exists() and file.read_text().strip()):
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the server did not start")
        time.sleep(0.1)
    return next(word.removeprefix("url=") for word in file.read_text().split() if word.startswith("url="))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", default="build/fuzz/bin/schemathesis")
    parser.add_argument("--examples", type=int, default=100, help="of each operation")
    parser.add_argument("--keys", action="store_true", help="with API keys on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        line = Path(folder) / "ready"
        flags = [
            "--port",
            "0",
            "--ready-file",
            str(line),
            "--admin-key",
            KEY,
            "--log-level",
            "error",
            "--kv-tokens",
            "8192",
            "--max-context",
            "512",
        ]
        flags += ["--api-key", USER] if options.keys else []
        server = subprocess.Popen([sys.executable, "-m", "phloem.cli", "serve", *flags])
        try:
            url = ready_url(line, server)
            command = [
                options.schemathesis,
                "run",
                f"{url}/openapi.json",
                "--checks",
                "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
            ]
            command += [
                "--max-examples",
                str(options.examples),
                "-H",
                f"Authorization: Bearer {USER}",  # the administrator's routes would take the server from under the others
                "--request-timeout",
                "120",
                "--no-color",
            ]
            status = subprocess.run(command, check=False).returncode
            text = get(f"{url}/v1/completions", prompt="still here", max_tokens=2)["choices"][0]["text"]
            state = get(f"{url}/get_server_info")["internal_states"][0]
            print(
                f"afterwards: text={text!r} running={state['running']} waiting={state['waiting']} pages_live={state['pages_live']}"
            )
            return status or int((state["running"], state["waiting"], state["pages_live"]) != (0, 0, 0))
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    raise SystemExit(main())
