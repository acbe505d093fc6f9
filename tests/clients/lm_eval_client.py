"""lm-evaluation-harness, `local-completions` with its remote tokenizer: loglikelihoods of pairs whose order is known.

It checks what the harness reads (probes, echoed prompts, one generated entry) and prints the scores; it does not compare them with
another implementation's.
"""

from __future__ import annotations

import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

URL = sys.argv[1]
PAIRS = [
    ("The capital of France is", " Paris"), ("The capital of France is", " London"), ("Two and two make", " four"), ("Two and two make", " five"),
    ("Water boils at one hundred", " degrees"), ("Once upon a time there was a", " king who lived in a castle"), ("def add(a, b):\n    return", " a + b"),
]  # fmt: skip


def main() -> None:
    model = LocalCompletionsAPI(
        base_url=f"{URL}/v1/completions", model="default", tokenizer_backend="remote", num_concurrent=2, max_retries=1, batch_size=4, max_length=1024
    )  # fmt: skip
    requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(PAIRS)]
    scores = model.loglikelihood(requests, disable_tqdm=True)
    assert len(scores) == len(PAIRS) and all(value < 0 for value, _ in scores)
    assert scores[0][0] > scores[1][0] and scores[2][0] > scores[3][0], scores
    print("SCORES " + " ".join(f"{value:.6f}:{int(greedy)}" for value, greedy in scores))


main()
