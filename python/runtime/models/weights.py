"""From the tensors of a checkpoint to the parameters of a model, by a table of rules that stands next to the model.

    rule("layers.{i}.qkv", [part("…q_proj.weight", "…attn_q.weight", ("q_width", "hidden"), heads="num_heads"), …])
          parameter         each part: its name in safetensors and in GGUF, its shape in words of ModelConfig
                            parts are stacked along the rows, so a fused matrix is one call of the backend

Two steps. `assign` matches both sides and reads no data: every tensor must be claimed by a rule and every parameter filled by
one, with the right shape and a type we can read; else one ModelLoadError lists all offenders. `fill` then reads, converts as
`dtype` says, and packs. Nothing stays random, nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from phloem.runtime.backends.base import Backend, BatchLike, Ops, Packed, Weight
from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.convert import Dtype, as_weights, num_bytes
from phloem.runtime.models.stored import READABLE, Stored

__all__ = [
    "Architecture",
    "Assignment",
    "Extra",
    "Form",
    "Parameters",
    "Part",
    "Rule",
    "assign",
    "extra",
    "fill",
    "part",
    "planned_bytes",
    "rule",
]

Form = Literal["matrix", "gated", "table", "vector"]
Naming = Literal["hf", "gguf"]


class Parameters:
    """Parameter name -> packed matrix or vector. `matrix` and `vector` say which one is meant; an absent one is None."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @property
    def values(self) -> Mapping[str, Any]:
        return self._values

    def matrix(self, name: str) -> Packed:
        packed: Packed = self._values[name]
        return packed

    def vector(self, name: str) -> Tensor:
        values: Tensor = self._values[name]
        return values

    def optional_vector(self, name: str) -> Tensor | None:
        return self._values.get(name)


class Architecture(Protocol):
    """A model class: its table, and a forward in the words of Ops."""

    WEIGHTS: ClassVar[tuple[Rule, ...]]
    EXTRAS: ClassVar[tuple[Extra, ...]]
    num_layers: int
    width: int

    def __init__(self, config: ModelConfig, parameters: Parameters, positions: int) -> None: ...
    def forward(self, ops: Ops, batch: BatchLike) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Part:
    """hf, gguf: the tensor's name, `{i}` is the layer.   shape: attributes of ModelConfig, or numbers.

    heads: attribute that counts the heads whose rows a GGUF file of architecture "llama" has interleaved for its RoPE order;
        they are put back (pairs (i, i + half), RopeTable).
    """

    hf: str
    gguf: str
    shape: tuple[str | int, ...]
    heads: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """param: name in Parameters.   shard: the axis that tensor parallelism cuts; None is kept whole on each rank.

    when, unless: flag of ModelConfig under which the parameter exists, or does not.
    """

    param: str
    parts: tuple[Part, ...]
    form: Form
    shard: int | None
    when: str = ""
    unless: str = ""

    def applies(self, config: ModelConfig) -> bool:
        return (not self.when or bool(getattr(config, self.when))) and not (self.unless and getattr(config, self.unless))


@dataclass(frozen=True, slots=True)
class Extra:
    """A tensor that may be there although nothing needs it, and why it does no harm.

    equals: it must equal this tensor bit for bit (an exported copy of a tied head); else it is an offender.
    """

    hf: str
    gguf: str = ""
    equals: str = ""
    when: str = ""


def rule(
    param: str,
    parts: Sequence[Part] | Part,
    form: Form = "matrix",
    *,
    shard: int | None = None,
    when: str = "",
    unless: str = "",
) -> Rule:
    return Rule(param, (parts,) if isinstance(parts, Part) else tuple(parts), form, shard, when, unless)


def part(hf: str, gguf: str, shape: tuple[str | int, ...], heads: str = "") -> Part:
    return Part(hf, gguf, shape, heads)


def extra(hf: str, gguf: str = "", *, equals: str = "", when: str = "") -> Extra:
    return Extra(hf, gguf, equals, when)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One parameter and the tensors that fill it, checked. heads: per part, the count to undo the interleaving for; 0 is none."""

    param: str
    rule: Rule
    tensors: tuple[Stored, ...]
    heads: tuple[int, ...]


def assign(
    kind: type[Architecture],
    config: ModelConfig,
    tensors: Mapping[str, Stored],
    naming: Naming,
    source: str,
    *,
    interleaved: bool = False,
) -> list[Assignment]:
    """The plan of loading. interleaved: the file keeps q and k rows in GGUF llama's order. Raises ModelLoadError with all offenders."""
    offenders: list[str] = []
    claimed: set[str] = set()
    out: list[Assignment] = []
    for each, layer in _instances(kind.WEIGHTS, config.num_layers):
        if not each.applies(config):
            continue
        found, heads = [], []
        for piece in each.parts:
            name = getattr(piece, naming).format(i=layer)
            claimed.add(name)
            stored = tensors.get(name)
            expected = tuple(d if isinstance(d, int) else int(getattr(config, d)) for d in piece.shape)
            if stored is None:
                offenders.append(f"missing     {name} {list(expected)}")
            elif stored.shape != expected:
                offenders.append(f"wrong shape {name}: {list(stored.shape)}, expected {list(expected)}")
            elif stored.kind not in READABLE or (each.form == "vector" and stored.kind not in ("f32", "f16", "bf16")):
                offenders.append(
                    f"wrong dtype {name}: {stored.kind}, expected f32, f16, bf16"
                    + ("" if naming == "hf" or each.form == "vector" else " or blocks")
                )
            else:
                found.append(stored)
                heads.append(int(getattr(config, piece.heads)) if piece.heads and interleaved else 0)
        if len(found) == len(each.parts):
            out.append(Assignment(each.param.format(i=layer), each, tuple(found), tuple(heads)))
    harmless, wrong = _harmless(kind.EXTRAS, config, tensors, naming)
    offenders += wrong
    offenders += [
        f"unexpected  {name} {list(tensors[name].shape)}" for name in tensors if name not in claimed and name not in harmless
    ]
    if offenders:
        raise ModelLoadError(
            f"{source}: {len(offenders)} of its tensors do not fit {config.architecture} as its config describes it:\n  "
            + "\n  ".join(offenders)
        )
    return out


def planned_bytes(assignments: Sequence[Assignment], dtype: Dtype) -> int:
    """What `fill` will report, from the headers. Raises UnsupportedModelError where `dtype` cannot be had."""
    return sum(
        sum(t.shape[0] * 4 for t in a.tensors)
        if a.rule.form == "vector"
        else num_bytes(a.tensors, dtype, is_table=a.rule.form == "table")
        for a in assignments
    )


def fill(
    assignments: Sequence[Assignment], backend: Backend, dtype: Dtype, progress: Callable[[int, int], None] | None = None
) -> tuple[Parameters, int]:
    """Read, convert and pack. The parameters, and the bytes of weights as the backend was given them (norms included).

    progress: called with (bytes read, bytes in all) after each parameter.
    """
    total = sum(t.nbytes for a in assignments for t in a.tensors)
    values: dict[str, Packed | Tensor] = {}
    size = done = 0
    for each in assignments:
        if each.rule.form == "vector":
            whole = torch.cat([_undo(t.float32(), heads) for t, heads in zip(each.tensors, each.heads)])
            values[each.param] = backend.vector(whole)
            size += whole.numel() * 4
        else:
            weights = as_weights(each.tensors, dtype, is_table=each.rule.form == "table")
            weights = [Weight(w.kind, w.shape, _undo(w.data, heads)) for w, heads in zip(weights, each.heads)]
            values[each.param] = backend.pack(weights, gated=each.rule.form == "gated")
            size += sum(w.data.numel() * w.data.element_size() for w in weights)
        done += sum(t.nbytes for t in each.tensors)
        if progress is not None:
            progress(done, total)
    return Parameters(values), size


def _instances(rules: Iterable[Rule], num_layers: int) -> Iterator[tuple[Rule, int]]:
    for each in rules:
        for layer in range(num_layers) if "{i}" in each.param else (0,):
            yield each, layer


def _undo(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from (0, half, 1, half + 1, …) back to (0, 1, …, half, half + 1, …). Blocks lie along a row: they move whole."""
    if not heads:
        return rows
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _harmless(
    extras: Iterable[Extra], config: ModelConfig, tensors: Mapping[str, Stored], naming: Naming
) -> tuple[set[str], list[str]]:
    harmless, offenders = set(), []
    for each in extras:
        pattern = getattr(each, naming)
        if not pattern or (each.when and not getattr(config, each.when)):
            continue
        for layer in range(config.num_layers) if "{i}" in pattern else (0,):
            name = pattern.format(i=layer)
            if name not in tensors:
                continue
            harmless.add(name)
            twin = tensors.get(each.equals)
            if twin is not None and not _same(tensors[name], twin):
                offenders.append(f"unexpected  {name}: differs from {each.equals}, although the config says that they are tied")
    return harmless, offenders


def _same(one: Stored, other: Stored) -> bool:
    return one.shape == other.shape and one.kind == other.kind and torch.equal(one.read(), other.read())
