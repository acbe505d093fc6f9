"""Programs on a server: ids go to `/generate`, ids come back, so that a path is the same tokens there as here (Z2).

    phloem server       everything: constraints, logprobs, select, tools, seeds
    SGLang >= 0.5       regex, JSON schema, EBNF; its seed needs a server flag (seeds=True)

Prefixes are reused by the server's own tree. The tokenizer must be here too; it is compared with the server's on a probe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from phloem.lang.backend import KINDS, Capabilities, Job
from phloem.lang.http import Wire, wait_until
from phloem.runtime.errors import BackendUnavailable, InvalidRequestError, PhloemError
from phloem.runtime.request import FinishReason, GrammarSpec, OutputDelta, Request, TokenLogprob, Usage
from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["RuntimeEndpoint"]

PROBE = "The quick  brown fox, 12345 naïve — 東京\n\tx_y[0]"
_BY_NAME = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "ignore_eos", "skip_special_tokens")  # fmt: skip
SGLANG_SAMPLING = frozenset(_BY_NAME) | {"max_tokens", "min_tokens", "stop", "stop_token_ids", "keep_stop"}


class RuntimeEndpoint:
    """A phloem or SGLang server as a backend.

    tokenizer: of its model; None loads it from the path that the server tells, or the embedded model's.   api_key: sent as a bearer.
    cache_salt: keeps this program's prefixes apart from those of others.   seeds: an SGLang server was started so that it honours seeds.
    timeout: seconds that one answer may take, None for no limit.
    Raises BackendUnavailable if the server cannot be reached, InvalidRequestError if the tokenizer is not its model's.
    """

    self_driven = True

    def __init__(
        self,
        url: str,
        *,
        tokenizer: Tokenizer | None = None,
        api_key: str | None = None,
        cache_salt: str | None = None,
        seeds: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._wire = Wire(url, api_key=api_key, timeout=timeout)
        self.name, self._salt = self._wire.url, cache_salt
        self._heads: dict[str, str] = {}  # request id -> the one that its HTTP request goes by
        try:
            model = self._wire.call("GET", "/get_model_info")
            self.is_phloem = _is_phloem(self._wire.call("GET", "/v1/models"))
            server = self._wire.call("GET", "/get_server_info")
            self.tokenizer = tokenizer if tokenizer is not None else _tokenizer_of(model, self.is_phloem)
            if self.is_phloem:
                self._check_tokenizer(self.tokenizer)
        except BaseException:
            self._wire.close()
            raise
        self.max_context: int | None = _int(model.get("max_model_len")) or _int(server.get("context_length"))
        self.kv_tokens: int | None = _int(server.get("max_total_num_tokens"))
        self.page_size: int = _int(server.get("page_size")) or 1
        self._seeds = self.is_phloem or seeds
        self.capabilities = (
            Capabilities(grammars=KINDS - {"structural_tag"}, hold=False)
            if self.is_phloem
            else Capabilities(
                grammars=frozenset({"regex", "json_schema", "ebnf"}), open_end=False, seed=seeds, hold=False, tools=False, sampling=SGLANG_SAMPLING
            )
        )  # fmt: skip

    def lang_backend(self) -> RuntimeEndpoint:
        return self

    def _check_tokenizer(self, tokenizer: Tokenizer) -> None:
        reply = self._wire.call("POST", "/tokenize", {"prompt": PROBE, "add_special_tokens": False})
        if reply["tokens"] != tokenizer.encode(PROBE, add_special_tokens=False):
            raise InvalidRequestError(
                f"the tokenizer is not that of the model at {self.name}: it gives other ids for a probe text. Pass tokenizer=, loaded from the same model.",
                param="tokenizer",
            )

    # ---- Backend --------------------------------------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        for each in _together(jobs):
            key = each[0].request.id
            for job in each[1:]:
                self._heads[job.request.id] = key
            self._wire.send(key, partial(self._serve, each), partial(self._cancelled, each))

    def abort(self, request_ids: Iterable[str]) -> None:
        # Samples of one prompt are one request there: it ends when the first of them is aborted here.
        self._wire.cancel([self._heads.get(i, i) for i in request_ids])

    def wait(self, done: Callable[[], bool], deadline: float | None) -> bool:
        return wait_until(done, deadline)

    def hold(self, name: str, token_ids: Sequence[int], namespace: str) -> None: ...
    def release(self, names: Sequence[str]) -> None: ...

    def flush(self) -> int:
        """Asks the server to forget its cache: an admin's route. How many pages that freed, it does not tell."""
        self._wire.call("POST", "/flush_cache")
        return 0

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self._wire.call("GET", "/get_server_info")
        return found

    def close(self) -> None:
        self._wire.close()

    def __enter__(self) -> RuntimeEndpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- one request ----------------------------------------------------------------------------------------------------

    async def _serve(self, jobs: list[Job]) -> None:
        try:
            body = self._body(jobs[0].request, len(jobs))
            if len(jobs) == 1 and jobs[0].streaming:
                await self._stream(jobs[0], body)
                return
            reply = await self._wire.ask("POST", "/generate", body)
            for job, entry in zip(jobs, reply if isinstance(reply, list) else [reply], strict=True):
                self._deliver(job, entry, 0)
        except PhloemError as error:
            for job in jobs:
                job.fail(error)
        except Exception as error:
            for job in jobs:
                job.fail(BackendUnavailable(f"{self.name} answered with something that is no reply of /generate: {error!r}"))
        finally:
            self._forget(jobs)

    def _forget(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._heads.pop(job.request.id, None)

    def _cancelled(self, jobs: Sequence[Job]) -> None:
        self._forget(jobs)
        for job in jobs:
            job.push(OutputDelta(job.request.id, finish_reason="abort", usage=Usage(len(job.request.token_ids))))

    async def _stream(self, job: Job, body: dict[str, Any]) -> None:
        told, last = 0, None
        async for event in self._wire.events("/generate", {**body, "stream": True}):
            last = event
            if event["meta_info"].get("finish_reason") is None:
                told = self._deliver(job, event, told)
        if last is None or last["meta_info"].get("finish_reason") is None:
            raise BackendUnavailable(f"{self.name} ended a stream before its last event.")
        self._deliver(job, last, told)

    def _deliver(self, job: Job, entry: dict[str, Any], told: int) -> int:
        """Push what is new behind `told` tokens; how many have been pushed then."""
        meta, ids, request = entry["meta_info"], [int(i) for i in entry["output_ids"]], job.request
        finish = meta.get("finish_reason")
        delta = OutputDelta(
            request.id,
            ids[told:],
            seed=int(meta.get("seed") or request.sampling.seed or 0),
            weights_version=_int(meta.get("weight_version")) or 0,
        )
        if request.sampling.logprobs is not None:
            delta.logprobs = self._logprobs(meta, "output", ids)[told:]
        if finish is not None:
            if request.sampling.prompt_logprobs is not None:
                delta.prompt_logprobs = self._prompt_logprobs(meta, request)
            delta.finish_reason = self._finish(finish, ids)
            delta.usage = Usage(
                len(request.token_ids), int(meta.get("cached_tokens") or 0), int(meta.get("completion_tokens") or len(ids)), int(meta.get("forced_tokens") or 0)
            )  # fmt: skip
            if isinstance(finish, dict) and finish.get("type") == "abort":
                delta.finish_reason = "abort"
        job.push(delta)
        if finish is not None:
            job.record.num_unfed = min(1, len(ids))  # the last one drawn; when the others came is the server's own business
        return len(ids)

    def _finish(self, finish: Any, ids: list[int]) -> FinishReason:
        kind = finish.get("type") if isinstance(finish, dict) else finish
        if kind == "length":
            return "length"
        matched = finish.get("matched") if isinstance(finish, dict) else None
        if isinstance(matched, str):
            return "stop_string"
        if isinstance(matched, int):
            return "eos" if matched in self.tokenizer.eos_ids else "stop_token"
        return "grammar"

    def _logprobs(self, meta: dict[str, Any], which: str, ids: Sequence[int]) -> list[TokenLogprob]:
        entries = meta[f"{which}_token_logprobs"]
        top = meta.get(f"{which}_top_logprobs") or [None] * len(entries)
        if len(entries) != len(ids):
            raise BackendUnavailable(f"{self.name} gave {len(entries)} logprobs for {len(ids)} tokens.")
        return [
            TokenLogprob(int(token), _float(value), tuple((int(t), _float(v)) for v, t, *_ in others or ()))
            for (value, token, *_), others in zip(entries, top)
        ]

    def _prompt_logprobs(self, meta: dict[str, Any], request: Request) -> list[TokenLogprob]:
        """Of the positions from max(1, prompt_logprobs) on. SGLang's first entry is null, whatever was asked."""
        start = max(1, request.sampling.prompt_logprobs or 0)
        entries = [(e[0], int(e[1])) for e in meta["input_token_logprobs"]]
        wanted = list(request.token_ids[start:])
        found = entries[len(entries) - len(wanted) :] if wanted else []
        if [token for _, token in found] != wanted or any(value is None for value, _ in found):
            raise BackendUnavailable(f"{self.name} gave no logprobs for a part of the prompt that was asked for.")
        return [TokenLogprob(token, _float(value)) for value, token in found]

    def _body(self, request: Request, n: int) -> dict[str, Any]:
        s = request.sampling
        params: dict[str, Any] = {name: getattr(s, name) for name in _BY_NAME}
        params["top_k"] = s.top_k or -1
        if s.max_tokens is not None:
            params["max_new_tokens"] = s.max_tokens
        for name, value in (
            ("min_new_tokens", s.min_tokens),
            ("stop", list(s.stop)),
            ("stop_token_ids", list(s.stop_token_ids)),
            ("no_stop_trim", s.keep_stop),
        ):
            if value:
                params[name] = value
        if self._seeds and s.seed is not None:
            params["sampling_seed"] = s.seed
        if n > 1:
            params["n"] = n
        if self.is_phloem:
            if s.logit_bias:
                params["logit_bias"] = {str(token): value for token, value in s.logit_bias.items()}
            if s.allowed_token_ids is not None:
                params["allowed_token_ids"] = list(s.allowed_token_ids)
            if s.logprobs is not None:
                params["logprobs_mode"] = "model" if s.logprobs == "both" else s.logprobs
        body: dict[str, Any] = {"input_ids": list(request.token_ids), "sampling_params": params}
        if request.grammar is not None:
            params.update(_constraint(request.grammar, self.is_phloem))
            if request.grammar.open_end and self.is_phloem:
                body["open_end"] = True
        if s.logprobs is not None or s.prompt_logprobs is not None:
            body["return_logprob"] = True
            body["logprob_start_len"] = -1
            if s.top_logprobs:
                body["top_logprobs_num"] = s.top_logprobs
            if s.prompt_logprobs is not None:
                start = max(1, s.prompt_logprobs)
                body["logprob_start_len"] = min(start, len(request.token_ids) - 1) if self.is_phloem else start - 1
        salt = "/".join(part for part in (self._salt, request.namespace) if part)
        if salt:
            body["cache_salt" if self.is_phloem else "extra_key"] = salt
        if request.priority:
            body["priority"] = request.priority
        return body


def _together(jobs: Sequence[Job]) -> list[list[Job]]:
    """Samples 0 … n - 1 of one gen are one HTTP request; anything else goes alone."""
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        r = job.request
        key = job.request.id if r.group is None or job.streaming else (r.group, r.token_ids, repr(r.sampling), r.grammar)
        groups.setdefault(key, []).append(job)
    made: list[list[Job]] = []
    for each in groups.values():
        each.sort(key=lambda job: job.request.sample)
        if [job.request.sample for job in each] == list(range(len(each))):
            made.append(each)
        else:
            made += [[job] for job in each]
    return made


def _constraint(spec: GrammarSpec, is_phloem: bool) -> dict[str, Any]:
    """The constraint as a field of sampling_params."""
    how: dict[str, Any] = {"json_whitespace": spec.json_whitespace, "jump_forward": spec.jump_forward} if is_phloem else {}
    if spec.kind == "json_schema":
        if is_phloem and not spec.strict:
            schema = {"name": "value", "schema": json.loads(spec.source), "strict": False}
            return {"response_format": {"type": "json_schema", "json_schema": schema}, **how}
        return {"json_schema": spec.source, **how}
    how.pop("json_whitespace", None)
    if spec.kind == "json_object":
        return {
            "response_format": {"type": "json_object"},
            **({"json_whitespace": spec.json_whitespace} if is_phloem else {}),
            **how,
        }
    if spec.kind == "choices":
        return {"structured_outputs": {"choice": json.loads(spec.source)}, **how}
    if spec.kind == "lark":
        marked = spec.source if spec.source.lstrip().startswith("%llguidance") else "%llguidance {}\n" + spec.source
        return {"ebnf": marked, **how}
    return {spec.kind: spec.source, **how}


def _is_phloem(models: Any) -> bool:
    data: Any = models.get("data") if isinstance(models, dict) else None
    return bool(data) and data[0].get("owned_by") == "phloem"


def _tokenizer_of(model: dict[str, Any], is_phloem: bool) -> Tokenizer:
    path = str(model.get("tokenizer_path") or model.get("model_path") or "")
    if path and Path(path).is_dir():
        return Tokenizer.from_directory(path)
    from phloem.runtime.models.embedded import find_embedded
    from phloem.runtime.models.gguf import GgufFile

    if path and Path(path).suffix == ".gguf" and Path(path).is_file():
        return Tokenizer.from_gguf_metadata(GgufFile(Path(path)).metadata, source=path)
    if not is_phloem:  # its own would have to be guessed, and a wrong one would go unnoticed
        raise InvalidRequestError(
            f"the tokenizer of {path or 'the model'} is not on this machine; pass tokenizer=, loaded from the same model.",
            param="tokenizer",
        )
    return Tokenizer.from_gguf_metadata(GgufFile(find_embedded()).metadata)


def _int(value: Any) -> int | None:
    if isinstance(value, str) and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: Any) -> float:
    return float("-inf") if value is None else float(value)
