"""A model bound to its pages on the GPU: a step is staged on the host, then enqueued; nothing here waits for the device.

    stage(batch)   check ─ layout (plan.py) ─ graph or eager, and why ─ arrays into pinned memory        host
    launch(staged) upload ─ FlashInfer's plans ─ page copies ─ FUTURE tokens ─ forward or replay          compute stream

The logits of a step are its own until the next launch. `forward` is both, and a wait, for tests and callers without a pipeline.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phloem.runtime.backends.base import ForwardBatch, KVSpec, Limits, Model
from phloem.runtime.backends.check import check_batch
from phloem.runtime.backends.cuda.attention import Attention, AttentionStep, Dtypes, GraphAttention, kind_of, scratch_bytes
from phloem.runtime.backends.cuda.graphs import Bucket, DecodeGraphs, bucket_sizes, padded
from phloem.runtime.backends.cuda.lanes import Device, Stream
from phloem.runtime.backends.cuda.ops import CudaKV, GpuBatch, GpuOps, NoLogits, specs_of
from phloem.runtime.backends.cuda.plan import Costs, Layout, Level, plan_layout
from phloem.runtime.backends.cuda.staging import Bundle, Staging
from phloem.runtime.errors import KernelError

__all__ = ["CudaRunner", "RunnerOptions", "Staged"]

log = logging.getLogger(__name__)
HEAD_DIMS = (64, 128, 256)  # FlashInfer's rope has these
GRAPH_STARTS = (
    20  # kernels of a layer that a graph starts for nothing, ten, twice over like every cost of the rule; not measured
)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """deterministic: unsplit keys, one tile, matmuls of one height, no cascade, no graphs.   graph_bytes: budget of all graphs; 0 is
    none.   cascade: share leading pages where the rule says so.   workspace_bytes: FlashInfer's scratch; None: what its plans can ask
    for.   any_head_dim: for stand-ins whose kernels take every width."""

    deterministic: bool = False
    graph_bytes: int = 2 << 30
    cascade: bool = True
    workspace_bytes: int | None = None
    any_head_dim: bool = False


@dataclass(slots=True)
class Staged:
    """A step ready to be enqueued. reason: why it has no bucket."""

    bundle: Bundle | None
    layout: Layout | None
    bucket: Bucket | None
    reason: str
    num_logits: int
    num_rows: int
    rows: NDArray[np.int32] | None = None
    level: Level | None = None
    step: AttentionStep | None = None


class CudaRunner:
    """kernels of `fi` on `device`; see base.Runner. Also keeps the compute stream, which whoever draws from the logits uses too.

    graph_steps, eager_steps: how many steps ran which way; reasons: why eagerly, and how often.
    """

    def __init__(
        self,
        fi: Any,
        device: Device,
        model: Model,
        kv: KVSpec,
        limits: Limits,
        *,
        compute: torch.dtype,
        kv_dtype: torch.dtype,
        options: RunnerOptions,
    ) -> None:
        specs = specs_of(model)
        wrong = sorted({s.head_dim for s in specs} - set(HEAD_DIMS))
        if wrong and not options.any_head_dim:
            raise KernelError(f"head_dim is {wrong[0]}; the cuda backend has kernels for {', '.join(map(str, HEAD_DIMS))}.")
        self.device, self.model, self.limits, self.options = device, model, limits, options
        self.stream: Stream = device.stream("compute")
        self.kv = CudaKV(kv, kv_dtype, device.torch_device)
        self._compute, self._kinds = compute, [kind_of(s) for s in specs]
        dtypes = Dtypes(compute, kv_dtype)
        scratch = scratch_bytes(self._kinds, limits.max_rows) if options.workspace_bytes is None else options.workspace_bytes
        self._attention = Attention(
            fi, device, kv, self._kinds, dtypes, deterministic=options.deterministic, workspace_bytes=scratch
        )
        self._ops = GpuOps(fi, self.kv, deterministic=options.deterministic)
        self._staging = Staging(device, nbytes=4 * (6 * limits.max_tokens + limits.max_pages + 8 * limits.max_rows + 1024))
        first = specs[0]
        self._costs = Costs(
            token_bytes=2 * kv.num_kv_heads * kv.head_dim * kv_dtype.itemsize,
            query_bytes=first.num_heads * (first.head_dim * compute.itemsize + 4),
            group=first.num_heads // first.num_kv_heads,
        ) if options.cascade and not options.deterministic else None  # fmt: skip
        self.graph_steps = self.eager_steps = 0
        self.reasons: Counter[str] = Counter()
        self._no_slots = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self._fi, self._dtypes = fi, dtypes
        self.graphs = DecodeGraphs(())
        device.synchronize()  # weights, pages and scratch were written on another stream, which ours does not wait for
        self.warm_up()
        self._capture()

    def rebind(self, model: Model) -> None:
        """Another model of the same shape over the same pages, its weights elsewhere. Nothing is in flight. Captures anew: graphs hold
        on to addresses."""
        assert [kind_of(s) for s in specs_of(model)] == self._kinds, "not a model of this shape"
        self.model = model
        self.device.synchronize()  # its weights may still be on their way, on another stream
        self._capture()

    def discard_kv(self) -> int:
        """Give the pages' memory, and that of the graphs, back to the system; bytes of the pages. Nothing is in flight."""
        self.device.synchronize()
        self.graphs = DecodeGraphs(())
        freed = self.kv.discard()
        self.device.release()
        return freed

    def restore_kv(self) -> None:
        """Take it again: empty pages, at addresses of their own, so the graphs are captured anew."""
        self.kv.restore()
        self.device.synchronize()
        self._capture()

    # ---------------------------------------------------------------------------------------------------- the two halves

    def stage(self, batch: ForwardBatch, from_slot: NDArray[np.int32] | None = None) -> Staged:
        """Host only. from_slot: int32 [T], the slot of `last_token` that holds a FUTURE token's id, -1 where the id is known.

        Raises KernelError, before anything is enqueued, if the batch breaks the page contract.
        """
        if from_slot is not None:  # an id that the device has yet to draw: any of the vocabulary passes the check
            batch.token_ids = np.where(from_slot >= 0, np.int32(0), batch.token_ids)
        check_batch(batch, self.kv.spec, self.limits, self.model.width)
        tokens = len(batch.token_ids)
        source = from_slot if from_slot is not None else np.full(tokens, -1, np.int32)
        copies = (
            {"copy_from": batch.copies[:, 0].astype(np.int64), "copy_to": batch.copies[:, 1].astype(np.int64)}
            if len(batch.copies)
            else {}
        )
        if not tokens:
            return Staged(self._staging.put(copies) if copies else None, None, None, "no tokens", 0, 0)
        # Pages that a decode step shares cost it its graph, so they must be worth the starts of a layer's kernels as well.
        replayed = tokens == len(batch.kv_last_page_len) and self.graphs.bucket(tokens) is not None
        least = GRAPH_STARTS * self._costs.launch_bytes if replayed and self._costs is not None else 0
        layout = plan_layout(batch, self.kv.spec.page_size, self._costs, least)
        bucket, reason = self._choose(batch, layout)
        rows = None if np.array_equal(batch.logit_rows, np.arange(tokens)) else batch.logit_rows
        if bucket is not None:
            inputs = padded(batch, source, bucket.rows, self.kv.spec)
            bucket.attention.settle()
            arrays: dict[str, np.ndarray[Any, Any]] = {
                "tokens": inputs.tokens,
                "indices": inputs.level.kv_indices,
                **({} if rows is None else {"rows": rows}),
                **copies,
            }
            bundle = self._staging.put(arrays)
            return Staged(bundle, layout, bucket, "", len(batch.logit_rows), tokens, rows, inputs.level)
        step = self._attention.settle(layout)
        order = layout.tokens
        every = np.stack([batch.token_ids, batch.positions, batch.kv_slots.astype(np.int32), source])
        if order is not None:
            every = np.ascontiguousarray(every[:, order])
            place = np.empty(tokens, np.int32)
            place[order] = np.arange(tokens, dtype=np.int32)
            rows = place[batch.logit_rows]
        indices = {f"indices {id(level)}": level.kv_indices for level in step.levels}
        bundle = self._staging.put({"tokens": every, **indices, **({} if rows is None else {"rows": rows}), **copies})
        return Staged(bundle, layout, None, reason, len(batch.logit_rows), tokens, rows, step=step)

    def launch(
        self,
        staged: Staged,
        last_token: Tensor | None,
        take: Callable[[Tensor], None],
        began: Callable[[], None] = lambda: None,
    ) -> None:
        """Enqueue the step. last_token: int32 [slots].   take: called within Device.run with the logits float32 [L, width], which
        the next launch may overwrite.   began: called on the host where only the model's own work is left to enqueue."""
        bundle, stream = staged.bundle, self.stream
        if bundle is not None:
            self.device.run(stream, bundle.upload)
            self.device.run(stream, lambda: self._copy_pages(bundle))
        if staged.layout is None:
            began()
            self.device.run(stream, lambda: take(self._empty()))
        elif staged.bucket is not None:
            bucket, level = staged.bucket, staged.level
            assert level is not None
            assert bundle is not None
            self.device.run(stream, lambda: bucket.attention.plan(level, bundle.device["indices"]))
            bucket.attention.planned(stream)
            began()
            self.device.run(stream, lambda: self._replay(staged, bucket, last_token, take))
        else:
            step = staged.step
            assert step is not None and bundle is not None
            indices = {id(level): bundle.device[f"indices {id(level)}"] for level in step.levels}
            self.device.run(stream, lambda: step.plan(indices))
            step.planned(stream)
            began()
            self.device.run(stream, lambda: self._eager(staged, last_token, take))
        if bundle is not None:
            self._staging.used(bundle, stream)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Copies, forward, wait: logits float32 [L, width] on the device."""
        taken: list[Tensor] = []
        self.launch(self.stage(batch), None, taken.append)
        self.device.record(self.stream).wait()
        return taken[0]

    def warm_up(self) -> None:
        """A prefill and a decode on the scratch page, so that FlashInfer builds its kernels before the first request. Not a step."""
        spec = self.kv.spec
        for tokens in (min(2, spec.page_size, self.limits.max_tokens), 1):
            batch = ForwardBatch(
                token_ids=np.zeros(tokens, np.int32),
                positions=np.arange(tokens, dtype=np.int32),
                kv_slots=spec.num_pages * spec.page_size + np.arange(tokens, dtype=np.int64),
                qo_indptr=np.array([0, tokens], np.int32),
                kv_indptr=np.array([0, 1], np.int32),
                kv_indices=np.zeros(1, np.int32),
                kv_last_page_len=np.array([tokens], np.int32),
                logit_rows=np.array([tokens - 1], np.int32),
            )
            self.forward(batch)
        self.graph_steps = self.eager_steps = 0
        self.reasons.clear()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _capture(self) -> None:
        options, spec = self.options, self.kv.spec
        self.graphs = DecodeGraphs(
            bucket_sizes(self.limits.max_rows) if options.graph_bytes and not options.deterministic else ()
        )
        self.graphs.capture(self.device, self.stream, self._graph_attention, self._forward_batch, spec, options.graph_bytes)

    def _graph_attention(self, rows: int) -> GraphAttention:
        pages = min(self.limits.max_pages, self.kv.spec.num_pages * rows) + rows
        return GraphAttention(
            self._fi, self.device, self.kv.spec, self._attention.kinds, self._dtypes, rows=rows, pages=pages, workspace=self._attention.workspace
        )  # fmt: skip

    def _choose(self, batch: ForwardBatch, layout: Layout) -> tuple[Bucket | None, str]:
        if self.options.deterministic:
            bucket, reason = None, "deterministic=True: graphs hold decode kernels, which add in another order"
        elif not self.options.graph_bytes:
            bucket, reason = None, "graphs are off: their budget is 0 bytes"
        else:
            bucket, reason = self.graphs.choose(batch, layout)
        if bucket is not None:
            self.graph_steps += 1
        else:
            self.eager_steps += 1
            self.reasons[reason] += 1
            log.debug("no CUDA graph for this step: %s", reason)
        return bucket, reason

    def _copy_pages(self, bundle: Bundle) -> None:
        if "copy_from" in bundle.device:
            self.kv.copy(bundle.device["copy_from"], bundle.device["copy_to"])

    def _known(self, staged: Staged, last_token: Tensor | None) -> Tensor:
        """Token ids, FUTURE ones read where the draw before left them."""
        assert staged.bundle is not None
        ids, _, _, source = staged.bundle.device["tokens"].unbind(0)
        drawn = (self._no_slots if last_token is None else last_token).index_select(0, source.clamp(min=0))
        return torch.where(source >= 0, drawn, ids)

    def _eager(self, staged: Staged, last_token: Tensor | None, take: Callable[[Tensor], None]) -> None:
        assert staged.bundle is not None and staged.step is not None
        _, positions, slots, _ = staged.bundle.device["tokens"].unbind(0)
        batch = GpuBatch(self._known(staged, last_token), positions, slots, staged.bundle.device.get("rows"), staged.step)
        take(self._forward_batch(batch))

    def _replay(self, staged: Staged, bucket: Bucket, last_token: Tensor | None, take: Callable[[Tensor], None]) -> None:
        assert staged.bundle is not None and bucket.graph is not None and bucket.logits is not None
        bucket.inputs.copy_(staged.bundle.device["tokens"][:3])
        bucket.inputs[0].copy_(self._known(staged, last_token))
        bucket.graph.replay()
        logits = bucket.logits[: staged.num_rows]
        take(logits if staged.rows is None else logits.index_select(0, staged.bundle.device["rows"]))

    def _forward_batch(self, batch: GpuBatch) -> Tensor:
        try:
            return self.model.forward(self._ops, batch).float()
        except NoLogits:
            return self._empty()

    def _empty(self) -> Tensor:
        return torch.empty((0, self.model.width), device=self.device.torch_device)
