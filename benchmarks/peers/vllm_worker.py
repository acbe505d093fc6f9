"""Runs in vLLM's own environment: reads one JSON request a line, generates all its prompts at once, answers with the time.

request: {"prompts": [[ids]], "max_tokens": n}      answer: {"seconds": s, "tokens": [[ids]]}
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout; the answers have a pipe of their own
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(sys.argv[1], dtype="float32", max_model_len=4096, max_num_seqs=int(sys.argv[2]), enable_prefix_caching=True)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(o.outputs[0].token_ids) for o in outputs]
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
