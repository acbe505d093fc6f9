"""ForwardBatches by hand, for tests of backends and models: sequences on permuted pages of a small pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phloem.runtime.backends.base import Backend, ForwardBatch, KVSpec, Limits, Model, Runner
from phloem.runtime.models.config import ModelConfig


@dataclass
class Piece:
    """Tokens start .. start + len(tokens) - 1 of a sequence that lives on `pages`; logits of the last `logits` of them."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    logits: int = 1
    to_scratch: bool = False


def make_batch(pieces: Sequence[Piece], spec: KVSpec, copies: Sequence[tuple[int, int]] = ()) -> ForwardBatch:
    size = spec.page_size
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    slots, last, tables = [], [], []
    starts, tables_at = [0], [0]
    for piece in pieces:
        end = piece.start + len(piece.tokens)
        table = list(piece.pages[: -(-end // size)])
        at = range(piece.start, end)
        rows += range(len(ids) + len(piece.tokens) - piece.logits, len(ids) + len(piece.tokens))
        ids += piece.tokens
        positions += at
        slots += [(spec.num_pages if piece.to_scratch else table[p // size]) * size + p % size for p in at]
        tables += table
        last.append((end - 1) % size + 1)
        starts.append(len(ids))
        tables_at.append(len(tables))
    return ForwardBatch(
        token_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        kv_slots=np.array(slots, np.int64),
        qo_indptr=np.array(starts, np.int32),
        kv_indptr=np.array(tables_at, np.int32),
        kv_indices=np.array(tables, np.int32),
        kv_last_page_len=np.array(last, np.int32),
        logit_rows=np.array(rows, np.int32),
        copies=np.array(copies, np.int32).reshape(-1, 2),
    )


def bind(
    backend: Backend,
    model: Model,
    config: ModelConfig,
    *,
    pages: int = 64,
    page_size: int = 16,
    dtype: str = "f32",
    tokens: int = 4096,
) -> Runner:
    spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, pages, page_size, dtype)  # type: ignore[arg-type]
    return backend.bind(model, spec, Limits(max_tokens=tokens, max_rows=64, max_logits=tokens, max_pages=4096))


def all_logits(
    backend: Backend, model: Model, config: ModelConfig, ids: Sequence[int], *, page_size: int = 16, chunk: int = 0
) -> Tensor:
    """[len(ids), width]: every position's logits, in chunks, on pages in descending order."""
    pages = -(-len(ids) // page_size)
    runner = bind(backend, model, config, pages=pages, page_size=page_size)
    table, out = list(range(pages))[::-1], []
    step = chunk or len(ids)
    for start in range(0, len(ids), step):
        part = list(ids[start : start + step])
        out.append(runner.forward(make_batch([Piece(part, start, table, logits=len(part))], runner.kv.spec)).clone())
    return torch.cat(out)
