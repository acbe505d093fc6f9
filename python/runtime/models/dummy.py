"""Random weights of a given shape, for benchmarks: a directory with config.json and a tokenizer, and no weights that anyone trained.

Values are two megabytes of bf16 noise, repeated: as fast to read as memory, and as slow to multiply as any other. The same model
twice has the same weights. What it says is noise; nothing but `load_format="dummy"` ever makes one.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.config import ModelConfig, config_from_hf
from phloem.runtime.models.loader import OpenModel
from phloem.runtime.models.registry import architecture_named
from phloem.runtime.models.safetensors_file import read_json
from phloem.runtime.models.stored import Stored
from phloem.runtime.models.weights import Architecture, assign

__all__ = ["dummy_tensors", "open_dummy"]

NOISE = 1 << 20  # values that repeat: 2 MB
SCALE = 0.02  # what models of this kind are initialised with


class _Dummy(Stored):
    """A tensor that is in no file."""

    __slots__ = ()

    def read(self) -> Tensor:
        """bf16 in `shape`: noise for a matrix, ones for a norm, zeros for a bias."""
        if len(self.shape) == 1:
            return torch.full(self.shape, 0.0 if self.name.endswith("bias") else 1.0, dtype=torch.bfloat16)
        noise, need = _noise(), self.shape[0] * self.shape[1]
        start = zlib.crc32(self.name.encode()) % NOISE
        whole = noise.roll(-start).repeat(-(-need // NOISE))
        return whole[:need].view(self.shape)


def _noise() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(NOISE, generator=generator) * SCALE).to(torch.bfloat16)


def dummy_tensors(kind: type[Architecture], config: ModelConfig, folder: Path) -> Mapping[str, Stored]:
    """Every tensor that the architecture's table asks for, in bf16."""
    nothing, found = mmap.mmap(-1, 1), dict[str, Stored]()
    for rule in kind.WEIGHTS:
        if not rule.applies(config):
            continue
        for layer in range(config.num_layers) if "{i}" in rule.param else (0,):
            for part in rule.parts:
                name = part.hf.format(i=layer)
                shape = tuple(d if isinstance(d, int) else int(getattr(config, d)) for d in part.shape)
                count = shape[0] * (shape[1] if len(shape) > 1 else 1)
                found[name] = _Dummy(name, "bf16", shape, folder / "config.json", nothing, 0, 2 * count)
    return found


def open_dummy(model: str | None) -> OpenModel:
    """The model that config.json describes, with random weights. Raises ModelLoadError if `model` is no directory with one."""
    path = Path(model).expanduser() if model is not None else None
    if path is None or not (path / "config.json").is_file():
        raise ModelLoadError(
            f'{model}: load_format="dummy" needs a directory with config.json and a tokenizer; weights in it are not read.',
            param="model",
        )
    source = str(path / "config.json")
    config = config_from_hf(read_json(path / "config.json"), source)
    kind = architecture_named(config.architecture, source)
    tensors = dummy_tensors(kind, config, path)
    return OpenModel(
        name=f"{path.resolve().name} (random weights)",
        path=path,
        config=config,
        architecture=kind,
        assignments=assign(kind, config, tensors, "hf", source),
        metadata=None,
        chat_template=None,
        generation_config={},
        eos_ids=config.eos_ids,
        file_bytes=sum(t.nbytes for t in tensors.values()),
    )
