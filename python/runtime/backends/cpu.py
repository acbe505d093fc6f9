"""The CPU backend: weights packed for the C++ kernels, a model's forward recorded once and replayed by one C call a step.

    pack ──► CpuMatrix: C handles, one a part             K of a layer  [num_pages + 1, kv_heads, head_dim, page_size]
    bind ──► CpuKV + Program (cpu_program.py)             V of a layer  [num_pages + 1, kv_heads, page_size, head_dim]
    forward(batch) ──► phloem_program_run ──► logits      (kernels/src/attention.h)

Knows nothing of schedules or tokens' meaning. B1 holds for every thread count; the code variant may change bits, so it is
chosen once, here.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from phloem.runtime.backends.base import ForwardBatch, KVSpec, Limits, Model, Packed, Weight, WeightKind
from phloem.runtime.backends.cpu_program import Program, record
from phloem.runtime.errors import ConfigError, KernelError
from phloem.runtime.native import MAX_PARTS, Context

__all__ = ["Cpu", "CpuKV", "CpuMatrix", "CpuRunner"]

# PHLOEM_* of phloem_linear.h, the torch dtype of the data, and the bytes of a block of how many elements.
_KINDS: dict[WeightKind, tuple[int, torch.dtype, int, int]] = {
    "f32": (0, torch.float32, 4, 1),
    "bf16": (1, torch.bfloat16, 2, 1),
    "q8_0": (2, torch.uint8, 34, 32),
    "q4_0": (3, torch.uint8, 18, 32),
    "q4_1": (4, torch.uint8, 20, 32),
    "f16": (5, torch.float16, 2, 1),
}


class CpuMatrix:
    """Parts stacked along `out`, each in the kernels' own form. Freed with its last reference, or with the backend."""

    def __init__(
        self,
        context: Context,
        handles: Sequence[int],
        widths: Sequence[int],
        columns: int,
        gated: bool,
        kind: int,
        keep: object = None,
    ) -> None:
        """kind: PHLOEM_* of phloem_linear.h, of the parts as they are kept."""
        self.kind = kind
        self.handles, self.widths, self.columns, self.gated = tuple(handles), tuple(widths), columns, gated
        self.context = context
        self._keep = keep  # the shared tensors: their memory is the kernels' too
        weakref.finalize(self, _destroy, context, self.handles)

    @property
    def shape(self) -> tuple[int, int]:
        return (sum(self.widths), self.columns)

    @property
    def bytes(self) -> int:
        """Memory of its own; 0 when shared."""
        return sum(int(self.context.library.phloem_matrix_bytes(handle)) for handle in self.handles)


def _destroy(context: Context, handles: tuple[int, ...]) -> None:
    if not context.closed:
        for handle in handles:
            context.library.phloem_matrix_destroy(context.handle, handle)


class Cpu:
    """The backend. One thread at a time may call it or its runners.

    threads: of the pool, the calling thread included; 0 is one a core.
    variant: "auto", or a name of native.VARIANTS that this CPU runs (tests).   Raises ConfigError, KernelError.
    """

    name = "cpu"
    kv_dtypes = ("f32", "bf16")

    def __init__(self, threads: int = 0, variant: str = "auto") -> None:
        if not 0 <= threads <= 1024:
            raise ConfigError(f"threads is {threads}; expected 0 (one a core) to 1024.", param="threads")
        self.threads = threads or len(os.sched_getaffinity(0))
        self.context = Context(self.threads, variant)

    @property
    def variant(self) -> str:
        return self.context.variant

    def pack(self, parts: Sequence[Weight], *, gated: bool = False) -> Packed:
        """A copy of the parts, packed. f16 becomes float32; GGUF blocks keep their numbers. Raises KernelError."""
        return self._matrix(parts, gated, share=False)

    def share(self, parts: Sequence[Weight], *, gated: bool = False) -> Packed:
        """Like `pack`, without a copy: contiguous float32 or bfloat16 tensors whose memory is read at every forward (a trainer's
        weights, updated in place). The same bits as packed, more slowly."""
        return self._matrix(parts, gated, share=True)

    def like(self, packed: Packed) -> Packed:
        one, library = _own(packed), self.context.library
        handles: list[int] = []
        try:
            for width in one.widths:
                handles.append(self.context.make(library.phloem_matrix_empty, one.kind, width, one.columns))
        except BaseException:
            _destroy(self.context, tuple(handles))
            raise
        return CpuMatrix(self.context, handles, one.widths, one.columns, one.gated, one.kind)

    def store(self, packed: Packed, part: int, weight: Weight) -> None:
        one = _own(packed)
        kind, data, row_bytes = _source(weight, share=False)
        if weight.shape != (one.widths[part], one.columns):
            raise KernelError(f"part {part} is {(one.widths[part], one.columns)}; the weight is {weight.shape}.")
        store = self.context.library.phloem_matrix_store
        self.context.check(store(self.context.handle, one.handles[part], kind, data.data_ptr(), row_bytes))

    def store_from(self, packed: Packed, source: Packed, part: int) -> None:
        copy = self.context.library.phloem_matrix_copy
        self.context.check(copy(self.context.handle, _own(packed).handles[part], _own(source).handles[part]))

    def settle(self) -> None:
        pass  # stores are done when they return

    def read(self, packed: Packed, row: int, count: int) -> Tensor:
        one = _own(packed)
        out, done = torch.empty(count, one.columns), 0
        for handle, width in zip(one.handles, one.widths):
            n = min(width - row, count - done)
            if 0 <= row < width and n > 0:
                ids = torch.arange(row, row + n, dtype=torch.int32)
                embed = self.context.library.phloem_embed
                self.context.check(embed(self.context.handle, handle, ids.data_ptr(), n, out[done:].data_ptr(), one.columns))
                done, row = done + n, width
            row -= width
        return out

    def discard(self, packed: Packed) -> int:
        discard = self.context.library.phloem_matrix_discard
        return sum(int(discard(self.context.handle, handle)) for handle in _own(packed).handles)

    def vector(self, values: Tensor) -> Tensor:
        return values.detach().to("cpu", torch.float32).contiguous().clone()

    def bind(self, model: Model, kv: KVSpec, limits: Limits) -> CpuRunner:
        """Records the model's forward; takes the memory of pages and buffers. Raises KernelError."""
        if kv.dtype not in self.kv_dtypes:
            raise KernelError(f"kv_dtype is {kv.dtype!r}; the cpu backend has {', '.join(self.kv_dtypes)}.")
        for name, value in (
            ("max_tokens", limits.max_tokens),
            ("max_rows", limits.max_rows),
            ("max_logits", limits.max_logits),
            ("max_pages", limits.max_pages),
        ):
            if value < 1:
                raise KernelError(f"limits.{name} is {value}; expected at least 1.")
        return CpuRunner(self.context, model, CpuKV(self.context, kv), limits)

    def close(self) -> None:
        """Ends the threads and frees everything made by this backend. Twice is fine; in a fork()ed child nothing is waited for."""
        self.context.close()

    def _matrix(self, parts: Sequence[Weight], gated: bool, share: bool) -> CpuMatrix:
        if not 1 <= len(parts) <= MAX_PARTS:
            raise KernelError(f"a matrix is made of 1 to {MAX_PARTS} parts, not {len(parts)}.")
        columns = {part.shape[1] for part in parts}
        if len(columns) != 1:
            raise KernelError(f"parts of one matrix have {sorted(columns)} columns; expected one width.")
        if gated and (len(parts) != 2 or parts[0].shape != parts[1].shape):
            raise KernelError(f"a gated matrix is made of [gate, up] of one shape, not of {[part.shape for part in parts]}.")
        handles: list[int] = []
        tensors: list[Tensor] = []
        try:
            for part in parts:
                kind, data, row_bytes = _source(part, share)
                tensors.append(data)
                make = self.context.library.phloem_matrix_share if share else self.context.library.phloem_matrix_pack
                handles.append(self.context.make(make, kind, *part.shape, data.data_ptr(), row_bytes))
        except BaseException:
            _destroy(self.context, tuple(handles))
            raise
        kept = _KINDS["f32" if parts[0].kind == "f16" else parts[0].kind][0]
        widths = [part.shape[0] for part in parts]
        return CpuMatrix(self.context, handles, widths, columns.pop(), gated, kept, tensors if share else None)


def _own(packed: Packed) -> CpuMatrix:
    if not isinstance(packed, CpuMatrix):
        raise KernelError(f"a matrix of another backend ({type(packed).__name__}) was given to the cpu backend.")
    return packed


def _source(part: Weight, share: bool) -> tuple[int, Tensor, int]:
    """(C kind, contiguous data, bytes of a row); raises KernelError if the data is not what `kind` and `shape` say."""
    if part.kind not in _KINDS:
        raise KernelError(f"weight kind is {part.kind!r}; the cpu backend takes {', '.join(_KINDS)}.")
    kind, dtype, block_bytes, block = _KINDS[part.kind]
    rows, columns = part.shape
    width = columns if block == 1 else columns // block * block_bytes
    if part.data.dtype != dtype or tuple(part.data.shape) != (rows, width) or columns % block:
        expected = f"{dtype} [{rows}, {width}]" + (f", and columns in blocks of {block}" if block > 1 else "")
        raise KernelError(
            f"a {part.kind} weight of shape {part.shape} has data {part.data.dtype} {list(part.data.shape)}; expected {expected}."
        )
    data = part.data.detach()
    if share and (part.kind not in ("f32", "bf16") or not data.is_contiguous() or data.device.type != "cpu"):
        raise KernelError(f"only contiguous f32 and bf16 tensors on the CPU can be shared, not this {part.kind}; pack it.")
    data = data.to("cpu").contiguous()
    return kind, data, width * data.element_size()


class CpuKV:
    """Pages in native memory: per layer a K plane and a V plane of num_pages + 1 pages."""

    def __init__(self, context: Context, spec: KVSpec) -> None:
        self.spec, self.context = spec, context
        element = 4 if spec.dtype == "f32" else 2
        self.page_bytes = spec.num_kv_heads * spec.head_dim * spec.page_size * element  # of K, or V, of a layer
        self._plane_bytes = -(-self.page_bytes * (spec.num_pages + 1) // 64) * 64
        self._address = context.allocate(2 * spec.num_layers * self._plane_bytes)
        self.planes = (ctypes.c_void_p * (2 * spec.num_layers))(
            *(self._address + i * self._plane_bytes for i in range(2 * spec.num_layers))
        )
        weakref.finalize(self, context.release, self._address)

    def discard(self) -> int:
        size = 2 * self.spec.num_layers * self._plane_bytes
        return int(self.context.library.phloem_memory_discard(self.context.handle, self._address, size))

    def restore(self) -> None:
        """The system gives the memory as pages are written."""

    def plane(self, layer: int, value: bool) -> int:
        """Address of a layer's K, or V, pages."""
        return self._address + (2 * layer + value) * self._plane_bytes

    def read(self, layer: int, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        spec = self.spec
        if not 0 <= layer < spec.num_layers or any(not 0 <= page <= spec.num_pages for page in pages):
            raise KernelError(
                f"layer {layer} of {spec.num_layers}, pages {list(pages)} of 0 .. {spec.num_pages}: there is no such page."
            )
        self.context.handle  # noqa: B018  raises once the memory is gone
        k = self._view(layer, False, (spec.num_kv_heads, spec.head_dim, spec.page_size))[list(pages)].permute(0, 3, 1, 2)
        v = self._view(layer, True, (spec.num_kv_heads, spec.page_size, spec.head_dim))[list(pages)].permute(0, 2, 1, 3)
        return k.float().contiguous(), v.float().contiguous()

    def _view(self, layer: int, value: bool, page: tuple[int, int, int]) -> Tensor:
        size = self.page_bytes * (self.spec.num_pages + 1)
        raw = (ctypes.c_char * size).from_address(self.plane(layer, value))
        dtype = torch.float32 if self.spec.dtype == "f32" else torch.bfloat16
        return torch.frombuffer(raw, dtype=dtype).view(self.spec.num_pages + 1, *page)


class CpuRunner:
    """A recorded model, its pages and its buffers."""

    def __init__(self, context: Context, model: Model, kv: CpuKV, limits: Limits) -> None:
        self.kv, self.limits, self.context = kv, limits, context
        self.width = model.width
        self.rebind(model)

    def rebind(self, model: Model) -> None:
        """Serve this model from now on, over the same pages: one of the same shape with other weights. Raises KernelError."""
        kv = self.kv
        self.program: Program = record(self.context, model, kv.spec, kv.plane, kv.planes, kv.page_bytes, self.limits)
        self._model = model  # the program points into its weights

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Copies, then the forward: logits float32 [L, width], a view that the next call overwrites.

        Raises KernelError, before anything is written, for a batch beyond the limits or the page contract; EngineClosedError
        after close() and in a fork()ed child.
        """
        return self.program.run(batch)
