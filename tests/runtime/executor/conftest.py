"""A runner that remembers tokens instead of keys, and refuses a batch that breaks the page contract."""

from __future__ import annotations

import hashlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from phloem.runtime.backends.base import ForwardBatch


def logits_of(history: tuple[int, ...], width: int) -> np.ndarray:
    """What the pretended model says after `history`: a function of these tokens alone."""
    digest = hashlib.blake2b(np.array(history, np.int64).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 2, width).astype(np.float32)


class TokenRunner:
    """Each slot holds (token, position); logits are read back through the page table. `fail_at`: calls that raise."""

    def __init__(self, *, page_size: int, num_pages: int, width: int, max_logits: int) -> None:
        self.page_size, self.num_pages, self.width, self.max_logits = page_size, num_pages, width, max_logits
        self.slots = np.full((num_pages + 1, page_size, 2), -7, np.int64)
        self.buffer = torch.zeros((max_logits, width), dtype=torch.float32)
        self.batches: list[ForwardBatch] = []
        self.fail_at: set[int] = set()
        self.poison: dict[tuple[int, ...], float] = {}
        self.gate: threading.Event | None = None
        self.threads: set[str] = set()
        self.kv = None  # type: ignore[assignment]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        if self.gate is not None:
            assert self.gate.wait(10)
        call = len(self.batches)
        self.batches.append(batch)
        self.check(batch)
        self.buffer.fill_(float("nan"))  # logits of the call before are gone
        if call in self.fail_at:
            self.slots[batch.kv_slots // self.page_size, batch.kv_slots % self.page_size] = -9
            raise RuntimeError(f"injected failure of call {call}")
        for src, dst in batch.copies.tolist():
            self.slots[dst] = self.slots[src]
        self.slots[batch.kv_slots // self.page_size, batch.kv_slots % self.page_size] = np.stack(
            [batch.token_ids, batch.positions], axis=1
        )
        for i, t in enumerate(batch.logit_rows.tolist()):
            self.buffer[i] = torch.from_numpy(self.logits(batch, t))
        return self.buffer[: len(batch.logit_rows)]

    def logits(self, batch: ForwardBatch, t: int) -> np.ndarray:
        b = int(np.searchsorted(batch.qo_indptr, t, side="right")) - 1
        table = batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b + 1]]
        position = int(batch.positions[t])
        seen = self.slots[table].reshape(-1, 2)[:position]  # its own key may be in the scratch page (R4)
        assert seen[:, 1].tolist() == list(range(position)), "keys of other positions, or none, where a row reads"
        history = (*seen[:, 0].tolist(), int(batch.token_ids[t]))
        logits = logits_of(history, self.width)
        if history in self.poison:
            logits[3] = self.poison[history]
        return logits

    def check(self, b: ForwardBatch) -> None:
        """Every sentence of the page contract."""
        rows, tokens = len(b.qo_indptr) - 1, len(b.token_ids)
        for name in (
            "token_ids",
            "positions",
            "qo_indptr",
            "kv_indptr",
            "kv_indices",
            "kv_last_page_len",
            "logit_rows",
            "copies",
        ):
            array = getattr(b, name)
            assert array.dtype == np.int32, name
            assert array.flags.c_contiguous, name
        assert b.kv_slots.dtype == np.int64
        assert len(b.positions) == len(b.kv_slots) == tokens
        assert len(b.kv_indptr) == rows + 1
        assert len(b.kv_last_page_len) == rows
        assert b.qo_indptr[0] == b.kv_indptr[0] == 0
        assert b.qo_indptr[-1] == tokens
        assert b.kv_indptr[-1] == len(b.kv_indices)
        assert (np.diff(b.qo_indptr) >= 1).all()
        assert ((b.token_ids >= 0) & (b.token_ids < self.width)).all(), "an id that indexes nothing"
        assert ((b.kv_indices >= 0) & (b.kv_indices < self.num_pages)).all(), "the scratch page is in no page table"
        kept = b.kv_slots[b.kv_slots < self.num_pages * self.page_size]
        assert len(set(kept.tolist())) == len(kept), "two tokens write one slot"
        assert (b.kv_slots < (self.num_pages + 1) * self.page_size).all()
        for i in range(rows):
            pages = b.kv_indices[b.kv_indptr[i] : b.kv_indptr[i + 1]]
            last = b.kv_last_page_len[i]
            assert 1 <= last <= self.page_size
            end = (len(pages) - 1) * self.page_size + last
            positions = b.positions[b.qo_indptr[i] : b.qo_indptr[i + 1]]
            assert positions.tolist() == list(range(end - len(positions), end))
            for t, position in zip(range(b.qo_indptr[i], b.qo_indptr[i + 1]), positions.tolist()):
                scratch = self.num_pages * self.page_size + position % self.page_size
                own = pages[position // self.page_size] * self.page_size + position % self.page_size
                assert b.kv_slots[t] in (own, scratch)
        assert (np.diff(b.logit_rows) > 0).all()
        assert len(b.logit_rows) <= self.max_logits, "more logits rows than the buffer holds"
        assert ((b.logit_rows >= 0) & (b.logit_rows < tokens)).all()
        sources, targets = b.copies[:, 0].tolist(), b.copies[:, 1].tolist()
        assert not set(sources) & set(targets)


@pytest.fixture(scope="session")
def device() -> SimpleNamespace:
    return SimpleNamespace(TokenRunner=TokenRunner, logits_of=logits_of)
