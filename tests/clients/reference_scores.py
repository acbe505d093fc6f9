"""Compares what lm_eval_client.py printed with transformers' scores on the same weights: reads its JSON line, prints the largest difference.

The oracle is scripts/make_fixtures.py's: the file read and dequantised by the `gguf` package, transformers' Llama in float32 with eager
attention, a tokenizer put together from the file. It shares nothing with Phloem. Exit status 1 above TOLERANCE, or where one says
greedy and the other does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gguf import GGUFReader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from make_fixtures import embedded, oracle, tokenizer

TOLERANCE = 1e-4


@torch.inference_mode()
def main() -> int:
    torch.set_num_threads(1)  # a pool of threads waits for its turn on a busy machine: minutes, not seconds
    scores = json.loads(sys.stdin.read())["scores"]
    reader = GGUFReader(str(embedded()))
    model, text_ids, worst = oracle(reader), tokenizer(reader), 0.0
    for context, continuation, score, greedy in scores:
        before = text_ids.encode(context).ids
        ids = text_ids.encode(context + continuation).ids
        assert ids[: len(before)] == before, (context, continuation)  # else the harness would have cut it elsewhere
        logits = model(torch.tensor([ids])).logits[0, len(before) - 1 : -1]
        said = torch.tensor(ids[len(before) :])
        expected = float(logits.double().log_softmax(-1).gather(1, said[:, None]).sum())
        worst = max(worst, abs(score - expected))
        if bool((logits.argmax(-1) == said).all()) != greedy:
            print(f"greedy is {greedy} for {context!r} {continuation!r}, transformers says otherwise", file=sys.stderr)
            return 1
    print(f"{len(scores)} scores, the largest difference to transformers {worst:.2e}")
    if worst > TOLERANCE:
        print(f"above {TOLERANCE:.0e}", file=sys.stderr)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
