"""Programs on any OpenAI-compatible server: text and messages go out, text comes back. What such a server cannot do is refused at its line (Z1).

    roles                 /v1/chat/completions     a gen stands at the end of an assistant turn, which it begins
    text without roles    /v1/completions

No tokens: no reuse that we know of, no select, no open end of a value. For a phloem server use RuntimeEndpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from phloem.lang.backend import Capabilities, Job
from phloem.lang.http import Wire, wait_until
from phloem.lang.ir import located
from phloem.runtime.errors import BackendUnavailable, BackendUnsupported, PhloemError
from phloem.runtime.request import FinishReason, Output, SamplingParams, Usage

__all__ = ["OpenAI"]

SAMPLING = frozenset(
    {"max_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty", "stop", "skip_special_tokens"}
)
_FINISH: dict[str, FinishReason] = {"stop": "eos", "length": "length", "content_filter": "abort"}


class OpenAI:
    """An OpenAI-compatible server as a backend.

    base_url: with its /v1.   structured: kinds of constraints that the server enforces, beyond JSON schemas: "regex", "choices", as
    `structured_outputs` (vLLM's name, ours too).   seeds: it honours `seed`.   emulate: `select` draws one of
    its choices under a constraint, without scores, and the trace says so.
    """

    self_driven = True
    tokenizer = None
    max_context: int | None = None
    kv_tokens: int | None = None
    page_size = 16

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        structured: Iterable[str] = (),
        seeds: bool = True,
        emulate: bool = False,
        timeout: float | None = 600.0,
    ) -> None:
        self._wire = Wire(base_url, api_key=api_key, timeout=timeout)
        self.name, self.model = f"{model} at {self._wire.url}", model
        self.capabilities = Capabilities(
            tokens=False, logprobs=False, prompt_logprobs=False, grammars=frozenset({"json_schema", "json_object", *structured}), open_end=False, seed=seeds,
            hold=False, tools=False, sampling=SAMPLING, roles_end_only=True, emulate=frozenset({"select"}) if emulate else frozenset(),
        )  # fmt: skip

    def lang_backend(self) -> OpenAI:
        return self

    def submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._wire.send(job.request.id, partial(self._serve, job), partial(self._cancelled, job))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._wire.cancel(request_ids)

    def wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        return wait_until(done, deadline)

    def hold(self, name: str, token_ids: Sequence[int], namespace: str) -> None: ...
    def release(self, names: Sequence[str]) -> None: ...
    def flush(self) -> int:
        raise BackendUnsupported(f"{self.name} has no cache that could be flushed from here.")

    def info(self) -> dict[str, Any]:
        return {"backend": self.name, "models": self._wire.call("GET", "/models")}

    def close(self) -> None:
        self._wire.close()

    def __enter__(self) -> OpenAI:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- one request ----------------------------------------------------------------------------------------------------

    async def _serve(self, job: Job) -> None:
        try:
            path, body = self._body(job)
            reply = await self._wire.ask("POST", path, body)
            choice = reply["choices"][0]
            text = choice["message"].get("content") if path.startswith("/chat") else choice["text"]
            used = reply.get("usage") or {}
            details = used.get("prompt_tokens_details") or {}
            usage = Usage(
                int(used.get("prompt_tokens") or 0),
                int(details.get("cached_tokens") or 0),
                int(used.get("completion_tokens") or 0),
            )
            finish = _FINISH.get(choice.get("finish_reason") or "stop", "eos")
            job.end(
                Output(text=text or "", token_ids=[], finish_reason=finish, usage=usage, seed=job.request.sampling.seed or 0)
            )
        except PhloemError as error:
            job.fail(error)
        except Exception as error:
            job.fail(BackendUnavailable(f"{self.name} answered with something that is no completion: {error!r}"))

    @staticmethod
    def _cancelled(job: Job) -> None:
        job.end(Output(text=job.text, token_ids=[], finish_reason="abort"))

    def _body(self, job: Job) -> tuple[str, dict[str, Any]]:
        prompt, s, record = job.prompt, job.request.sampling, job.record
        assert prompt is not None
        body: dict[str, Any] = {"model": self.model, **_sampling(s)}
        if self.capabilities.seed and s.seed is not None:
            body["seed"] = s.seed & 0x7FFFFFFF  # some servers take 32 bits
        if not prompt.messages:
            if job.request.grammar is not None:
                raise located(
                    BackendUnsupported(f"{self.name} constrains chat replies only; put this gen into assistant(…)."),
                    record.at,
                    record.name,
                )
            return "/completions", {**body, "prompt": prompt.text + prompt.partial}
        if prompt.partial:
            raise located(
                BackendUnsupported(
                    f"{self.name} begins each assistant turn itself; put the text before this gen into the user's message."
                ),
                record.at,
                record.name,
            )
        if prompt.text.strip():
            raise located(
                BackendUnsupported(f"{self.name} reads messages; text outside of a role has no place before them."),
                record.at,
                record.name,
            )
        body["messages"] = [dict(message) for message in prompt.messages]
        if job.request.grammar is not None:
            body |= _constraint(job)
        return "/chat/completions", body


def _sampling(s: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": s.temperature, "top_p": s.top_p}
    if s.max_tokens is not None:
        body["max_tokens"] = s.max_tokens
    for name in ("frequency_penalty", "presence_penalty"):
        if getattr(s, name):
            body[name] = getattr(s, name)
    if s.stop:
        body["stop"] = list(s.stop)
    return body


def _constraint(job: Job) -> dict[str, Any]:
    spec = job.request.grammar
    assert spec is not None
    if spec.kind == "json_schema":
        schema = {"name": "value", "schema": json.loads(spec.source), "strict": spec.strict}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if spec.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    return {
        "structured_outputs": {"choice": json.loads(spec.source)}
        if spec.kind == "choices"
        else {"regex" if spec.kind == "regex" else "grammar": spec.source}
    }
