"""FlashInfer's attention wrappers: made once for each kind of layer, planned once a step, run once a layer.

    kind (window, soft cap, scale) ──┬─ prefill   any query length; also every windowed layer of a mixed step
                                     ├─ decode    all rows of the part have one token (tensor cores where several q heads share a kv head)
                                     ├─ cascade   two or three levels, per part of plan.Layout
                                     └─ one decode wrapper a bucket, on fixed buffers, for CUDA graphs (graphs.py)

`fi` is the package flashinfer, or a stand-in with its signatures. FA3 or FA2 is FlashInfer's "auto": FA3 on Hopper unless K and V
are fp8; decode on tensor cores is always FA2. With `deterministic` every row goes through FA2 prefill, whatever its length, its keys
unsplit, and in the same tile (`same_tile`): the tile decides in which order a row's keys are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phloem.runtime.backends.base import AttentionSpec, KVSpec
from phloem.runtime.backends.cuda.lanes import Device, Event, Stream
from phloem.runtime.backends.cuda.plan import Layout, Level, Part

__all__ = [
    "Attention",
    "AttentionStep",
    "Dtypes",
    "GraphAttention",
    "Indices",
    "Kind",
    "kind_of",
    "same_tile",
    "scratch_bytes",
    "upload_indices",
    "use_tensor_cores",
]

MOST_SMS = 192  # of one GPU; FlashInfer cuts long rows until each has two pieces
LEAST_SCRATCH = 128 << 20  # what FlashInfer recommends


@dataclass(frozen=True, slots=True)
class Kind:
    """What a plan must know of a layer beside the pages. Layers of one kind share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float


def kind_of(spec: AttentionSpec) -> Kind:
    return Kind(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.window, spec.softcap)


def use_tensor_cores(kind: Kind) -> bool:
    """FlashInfer's CUDA-core decode works on each key once for each q head of its group; from four on tensor cores should win."""
    return kind.num_heads // kind.num_kv_heads >= 4


def _tile(kind: Kind, packed: int) -> int:
    """FA2DetermineCtaTileQ: query rows of one tile, of rows of so many tokens x heads a kv head on average."""
    return 128 if packed > 64 and kind.head_dim < 256 else 64 if packed > 16 else 16


def scratch_bytes(kinds: Sequence[Kind], rows: int) -> int:
    """The most that any plan of these kinds asks of the workspace, captured decodes of `rows` rows among them (PrefillPlan in
    scheduler.cuh). With less, FlashInfer raises where it plans."""

    def bytes_of(kind: Kind, tiles: int, tile: int) -> int:
        return kind.num_heads * tiles * tile * (kind.head_dim + 1) * 4

    most = LEAST_SCRATCH
    for kind in kinds:
        group, pieces = kind.num_heads // kind.num_kv_heads, 2 * MOST_SMS // kind.num_kv_heads
        tile = _tile(kind, group)
        captured = max(pieces, -(-rows * group // tile) + rows - 1)
        most = max(
            most, bytes_of(kind, pieces, _tile(kind, 128)), bytes_of(kind, captured, tile) if use_tensor_cores(kind) else 0
        )
    return most + (1 << 20)  # what alignment costs


def same_tile(kind: Kind, qo_indptr: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """(qo_indptr, taken, kept): rows lengthened in front until any company of them has one tile. FlashInfer chooses the tile by the rows'
    average length. taken [T']: the token whose query stands at each place (a copy of the row's first in front, its result is dropped);
    kept [T]: where each token's own result is."""
    group, limit = kind.num_heads // kind.num_kv_heads, 64 if kind.head_dim < 256 else 16
    lengths = np.diff(qo_indptr)
    front = np.maximum(limit // group + 1 - lengths, 0)
    wide = np.zeros_like(qo_indptr)
    np.cumsum(lengths + front, out=wide[1:])
    kept = np.arange(qo_indptr[-1]) + np.repeat(np.cumsum(front), lengths)
    taken = np.repeat(qo_indptr[:-1].astype(np.int64), lengths + front)
    taken[kept] = np.arange(qo_indptr[-1])
    return wide, taken, kept


@dataclass(frozen=True, slots=True)
class Dtypes:
    query: torch.dtype
    kv: torch.dtype


def _options(kind: Kind, dtypes: Dtypes) -> dict[str, Any]:
    """What every plan takes alike. window_left counts the tokens before the own one; -1 is all."""
    return {
        "sm_scale": kind.scale,
        "window_left": kind.window - 1 if kind.window else -1,
        "logits_soft_cap": kind.softcap or None,
        "q_data_type": dtypes.query,
        "kv_data_type": dtypes.kv,
    }


Indices = Mapping[int, Tensor]


def upload_indices(levels: Sequence[Level], device: torch.device) -> Indices:
    """id(level) -> its page ids on the device. FlashInfer copies page ids that lie on the host in a way that waits for the device, which
    is what overlap is there to avoid: a step sends them with its other arrays; this is for everyone else."""
    return {id(level): torch.from_numpy(level.kv_indices).to(device) for level in levels}


def _host(level: Level) -> tuple[Tensor, Tensor, Tensor]:
    """qo_indptr, kv_indptr, last_page_len: FlashInfer's schedulers read them on the host."""
    return torch.from_numpy(level.qo_indptr), torch.from_numpy(level.kv_indptr), torch.from_numpy(level.kv_last_page_len)


class _Planned:
    """A wrapper, and when its last plan's copies have left the host. FlashInfer writes its pinned plan in place: to plan again
    before the copy of the plan before it ran would change a step under way."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self.event: Event | None = None

    def ready(self) -> Any:
        if self.event is not None:
            self.event.wait()
            self.event = None
        return self.wrapper


class Attention:
    """One runner's wrappers, made as they are first needed."""

    def __init__(
        self,
        fi: Any,
        device: Device,
        kv: KVSpec,
        kinds: Sequence[Kind],
        dtypes: Dtypes,
        *,
        deterministic: bool,
        workspace_bytes: int,
    ) -> None:
        self.fi, self.kv, self.dtypes, self.deterministic, self.device = fi, kv, dtypes, deterministic, device
        self.kinds = tuple(dict.fromkeys(kinds))
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device.torch_device)
        self._wrappers: dict[tuple[Kind, str], _Planned] = {}

    def settle(self, layout: Layout) -> AttentionStep:
        """The wrappers of a step, once each may be planned again. On the host, outside Device.run."""
        uses = {kind: [(part, self._wrapper(kind, self._role(part))) for part in _parts(kind, layout)] for kind in self.kinds}
        for planned in (planned for parts in uses.values() for _, planned in parts):
            planned.ready()
        return AttentionStep(self, uses)

    def _role(self, part: Part) -> str:
        if len(part.levels) > 1:
            return f"cascade{len(part.levels)}"
        decode = bool((np.diff(part.levels[0].qo_indptr) == 1).all())
        return "decode" if decode and not self.deterministic else "prefill"

    def _wrapper(self, kind: Kind, role: str) -> _Planned:
        found = self._wrappers.get((kind, role))
        if found is None:
            found = self._wrappers[kind, role] = _Planned(self._make(kind, role))
        return found

    def _make(self, kind: Kind, role: str) -> Any:
        if role == "decode":
            return self.fi.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", use_tensor_cores=use_tensor_cores(kind))
        if role == "prefill":
            return self.fi.BatchPrefillWithPagedKVCacheWrapper(
                self.workspace, "NHD", backend="fa2" if self.deterministic else "auto"
            )
        return self.fi.MultiLevelCascadeAttentionWrapper(int(role[-1]), self.workspace, "NHD")


class AttentionStep:
    """One step's attention. `plan` and `run` are called within Device.run."""

    def __init__(self, owner: Attention, uses: dict[Kind, list[tuple[Part, _Planned]]]) -> None:
        self._owner, self._uses = owner, uses
        self._moved: dict[Kind, tuple[Tensor, Tensor]] = {}  # deterministic: taken and kept of `same_tile`, on the device
        parts = [part for these in uses.values() for part, _ in these]
        self.levels = list({id(level): level for part in parts for level in part.levels}.values())  # each once

    def plan(self, indices: Indices) -> None:
        """Host work of FlashInfer's schedulers, and the copies of what they decided. indices: of each level, on the device."""
        for kind, parts in self._uses.items():
            for part, planned in parts:
                if self._owner.deterministic:
                    self._plan_alone(kind, part, planned.wrapper, indices)
                else:
                    _plan(self._owner, kind, part, planned.wrapper, indices)

    def _plan_alone(self, kind: Kind, part: Part, wrapper: Any, indices: Indices) -> None:
        """Each row as if it were alone: one tile, and keys in one piece. What is split depends on who else is there."""
        (level,), where = part.levels, self._owner.device.torch_device
        _, kv_indptr, last_page_len = _host(level)
        wide, taken, kept = same_tile(kind, level.qo_indptr)
        self._moved[kind] = (
            torch.from_numpy(taken).to(where, non_blocking=True),
            torch.from_numpy(kept).to(where, non_blocking=True),
        )
        wrapper.plan(
            torch.from_numpy(wide), kv_indptr, indices[id(level)], last_page_len, kind.num_heads, kind.num_kv_heads, kind.head_dim,
            self._owner.kv.page_size, causal=True, disable_split_kv=True, **_options(kind, self._owner.dtypes),
        )  # fmt: skip

    def planned(self, stream: Stream) -> None:
        """Right behind `plan`: marks when the plans have left the host."""
        event = self._owner.device.record(stream)
        for planned in (planned for parts in self._uses.values() for _, planned in parts):
            planned.event = event

    def run(self, kind: Kind, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """q [T, heads, dim] in the layout's order; pages [pages + 1, page_size, kv heads, dim]. Returns the shape of q."""
        parts = self._uses[kind]
        if kind in self._moved:
            taken, kept = self._moved[kind]
            wide: Tensor = parts[0][1].wrapper.run(q.index_select(0, taken), (k_pages, v_pages))
            return wide.index_select(0, kept)
        if len(parts) == 1:
            out: Tensor = parts[0][1].wrapper.run(q, (k_pages, v_pages))
            return out
        return torch.cat([planned.wrapper.run(q[part.first : part.last], (k_pages, v_pages)) for part, planned in parts])


def _parts(kind: Kind, layout: Layout) -> list[Part]:
    if kind.window and len(layout.parts[0].levels) > 1:  # a shared level has no causal mask, so it cannot place a window
        return [Part(0, int(layout.flat.qo_indptr[-1]), [layout.flat])]
    return layout.parts


def _plan(owner: Attention, kind: Kind, part: Part, wrapper: Any, indices: Indices) -> None:
    heads, kv_heads, dim, page_size = kind.num_heads, kind.num_kv_heads, kind.head_dim, owner.kv.page_size
    options = _options(kind, owner.dtypes)
    if len(part.levels) > 1:
        arrays = [_host(level) for level in part.levels]
        wrapper.plan(
            [a[0] for a in arrays], [a[1] for a in arrays], [indices[id(level)] for level in part.levels], [a[2] for a in arrays],
            heads, kv_heads, dim, page_size, causal=True, **options,
        )  # fmt: skip
        return
    (level,) = part.levels
    (qo_indptr, kv_indptr, last_page_len), kv_indices = _host(level), indices[id(level)]
    if isinstance(wrapper, owner.fi.BatchDecodeWithPagedKVCacheWrapper):
        wrapper.plan(kv_indptr, kv_indices, last_page_len, heads, kv_heads, dim, page_size, **options)
        return
    wrapper.plan(qo_indptr, kv_indptr, kv_indices, last_page_len, heads, kv_heads, dim, page_size, causal=True, **options)


class GraphAttention:
    """Decode wrappers of one bucket, on buffers that a graph may hold on to: always `rows` rows.

    pages: room for page ids of all rows."""

    def __init__(
        self,
        fi: Any,
        device: Device,
        kv: KVSpec,
        kinds: Sequence[Kind],
        dtypes: Dtypes,
        *,
        rows: int,
        pages: int,
        workspace: Tensor,
    ) -> None:
        self._kv, self._dtypes, self._device = kv, dtypes, device
        where = device.torch_device
        self._wrappers = {
            kind: _Planned(
                fi.BatchDecodeWithPagedKVCacheWrapper(
                    workspace,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=use_tensor_cores(kind),
                    paged_kv_indptr_buffer=torch.zeros(rows + 1, dtype=torch.int32, device=where),
                    paged_kv_indices_buffer=torch.zeros(pages, dtype=torch.int32, device=where),
                    paged_kv_last_page_len_buffer=torch.ones(rows, dtype=torch.int32, device=where),
                )
            )
            for kind in kinds
        }

    def settle(self) -> None:
        for planned in self._wrappers.values():
            planned.ready()

    def plan(self, level: Level, kv_indices: Tensor) -> None:
        """kv_indices: the level's, on the device."""
        _, kv_indptr, last_page_len = _host(level)
        for kind, planned in self._wrappers.items():
            planned.wrapper.plan(
                kv_indptr, kv_indices, last_page_len, kind.num_heads, kind.num_kv_heads, kind.head_dim, self._kv.page_size,
                **_options(kind, self._dtypes),
            )  # fmt: skip

    def planned(self, stream: Stream) -> None:
        event = self._device.record(stream)
        for planned in self._wrappers.values():
            planned.event = event

    def run(self, kind: Kind, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        out: Tensor = self._wrappers[kind].wrapper.run(q, (k_pages, v_pages))
        return out
