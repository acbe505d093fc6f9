"""`make test-clients`: every client in an environment of its own, against `phloem serve` with the embedded model, on loopback.

    tests/clients/requirements/NAME.txt ─> build/clients/NAME (a virtual environment, or node_modules) ─> NAME's script ─> a row

The rows go to stdout as a table (client, version, result), which docs/clients.md keeps with its date. Exit status 1 if one failed.
Names on the command line choose clients; --envs DIR takes environments from there instead of building them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CLIENTS = {
    "load-bodies": "load_bodies.py", "openai": "openai_python.py", "node": "openai_node.mjs", "llm": "llm_cli.py", "litellm": "litellm_client.py",
    "langchain": "langchain_client.py", "instructor": "instructor_client.py", "pydantic-ai": "pydantic_ai_client.py", "dspy": "dspy_client.py",
    "outlines": "outlines_client.py", "guidance": "guidance_client.py", "lm-eval": "lm_eval_client.py",
}  # fmt: skip
EXACT = ("lm-eval",)  # served in float32, and their scores compared with transformers' (reference_scores.py)
LIMIT = 600.0  # seconds of one client


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("names", nargs="*", choices=[[], *CLIENTS], default=[])
    options.add_argument("--envs", type=Path, default=ROOT / "build" / "clients")
    given = options.parse_args()
    names = given.names or list(CLIENTS)
    rows = []
    for exact in (False, True):
        group = [name for name in names if (name in EXACT) == exact]
        if group:
            rows += with_server(group, given.envs, ["--dtype", "f32"] if exact else [])
    print(f"\n{datetime.date.today()}\n| client | version | result |\n|---|---|---|")
    for name, version, result in rows:
        print(f"| {name} | {version} | {result} |")
    return 0 if all(result.startswith("passed") for _, _, result in rows) else 1


def with_server(names: list[str], envs: Path, options: list[str]) -> list[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [
            sys.executable,
            "-m",
            "phloem",
            "serve",
            "--port",
            "0",
            "--ready-file",
            str(ready),
            "--kv-tokens",
            "16384",
            *options,
        ]
        with open(Path(folder) / "log", "wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": folder})
        try:
            url = wait_for(ready, server)
            return [try_one(name, url, envs) for name in names]
        finally:
            server.terminate()
            server.wait(60)


def wait_for(ready: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 300
    while not ready.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the server did not start")
        time.sleep(0.1)
    found = re.search(r"url=(\S+)", ready.read_text())
    assert found is not None
    return found[1]


def try_one(name: str, url: str, envs: Path) -> tuple[str, str, str]:
    try:
        command, version = prepare(name, envs)
    except subprocess.CalledProcessError as error:
        return name, "-", f"not installed: {(error.stderr or b'').decode()[-200:].strip()}"
    start = time.monotonic()
    try:
        found = subprocess.run([*command, url], capture_output=True, text=True, timeout=LIMIT, cwd=envs)
    except subprocess.TimeoutExpired:
        return name, version, f"failed: over {LIMIT:.0f} s"
    if found.returncode == 0 and name in EXACT:
        line = found.stdout.strip().splitlines()[-1]
        compare = [sys.executable, str(HERE / "reference_scores.py")]
        found = subprocess.run(compare, input=line, capture_output=True, text=True, timeout=LIMIT, cwd=envs)
    if found.returncode:
        print(f"--- {name}\n{found.stdout[-2000:]}\n{found.stderr[-4000:]}", file=sys.stderr)
        return (
            name,
            version,
            f"failed: {found.stderr.strip().splitlines()[-1][:200] if found.stderr.strip() else found.returncode}",
        )
    print(f"{name}: passed in {time.monotonic() - start:.0f} s {found.stdout.strip()[-300:]}", flush=True)
    return name, version, "passed"


def prepare(name: str, envs: Path) -> tuple[list[str], str]:
    """(the command that runs the client's script, its version). Builds the environment if it is not there."""
    script, folder = str(HERE / CLIENTS[name]), envs / name
    envs.mkdir(parents=True, exist_ok=True)
    if name == "load-bodies":
        return [sys.executable, script], "bodies of sglang 0.5.23 and vllm 0.32"
    pins = (HERE / "requirements" / f"{name}.txt").read_text().split()
    if name == "node":
        if not (folder / "node_modules").exists():
            folder.mkdir(exist_ok=True)
            subprocess.run(["npm", "install", "--no-audit", "--no-fund", *pins], cwd=folder, check=True, capture_output=True)
        copy = folder / "client.mjs"  # imports are looked up beside the file
        copy.write_text(Path(script).read_text())
        return ["node", str(copy)], " ".join(pins)
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *pins], check=True, capture_output=True)
    return [str(python), script], pins[0]


if __name__ == "__main__":
    sys.exit(main())
