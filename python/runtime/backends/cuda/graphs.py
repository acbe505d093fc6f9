"""CUDA graphs for steps in which every row decodes one token: one a bucket of rows, captured at start, largest first.

    13 rows ──► bucket 16: 3 rows of padding on the scratch page ──► replay ──► logits[:13]

A bucket's inputs and plans live at fixed addresses, and so do the logits, which all buckets write to one place: a step's are its own
until the next launch. Graphs share memory: the largest is captured first, the others fit into what it took. Capturing stops when the
budget, or the device's memory, is spent; which buckets are missing then, and why a step runs without a graph, is said in words that a
person can act on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phloem.runtime.backends.base import ForwardBatch, KVSpec
from phloem.runtime.backends.cuda.attention import GraphAttention
from phloem.runtime.backends.cuda.lanes import Device, Graph, Stream
from phloem.runtime.backends.cuda.ops import GpuBatch
from phloem.runtime.backends.cuda.plan import Layout, Level

__all__ = ["Bucket", "DecodeGraphs", "Inputs", "bucket_sizes", "padded"]

log = logging.getLogger(__name__)
Forward = Callable[[GpuBatch], Tensor]


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of a quarter of the power of two below: less than a fifth of a large step is padding."""
    sizes, size = [1, 2, 4], 4
    while sizes[-1] < max_rows:
        while size * 2 <= sizes[-1]:
            size *= 2
        sizes.append(sizes[-1] + max(4, size // 4))
    kept = [s for s in sizes if s < max_rows]
    return (*kept, max_rows)


@dataclass(slots=True)
class Inputs:
    """A decode step padded to a bucket. tokens: int32 [4, rows]: token ids, positions, slots, source slots of FUTURE (-1: known)."""

    tokens: NDArray[np.int32]
    level: Level


def padded(batch: ForwardBatch, from_slot: NDArray[np.int32], rows: int, spec: KVSpec) -> Inputs:
    """Rows beyond the batch read and write the scratch page: one key each, their own."""
    n, scratch = len(batch.token_ids), spec.num_pages
    extra = rows - n
    tokens = np.zeros((4, rows), np.int32)
    tokens[0, :n], tokens[1, :n], tokens[2, :n] = batch.token_ids, batch.positions, batch.kv_slots
    tokens[2, n:] = scratch * spec.page_size
    tokens[3] = -1
    tokens[3, :n] = from_slot
    kv_indptr = np.concatenate([batch.kv_indptr, batch.kv_indptr[-1] + np.arange(1, extra + 1, dtype=np.int32)])
    return Inputs(
        tokens,
        Level(
            np.arange(rows + 1, dtype=np.int32),
            kv_indptr.astype(np.int32, copy=False),
            np.concatenate([batch.kv_indices, np.full(extra, scratch, np.int32)]),
            np.concatenate([batch.kv_last_page_len, np.ones(extra, np.int32)]),
        ),
    )


class Bucket:
    """One captured size."""

    def __init__(self, rows: int, attention: GraphAttention, device: torch.device) -> None:
        self.rows, self.attention = rows, attention
        self.inputs = torch.zeros((3, rows), dtype=torch.int32, device=device)
        self.logits: Tensor | None = None
        self.graph: Graph | None = None

    @property
    def batch(self) -> GpuBatch:
        ids, positions, slots = self.inputs.unbind(0)
        return GpuBatch(ids, positions, slots, None, self.attention)


class DecodeGraphs:
    """sizes: wanted, ascending.   missing: rows of each bucket that was not captured -> why."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.buckets: dict[int, Bucket] = {}
        self.missing: dict[int, str] = {}
        self._logits: Tensor | None = None

    def capture(
        self, device: Device, stream: Stream, make: Callable[[int], GraphAttention], forward: Forward, spec: KVSpec, budget: int
    ) -> None:
        """budget: bytes that all graphs together may take, and at most half of what the device has left: activations and draws need the
        rest. make: a bucket's attention. forward: logits float32 of a batch."""
        start = device.free_bytes()
        budget = min(budget, start // 2)
        for rows in reversed(self.sizes):
            spent = start - device.free_bytes()
            if spent >= budget:
                self.missing[rows] = f"graphs had taken {spent >> 20} MiB of a budget of {budget >> 20} MiB"
                continue
            try:
                self.buckets[rows] = self._captured(device, stream, make(rows), forward, spec, rows)
            except torch.OutOfMemoryError:  # the pool was given too much of the device: run on without, rather than not at all
                self.missing[rows] = f"the GPU's memory was spent after {spent >> 20} MiB of graphs"
        if self.missing:
            log.warning(
                "no CUDA graph for %s rows: %s. Raise the budget, or lower max_running or kv_memory.",
                ", ".join(map(str, sorted(self.missing))),
                "; ".join(dict.fromkeys(self.missing.values())),
            )

    def _captured(
        self, device: Device, stream: Stream, attention: GraphAttention, forward: Forward, spec: KVSpec, rows: int
    ) -> Bucket:
        bucket = Bucket(rows, attention, device.torch_device)
        nothing = ForwardBatch(
            token_ids=np.zeros(0, np.int32), positions=np.zeros(0, np.int32), kv_slots=np.zeros(0, np.int64),
            qo_indptr=np.zeros(1, np.int32), kv_indptr=np.zeros(1, np.int32), kv_indices=np.zeros(0, np.int32),
            kv_last_page_len=np.zeros(0, np.int32), logit_rows=np.zeros(0, np.int32),
        )  # fmt: skip
        blank = padded(nothing, np.zeros(0, np.int32), rows, spec)

        def once() -> None:
            bucket.inputs.copy_(torch.from_numpy(blank.tokens[:3]))
            attention.plan(blank.level, torch.from_numpy(blank.level.kv_indices).to(device.torch_device))
            forward(bucket.batch)  # kernels are built and memory is found outside the capture

        def work() -> None:
            found = forward(bucket.batch)
            if self._logits is None:  # the largest bucket, and not yet under capture
                self._logits = torch.empty_like(found)
            bucket.logits = self._logits[:rows]
            bucket.logits.copy_(found)

        device.synchronize()  # the buffers above, and FlashInfer's, were filled on another stream
        device.run(stream, once)
        device.synchronize()
        bucket.graph = device.capture(work, next((b.graph for b in self.buckets.values()), None))
        return bucket

    def choose(self, batch: ForwardBatch, layout: Layout) -> tuple[Bucket | None, str]:
        """The bucket that this step can replay, or None and why."""
        rows = len(batch.kv_last_page_len)
        if not layout.decode:
            longest = int(np.diff(batch.qo_indptr).max())
            return None, f"not a pure decode step: a row has {longest} tokens"
        if len(layout.parts[0].levels) > 1:
            return None, f"cascade attention saves {layout.saved_bytes >> 20} MiB a layer, more than a graph does"
        if not self.sizes or rows > self.sizes[-1]:
            return None, f"{rows} rows are more than the largest bucket, {self.sizes[-1] if self.sizes else 0}"
        found = self.bucket(rows)
        if found is None:
            size = next(s for s in self.sizes if s >= rows)
            return None, f"bucket {size} was not captured: {self.missing.get(size, 'nothing was captured')}"
        return found, ""

    def bucket(self, rows: int) -> Bucket | None:
        """The smallest captured one that has room for so many rows."""
        return next((self.buckets[s] for s in self.sizes if s >= rows and s in self.buckets), None)
