"""Records a model's forward as C ops over one arena of buffers, and replays it. The Ops of the `cpu` backend.

    model.forward(Recorder) ──► [op, op, ...] over numbered buffers ──layout──► byte offsets ──► phloem_program_create

    buffer   0 ████              a buffer lives from the op that writes it to the last that reads it; its bytes then serve
             1   ██              another. So memory does not grow with layers. A residual that nobody reads again is
             2     ███           overwritten by its sum, in place.

Buffers hold max_tokens rows before `logit_rows`, max_logits rows after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phloem.runtime import native
from phloem.runtime.backends.base import AttentionSpec, BatchLike, ForwardBatch, KVSpec, Limits, Model, Packed
from phloem.runtime.errors import KernelError
from phloem.runtime.native import Context, OpKind

if TYPE_CHECKING:
    from phloem.runtime.backends.cpu import CpuMatrix

__all__ = ["Program", "Recorder", "layout", "record"]

_ALIGN = 64
_NAMES = ("embed", "norm", "linear", "gated", "attention", "gather")  # by OpKind


@dataclass(eq=False)
class Buffer:
    """What a recording model holds for a float32 tensor [rows, width]."""

    width: int
    logits: bool  # rows are logit rows, not tokens
    ops: list[int] = field(default_factory=list)  # that write or read it, ascending
    home: Buffer | None = None  # it lives in this one's memory

    @property
    def shape(self) -> tuple[int, int]:
        return (-1, self.width)


@dataclass
class _Recorded:
    """An op before its buffers have addresses."""

    kind: int
    y: Buffer
    x: Buffer | None = None
    residual: Buffer | None = None
    vector: Tensor | None = None
    eps: float = 0.0
    matrices: tuple[int, ...] = ()
    attention: native.AttentionArgs | None = None


class _Batch:
    """The stand-in that a model hands back to the ops."""


class Recorder:
    """The Ops. Each call appends an op; KernelError at once for shapes that do not fit."""

    def __init__(self, spec: KVSpec, plane: Callable[[int, bool], int]) -> None:
        self.spec, self._plane = spec, plane
        self.recorded: list[_Recorded] = []
        self.keep: list[object] = []  # tensors that the ops point into

    def embed(self, batch: BatchLike, table: Packed) -> Tensor:
        matrix = _matrix(table)
        if len(matrix.handles) != 1:
            raise KernelError(f"an embedding table is one matrix, not {len(matrix.handles)} parts.")
        return self._add(OpKind.EMBED, matrix.columns, False, matrices=matrix.handles)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        source = _buffer(x)
        return self._add(
            OpKind.RMS_NORM,
            source.width,
            source.logits,
            x=source,
            vector=self._vector(weight, source.width, "a norm's weight"),
            eps=eps,
        )

    def linear(self, x: Tensor, weight: Packed, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        source, matrix = _buffer(x), _matrix(weight)
        rows, columns = matrix.shape
        if source.width != columns or matrix.gated:
            raise KernelError(
                f"linear: x is {source.width} wide, the matrix {matrix.shape}{' and gated' * matrix.gated}; expected one width, not gated."
            )
        added = None if residual is None else _buffer(residual)
        if added is not None and (added.width != rows or added.logits != source.logits):
            raise KernelError(f"linear: the residual is {added.width} wide, the result {rows}.")
        vector = None if bias is None else self._vector(bias, rows, "a bias")
        return self._add(OpKind.LINEAR, rows, source.logits, x=source, residual=added, vector=vector, matrices=matrix.handles)

    def gated_linear(self, x: Tensor, gate_up: Packed) -> Tensor:
        source, matrix = _buffer(x), _matrix(gate_up)
        if not matrix.gated or source.width != matrix.columns:
            raise KernelError(
                f"gated_linear: x is {source.width} wide, the matrix {matrix.shape}; expected one width, packed with gated=True."
            )
        return self._add(OpKind.GATED, matrix.widths[0], source.logits, x=source, matrices=matrix.handles)

    def attention(
        self,
        batch: BatchLike,
        qkv: Tensor,
        layer: int,
        spec: AttentionSpec,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> Tensor:
        source, kv, dim = _buffer(qkv), self.spec, spec.head_dim
        if not 0 <= layer < kv.num_layers or spec.num_kv_heads != kv.num_kv_heads or dim != kv.head_dim:
            raise KernelError(
                f"attention: layer {layer} with {spec.num_kv_heads} kv heads of {dim}; the pages hold {kv.num_layers} layers, "
                f"{kv.num_kv_heads} heads of {kv.head_dim}."
            )
        if source.width != (spec.num_heads + 2 * spec.num_kv_heads) * dim or source.logits:
            raise KernelError(
                f"attention: qkv is {source.width} wide; expected (heads + 2 kv heads) * head_dim, of all tokens."
            )
        cos, sin = (table.detach().float().contiguous() for table in (spec.rope.cos, spec.rope.sin))
        if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > dim:
            raise KernelError(
                f"attention: rotary tables are {tuple(cos.shape)} and {tuple(sin.shape)}; expected two [positions, <= {dim // 2}]."
            )
        norms = [None if norm is None else self._vector(norm, dim, "a per-head norm's weight") for norm in (q_norm, k_norm)]
        self.keep += [cos, sin, *norms]
        args = native.AttentionArgs(
            k_cache=self._plane(layer, False),
            v_cache=self._plane(layer, True),
            rope_cos=cos.data_ptr(),
            rope_sin=sin.data_ptr(),
            q_norm=None if norms[0] is None else norms[0].data_ptr(),
            k_norm=None if norms[1] is None else norms[1].data_ptr(),
            kv_type=0 if kv.dtype == "f32" else 1,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=dim,
            page_size=kv.page_size,
            num_pages=kv.num_pages,
            rotary_dim=2 * cos.shape[1],
            max_positions=cos.shape[0],
            window=spec.window,
            scale=spec.scale,
            softcap=spec.softcap,
            norm_eps=spec.norm_eps,
        )
        return self._add(OpKind.ATTENTION, spec.num_heads * dim, False, x=source, attention=args)

    def logit_rows(self, batch: BatchLike, x: Tensor) -> Tensor:
        source = _buffer(x)
        if source.logits:
            raise KernelError("logit_rows was called on what it had made already; a model gathers its logit rows once.")
        return self._add(OpKind.GATHER, source.width, True, x=source)

    def _vector(self, values: Tensor, length: int, what: str) -> Tensor:
        if tuple(values.shape) != (length,):
            raise KernelError(f"{what} has shape {tuple(values.shape)}; expected ({length},).")
        vector = values.detach().float().contiguous()
        self.keep.append(vector)
        return vector

    def _add(
        self, kind: int, width: int, logits: bool, x: Buffer | None = None, residual: Buffer | None = None, **rest: object
    ) -> Tensor:
        y, index = Buffer(width, logits), len(self.recorded)
        for buffer in {x, residual} - {None}:
            assert buffer is not None
            if any(self.recorded[i].kind == OpKind.ATTENTION and self.recorded[i].x is buffer for i in buffer.ops):
                raise KernelError("a model reads qkv after attention, which changes it; read it before.")
            buffer.ops.append(index)
        y.ops.append(index)
        self.recorded.append(_Recorded(kind, y, x, residual, **rest))  # type: ignore[arg-type]
        return cast("Tensor", y)


def _buffer(x: object) -> Buffer:
    if not isinstance(x, Buffer):
        raise KernelError(
            f"while it is recorded, a model may give ops only what ops returned, not a {type(x).__name__}: use the Ops for all arithmetic."
        )
    return x


def _matrix(packed: Packed) -> CpuMatrix:
    from phloem.runtime.backends.cpu import CpuMatrix

    if not isinstance(packed, CpuMatrix):
        raise KernelError(f"a matrix of another backend ({type(packed).__name__}) was given to the cpu backend.")
    return packed


def stride(width: int) -> int:
    """Floats between rows: whole cache lines, and not a multiple of 4 KiB, which puts all rows into one set of L1."""
    floats = -(-width // 16) * 16
    return floats + 16 if floats * 4 % 4096 == 0 else floats


def layout(recorded: list[_Recorded], result: Buffer, limits: Limits) -> tuple[dict[Buffer, int], int]:
    """Byte offset of every buffer but `result`, and the bytes of all. Buffers that live at once do not overlap."""
    end = len(recorded)
    last = {op.y: op.y.ops[-1] for op in recorded}
    for op in recorded:
        if op.kind == OpKind.GATHER and op.x is not None:
            last[op.x] = end  # parts of a long list of logit rows gather from it again
    for index, op in enumerate(recorded):
        if op.residual is not None and op.y is not result and last[op.residual] == index and op.residual is not op.x:
            op.y.home = op.residual.home or op.residual
            last[op.y.home] = max(last[op.y.home], last[op.y])
    placed: list[tuple[Buffer, int, int, int]] = []  # buffer, offset, bytes, last op
    offsets: dict[Buffer, int] = {}
    for index, op in enumerate(recorded):
        y = op.y
        if y is result or y.home is not None:
            continue
        size = -(-(limits.max_logits if y.logits else limits.max_tokens) * stride(y.width) * 4 // _ALIGN) * _ALIGN
        live = sorted((offset, offset + taken) for _, offset, taken, until in placed if until >= index)
        at = 0
        for low, high in live:
            if at + size <= low:
                break
            at = max(at, high)
        placed.append((y, at, size, last[y]))
        offsets[y] = at
    for op in recorded:
        if op.y.home is not None:
            offsets[op.y] = offsets[op.y.home]
    return offsets, max((offset + size for _, offset, size, _ in placed), default=0)


class Program:
    """The replayable forward: C ops, their memory, and the arrays that a batch is copied into."""

    def __init__(
        self,
        context: Context,
        handle: int,
        names: list[str],
        spec: KVSpec,
        planes: object,
        page_bytes: int,
        limits: Limits,
        logits: Tensor,
        keep: object,
    ) -> None:
        self.names = names
        self._context, self._handle, self._limits, self._logits, self._keep = context, handle, limits, logits, keep
        self._copy_args = (planes, 2 * spec.num_layers, page_bytes)
        self._num_pages = spec.num_pages
        ints: dict[str, int] = {
            "token_ids": limits.max_tokens,
            "positions": limits.max_tokens,
            "qo_indptr": limits.max_rows + 1,
            "kv_indptr": limits.max_rows + 1,
            "kv_indices": limits.max_pages,
            "kv_last_page_len": limits.max_rows,
        }
        self._arrays: dict[str, NDArray[np.int32] | NDArray[np.int64]] = {
            name: np.zeros(size, np.int32) for name, size in ints.items()
        }
        self._arrays["kv_slots"] = np.zeros(limits.max_tokens, np.int64)
        self._batch = native.Batch(**{name: array.ctypes.data for name, array in self._arrays.items()})
        self._run = context.library.phloem_program_run
        self._reference = ctypes.byref(self._batch)
        weakref.finalize(self, _destroy, context, handle)

    @contextlib.contextmanager
    def profile(self) -> Iterator[NDArray[np.int64]]:
        """While it lasts, the nanoseconds of each op (see `names`) add up in the array it gives."""
        times = np.zeros(len(self.names), np.int64)
        self._context.library.phloem_program_profile(self._handle, times.ctypes.data)
        try:
            yield times
        finally:
            self._context.library.phloem_program_profile(self._handle, None)

    def run(self, batch: ForwardBatch) -> Tensor:
        """CpuRunner.forward's promise."""
        limits, native_batch, context = self._limits, self._batch, self._context
        context.handle  # noqa: B018  raises after close
        tokens, rows, pages, wanted = (
            len(batch.token_ids),
            len(batch.kv_last_page_len),
            len(batch.kv_indices),
            len(batch.logit_rows),
        )
        if tokens > limits.max_tokens or rows > limits.max_rows or pages > limits.max_pages:
            raise KernelError(
                f"bad batch: {tokens} tokens, {rows} rows, {pages} pages; the limits of this runner are {limits.max_tokens}, {limits.max_rows}, {limits.max_pages}."
            )
        copies = batch.copies
        if copies.dtype != np.int32 or copies.ndim != 2 or copies.shape[1] != 2:
            raise KernelError(f"bad batch: copies is {copies.dtype}{copies.shape}; expected int32(C, 2).")
        copies = np.ascontiguousarray(copies)
        if not tokens:
            context.check(
                context.library.phloem_copy_pages(
                    context.handle, *self._copy_args, copies.ctypes.data, len(copies), self._num_pages
                )
            )
            return self._logits[:0]
        counts = {
            "kv_slots": tokens,
            "token_ids": tokens,
            "positions": tokens,
            "qo_indptr": rows + 1,
            "kv_indptr": rows + 1,
            "kv_indices": pages,
        }
        counts["kv_last_page_len"] = rows
        for name, count in counts.items():
            source, target = getattr(batch, name), self._arrays[name]
            if source.dtype != target.dtype or source.shape != (count,):
                raise KernelError(f"bad batch: {name} is {source.dtype}{source.shape}; expected {target.dtype}({count},).")
            target[:count] = source
        logit_rows = np.ascontiguousarray(batch.logit_rows)
        if logit_rows.dtype != np.int32:
            raise KernelError(f"bad batch: logit_rows is {logit_rows.dtype}; expected int32.")
        result = self._logits
        native_batch.logits = None
        if wanted > limits.max_logits:
            result = torch.empty(wanted, result.shape[1])
            native_batch.logits = result.data_ptr()
        native_batch.logit_rows = logit_rows.ctypes.data if wanted else None
        native_batch.copies = copies.ctypes.data if len(copies) else None
        native_batch.num_tokens, native_batch.num_rows, native_batch.num_pages = tokens, rows, pages
        native_batch.num_logits, native_batch.num_copies = wanted, len(copies)
        status = self._run(self._handle, self._reference)
        if status:
            context.check(status)
        return result[:wanted]


def _destroy(context: Context, handle: int) -> None:
    if not context.closed:
        context.library.phloem_program_destroy(handle)


def record(
    context: Context,
    model: Model,
    spec: KVSpec,
    plane: Callable[[int, bool], int],
    planes: ctypes.Array[ctypes.c_void_p],
    page_bytes: int,
    limits: Limits,
) -> Program:
    """Runs model.forward once on a Recorder and makes the program. Raises KernelError if the model asks for what there is not."""
    recorder = Recorder(spec, plane)
    result = _buffer(model.forward(recorder, _Batch()))
    recorded = recorder.recorded
    if not result.logits or result.width != model.width or recorded[-1].y is not result:
        raise KernelError(f"the model's forward must end with its logits: [L, {model.width}] of its logit rows.")
    offsets, size = layout(recorded, result, limits)
    arena = context.allocate(max(size, _ALIGN))
    logits = torch.zeros(limits.max_logits, result.width)

    def place(buffer: Buffer) -> tuple[int, int]:
        if buffer is result:
            return logits.data_ptr(), result.width
        return arena + offsets[buffer], stride(buffer.width)

    ops = (native.Op * len(recorded))()
    for op, source in zip(ops, recorded, strict=True):
        op.kind, op.width, op.eps, op.num_matrices = source.kind, source.y.width, source.eps, len(source.matrices)
        op.y, op.y_ld = place(source.y)
        if source.x is not None:
            op.x, op.x_ld = place(source.x)
        if source.residual is not None:
            op.residual, op.residual_ld = place(source.residual)
        if source.vector is not None:
            op.vector = source.vector.data_ptr()
        for i, handle in enumerate(source.matrices):
            op.matrices[i] = handle
        if source.attention is not None:
            op.attention = ctypes.pointer(source.attention)
    c_limits = native.Limits(limits.max_tokens, limits.max_rows, limits.max_logits, limits.max_pages)
    pages = native.Pages(planes, len(planes), spec.num_pages, spec.page_size, page_bytes)
    try:
        handle = context.make(context.library.phloem_program_create, ops, len(ops), ctypes.byref(c_limits), ctypes.byref(pages))
    except BaseException:
        context.release(arena)
        raise
    names = [_NAMES[op.kind] + (f" {op.x.width}x{op.y.width}" if op.x is not None and op.matrices else "") for op in recorded]
    program = Program(context, handle, names, spec, planes, page_bytes, limits, logits, (recorder.keep, model))
    weakref.finalize(program, context.release, arena)
    return program
