"""The cuda backend's whole forward on a fake device and FlashInfer by its definition, against `reference`: the same arrays in, the
same logits out. What this cannot show is what the real kernels do; docs/gpu.md says so."""

from __future__ import annotations

import ast
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import phloem.runtime.backends.cuda as package
from phloem.runtime.backends.base import KVSpec, Limits
from phloem.runtime.backends.cuda import Cuda
from phloem.runtime.backends.cuda import plan as plan_module
from phloem.runtime.backends.cuda import runner as runner_module
from phloem.runtime.backends.cuda.graphs import DecodeGraphs
from phloem.runtime.backends.cuda.plan import Costs
from phloem.runtime.backends.cuda.runner import CudaRunner, RunnerOptions
from phloem.runtime.backends.reference import Reference
from phloem.runtime.errors import KernelError
from phloem.runtime.models.loader import load_model
from tests.fake_device import FakeDevice, FakeFlashInfer
from tests.paged_runs import Piece, make_batch
from tests.tiny_models import tiny_config, write_hf

PAGES, PAGE = 48, 4


class Pair:
    """One checkpoint, bound to `reference` and to the cuda backend on fakes. compute f32: then only the order of sums differs."""

    def __init__(
        self,
        folder: Path,
        family: str = "llama",
        *,
        seed: int = 0,
        kv: str = "f32",
        options: RunnerOptions | None = None,
        **changes: Any,
    ):
        write_hf(folder, tiny_config(family, **changes))
        self.device, self.fi = FakeDevice(seed, eagerness=0.3), FakeFlashInfer()
        options = options or RunnerOptions(any_head_dim=True, workspace_bytes=1 << 16)
        backend = Cuda(compute="f32", options=options, device=self.device, flashinfer=self.fi)
        reference, ours = (load_model(str(folder), b, "f32") for b in (Reference(), backend))
        config = ours.config
        limits = Limits(max_tokens=256, max_rows=9, max_logits=256, max_pages=512)
        self.spec = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, PAGES, PAGE, kv)  # type: ignore[arg-type]
        plain = KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, PAGES, PAGE, "f32")
        self.reference = Reference().bind(reference.model, plain, limits)
        self.ours: CudaRunner = backend.bind(ours.model, self.spec, limits)

    def step(self, *pieces: Piece, copies: Any = ()) -> tuple[torch.Tensor, torch.Tensor]:
        batch = make_batch(pieces, self.spec, copies)
        return self.reference.forward(batch), self.ours.forward(batch)

    def agree(self, *pieces: Piece, copies: Any = ()) -> None:
        want, got = self.step(*pieces, copies=copies)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(3, 96), k=n)


def scenario(pair: Pair) -> None:
    """A tree: a shared prefix, three branches (one shares further with a fourth), a stranger; chunks, copies, scratch, mixed steps."""
    trunk, pages = ids(1, 18), [40, 3, 17, 22, 9]
    pair.agree(Piece(trunk[:7], 0, pages, logits=0))
    pair.agree(Piece(trunk[7:], 7, pages, logits=11), Piece(ids(2, 5), 0, [30, 31]))
    # Three continuations share the trunk's four full pages; its fifth, half written, is copied for each.
    tails = [[*pages[:4], p, p + 1] for p in (11, 13, 15)]
    pair.agree(*(Piece(ids(3 + i, 3), 18, t, logits=2) for i, t in enumerate(tails)), copies=[(9, 11), (9, 13), (9, 15)])
    for step in range(3):
        pair.agree(*(Piece([5 + step], 21 + step, [*t, 33 + i]) for i, t in enumerate(tails)), Piece([7], 5 + step, [30, 31]))
    pair.agree(
        Piece(ids(9, 2), 24, [*tails[0], 33, 36]),
        Piece([8], 24, [*tails[1], 34]),
        Piece([trunk[15]], 15, pages[:4], to_scratch=True),
    )
    pair.agree(Piece([3], 8, [30, 31, 32], logits=0), Piece([4], 25, [*tails[1], 34]))
    pair.agree(Piece([3], 9, [30, 31, 32], logits=0))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_same_arrays_give_the_logits_of_reference(tmp_path: Path, family: str) -> None:
    pair = Pair(tmp_path / "m", family, tie_word_embeddings=family == "qwen2")
    scenario(pair)
    assert pair.ours.graph_steps and pair.ours.eager_steps


def test_sliding_windows(tmp_path: Path) -> None:
    scenario(Pair(tmp_path / "m", "mistral", sliding_window=6))


def test_windowed_and_full_layers_in_one_model(tmp_path: Path) -> None:
    pair = Pair(
        tmp_path / "m", "qwen3", use_sliding_window=True, sliding_window=5, layer_types=["full_attention", "sliding_attention"]
    )
    scenario(pair)
    assert len(pair.ours._attention.kinds) == 2


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 6}])
def test_decodes_beside_a_prompt_go_through_the_decode_kernel(tmp_path: Path, changes: dict[str, int]) -> None:
    pair = Pair(tmp_path / "m", "mistral" if changes else "llama", **changes)
    for at in range(4):
        pair.agree(*(Piece(ids(i, 6), 0, [2 * i, 2 * i + 1]) for i in range(2 * at, 2 * at + 2)))
    before = pair.fi.calls.copy()
    decodes = [Piece([5 + i], 6, [2 * i, 2 * i + 1]) for i in range(8)]
    pair.agree(*decodes[:3], Piece(ids(9, 7), 0, [20, 21]), *decodes[3:])
    used = pair.fi.calls - before
    layers = pair.spec.num_layers
    assert used["BatchDecodeWithPagedKVCacheWrapper.run"] == used["BatchPrefillWithPagedKVCacheWrapper.run"] == layers


def test_cascade_reads_shared_pages_once_and_gives_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module._Rows, "_saving", lambda self, a, b, pages: pages * (b - a - 1))
    monkeypatch.setattr(runner_module, "GRAPH_STARTS", 0)
    for family, changes in (("llama", {}), ("mistral", {"sliding_window": 6})):
        pair = Pair(tmp_path / family, family, **changes)
        scenario(pair)
        used = pair.fi.calls["MultiLevelCascadeAttentionWrapper.run"]
        assert used > 0 if family == "llama" else used == 0, "a window and a shared level exclude each other"
    assert any("cascade attention saves" in reason for reason in pair.ours.reasons) or family == "mistral"


def test_a_deterministic_runner_uses_neither_graphs_nor_cascade_nor_decode_kernels(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "m", options=RunnerOptions(deterministic=True, any_head_dim=True, workspace_bytes=1 << 16))
    scenario(pair)
    assert set(pair.ours.reasons) == {"deterministic=True: graphs hold decode kernels, which add in another order"}
    assert not any("Decode" in name or "Cascade" in name for name in pair.fi.calls)


def test_a_decode_step_keeps_its_graph_unless_shared_pages_are_worth_more(tmp_path: Path) -> None:
    """The rule's own costs, with a saving between what a level costs and what a graph is worth."""
    pair = Pair(tmp_path / "m")
    costs = Costs(token_bytes=4_000_000, query_bytes=0, group=1)
    trunk = [40, 3, 17, 22]
    saves = 2 * (4 * PAGE) * costs.token_bytes - 2 * costs.launch_bytes  # three rows read the trunk once
    assert 0 < saves < runner_module.GRAPH_STARTS * costs.launch_bytes
    rows = make_batch([Piece([5], 16, [*trunk, 30 + i]) for i in range(3)], pair.spec)
    pair.ours._costs = costs
    staged = pair.ours.stage(rows)
    assert staged.bucket is not None
    pair.ours._costs = dataclasses.replace(costs, token_bytes=10_000_000)
    assert "cascade attention saves" in pair.ours.stage(rows).reason
    pair.ours.graphs = DecodeGraphs(())  # no graph to lose
    pair.ours._costs = costs
    assert "cascade attention saves" in pair.ours.stage(rows).reason


@pytest.mark.parametrize("kv", ["bf16", "f16", "fp8"])
def test_pages_of_every_dtype(tmp_path: Path, kv: str) -> None:
    """Rounded keys and values move the logits by the rounding, not more; what is out of fp8's range saturates and is never NaN."""
    pair = Pair(tmp_path / "m", kv=kv)
    want, got = pair.step(Piece(ids(1, 18), 0, [40, 3, 17, 22, 9], logits=18))
    assert torch.isfinite(got).all()
    loose = {"bf16": 0.1, "f16": 0.02, "fp8": 0.8}[kv]
    assert (got - want).abs().max() < loose * want.abs().max()
    pair.ours.kv.data[0, 0, 2].copy_(torch.full((PAGE, 2, 16), 3.0))
    k, v = pair.ours.kv.read(0, [2])
    assert k.dtype == torch.float32 and (k == 3).all() and (v == 0).all()


def test_pages_are_copied_whole_and_in_all_layers(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "m", kv="fp8")
    pair.step(Piece(ids(1, 4), 0, [1]))
    pair.step(Piece(ids(2, 1), 0, [5]), copies=[(1, 2), (1, 3)])
    for layer in range(2):
        for a, b, c in zip(*(pair.ours.kv.read(layer, [p]) for p in (1, 2, 3))):
            assert torch.equal(a, b) and torch.equal(a, c)


def test_bad_batches_are_refused_before_anything_is_enqueued(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "m")
    batch = make_batch([Piece([4, 5], 0, [PAGES + 3])], pair.spec)
    before = pair.device.clock
    with pytest.raises(KernelError, match="kv_indices"):
        pair.ours.stage(batch)
    assert pair.device.clock == before


def test_head_dims_without_a_kernel_are_refused_at_bind(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"head_dim is 16; the cuda backend has kernels for 64, 128, 256\."):
        Pair(tmp_path / "m", options=RunnerOptions())


def test_every_flashinfer_call_of_the_source_is_bound_to_the_installed_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are read off the source, so a call that nothing here exercises is a failure, not a gap. FakeFlashInfer binds each call to
    the installed package before it computes, and has no attribute that the package lacks."""
    named: set[str] = set()
    folder = Path(package.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and _is_flashinfer(node.value):
                named.add(node.attr)
            assert not (isinstance(node, (ast.Import, ast.ImportFrom)) and "flashinfer" in ast.unparse(node)), (
                "imports go through Cuda"
            )
    assert named >= {
        "rmsnorm",
        "fused_add_rmsnorm",
        "silu_and_mul",
        "append_paged_kv_cache",
        "MultiLevelCascadeAttentionWrapper",
    }
    called: set[str] = set()
    for options in (
        RunnerOptions(any_head_dim=True, workspace_bytes=1 << 16),
        RunnerOptions(deterministic=True, any_head_dim=True, workspace_bytes=1 << 16),
    ):
        if not options.deterministic:
            monkeypatch.setattr(plan_module._Rows, "_saving", lambda self, a, b, pages: pages * (b - a - 1) if pages < 5 else 0)
        pair = Pair(tmp_path / f"m{options.deterministic}", "qwen3", options=options)
        scenario(pair)
        called |= set(pair.fi.calls)
    wrappers = {name for name in named if name[0].isupper()}
    expected = (named - wrappers) | {f"{w}.{method}" for w in wrappers for method in ("__init__", "plan", "run")}
    assert called == expected


def _is_flashinfer(node: ast.AST) -> bool:
    """`fi`, `self._fi`, `self.fi`, `owner.fi`: what the package's object is called in these files."""
    return (isinstance(node, ast.Name) and node.id == "fi") or (isinstance(node, ast.Attribute) and node.attr in ("fi", "_fi"))


def test_flashinfer_never_copies_page_ids_from_the_host(tmp_path: Path) -> None:
    """Such a copy waits for the device in FlashInfer's graph mode: the host could not run ahead. They come with the step's upload."""
    pair, where, bound = Pair(tmp_path / "m"), list[bool](), FakeFlashInfer.bound

    def watched(self: FakeFlashInfer, name: str, real: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        a = bound(self, name, real, args, kwargs)
        if name.endswith(".plan"):
            (given,) = (a[key] for key in ("indices", "paged_kv_indices", "paged_kv_indices_arr") if key in a)
            ours = {block.device.untyped_storage().data_ptr() for block in pair.ours._staging._blocks}
            where.extend(t.untyped_storage().data_ptr() in ours for t in (given if isinstance(given, list) else [given]))
        return a

    pair.fi.bound = watched.__get__(pair.fi)  # type: ignore[method-assign]
    scenario(pair)
    assert len(where) > 8 and all(where)
