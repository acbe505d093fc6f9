"""EngineConfig: one flat frozen record. `resolve` turns it and the machine into numbers, and is a pure function."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal

from phloem.runtime.errors import ConfigError

__all__ = ["Dtype", "EngineConfig", "Hardware", "KVDtype", "Resolved", "make_config", "parse_bytes", "resolve"]

GIB = 1 << 30
GPU_SHARE = 0.9  # of a GPU's memory, weights included; the rest is for activations, graphs and FlashInfer's workspace
Dtype = Literal["auto", "f32", "bf16", "f16", "fp8", "q8", "q4"]
KVDtype = Literal["f32", "bf16", "f16", "fp8"]
MAX_BYTES = 1 << 60  # beyond what any machine has, within what arithmetic on floats can show


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """model: None is the embedded default; else a directory, a .gguf file, or org/name.
    dtype: "auto" keeps what the file has; "fp8" is for cuda alone.   load_format "dummy": random weights of the shape in config.json.
    page_size: a power of two, 1 .. 64.
    kv_memory: bytes, "2GiB", or a fraction of the device (weights included); kv_tokens: the same in tokens; not both.
    max_context: prompt + output, at most the model's.   max_running: sequences that hold pages at once.
    max_step_tokens: token budget of one step.   policy: order of the waiting queue.   max_wait: served tokens after which a
    waiting request is overtaken no more (S2).   threads: 0 is one a core.
    cache_mode "off": the same code with no hits.   deterministic: None lets the device decide; always true on
    reference and cpu (B1), on cuda an option with a price.   overlap: None lets the device decide.   seed: of the seeds drawn for requests without one.
    """

    model: str | None = None
    dtype: Dtype = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    device: Literal["auto", "cpu", "cuda", "reference"] = "auto"
    page_size: int = 16
    kv_memory: int | float | str | None = None
    kv_tokens: int | None = None
    kv_dtype: Literal["auto", "f32", "bf16", "f16", "fp8"] = "auto"
    max_context: int | None = None
    max_running: int = 64
    max_step_tokens: int = 256
    policy: Literal["prefix", "fcfs", "priority"] = "prefix"
    max_wait: int = 16_384
    threads: int = 0
    cache_mode: Literal["on", "off"] = "on"
    deterministic: bool | None = None
    overlap: bool | None = None
    seed: int | None = None


_CHOICES: dict[str, tuple[object, ...]] = {
    "dtype": ("auto", "f32", "bf16", "f16", "fp8", "q8", "q4"),
    "load_format": ("auto", "dummy"),
    "device": ("auto", "cpu", "cuda", "reference"),
    "kv_dtype": ("auto", "f32", "bf16", "f16", "fp8"),
    "policy": ("prefix", "fcfs", "priority"),
    "cache_mode": ("on", "off"),
    "deterministic": (None, True, False),
    "overlap": (None, True, False),
    "page_size": (1, 2, 4, 8, 16, 32, 64),
}
_RANGES: dict[str, tuple[int, int]] = {
    "kv_tokens": (1, 2**40),
    "max_context": (1, 2**31 - 1),
    "max_running": (1, 65_536),
    "max_step_tokens": (1, 1_048_576),
    "max_wait": (0, 2**60),
    "threads": (0, 1024),
    "seed": (-(2**63), 2**63 - 1),
}


def make_config(model: str | None = None, **options: Any) -> EngineConfig:
    """An EngineConfig, each field checked. Raises ConfigError that names the field and what it may be."""
    known = {f.name for f in dataclasses.fields(EngineConfig)}
    for name in options:
        if name not in known:
            close = ", ".join(sorted(known - {"model"}))
            raise ConfigError(f"there is no engine option {name!r}. The options are: {close}.", param=name)
    if model is not None and not isinstance(model, str):
        model = getattr(model, "__fspath__", lambda: None)()
        if not isinstance(model, str):
            raise ConfigError("model must be a path, an org/name, or None for the embedded model.", param="model")
    for name, value in options.items():
        if name in _CHOICES:
            if not any(value is c or (value == c and type(value) is type(c)) for c in _CHOICES[name]):
                allowed = ", ".join(repr(c) for c in _CHOICES[name])
                raise ConfigError(f"{name} is {value!r}; expected one of {allowed}.", param=name)
        elif name in _RANGES and value is not None:
            low, high = _RANGES[name]
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} is {value!r}; expected an integer from {low} to {high}.", param=name)
        elif name in _RANGES and name not in ("kv_tokens", "max_context", "seed"):
            raise ConfigError(f"{name} is None; expected an integer.", param=name)
    if options.get("kv_memory") is not None and options.get("kv_tokens") is not None:
        raise ConfigError("kv_memory and kv_tokens both say how large the pool is; give one of them.", param="kv_tokens")
    if options.get("kv_memory") is not None:
        parse_bytes(options["kv_memory"], GIB)
    return EngineConfig(model=model, **options)


def parse_bytes(value: int | float | str, device_bytes: int) -> int:
    """Bytes: an integer, "2GiB", "500MB", or a fraction of the device (0 < x <= 1 as a float, or "25%")."""
    text = value if isinstance(value, str) else None
    if text is not None:
        m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)([bB]?)\s*", text)
        if m and (m[2] or m[4] or "." not in m[1]):
            scale = (1024 if m[3] else 1000) ** " kmgt".index(m[2].lower() or " ")
            number = float(m[1]) * scale
            if number < MAX_BYTES:
                return int(number)
        p = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
        if p and 0 < float(p[1]) <= 100:
            return int(device_bytes * float(p[1]) / 100)
    elif isinstance(value, float) and 0 < value <= 1:
        return int(device_bytes * value)
    elif isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_BYTES:
        return value
    raise ConfigError(
        f'kv_memory is {value!r}; expected bytes, a size such as "2GiB", or a fraction such as 0.25.', param="kv_memory"
    )


@dataclass(frozen=True, slots=True)
class Hardware:
    """What `resolve` needs to know of the machine."""

    cores: int
    memory_bytes: int
    is_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Resolved:
    """The numbers an engine runs with. `arithmetic`: how they came about, a line each, for people."""

    config: EngineConfig
    device: str
    threads: int
    max_context: int
    num_pages: int
    kv_dtype: KVDtype
    overlap: bool
    page_bytes: int
    arithmetic: tuple[str, ...]


def resolve(
    config: EngineConfig, hardware: Hardware, *, model_context: int, kv_bytes_per_token_f32: int, weight_bytes: int
) -> Resolved:
    """P3: the pool from a byte budget. Pure. Raises ConfigError if not one page fits."""
    device = config.device if config.device != "auto" else ("cuda" if hardware.is_gpu else "cpu")
    threads = config.threads or hardware.cores
    context = min(config.max_context or model_context, model_context)
    if config.max_context and config.max_context > model_context:
        raise ConfigError(
            f"max_context is {config.max_context}; the model was made for {model_context} tokens.", param="max_context"
        )
    on_gpu = device == "cuda"
    plain: KVDtype = "bf16" if on_gpu else "f32"
    kv_dtype: KVDtype = plain if config.kv_dtype == "auto" else config.kv_dtype
    token_bytes = kv_bytes_per_token_f32 // {"f32": 1, "bf16": 2, "f16": 2, "fp8": 4}[kv_dtype]
    page_bytes = token_bytes * config.page_size
    if config.kv_tokens is not None:
        num_pages = -(-config.kv_tokens // config.page_size)
        how = f"kv_tokens={config.kv_tokens}"
    else:
        if config.kv_memory is not None:
            budget = parse_bytes(config.kv_memory, hardware.memory_bytes)
            if isinstance(config.kv_memory, float) or (isinstance(config.kv_memory, str) and "%" in config.kv_memory):
                budget -= weight_bytes
            how = f"kv_memory={config.kv_memory}"
        else:
            # Never more than every running sequence could use at full context: a small model would take RAM for nothing.
            budget, how = hardware.memory_bytes // 4, "25 % of RAM, at most max_running x max_context"
            if on_gpu:
                budget = int(hardware.memory_bytes * GPU_SHARE) - weight_bytes
                how = f"{GPU_SHARE:.0%} of the GPU less the weights, at most max_running x max_context"
            budget = min(budget, config.max_running * context * token_bytes)
        num_pages = budget // page_bytes
    if num_pages < 1:
        raise ConfigError(
            f"the KV pool has no room for one page of {page_bytes} bytes ({how}). Raise kv_memory or lower page_size.",
            param="kv_memory",
        )
    memory = hardware.memory_bytes
    if num_pages * page_bytes + weight_bytes > memory:  # the system may promise more than it has, and kill us when we touch it
        most = max(memory - weight_bytes, 0)
        raise ConfigError(
            f"the KV pool would be {num_pages} pages of {page_bytes} bytes ({how}); of this machine's {memory / GIB:.1f} GiB, "
            f"{most / GIB:.1f} GiB are left beside the weights, which is {most // token_bytes} tokens. Lower kv_memory or kv_tokens.",
            param="kv_memory" if config.kv_tokens is None else "kv_tokens",
        )
    arithmetic = (
        f"KV: {token_bytes} bytes a token ({kv_dtype}) x {config.page_size} = {page_bytes} bytes a page",
        f"pool: {how} -> {num_pages} pages = {num_pages * config.page_size} tokens = {num_pages * page_bytes / GIB:.2f} GiB",
        f"weights: {weight_bytes / GIB:.2f} GiB; {'GPU' if on_gpu else 'RAM'}: {hardware.memory_bytes / GIB:.1f} GiB; context: {context} tokens",
    )
    overlap = bool(config.overlap) if config.overlap is not None else on_gpu
    return Resolved(config, device, threads, context, num_pages, kv_dtype, overlap, page_bytes, arithmetic)
