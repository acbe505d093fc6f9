"""lm-evaluation-harness, `local-completions` with its remote tokenizer: a loglikelihood task without the hub, from its file to its metric.

Prints one JSON line, {"scores": [[context, continuation, logprob, greedy], …]}: what the harness made of our replies, which run.py
compares with transformers' on the same weights (reference_scores.py).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": tempfile.mkdtemp()}
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI

URL = sys.argv[1]
TASK = Path(__file__).parent / "lm_eval_task" / "facts.yaml"


def main() -> None:
    task: dict[str, Any] = yaml.safe_load(TASK.read_text())
    task["dataset_kwargs"]["data_files"]["test"] = str(TASK.with_suffix(".jsonl"))
    model = LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions", model="default", tokenizer_backend="remote", num_concurrent=2, max_retries=1, batch_size=4, max_length=1024
    )  # fmt: skip
    found = simple_evaluate(model=model, tasks=[task], log_samples=True, bootstrap_iters=0)
    name = task["task"]
    scores = [
        [context, continuation, *reply[0]]
        for sample in found["samples"][name]
        for (context, continuation), reply in zip(_pairs(sample["arguments"]), sample["resps"], strict=True)
    ]
    docs = len(TASK.with_suffix(".jsonl").read_text().splitlines())
    assert len(scores) == 3 * docs, len(scores)
    accuracy = found["results"][name]["acc,none"]
    assert accuracy >= 0.75, (accuracy, scores)  # chance is 0.33
    print(json.dumps({"accuracy": accuracy, "scores": scores}))


def _pairs(arguments: Any) -> list[tuple[str, str]]:
    """Of one sample's requests, however this version keeps them."""
    if isinstance(arguments, dict):
        return [(one["arg_0"], one["arg_1"]) for one in arguments.values()]
    return [tuple(one) for one in arguments]


main()
