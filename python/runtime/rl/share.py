"""A live torch module as an engine's weights: matched against the model's table, shared where its storage can be, audited after.

    module's Parameters        re-homed (fused parts)                     engine
    q.weight  [576, 576] ──┐   one buffer, row-major
    k.weight  [192, 576] ──┼─► [ q rows | k rows | v rows ] ◄── read in place by the kernels at every forward
    v.weight  [192, 576] ──┘   p.data of each: its slice; the Parameter objects stay, so optimizers and hooks keep working

A lost sharing (`.to(…)`, a replaced Parameter) and weights that changed without a commit are found by `audit` and `changed`: data
pointers, and 64 elements a tensor read in one native call. A guard, not a proof: an edit of one other element goes unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from phloem.runtime.backends.base import Backend, Packed, Weight, WeightKind
from phloem.runtime.config import Resolved
from phloem.runtime.errors import PhloemError, WeightLayoutError
from phloem.runtime.models.config import ModelConfig, config_from_hf, token_ids
from phloem.runtime.models.live import LiveWeights, Slot, slots_of
from phloem.runtime.models.loader import LoadedModel, OpenModel
from phloem.runtime.models.registry import architecture_named
from phloem.runtime.models.weights import Parameters

__all__ = ["Attached", "Share"]

Share = Literal["auto", "require", "copy"]
KINDS: dict[torch.dtype, WeightKind] = {torch.float32: "f32", torch.bfloat16: "bf16"}
SAMPLED, PLACES = (
    64,
    16,
)  # elements a tensor that are looked at, and in how many pages of memory: to find a page costs as much as to read
COPY_DTYPES: dict[str, WeightKind] = {"f32": "f32", "bf16": "bf16", "q8": "q8_0", "q4": "q4_0"}


@dataclass(slots=True)
class _Pair:
    """A Parameter whose storage the engine reads, where it hangs, and how it lay when it was shared."""

    name: str
    owner: nn.Module
    attribute: str
    parameter: Tensor
    pointer: int
    dtype: torch.dtype
    shape: torch.Size

    def fault(self) -> str:
        now = self.owner._parameters.get(self.attribute)
        if now is not self.parameter:
            return f"{self.name}: another Parameter hangs in its place"
        if now.data_ptr() != self.pointer:
            return f"{self.name}: its storage was replaced (by .to(), by .data = …, or by a loader)"
        if now.dtype is not self.dtype or now.shape != self.shape or not now.is_contiguous():
            return f"{self.name}: it is {now.dtype} {tuple(now.shape)} now; it was {self.dtype} {tuple(self.shape)}"
        return ""


@dataclass(slots=True)
class Attached:
    """One module, as an engine has it. copied: name -> why it is not shared; then a commit reads it anew.

    refresh: vectors that the engine keeps as float32 beside bfloat16 Parameters.
    """

    module: nn.Module
    config: ModelConfig
    opened: OpenModel
    slots: list[Slot]
    copied: dict[str, str]
    named: dict[str, nn.Parameter]
    owners: dict[str, tuple[nn.Module, str]]
    kind: WeightKind
    shared_bytes: int = 0
    copied_bytes: int = 0
    _pairs: list[_Pair] = field(default_factory=list)
    _aliases: list[tuple[str, str]] = field(default_factory=list)
    _refresh: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    _gathers: list[tuple[NDArray[np.int64], int, NDArray[np.uint8]]] = field(default_factory=list)
    _seen: list[bytes] = field(default_factory=list)
    _gather: Callable[[int, int, int, int], None] | None = None

    # ---- making it -----------------------------------------------------------------------------------------------------

    @classmethod
    def examine(cls, module: nn.Module, share: Share, dtype: str | None) -> Attached:
        """Match the module with the model's table, in both directions. Raises WeightLayoutError with every offender (rl A1)."""
        source = type(module).__name__
        raw = getattr(module, "config", None)
        if raw is None or not hasattr(raw, "to_dict"):
            raise WeightLayoutError(
                f"{source} has no transformers config, so nothing says which architecture it is. Give it .config."
            )
        fields = {**raw.to_dict(), "architectures": [source]}
        config = config_from_hf(fields, f"{source}.config")
        architecture = architecture_named(config.architecture, source)
        named = dict(module.named_parameters(remove_duplicate=False))
        owners = {
            f"{prefix}.{name}" if prefix else name: (m, name) for prefix, m in module.named_modules() for name in m._parameters
        }
        kinds = {p.dtype for p in named.values()}
        kind = (
            COPY_DTYPES[dtype]
            if dtype is not None
            else KINDS.get(next(iter(kinds)) if len(kinds) == 1 else torch.float32, "f32")
        )
        params = {rule.param.format(i=layer) for rule in architecture.WEIGHTS for layer in range(config.num_layers)}
        slots = slots_of(architecture, config, dict.fromkeys(params, kind))
        aliases = {e.hf: e.equals for e in architecture.EXTRAS if e.equals and (not e.when or getattr(config, e.when))}
        _check_layout(source, slots, named, aliases)
        generation = getattr(module, "generation_config", None)
        eos = [
            *config.eos_ids,
            *token_ids(getattr(generation, "eos_token_id", None), f"{source}.generation_config", "eos_token_id"),
        ]
        opened = OpenModel(
            name=source, path=Path("."), config=config, architecture=architecture, assignments=[], metadata=None, chat_template=None,
            generation_config={}, eos_ids=tuple(dict.fromkeys(eos)), file_bytes=0,
        )  # fmt: skip
        why = {name: reason for name, p in named.items() if (reason := _not_shareable(p, kind, dtype))}
        if share == "copy":
            why = dict.fromkeys(named, "share='copy'")
        if share == "require" and why:
            lines = "\n  ".join(f"{name}: {reason}" for name, reason in why.items())
            raise WeightLayoutError(f"share='require', and {len(why)} Parameters of {source} cannot be shared:\n  {lines}")
        made = cls(module, config, opened, slots, why, named, owners, kind)
        made._aliases = [(alias, target) for alias, target in aliases.items() if alias in named]
        return made

    @property
    def is_shared(self) -> bool:
        return not self.copied

    def pack(self, backend: Backend, resolved: Resolved, share: Share) -> LoadedModel:
        """The module in the backend's form. All of it is shared, or all is copied: half of each would commit like a copy anyway."""
        sharer = getattr(backend, "share", None)
        if sharer is None and self.is_shared:
            reason = f"the {backend.name} backend reads no storage but its own"
            if share == "require":
                raise WeightLayoutError(f"share='require': {reason}.")
            self.copied = dict.fromkeys(self.named, reason)
        values: dict[str, Any] = {}
        for slot in self.slots:
            tensors: list[Tensor] = [self.named[piece.name] for piece in slot.pieces]
            if sharer is not None and self.is_shared:
                values[slot.param] = self._share(sharer, slot, tensors)
            else:
                values[slot.param] = _copy(backend, slot, tensors)
                self.copied_bytes += sum(t.numel() * t.element_size() for t in tensors)
        positions = resolved.max_context
        model = self.opened.architecture(self.config, Parameters(values), positions)
        weights = LiveWeights(
            self.opened.architecture, self.config, self.slots, backend, values, model, positions, shared=self.is_shared
        )
        if self.is_shared:
            self._note_pairs(backend)
        return LoadedModel(model=model, opened=self.opened, weight_bytes=self.copied_bytes, weights=weights)

    def _share(self, sharer: Callable[..., Packed], slot: Slot, tensors: list[Tensor]) -> Packed | Tensor:
        if slot.form == "vector":
            if tensors[0].dtype != torch.float32:
                kept = torch.cat([t.detach().float() for t in tensors])
                self._refresh.append((kept, tensors))
                self.copied_bytes += kept.numel() * 4
                return kept
            self.shared_bytes += sum(t.numel() * 4 for t in tensors)
            return rehome(tensors) if len(tensors) > 1 else tensors[0].detach()
        if len(tensors) > 1:
            rehome(tensors)
        self.shared_bytes += sum(t.numel() * t.element_size() for t in tensors)
        parts = [Weight(self.kind, (t.shape[0], t.shape[1]), t.detach()) for t in tensors]
        return sharer(parts, gated=slot.form == "gated")

    def _note_pairs(self, backend: Backend) -> None:
        for slot in self.slots:
            for piece in slot.pieces:
                p, (owner, attribute) = self.named[piece.name], self.owners[piece.name]
                self._pairs.append(_Pair(piece.name, owner, attribute, p, p.data_ptr(), p.dtype, p.shape))
        context = getattr(backend, "context", None)
        if context is not None:
            library = context.library

            def gather(addresses: int, count: int, width: int, out: int) -> None:
                context.check(library.phloem_gather(context.handle, addresses, count, width, out))

            self._gather = gather
        rng = np.random.default_rng(0)
        for width in (2, 4):
            at = [
                pair.pointer + width * _sampled(n, 4096 // width, rng)
                for pair in self._pairs
                if pair.parameter.element_size() == width and (n := pair.parameter.numel())
            ]
            if at:
                addresses = np.concatenate(at).astype(np.int64)
                self._gathers.append((addresses, width, np.zeros(len(addresses) * width, np.uint8)))
        self._seen = self._look()

    # ---- watching it ---------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Every pair still shares its storage, tied ones each other's (rl A4, A6). Raises WeightLayoutError."""
        faults = [fault for pair in self._pairs if (fault := pair.fault())]
        for alias, target in self._aliases:
            (a, name_a), (b, name_b) = self.owners[alias], self.owners[target]
            if a._parameters.get(name_a) is not b._parameters.get(name_b):
                faults.append(f"{alias}: it was tied to {target}, and is no more")
        if faults:
            raise WeightLayoutError(
                "the engine no longer shares these weights; attach the module again:\n  " + "\n  ".join(faults)
            )

    def changed(self) -> bool:
        """Whether the sampled elements differ from those of the last commit. Copies have none: only a commit reads them."""
        return self.is_shared and self._look() != self._seen

    def committed(self) -> None:
        """What is there now is what the engine serves."""
        for kept, tensors in self._refresh:
            torch.cat([t.detach().float() for t in tensors], out=kept)
        self._seen = self._look()

    def _look(self) -> list[bytes]:
        out = []
        for addresses, width, buffer in self._gathers:
            assert self._gather is not None
            self._gather(addresses.ctypes.data, len(addresses), width, buffer.ctypes.data)
            out.append(buffer.tobytes())
        return out

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Every tensor as the module has it now, for an update of copied weights. DTensors are gathered, one at a time."""
        for slot in self.slots:
            for piece in slot.pieces:
                owner, attribute = self.owners[piece.name]
                p = owner._parameters[attribute]
                assert p is not None
                yield piece.name, p.full_tensor() if hasattr(p, "full_tensor") else p.detach()


def _sampled(n: int, page: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Up to SAMPLED elements of n, the first and the last among them, in at most PLACES stretches of `page` elements. Ascending."""
    starts = np.r_[0, max(0, n - page), rng.integers(0, max(1, n - page + 1), PLACES - 2)]
    chosen = (starts[:, None] + rng.integers(0, min(page, n), (PLACES, SAMPLED // PLACES))).ravel()
    chosen[0], chosen[-1] = 0, n - 1
    return np.unique(chosen).astype(np.int64)


def rehome(tensors: Sequence[Tensor]) -> Tensor:
    """Move tensors into one new buffer, stacked along the rows; `data` of each becomes its slice. Returns the buffer.

    Values, Parameter identity, `requires_grad` and optimizer state stay. To be done before torch.compile and graph capture.
    """
    whole = torch.cat([t.detach() for t in tensors])
    at = 0
    for tensor in tensors:
        tensor.data = whole[at : at + tensor.shape[0]]
        at += tensor.shape[0]
    return whole


def _copy(backend: Backend, slot: Slot, tensors: Sequence[Tensor]) -> Packed | Tensor:
    from phloem.runtime.backends.blocks import BLOCK_BYTES, quantise

    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t.detach() for t in tensors]
    if slot.kind == "":
        return backend.vector(torch.cat([t.float().cpu() for t in whole]))
    parts = []
    for t in whole:
        shape = (t.shape[0], t.shape[1])
        if slot.kind in BLOCK_BYTES:
            parts.append(Weight(slot.kind, shape, quantise(slot.kind, t.float().cpu())))
        else:
            parts.append(Weight(slot.kind, shape, t.cpu().to(torch.float32 if slot.kind == "f32" else torch.bfloat16)))
    return backend.pack(parts, gated=slot.form == "gated")


def _check_layout(source: str, slots: Sequence[Slot], named: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    offenders, claimed = list[str](), set(aliases)
    for slot in slots:
        for piece in slot.pieces:
            claimed.add(piece.name)
            p = named.get(piece.name)
            if p is None:
                offenders.append(f"missing     {piece.name} {list(piece.shape)}")
            elif tuple(p.shape) != piece.shape:
                offenders.append(f"wrong shape {piece.name}: {list(p.shape)}, expected {list(piece.shape)}")
            elif not p.dtype.is_floating_point or p.dtype.itemsize < 2:
                offenders.append(
                    f"wrong dtype {piece.name}: {p.dtype}; quantised modules cannot be attached, load the checkpoint instead"
                )
            elif p.device.type == "meta":
                offenders.append(f"no values   {piece.name}: it is on the meta device")
    hint = " (an adapter: merge it first)" if any("lora_" in name for name in named) else ""
    offenders += [f"unexpected  {name} {list(p.shape)}{hint}" for name, p in named.items() if name not in claimed]
    for alias, target in aliases.items():
        if alias in named and named[alias] is not named.get(target):
            offenders.append(f"unexpected  {alias}: it is not {target}, although the config says that they are tied")
    if offenders:
        raise WeightLayoutError(f"{source}: {len(offenders)} Parameters do not fit its config:\n  " + "\n  ".join(offenders))


def _not_shareable(p: Tensor, kind: WeightKind, dtype: str | None) -> str:
    """Why the engine cannot read this Parameter's storage, or "" (rl A2)."""
    if hasattr(p, "full_tensor"):
        return "it is sharded (a DTensor)"
    if p.device.type != "cpu":
        return f"it is on {p.device}, the engine is on the CPU"
    if p.dtype not in KINDS:
        return f"it is {p.dtype}; float32 and bfloat16 are computed with"
    if KINDS[p.dtype] != kind:
        return f"it is {p.dtype}, the engine computes in {dtype or 'one dtype for all'}"
    if p.layout is not torch.strided or not p.is_contiguous():
        return "it is not dense and row-major"
    return ""


def ensure_module(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise PhloemError(
            f"attach takes a torch module, not a {type(module).__name__}. For a checkpoint use RolloutEngine(path)."
        )
    return module
