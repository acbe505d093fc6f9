"""`get_meta_info`: SGLang's dictionary about one gen or select."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phloem.lang.ir import Select
from phloem.lang.path import Slot

if TYPE_CHECKING:
    from phloem.runtime.request import Output, TokenLogprob
    from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["meta_info"]


def meta_info(slot: Slot, tokenizer: Tokenizer | None) -> Any:
    """One dictionary; for n > 1 a list of them."""
    if isinstance(slot.node, Select) and slot.selection is not None:
        chosen = slot.selection
        return {
            "id": slot.jobs[0].request.id,
            "finish_reason": {"type": "select"},
            "prompt_tokens": sum(o.usage.prompt_tokens for o in slot.outputs),
            "completion_tokens": 0,
            "cached_tokens": sum(o.usage.cached_tokens for o in slot.outputs),
            "normalized_prompt_logprobs": [c.scores[chosen.method] for c in chosen.per_choice],
            "input_token_logprobs": [
                [(p, i, _text(tokenizer, i)) for p, i in zip(c.logprobs, c.token_ids)] for c in chosen.per_choice
            ],
        }
    found = [_of(job.request.id, output, tokenizer) for job, output in zip(slot.jobs, slot.outputs)]
    return found[0] if len(found) == 1 else found


def _of(request_id: str, output: Output, tokenizer: Tokenizer | None) -> dict[str, Any]:
    info: dict[str, Any] = {
        "id": request_id,
        "finish_reason": finish(output),
        "prompt_tokens": output.usage.prompt_tokens,
        "completion_tokens": output.usage.completion_tokens,
        "cached_tokens": output.usage.cached_tokens,
        "forced_tokens": output.usage.forced_tokens,
        "seed": output.seed,
        "weight_version": output.weights_version,
    }
    if output.logprobs is not None:
        info["output_token_logprobs"] = [entry(e, tokenizer) for e in output.logprobs]
        info["output_top_logprobs"] = [[(p, i, _text(tokenizer, i)) for i, p in e.top] for e in output.logprobs]
    return info


def finish(output: Output) -> dict[str, Any]:
    reason = output.finish_reason
    if reason in ("eos", "stop_token", "stop_string"):
        return {"type": "stop", "matched": output.stop_reason if output.stop_reason is not None else output.token_ids[-1:]}
    return {"type": reason} if reason != "length" else {"type": "length", "length": output.usage.completion_tokens}


def entry(logprob: TokenLogprob, tokenizer: Tokenizer | None) -> tuple[float, int, str]:
    """(logprob, id, text): the real value first."""
    return (logprob.logprob, logprob.token_id, _text(tokenizer, logprob.token_id))


def _text(tokenizer: Tokenizer | None, token_id: int) -> str:
    return "" if tokenizer is None else tokenizer.token_bytes(token_id).decode("utf-8", "replace")
