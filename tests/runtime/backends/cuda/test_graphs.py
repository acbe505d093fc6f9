"""Capture buckets: which sizes, how a step is padded to one, what a budget leaves out, and why a step has none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phloem.runtime.backends.base import KVSpec, Limits
from phloem.runtime.backends.cuda import Cuda
from phloem.runtime.backends.cuda.graphs import DecodeGraphs, bucket_sizes, padded
from phloem.runtime.backends.cuda.plan import plan_layout
from phloem.runtime.backends.cuda.runner import CudaRunner, RunnerOptions
from phloem.runtime.models.loader import load_model
from tests.fake_device import FakeDevice, FakeFlashInfer
from tests.paged_runs import Piece, make_batch
from tests.tiny_models import tiny_config, tiny_tensors, write_hf

SPEC = KVSpec(2, 2, 16, 24, 4, "f32")


def test_buckets_are_dense_enough_and_few() -> None:
    assert bucket_sizes(1) == (1,) and bucket_sizes(3) == (1, 2, 3) and bucket_sizes(9) == (1, 2, 4, 8, 9)
    for most in (1, 2, 5, 16, 64, 100, 256, 1024):
        sizes = bucket_sizes(most)
        assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most and len(sizes) <= 45
        for rows in range(1, most + 1):
            size = next(s for s in sizes if s >= rows)
            assert size - rows < max(4, rows / 4), (rows, size)


def test_padding_reads_and_writes_the_scratch_page_alone() -> None:
    batch = make_batch([Piece([7], 5, [3, 9]), Piece([8], 0, [4])], SPEC)
    inputs = padded(batch, np.array([-1, 2], np.int32), 4, SPEC)
    assert inputs.tokens.tolist() == [[7, 8, 0, 0], [5, 0, 0, 0], [9 * 4 + 1, 4 * 4, 24 * 4, 24 * 4], [-1, 2, -1, -1]]
    assert inputs.level.kv_indptr.tolist() == [0, 2, 3, 4, 5] and inputs.level.kv_indices.tolist() == [3, 9, 4, 24, 24]
    assert inputs.level.kv_last_page_len.tolist() == [2, 1, 1, 1] and inputs.level.kv_indptr.dtype == np.int32
    same = padded(batch, np.array([-1, 2], np.int32), 2, SPEC)
    assert np.array_equal(same.level.kv_indices, batch.kv_indices) and same.tokens.shape == (4, 2)


def runner(folder: Path, device: FakeDevice, **options: Any) -> CudaRunner:
    if not folder.exists():
        write_hf(folder, tiny_config(num_hidden_layers=1))
    fi = FakeFlashInfer()
    backend = Cuda(
        compute="f32",
        options=RunnerOptions(any_head_dim=True, workspace_bytes=1 << 16, **options),
        device=device,
        flashinfer=fi,
    )
    loaded = load_model(str(folder), backend, "f32")
    spec = KVSpec(1, 2, 16, 24, 4, "f32")
    return backend.bind(loaded.model, spec, Limits(max_tokens=64, max_rows=9, max_logits=64, max_pages=96))


def decode(n: int, *, logits: int = 1, tokens: int = 1) -> Any:
    return make_batch([Piece([5 + i] * tokens, 1, [2 * i, 2 * i + 1], logits=logits if i == 0 else 1) for i in range(n)], SPEC)


def test_a_decode_step_replays_the_smallest_bucket_and_prefill_runs_eagerly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    ours = runner(tmp_path / "m", device)
    assert sorted(ours.graphs.buckets) == [1, 2, 4, 8, 9] and len(device.graphs) == 5
    replays = dict(zip([9, 8, 4, 2, 1], device.graphs))  # largest first
    for n, bucket in ((1, 1), (3, 4), (4, 4), (5, 8), (9, 9)):
        before = replays[bucket].replays
        assert ours.forward(decode(n)).shape == (n, 96) and replays[bucket].replays == before + 1
    assert ours.graph_steps == 5 and ours.eager_steps == 0
    with caplog.at_level(logging.DEBUG, logger="phloem"):
        ours.forward(decode(2, tokens=3))
    assert ours.reasons == {"not a pure decode step: a row has 3 tokens": 1}
    assert "no CUDA graph for this step: not a pure decode step: a row has 3 tokens" in caplog.text


def test_a_graph_gives_what_eager_gives(tmp_path: Path) -> None:
    one, other = runner(tmp_path / "m", FakeDevice()), runner(tmp_path / "m", FakeDevice(), graph_bytes=0)
    for n, logits in ((3, 1), (5, 0), (1, 0), (8, 1)):
        a, b = one.forward(decode(n, logits=logits)), other.forward(decode(n, logits=logits))
        assert a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
    assert one.graph_steps == 4 and other.eager_steps == 4
    assert set(other.reasons) == {"graphs are off: their budget is 0 bytes"}


def test_the_budget_keeps_the_largest_buckets_and_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="phloem"):
        ours = runner(tmp_path / "m", FakeDevice(capture_bytes=3 << 20), graph_bytes=5 << 20)
    assert sorted(ours.graphs.buckets) == [8, 9] and sorted(ours.graphs.missing) == [1, 2, 4]
    assert "no CUDA graph for 1, 2, 4 rows: graphs had taken 6 MiB of a budget of 5 MiB" in caplog.text
    ours.forward(decode(2))  # a larger bucket serves
    assert ours.graph_steps == 1


def test_a_device_without_room_for_a_graph_runs_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="phloem"):
        ours = runner(tmp_path / "m", FakeDevice(free=5 << 20, capture_bytes=6 << 20))
    assert not ours.graphs.buckets
    assert "no CUDA graph for 1, 2, 4, 8, 9 rows: the GPU's memory was spent after 0 MiB of graphs" in caplog.text
    ours.forward(decode(2))
    assert set(ours.reasons) == {"bucket 2 was not captured: the GPU's memory was spent after 0 MiB of graphs"}


def test_graphs_take_at_most_half_of_what_is_left(tmp_path: Path) -> None:
    ours = runner(tmp_path / "m", FakeDevice(free=9 << 20, capture_bytes=2 << 20))
    assert sorted(ours.graphs.buckets) == [4, 8, 9]
    assert ours.graphs.missing[2] == "graphs had taken 6 MiB of a budget of 4 MiB"


def test_all_buckets_write_their_logits_to_one_place(tmp_path: Path) -> None:
    ours = runner(tmp_path / "m", FakeDevice())
    places = {bucket.logits.data_ptr() for bucket in ours.graphs.buckets.values() if bucket.logits is not None}
    assert len(places) == 1 and len(ours.graphs.buckets) == 5


def test_reasons_are_exact() -> None:
    layout = plan_layout(decode(3), 4, None)
    assert DecodeGraphs(()).choose(decode(3), layout) == (None, "3 rows are more than the largest bucket, 0")
    assert DecodeGraphs((1, 2)).choose(decode(3), layout) == (None, "3 rows are more than the largest bucket, 2")
    graphs = DecodeGraphs((2, 4))
    assert graphs.choose(decode(3), layout) == (None, "bucket 4 was not captured: nothing was captured")
    graphs.missing[4] = "graphs had taken 6 MiB of a budget of 5 MiB"
    assert graphs.choose(decode(3), layout)[1] == "bucket 4 was not captured: graphs had taken 6 MiB of a budget of 5 MiB"


def test_another_model_is_captured_anew(tmp_path: Path) -> None:
    device = FakeDevice()
    ours = runner(tmp_path / "m", device)
    before = ours.forward(decode(2)).clone()
    config = tiny_config(num_hidden_layers=1)
    write_hf(tmp_path / "n", config, tiny_tensors(config, seed=5))
    theirs = runner(tmp_path / "n", FakeDevice())
    ours.rebind(theirs.model)
    assert len(device.graphs) == 10
    after = ours.forward(decode(2))
    assert torch.equal(after, theirs.forward(decode(2))) and not torch.equal(after, before)
