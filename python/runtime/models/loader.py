"""From what the user calls a model to a model that runs: the one door.

    None          -> embedded.find_embedded ─┐
    x.gguf        ───────────────────────────┴> GgufFile         ┐
    a directory   -> config.json, safetensors, tokenizer.json    ├> ModelConfig + Stored ─assign─fill─> LoadedModel
    org/name      -> hub.find: local cache first ─> a directory  ┘

Everything is checked before memory is taken: `open_model` reads headers only, `load_model` goes on to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phloem.runtime.backends.base import Backend, Model
from phloem.runtime.errors import ModelLoadError, UnsupportedModelError
from phloem.runtime.models import hub
from phloem.runtime.models.config import ModelConfig, config_from_hf, token_ids
from phloem.runtime.models.convert import Dtype, common_kind
from phloem.runtime.models.embedded import EMBEDDED_NAME, find_embedded
from phloem.runtime.models.gguf import GgufFile
from phloem.runtime.models.gguf_config import config_from_gguf
from phloem.runtime.models.live import LiveWeights, slots_of
from phloem.runtime.models.quantised import present, stored_format
from phloem.runtime.models.registry import architecture_named
from phloem.runtime.models.safetensors_file import INDEX, SINGLE, read_json, read_safetensors, read_sharded
from phloem.runtime.models.weights import Architecture, Assignment, assign, fill, planned_bytes

__all__ = ["LoadedModel", "OpenModel", "load_model", "open_model"]

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A checkpoint that was found complete and sound; no weight was read.

    path: the .gguf file or the directory.   metadata: of a GGUF file, tokenizer included; None for a directory.
    chat_template: its source, or None.   generation_config: as the file says; empty without one.
    eos_ids: config's and generation_config's; the tokenizer adds its own.   file_bytes: of tensors.
    """

    name: str
    path: Path
    config: ModelConfig
    architecture: type[Architecture]
    assignments: list[Assignment] = field(repr=False)
    metadata: Mapping[str, Any] | None = field(repr=False)
    chat_template: str | None = field(repr=False)
    generation_config: Mapping[str, Any]
    eos_ids: tuple[int, ...]
    file_bytes: int

    def weight_bytes(self, dtype: Dtype) -> int:
        """What the weights will take under `dtype`. Raises UnsupportedModelError if their shapes do not allow it."""
        return planned_bytes(self.assignments, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """`opened` with its weights packed. weight_bytes: as the backend was given them."""

    model: Model
    opened: OpenModel = field(repr=False)
    weight_bytes: int
    weights: LiveWeights = field(repr=False)

    @property
    def config(self) -> ModelConfig:
        return self.opened.config

    @property
    def name(self) -> str:
        return self.opened.name

    @property
    def path(self) -> Path:
        return self.opened.path

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        return self.opened.metadata

    @property
    def chat_template(self) -> str | None:
        return self.opened.chat_template

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self.opened.generation_config

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.opened.eos_ids


def load_model(
    model: str | OpenModel | None,
    backend: Backend,
    dtype: Dtype = "auto",
    *,
    max_context: int | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """The model, packed for `backend`.

    dtype: see `convert`.   max_context: positions that will be used, if fewer than the model's (a smaller rotary table).
    progress: called with (bytes done, bytes in all).
    Raises ModelLoadError or UnsupportedModelError before it takes memory, with every offender listed.
    """
    opened = model if isinstance(model, OpenModel) else open_model(model)
    opened.weight_bytes(dtype)  # a dtype that some matrix cannot have is refused before the first is read
    parameters, size = fill(opened.assignments, backend, dtype, progress)
    positions = min(max_context or opened.config.max_context, opened.config.max_context)
    model_ = opened.architecture(opened.config, parameters, positions)
    kinds = {
        a.param: common_kind(a.tensors, dtype, is_table=a.rule.form == "table")
        for a in opened.assignments
        if a.rule.form != "vector"
    }
    slots = slots_of(opened.architecture, opened.config, kinds)
    weights = LiveWeights(opened.architecture, opened.config, slots, backend, parameters.values, model_, positions)
    return LoadedModel(model=model_, opened=opened, weight_bytes=size, weights=weights)


def open_model(model: str | None) -> OpenModel:
    """Find and verify a checkpoint. Reads headers only."""
    if model is None:
        return _open_gguf(find_embedded(), EMBEDDED_NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_directory(path, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(
                f"{path}: expected a directory with config.json and safetensors, or a .gguf file.", param="model"
            )
        return _open_gguf(path, path.stem)
    if hub.is_repository(model) and path.suffix != ".gguf":
        return _open_directory(hub.find(model), model)
    raise ModelLoadError(
        f"{model}: no such file or directory. A model is a directory, a .gguf file, org/name on the hub, or None for the embedded one.",
        param="model",
    )


def _open_gguf(path: Path, name: str) -> OpenModel:
    file = GgufFile(path)
    source, tensors, metadata = str(path), file.tensors, file.metadata
    table, factors = tensors.get("token_embd.weight"), tensors.get("rope_freqs.weight")
    if table is None or len(table.shape) != 2:
        raise ModelLoadError(f"{source}: token_embd.weight is missing or no matrix.")
    config = config_from_gguf(
        metadata,
        source,
        tied="output.weight" not in tensors,
        vocabulary=table.shape[0],
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        rope_factors=tuple(factors.float32().flatten().tolist()) if factors is not None and factors.kind == "f32" else (),
    )
    kind = architecture_named(config.architecture, source)
    interleaved = metadata["general.architecture"] == "llama"
    template = metadata.get("tokenizer.chat_template")
    return OpenModel(
        name=name,
        path=path,
        config=config,
        architecture=kind,
        assignments=assign(kind, config, tensors, "gguf", source, interleaved=interleaved),
        metadata=metadata,
        chat_template=template if isinstance(template, str) else None,
        generation_config={},
        eos_ids=config.eos_ids,
        file_bytes=sum(t.nbytes for t in tensors.values()),
    )


def _open_directory(path: Path, name: str) -> OpenModel:
    if not (path / "config.json").is_file():
        files = sorted(p.name for p in path.glob("*.gguf"))
        hint = f" It holds {files[0]}: name that file." if files else " Expected a transformers directory or a .gguf file."
        raise ModelLoadError(f"{path}: no config.json.{hint}", param="model")
    raw = read_json(path / "config.json")
    config = config_from_hf(raw, str(path / "config.json"))
    if (path / INDEX).is_file():
        tensors = read_sharded(path / INDEX)
    elif (path / SINGLE).is_file():
        tensors = read_safetensors(path / SINGLE)
    else:
        found = ", ".join(sorted(p.name for p in path.glob("*.bin"))) or "no weights"
        raise UnsupportedModelError(f"{path}: expected {SINGLE} or {INDEX}; found {found}.", param="model")
    form = stored_format(raw, str(path / "config.json"))
    if form is not None:
        tensors = present(tensors, form, str(path))
    kind = architecture_named(config.architecture, str(path))
    generation = read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    extra_eos = token_ids(generation.get("eos_token_id"), str(path / "generation_config.json"), "eos_token_id")
    return OpenModel(
        name=name,
        path=path,
        config=config,
        architecture=kind,
        assignments=assign(kind, config, tensors, "hf", str(path)),
        metadata=None,
        chat_template=_template(path),
        generation_config=generation,
        eos_ids=tuple(dict.fromkeys([*config.eos_ids, *extra_eos])),
        file_bytes=sum(t.nbytes for t in tensors.values()),
    )


def _template(path: Path) -> str | None:
    """chat_template.jinja (transformers 5), else tokenizer_config.json's chat_template, of several the one named default."""
    alone = path / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    if not (path / "tokenizer_config.json").is_file():
        return None
    value = read_json(path / "tokenizer_config.json").get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
