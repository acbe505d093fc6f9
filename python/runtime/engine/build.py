"""EngineConfig -> the parts of an engine: where model, kernels, pool and text meet. Runs once, then has no say.

open_model ─ headers only ─> resolve (P3) ─ is there room? ─> load_model ─> Backend.bind ─> LocalExecutor ─┐
     └──────> Tokenizer ──────────────────────────────────────────────────> Text                          EngineCore
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch

from phloem.runtime.backends.base import Backend, KVSpec, Limits
from phloem.runtime.config import Dtype, EngineConfig, Hardware, Resolved, resolve
from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.engine.gpu import check_dtype, device_executor, gpu_dtype, gpu_kv, make_backend, on_gpu, planned_bytes
from phloem.runtime.engine.grammars import Grammars, vocabulary_of
from phloem.runtime.engine.textside import Text
from phloem.runtime.errors import ConfigError
from phloem.runtime.executor.base import Executor
from phloem.runtime.executor.local import LocalExecutor
from phloem.runtime.executor.sampler import ReferenceSampler, Sampler
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.dummy import open_dummy
from phloem.runtime.models.loader import LoadedModel, OpenModel, load_model, open_model
from phloem.runtime.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from phloem.runtime.engine.client import Core

__all__ = ["EngineOptions", "Parts", "Text", "assemble", "build", "detect_hardware", "load_tokenizer"]

LOGIT_ROWS = 64  # logits buffered at once; more of one step (prompt logprobs) are computed in parts


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of Engine and AsyncEngine: EngineConfig's fields, `model` aside, which comes first."""

    dtype: Dtype
    load_format: Literal["auto", "dummy"]
    device: Literal["auto", "cpu", "cuda", "reference"]
    page_size: int
    kv_memory: int | float | str | None
    kv_tokens: int | None
    kv_dtype: Literal["auto", "f32", "bf16", "f16", "fp8"]
    max_context: int | None
    max_running: int
    max_step_tokens: int
    policy: Literal["prefix", "fcfs", "priority"]
    max_wait: int
    threads: int
    cache_mode: Literal["on", "off"]
    deterministic: bool | None
    overlap: bool | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a facade is made of. The core, and with it the model and the pool, goes to the client; the rest stays.

    on_close: frees what the core does not own (the backend with its threads); called once, after the core was closed.
    """

    core: Core
    text: Text
    tokenizer: Tokenizer
    config: EngineConfig
    resolved: Resolved
    on_close: Callable[[], None]
    grammars: Grammars | None = None


def build(
    config: EngineConfig,
    on_load: Callable[[str], None] | None = None,
    on_open: Callable[[OpenModel], None] | None = None,
) -> Parts:
    """Load and wire everything. Blocks for as long as the weights take.

    on_load: told of each stage, with a percentage while weights are read.   on_open: told what the headers say.
    Raises ConfigError, ModelLoadError, UnsupportedModelError, most of them before the weights are read.
    """
    report = on_load if on_load is not None else _ignore
    hardware = on_gpu(config, detect_hardware())
    report("reading the headers")
    opened = _opened(config)
    if on_open is not None:
        on_open(opened)
    device = "cuda" if hardware.is_gpu else "cpu" if config.device == "auto" else config.device
    check_dtype(device, config.dtype)
    dtype = gpu_dtype(config.dtype, opened) if device == "cuda" else config.dtype
    planned = planned_bytes(device, dtype, opened)
    settled = gpu_kv(config, dtype) if device == "cuda" else config
    first = _resolve(settled, hardware, opened.config, planned)  # what cannot fit is refused before it is loaded
    backend = make_backend(first, dtype)
    try:
        if first.kv_dtype not in backend.kv_dtypes:
            known = ", ".join(repr(d) for d in backend.kv_dtypes)
            raise ConfigError(f"kv_dtype is {first.kv_dtype!r}; the {backend.name} backend keeps {known}.", param="kv_dtype")
        report("the tokenizer")
        tokenizer = load_tokenizer(opened)
        report("the weights")
        with _one_torch_thread():
            loaded = load_model(
                opened, backend, dtype, max_context=first.max_context, progress=lambda done, total: report(f"weights {done / total:.0%}")
            )  # fmt: skip
            resolved = _resolve(settled, hardware, opened.config, max(planned, loaded.weight_bytes))
            report("the KV pool")
            grammars = _grammars(loaded.opened, tokenizer)
            core = _core(backend, loaded, resolved, tokenizer, grammars)
    except BaseException:
        backend.close()
        raise

    def close() -> None:
        grammars.close()
        backend.close()

    return Parts(core, Text(tokenizer), tokenizer, config, resolved, close, grammars)


def assemble(
    config: EngineConfig,
    backend: Backend,
    pack: Callable[[Resolved], LoadedModel],
    opened: OpenModel,
    tokenizer: Tokenizer | None,
) -> Parts:
    """An engine around a model that is not a checkpoint: a trainer's. Closes `backend` if it fails.

    pack: the model in `backend`'s form, once it is known how many positions there are.   tokenizer: None, and ids are all there
    is: no text, no grammars, no stop strings.   Raises ConfigError.
    """
    hardware = detect_hardware()
    text: Any = tokenizer if tokenizer is not None else IdsOnly(opened.config.vocabulary)
    try:
        loaded = pack(_resolve(config, hardware, opened.config, 0))
        resolved = _resolve(config, hardware, opened.config, loaded.weight_bytes)
        grammars = _grammars(opened, tokenizer) if tokenizer is not None else None
        core = _core(backend, loaded, resolved, text, grammars)
    except BaseException:
        backend.close()
        raise

    def close() -> None:
        if grammars is not None:
            grammars.close()
        backend.close()

    return Parts(core, Text(text), text, config, resolved, close, grammars)


class IdsOnly:
    """Stands where a tokenizer would: every id of the model's width is a token, and none has a text."""

    def __init__(self, width: int) -> None:
        self.vocab_size = width
        self.eos_ids = frozenset[int]()

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"this engine was made without a tokenizer, and {name} needs one: pass tokenizer= when you make it.",
            param="tokenizer",
        )


def _grammars(opened: OpenModel, tokenizer: Tokenizer) -> Grammars:
    ends = frozenset(tokenizer.eos_ids) | frozenset(opened.eos_ids)
    return Grammars(lambda: vocabulary_of(tokenizer, ends, opened.config.vocabulary), tokenizer.eos_id)


def _core(
    backend: Backend, loaded: LoadedModel, resolved: Resolved, tokenizer: Tokenizer, grammars: Grammars | None
) -> EngineCore:
    kv, limits, max_running = kv_spec(loaded.config, resolved), limits_of(resolved), resolved.config.max_running
    executor: Executor
    if backend.name == "cuda":
        width = loaded.config.vocabulary
        executor = device_executor(
            backend, loaded, kv, limits, vocab_size=min(tokenizer.vocab_size, width), width=width, max_running=max_running,
            overlap=resolved.overlap,
        )  # fmt: skip
        return EngineCore(_core_settings(resolved, loaded.opened, tokenizer), executor, grammar=grammars)
    executor = LocalExecutor(
        backend.bind(loaded.model, kv, limits), _sampler(backend, tokenizer, loaded.config, max_running), page_size=kv.page_size,
        num_pages=kv.num_pages, width=loaded.config.vocabulary, max_running=max_running, max_logits=limits.max_logits, overlap=resolved.overlap,
        weights=loaded.weights,
    )  # fmt: skip
    return EngineCore(_core_settings(resolved, loaded.opened, tokenizer), executor, grammar=grammars)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """torch's pool would be a second one beside the kernels' (and no faster: 0.26 s against 0.35 s to load the embedded model), and
    once it was started, a forked child that makes an engine of its own would hang in it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _opened(config: EngineConfig) -> OpenModel:
    return open_dummy(config.model) if config.load_format == "dummy" else open_model(config.model)


def load_tokenizer(opened: OpenModel) -> Tokenizer:
    """The tokenizer that belongs to a checkpoint: of a GGUF's metadata, or of the directory."""
    width = opened.config.vocabulary
    if opened.metadata is not None:
        return Tokenizer.from_gguf_metadata(opened.metadata, width=width, source=str(opened.path))
    return Tokenizer.from_directory(opened.path, width=width)


def kv_spec(model: ModelConfig, resolved: Resolved) -> KVSpec:
    return KVSpec(
        num_layers=model.num_layers, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, num_pages=resolved.num_pages,
        page_size=resolved.config.page_size, dtype=resolved.kv_dtype,
    )  # fmt: skip


def limits_of(resolved: Resolved) -> Limits:
    """Bounds of one step: its token budget, and every running sequence at full context."""
    config = resolved.config
    rows = min(config.max_running, config.max_step_tokens)
    pages_each = min(-(-resolved.max_context // config.page_size), resolved.num_pages)
    return Limits(
        max_tokens=config.max_step_tokens,
        max_rows=rows,
        max_logits=min(config.max_step_tokens, max(LOGIT_ROWS, rows)),
        max_pages=rows * pages_each,
    )


def detect_hardware() -> Hardware:
    """The cores and the memory that this process may use: affinity and control groups count, not only the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    quota = _first_line("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _first_line(path)
        if limit.isdigit():
            memory = min(memory, int(limit))
    return Hardware(cores=max(cores, 1), memory_bytes=memory)


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _resolve(config: EngineConfig, hardware: Hardware, model: ModelConfig, weight_bytes: int) -> Resolved:
    return resolve(
        config, hardware, model_context=model.max_context, kv_bytes_per_token_f32=model.kv_bytes_per_token_f32, weight_bytes=weight_bytes
    )  # fmt: skip


def _sampler(backend: Backend, tokenizer: Tokenizer, model: ModelConfig, max_running: int) -> Sampler:
    """The native one where the logits are in the kernels' memory; the same draws, but where a border falls within float32 rounding."""
    vocab_size, width, remembered = min(tokenizer.vocab_size, model.vocabulary), model.vocabulary, 2 * max_running
    if backend.name == "cpu":
        from phloem.runtime.backends.cpu import Cpu
        from phloem.runtime.executor.native_sampler import NativeSampler

        assert isinstance(backend, Cpu)
        return NativeSampler(backend.context, vocab_size=vocab_size, width=width, max_requests=remembered)
    return ReferenceSampler(vocab_size=vocab_size, width=width, max_requests=remembered)


def _core_settings(resolved: Resolved, opened: OpenModel, tokenizer: Tokenizer) -> CoreSettings:
    config, width = resolved.config, opened.config.vocabulary
    return CoreSettings(
        page_size=config.page_size,
        num_pages=resolved.num_pages,
        max_context=resolved.max_context,
        vocab_size=min(tokenizer.vocab_size, width),
        width=width,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        policy=config.policy,
        max_wait=config.max_wait,
        overlap=resolved.overlap,
        cache_enabled=config.cache_mode == "on",
        eos_ids=frozenset(tokenizer.eos_ids) | frozenset(opened.eos_ids),
        seed=config.seed,
    )


def _ignore(stage: str) -> None:
    pass
