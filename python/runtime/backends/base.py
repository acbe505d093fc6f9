"""The page contract, and what a backend promises: the words between the model code and the kernels.

The page contract (normative; docs/page-contract.md draws it)
-------------------------------------------------------------
A page holds the keys and values of `page_size` consecutive tokens, for every layer. Page ids are 0 .. num_pages - 1; the
storage has one page more, the scratch page `num_pages`: in no page table, the slot of every K and V that must not be kept.
A batch of B rows with T tokens carries FlashInfer's CSR arrays, int32, and one int64 array:

    qo_indptr          [B + 1]  row b's tokens are qo_indptr[b] .. qo_indptr[b + 1] - 1 of the batch; each row has >= 1
    kv_indptr          [B + 1]  row b's page table is kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
    kv_indices         [P]      page ids; entry i of a row holds its positions i * page_size ...
    kv_last_page_len   [B]      1 .. page_size: tokens on the row's last page, its own new tokens included
    kv_slots           [T]      int64, page * page_size + offset: where token t's K and V go (distinct but in the scratch page)

So row b has kv_len = (pages - 1) * page_size + kv_last_page_len keys, its last token is at position kv_len - 1, and its token
i attends to positions 0 .. kv_len - (row length) + i (causal), fewer under a sliding window.
Within one forward each layer writes K and V of *all* rows before any row reads them (R5). Page copies of a plan run before
the forward. `page_size`: a power of two from 1 to 64. A backend may lay a page out as it likes inside, as long as the K of a
page, and its V, are one contiguous run of bytes a layer: then copying pages is layout-blind.

    model code --Ops--> reference: eager torch, slow, obviously right     cpu: recorded once, replayed by one C call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AttentionSpec", "Backend", "BatchLike", "ForwardBatch", "KVCache", "KVMemory", "KVSpec", "Limits", "Model", "Ops", "Packed", "RewritableBackend", "RopeTable", "Runner",
    "Weight", "WeightKind",
]  # fmt: skip

WeightKind = Literal["f32", "bf16", "f16", "f8", "q8_0", "q4_0", "q4_1", "int4", "e4m3"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [out, in] as a checkpoint stores it, row-major.

    kind f32, bf16, f16: data is a torch tensor [out, in] of that dtype.
    kind f8: data is bf16 or float32 [out, in], to be kept as e4m3 with a scale a row by a backend that multiplies it so.
    kind e4m3: data is uint8 [out, in + 4]: e4m3 a byte, then the row's scale, float32; value = e4m3 * scale.
    kind int4: data is uint8 [out, in + 8 * groups]: q 0 .. 15 a byte, then (scale, zero) float32 a group: (q - 8) * scale + zero.
    kind q8_0, q4_0, q4_1: data is uint8 [out, in / 32 * block bytes], GGUF blocks of 32 (34, 18 and 20 bytes).
    """

    kind: WeightKind
    shape: tuple[int, int]
    data: Tensor


class Packed(Protocol):
    """A matrix in the backend's own form; parts are stacked along `out`. Opaque to models."""

    @property
    def shape(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin for every position, float32 [max_position, rotary_dim / 2]; the scaling (linear, llama3, yarn with its
    attention factor) is in the numbers. Pairs are (i, i + rotary_dim / 2), the "NeoX" order."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """window: a token sees itself and window - 1 tokens before it; 0 is all.   softcap: cap * tanh(score / cap); 0 is off.
    qkv rows are [q heads | k heads | v heads], each head_dim wide.   norm_eps: of the per-head q and k norms (Qwen3)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeTable
    window: int = 0
    softcap: float = 0.0
    norm_eps: float = 0.0


@dataclass(frozen=True, slots=True)
class KVSpec:
    """num_pages excludes the scratch page."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    dtype: Literal["f32", "bf16", "f16", "fp8"]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: K and V, all layers."""
        size = {"f32": 4, "bf16": 2, "f16": 2, "fp8": 1}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.page_size * size


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds of one forward: buffers are made for them once, nothing grows in steady state."""

    max_tokens: int  # T
    max_rows: int  # B
    max_logits: int  # logits rows; a larger batch of them is computed in parts
    max_pages: int  # P


@dataclass(slots=True)
class ForwardBatch:
    """One forward, as the page contract says. `logit_rows`: int32 [L], indices into the T tokens, ascending.
    `copies`: int32 [C, 2], (source, target) pages."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    kv_slots: NDArray[np.int64]
    qo_indptr: NDArray[np.int32]
    kv_indptr: NDArray[np.int32]
    kv_indices: NDArray[np.int32]
    kv_last_page_len: NDArray[np.int32]
    logit_rows: NDArray[np.int32]
    copies: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 2), np.int32))


class BatchLike(Protocol):
    """What model code may do with a batch: hand it on to Ops. A `ForwardBatch`, or a recording backend's stand-in."""


class Ops(Protocol):
    """The operations a model is written in. Tensors are float32 [T, width] (or handles of that shape, when recording).

    Under B1 each output row depends on its own input row, the weights and (attention) its own keys alone, bit for bit.
    """

    def embed(self, batch: BatchLike, table: Packed) -> Tensor: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) (+ residual); a residual may be overwritten by the result."""
        ...

    def gated_linear(self, x: Tensor, gate_up: Packed) -> Tensor:
        """silu(x @ gate.T) * (x @ up.T); `gate_up` was packed with gated=True from [gate, up]."""
        ...

    def attention(
        self,
        batch: BatchLike,
        qkv: Tensor,
        layer: int,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        """Per-head norms if given, RoPE at the batch's positions, write K and V of all rows, then attend: [T, heads * dim]."""
        ...

    def logit_rows(self, batch: BatchLike, x: Tensor) -> Tensor:
        """The rows whose logits are wanted: [L, width]."""
        ...


class Model(Protocol):
    """Architecture + packed weights. `forward` returns logits [L, width] of the batch's logit rows."""

    num_layers: int
    width: int

    def forward(self, ops: Ops, batch: BatchLike) -> Tensor: ...


class KVCache(Protocol):
    spec: KVSpec

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """K and V of these pages as float32 [n, page_size, num_kv_heads, head_dim], whatever the layout inside. For tests."""
        ...


class Runner(Protocol):
    """A model bound to its pages and buffers."""

    kv: KVCache

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Copies, forward: logits float32 [L, width], valid until the next call. Raises on failure; then nothing that this
        call wrote can be trusted."""
        ...


class KVMemory(Protocol):
    """Pages whose memory can be handed back while nothing is in them (rl Z1). A KVCache that has no such methods keeps it."""

    def discard(self) -> int:
        """Give the memory back, keep the place: the bytes that are free now. What the pages held is gone."""
        ...

    def restore(self) -> None:
        """Take it again."""
        ...


class Backend(Protocol):
    name: str
    kv_dtypes: tuple[str, ...]

    def pack(self, parts: Sequence[Weight], *, gated: bool = False) -> Packed: ...
    def vector(self, values: Tensor) -> Tensor:
        """A norm weight or a bias as the ops want it (float32, on the device)."""
        ...

    def bind(self, model: Model, kv: KVSpec, limits: Limits) -> Runner: ...
    def close(self) -> None: ...


class RewritableBackend(Backend, Protocol):
    """A backend whose matrices take new numbers in place (updates of weights); its runners have `rebind(model)`, which serves
    another model over the same pages."""

    def like(self, packed: Packed) -> Packed:
        """An empty matrix of the same form."""
        ...

    def store(self, packed: Packed, part: int, weight: Weight) -> None:
        """Write a part's numbers: plain floats into plain floats of any width, blocks into blocks of the same kind."""
        ...

    def store_from(self, packed: Packed, source: Packed, part: int) -> None:
        """The same part of another matrix of the same form."""
        ...

    def settle(self) -> None:
        """Everything stored so far, vectors too, has arrived where a step reads it."""
        ...

    def read(self, packed: Packed, row: int, count: int) -> Tensor:
        """Rows as the arithmetic takes them, float32 [count, in]."""
        ...

    def discard(self, packed: Packed) -> int:
        """Give its memory back to the system; the bytes. It holds nothing until every part is stored again. A backend may lack this
        method: its weights stay."""
        ...
