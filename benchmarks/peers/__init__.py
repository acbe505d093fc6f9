"""Other engines, driven as subprocesses on the same weights. Each is optional: `find()` says what is there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

PEERS = Path(os.environ.get("PEERS", Path.home() / ".cache" / "phloem-peers"))


class LlamaCpp:
    """llama-bench and llama-batched-bench of one GGUF."""

    def __init__(self, gguf: str, threads: int) -> None:
        self.bin, self.gguf, self.threads = PEERS / "llama-build" / "bin", PEERS / "gguf" / f"{gguf}.gguf", threads

    def found(self) -> bool:
        return (self.bin / "llama-bench").exists() and self.gguf.exists()

    def bench(self, prompt: int, new: int) -> float:
        """Tokens a second of one prompt of `prompt` tokens (new == 0), or of `new` decoded ones (prompt == 0)."""
        cmd = [self.bin / "llama-bench", "-m", self.gguf, "-t", str(self.threads), "-p", str(prompt), "-n", str(new), "-r", "1"]
        out = subprocess.run([*map(str, cmd), "-fa", "1", "-o", "json"], capture_output=True, text=True, check=True).stdout
        return float(json.loads(out)[0]["avg_ts"])

    def batched(self, prompt: int, new: int, parallel: int) -> float:
        """Output tokens a second, prefill included, of `parallel` sequences of prompt + new tokens."""
        cmd = [self.bin / "llama-batched-bench", "-m", self.gguf, "-t", str(self.threads), "-tb", str(self.threads)]
        args = f"-c {(prompt + new) * parallel + 64} -b 2048 -ub 512 -npp {prompt} -ntg {new} -npl {parallel} -fa on --output-format jsonl"
        out = subprocess.run([*map(str, cmd), *args.split()], capture_output=True, text=True, check=True).stdout
        row = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
        return float(parallel * new / row["t"])


class Vllm:
    """An offline vLLM in a process of its own."""

    def __init__(self, max_running: int) -> None:
        self.python, self.model, self.max_running = (
            PEERS / "venv-vllm" / "bin" / "python",
            PEERS / "smollm2-135m-hf",
            max_running,
        )
        self.process: subprocess.Popen[str] | None = None

    def found(self) -> bool:
        return self.python.exists() and self.model.exists()

    def start(self) -> None:
        worker = Path(__file__).with_name("vllm_worker.py")
        log = (PEERS / "vllm_worker.log").open("w")
        cmd = [str(self.python), str(worker), str(self.model), str(self.max_running)]
        self.process = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self._read()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        assert self.process and self.process.stdin
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return float(answer["seconds"]), answer["tokens"]

    def _read(self) -> Any:
        assert self.process and self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended; see {PEERS / 'vllm_worker.log'}")
        return json.loads(line)

    def stop(self) -> None:
        if self.process and self.process.stdin:
            self.process.stdin.close()
            self.process.wait(30)
