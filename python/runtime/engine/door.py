"""The door: everything a request says that could index, allocate or wait for ever is checked here, once, before it has a Sequence.

    prompt + max_tokens <= context                       ContextLengthError
    ceil((prompt + max(max_tokens, 1) - 1) / page_size)  pages <= pool: the last token drawn needs no slot (P3)    CapacityError

Pure functions. Whatever they raise becomes the request's Output (S6).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

from phloem.runtime.errors import CapacityError, ContextLengthError, InvalidRequestError
from phloem.runtime.request import Request

__all__ = ["DEFAULT_MAX_TOKENS", "Limits", "check_namespace", "check_prompt", "check_request", "pages_needed"]

DEFAULT_MAX_TOKENS = 128


class Limits(Protocol):
    """What the engine was built with. vocab_size: ids below it are tokens."""

    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def max_context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def pages_needed(num_prompt: int, max_tokens: int, page_size: int) -> int:
    return -(-(num_prompt + max(max_tokens, 1) - 1) // page_size)


def check_request(request: Request, limits: Limits) -> tuple[array[int], int]:
    """The prompt as int32, and max_tokens with its default filled in. Raises a RequestError."""
    if not isinstance(request.id, str):
        raise InvalidRequestError(f"the request's id is {request.id!r}; expected a string.", param="id")
    check_namespace(request.namespace)
    if request.group is not None and not isinstance(request.group, str):
        raise InvalidRequestError(f"group is {request.group!r}; expected a string or None.", param="group")
    for name in ("sample", "priority"):
        value = getattr(request, name)
        low = 0 if name == "sample" else -(2**31)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**31:
            raise InvalidRequestError(f"{name} is {value!r}; expected an integer from {low} to {2**31 - 1}.", param=name)
    tokens = check_prompt(request.token_ids, limits)
    num_prompt = len(tokens) - _check_output(request, len(tokens))
    max_tokens = _check_room(num_prompt, request, limits)
    if request.num_output >= max_tokens > 0 or (request.num_output and not max_tokens):
        raise InvalidRequestError(
            f"{request.num_output} of the ids are output already, and max_tokens is {max_tokens}: nothing is left to draw.",
            param="num_output",
        )
    s = request.sampling
    _check_ids("stop_token_ids", s.stop_token_ids, limits)
    _check_ids("allowed_token_ids", s.allowed_token_ids or (), limits)
    _check_ids("logit_bias", s.logit_bias, limits)
    if s.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {s.min_tokens}, but at most {max_tokens} tokens will be drawn. Lower it or raise max_tokens.",
            param="min_tokens",
        )
    if s.prompt_logprobs is not None and s.prompt_logprobs >= max(num_prompt, 1):
        raise InvalidRequestError(
            f"prompt_logprobs starts at position {s.prompt_logprobs}; the prompt's last position is {num_prompt - 1}.",
            param="prompt_logprobs",
        )
    return tokens, max_tokens


def _check_output(request: Request, num_tokens: int) -> int:
    value = request.num_output
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < max(num_tokens, 1):
        raise InvalidRequestError(
            f"num_output is {value!r}; expected 0 to {num_tokens - 1}: the ids that are output already.", param="num_output"
        )
    return value


def check_namespace(namespace: object) -> None:
    if not isinstance(namespace, str):
        raise InvalidRequestError(f"namespace is {namespace!r}; expected a string.", param="namespace")


def check_prompt(token_ids: Sequence[int], limits: Limits) -> array[int]:
    """The ids as int32: at least one, each of the vocabulary. Raises InvalidRequestError that says which is not."""
    try:
        tokens = array("i", token_ids)
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequestError(
            f"the prompt must be token ids from 0 to {limits.vocab_size - 1}; it holds something else.", param="token_ids"
        ) from None
    if not tokens:
        raise InvalidRequestError("the prompt is empty; give at least one token (the model's BOS, say).", param="token_ids")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        at, bad = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < limits.vocab_size)
        raise InvalidRequestError(
            f"the prompt holds id {bad} at position {at}; the vocabulary has ids 0 to {limits.vocab_size - 1}.",
            param="token_ids",
        )
    return tokens


def _check_ids(name: str, ids: Iterable[int], limits: Limits) -> None:
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise InvalidRequestError(
                f"{name} names id {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}.", param=name
            )


def _check_room(num_prompt: int, request: Request, limits: Limits) -> int:
    wanted, context, pool = request.sampling.max_tokens, limits.max_context, limits.num_pages * limits.page_size
    if num_prompt > context or (num_prompt == context and wanted != 0):
        what = "leaves no room for a token" if num_prompt == context else f"is {num_prompt - context} too many"
        raise ContextLengthError(
            f"the prompt is {num_prompt} tokens, which {what}: this engine's context is {context}. "
            "Shorten the prompt or raise max_context.",
            param="token_ids",
        )
    if num_prompt > pool:
        raise CapacityError(
            f"the prompt is {num_prompt} tokens; this engine's KV pool holds {pool}. Shorten the prompt or raise kv_memory.",
            param="token_ids",
        )
    room = min(context - num_prompt, pool - num_prompt + 1)
    if wanted is None:
        return min(DEFAULT_MAX_TOKENS, room)
    if num_prompt + wanted > context:
        raise ContextLengthError(
            f"the prompt is {num_prompt} tokens and max_tokens is {wanted}: {num_prompt + wanted} in all, and this engine's "
            f"context is {context}. Ask for at most {context - num_prompt}, or shorten the prompt.",
            param="max_tokens",
        )
    need = pages_needed(num_prompt, wanted, limits.page_size)
    if need > limits.num_pages:
        raise CapacityError(
            f"the prompt is {num_prompt} tokens and max_tokens is {wanted}: {need} pages of {limits.page_size} tokens, and this "
            f"engine's KV pool has {limits.num_pages}. Ask for at most {room}, or raise kv_memory.",
            param="max_tokens",
        )
    return wanted
