"""The weights of a running model: which ones are served, which ones are being loaded beside them, and how the two change places.

    v  [ served model ]                                     begin ── load, any order, any number of calls ── finish: all there?
    v+1        [ staged: the second buffer ]  <── store ──                                                     └─> swap between steps
                                                 an exception, or a name missing: the staged one is forgotten, v stays

Names are a checkpoint's (transformers'), through the model's WEIGHTS table, whatever file the model came from. With staging "none"
tensors are written over the served ones, and nothing may be served until all have come. Knows no requests and no versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from phloem.runtime.backends.base import Backend, Model, Packed, RewritableBackend, Weight, WeightKind
from phloem.runtime.backends.blocks import BLOCK_BYTES, dequantise, quantise
from phloem.runtime.errors import ConfigError, UnsupportedModelError, WeightLayoutError, WeightsInvalidError
from phloem.runtime.models.config import ModelConfig
from phloem.runtime.models.safetensors_file import INDEX, SINGLE, read_safetensors, read_sharded

if TYPE_CHECKING:
    from phloem.runtime.models.weights import Architecture, Form

__all__ = ["LiveWeights", "Piece", "Slot", "slots_of"]

Staging = Literal["full", "none"]
FLOATS: dict[torch.dtype, WeightKind] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
ROWS_READ = 4096  # at a time, so that reading a large table back needs no second one


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the checkpoint that is part of a parameter."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of the model, its pieces stacked along the rows, and the kind that they are kept as ("" for a vector)."""

    param: str
    form: Form
    pieces: tuple[Piece, ...]
    kind: WeightKind | Literal[""]


def slots_of(architecture: type[Architecture], config: ModelConfig, kinds: Mapping[str, WeightKind]) -> list[Slot]:
    """The WEIGHTS table, spelled out for this config. kinds: of each matrix parameter."""
    slots = []
    for rule in architecture.WEIGHTS:
        if not rule.applies(config):
            continue
        for layer in range(config.num_layers) if "{i}" in rule.param else (0,):
            param = rule.param.format(i=layer)
            pieces = tuple(
                Piece(part.hf.format(i=layer), tuple(d if isinstance(d, int) else int(getattr(config, d)) for d in part.shape))
                for part in rule.parts
            )
            slots.append(Slot(param, rule.form, pieces, "" if rule.form == "vector" else kinds[param]))
    return slots


@dataclass(slots=True)
class _Update:
    """One update under way. values: the parameters written so far; arrived: names."""

    staging: Staging
    partial: bool
    values: dict[str, Packed | Tensor] = field(default_factory=dict)
    arrived: dict[str, str] = field(default_factory=dict)
    promised: dict[str, tuple[int, ...]] = field(default_factory=dict)


class LiveWeights:
    """See the module's drawing. One thread at a time, between two steps of the engine.

    values: parameter -> what the backend made of it, as `fill` gives.   positions: rows of the rotary table.
    shared: the values are a trainer's own storage; then nothing can be loaded here.
    """

    def __init__(
        self, architecture: type[Architecture], config: ModelConfig, slots: Sequence[Slot], backend: Backend, values: Mapping[str, Any],
        model: Model, positions: int, *, shared: bool = False,
    ) -> None:  # fmt: skip
        self.slots = list(slots)
        self.shared = shared
        self.invalid = ""  # why nothing may be served, if so
        self.model = model
        self._architecture, self._config, self._positions = architecture, config, positions
        self._name, self._can_rewrite = backend.name, hasattr(backend, "store")
        self._backend = cast("RewritableBackend", backend)
        self._values: dict[str, Packed | Tensor] = dict(values)
        self._spare: dict[str, Packed | Tensor] = {}
        self._where = {piece.name: (slot, i) for slot in self.slots for i, piece in enumerate(slot.pieces)}
        self._aliases = {
            extra.hf: extra.equals
            for extra in architecture.EXTRAS
            if extra.equals and (not extra.when or getattr(config, extra.when)) and extra.equals in self._where
        }
        self._update: _Update | None = None

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that an update must bring, with its shape. A tied tensor's second name may come too."""
        return {name: slot.pieces[i].shape for name, (slot, i) in self._where.items()}

    @property
    def num_bytes(self) -> int:
        """Of the weights as kept, vectors as float32."""
        total = 0
        for slot in self.slots:
            for piece in slot.pieces:
                elements = 1
                for d in piece.shape:
                    elements *= d
                per = BLOCK_BYTES.get(slot.kind)
                total += elements // 32 * per if per else elements * {"bf16": 2, "f16": 2, "f8": 1}.get(slot.kind, 4)
        return total

    # ---- an update -----------------------------------------------------------------------------------------------------

    def begin(
        self, staging: Staging = "full", partial: bool = False, promised: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """promised: with staging "none", every name and shape that will come; checked before a byte is written."""
        if self.shared:
            raise WeightLayoutError(
                "these weights are the trainer's own: change them inside training(), or attach with share='copy' to load others."
            )
        if not self._can_rewrite:
            raise UnsupportedModelError(f"the {self._name} backend does not take new weights yet; make a new engine.")
        update = _Update(staging, partial)
        if staging == "none":
            if promised is None:
                raise WeightLayoutError(
                    "staging='none' writes in place: name every tensor and its shape first, names={name: shape}."
                )
            update.promised = {name: tuple(shape) for name, shape in promised.items()}
            offenders = [line for name, shape in update.promised.items() for line in self._offence(name, shape)]
            offenders += [] if partial else [f"missing     {name}" for name in self._missing(update.promised)]
            if offenders:
                raise _layout(offenders)
        self._update = update

    def load(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Some tensors, of any float type. Each is checked before a byte of it is written. Raises WeightLayoutError."""
        update = self._now()
        for name, tensor in named:
            offenders = self._offence(name, tuple(tensor.shape))
            if tensor.dtype not in FLOATS:
                offenders.append(f"wrong dtype {name}: {tensor.dtype}, expected float32, float16 or bfloat16")
            if name in update.arrived:
                offenders.append(f"twice       {name}: it came in this update already")
            if update.staging == "none" and name not in update.promised and self._aliases.get(name) not in update.promised:
                offenders.append(f"unexpected  {name}: it was not among the names given first")
            if offenders:
                raise _layout(offenders)
            tensor = tensor.detach()
            tied = self._aliases.get(name) or (name if name in self._aliases.values() else None)
            names = {name} if tied is None else {tied, *(alias for alias, target in self._aliases.items() if target == tied)}
            came_before = bool(names & update.arrived.keys())
            update.arrived[name] = ""
            if came_before:
                if not self._holds(update, self._aliases.get(name, name), tensor):
                    raise _layout([f"unexpected  {name}: differs from what it is tied to"])
                continue
            if update.staging == "none":
                self.invalid = "an update in place has begun and not ended"
            self._store(update, self._aliases.get(name, name), tensor)

    def load_path(self, path: str | Path) -> None:
        """`load` what a folder or a file of safetensors holds. Raises ModelLoadError too."""
        folder = Path(path)
        if folder.is_dir():
            stored = read_sharded(folder / INDEX) if (folder / INDEX).is_file() else read_safetensors(folder / SINGLE)
        else:
            stored = read_safetensors(folder)
        self.load((name, tensor.read()) for name, tensor in stored.items())

    def load_bytes(self, blobs: Iterable[bytes]) -> None:
        """`load` safetensors in memory."""
        for blob in blobs:
            try:
                named = parse_safetensors(blob)
            except Exception as error:  # of a foreign parser, which has types of its own
                raise WeightLayoutError(f"these bytes are no safetensors: {error}") from None
            self.load(named.items())

    def finish(self) -> Model | None:
        """All have come: the new model, ready to be served, or None if it was written in place. Raises WeightLayoutError."""
        update = self._now()
        missing = [] if update.partial else self._missing(update.arrived)
        if missing:
            raise _layout([f"missing     {name} {list(self.names[name])}" for name in missing])
        if update.staging == "none":
            self._backend.settle()
            self._update, self.invalid = None, ""
            return None
        if update.partial:
            come = {self._aliases.get(name, name) for name in update.arrived}
            for slot in self.slots:
                self._complete(update, slot, come)
        self._backend.settle()
        values = {slot.param: update.values.get(slot.param, self._values[slot.param]) for slot in self.slots}
        return self._build(values)

    def serve(self, model: Model) -> None:
        """`model`, which `finish` made, is served from now on; what was served is the next update's second buffer."""
        update = self._now()
        for param, value in update.values.items():
            self._spare[param], self._values[param] = self._values[param], value
        self.model, self._update, self.invalid = model, None, ""

    def forget(self) -> None:
        """Drop the update under way: what was served stays. One in place cannot be undone: it stays invalid."""
        update, self._update = self._update, None
        if update is not None and update.staging == "full":
            self._spare.update(update.values)
        elif update is not None and self.invalid:
            self.invalid = f"an update in place ended after {len(update.arrived)} of {len(update.promised)} tensors, so old and new ones are mixed"

    def ensure_valid(self) -> None:
        if self.invalid:
            raise WeightsInvalidError(f"the weights cannot be served: {self.invalid}. Load all of them with update().")

    # ---- looking at them ------------------------------------------------------------------------------------------------

    def read(self, name: str) -> Tensor:
        """One tensor as it is served, float32."""
        name = self._aliases.get(name, name)
        if name not in self._where:
            raise _layout([f"unexpected  {name}: this model has no such tensor"])
        slot, i = self._where[name]
        return self._rows(self._values[slot.param], slot, i)

    def _rows(self, value: Packed | Tensor, slot: Slot, i: int) -> Tensor:
        at, shape = sum(piece.shape[0] for piece in slot.pieces[:i]), slot.pieces[i].shape
        if isinstance(value, Tensor):
            return value[at : at + shape[0]].to("cpu", torch.float32, copy=True)
        return torch.cat(
            [self._backend.read(value, at + r, min(ROWS_READ, shape[0] - r)) for r in range(0, shape[0], ROWS_READ)]
        )

    def digest(self) -> str:
        """A checksum over all names and values, in whatever form they are kept: equal weights, equal digest."""
        total = hashlib.blake2b(digest_size=16)
        for name in sorted(self._where):
            total.update(name.encode())
            total.update(_raw(self.read(name)))
        return total.hexdigest()

    # ---- memory ---------------------------------------------------------------------------------------------------------

    def ensure_discardable(self) -> None:
        if not hasattr(self._backend, "discard"):
            raise ConfigError(
                f"the {self._name} backend keeps its weights: suspend({{'kv'}}) gives back the pages alone.", param="what"
            )

    def discard(self) -> int:
        """Give the memory of all weights back (rl Z2); they must be loaded again, all of them. Returns the bytes."""
        freed = 0
        for values in (self._values, self._spare):
            for value in values.values():
                if not isinstance(value, Tensor):
                    freed += self._backend.discard(value)
        self.invalid = "their memory was given back"
        return freed

    # ---- inside ---------------------------------------------------------------------------------------------------------

    def _now(self) -> _Update:
        if self._update is None:
            raise WeightLayoutError("no update is under way: load() belongs inside update().")
        return self._update

    def _offence(self, name: str, shape: tuple[int, ...]) -> list[str]:
        known = self._where.get(self._aliases.get(name, name))
        if known is None:
            return [f"unexpected  {name} {list(shape)}"]
        expected = known[0].pieces[known[1]].shape
        return [] if shape == expected else [f"wrong shape {name}: {list(shape)}, expected {list(expected)}"]

    def _missing(self, arrived: Mapping[str, object]) -> list[str]:
        there = {self._aliases.get(name, name) for name in arrived}
        return [name for name in self._where if name not in there]

    def _target(self, update: _Update, slot: Slot) -> Packed | Tensor:
        if update.staging == "none":
            return self._values[slot.param]
        if slot.param not in update.values:
            spare = self._spare.pop(slot.param, None)
            if spare is None:
                live = self._values[slot.param]
                spare = torch.empty_like(live) if isinstance(live, Tensor) else self._backend.like(live)
            update.values[slot.param] = spare
        return update.values[slot.param]

    def _store(self, update: _Update, name: str, tensor: Tensor) -> None:
        slot, i = self._where[name]
        target = self._target(update, slot)
        if isinstance(target, Tensor):
            at = sum(piece.shape[0] for piece in slot.pieces[:i])
            target[at : at + slot.pieces[i].shape[0]].copy_(tensor)
            return
        kind = FLOATS[tensor.dtype]
        if slot.kind in BLOCK_BYTES:
            kind, tensor = slot.kind, quantise(slot.kind, tensor.float())  # type: ignore[assignment]
        self._backend.store(target, i, Weight(kind, slot.pieces[i].shape, tensor))  # type: ignore[arg-type]

    def _holds(self, update: _Update, name: str, tensor: Tensor) -> bool:
        """Whether the buffer being filled has these very numbers already: the second name of a tied tensor."""
        slot, i = self._where[name]
        kept = self._rows(self._target(update, slot), slot, i)
        if slot.kind in BLOCK_BYTES:
            tensor = dequantise(slot.kind, quantise(slot.kind, tensor.float()))
        elif slot.kind in ("bf16", "f16"):
            tensor = tensor.to(torch.bfloat16 if slot.kind == "bf16" else torch.float16)
        return torch.equal(kept, tensor.float().cpu().view(kept.shape))

    def _complete(self, update: _Update, slot: Slot, come: set[str]) -> None:
        """Of a partial update: pieces that did not come keep their values, in the buffer where the others are new."""
        if slot.param not in update.values:
            return
        new, live = update.values[slot.param], self._values[slot.param]
        for i, piece in enumerate(slot.pieces):
            if piece.name in come:
                continue
            if isinstance(new, Tensor):
                at = sum(p.shape[0] for p in slot.pieces[:i])
                new[at : at + piece.shape[0]].copy_(live[at : at + piece.shape[0]])  # type: ignore[index]
            else:
                self._backend.store_from(new, live, i)  # type: ignore[arg-type]

    def _build(self, values: Mapping[str, Any]) -> Model:
        from phloem.runtime.models.weights import Parameters

        return self._architecture(self._config, Parameters(values), self._positions)


def _raw(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().numpy().view(np.uint8).data).cast("B")


def _layout(offenders: Sequence[str]) -> WeightLayoutError:
    return WeightLayoutError(
        f"{len(offenders)} tensors do not fit this model; nothing of them was written:\n  " + "\n  ".join(offenders)
    )
