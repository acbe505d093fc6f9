"""Updates of weights, and the pages' memory handed back and taken again, on the fake device: what the CPU's engine does (rl W, Z)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import phloem as ph
from phloem import rl
from phloem.runtime.backends.base import Weight
from phloem.runtime.backends.cuda import Cuda
from phloem.runtime.backends.cuda.matrices import Fp8Matrix, PlainMatrix
from phloem.runtime.errors import ConfigError, UnsupportedModelError, WeightLayoutError
from tests.device_contracts import engine_options, small_model
from tests.fake_device import FakeDevice, FakeFlashInfer, pretend
from tests.rl.tiny import attach, nudge, tiny_module

GREEDY = ph.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model's folder, and other weights of the same shape."""
    from safetensors.torch import load_file

    folder = small_model(tmp_path_factory.mktemp("rewrite") / "m")
    generator = torch.Generator().manual_seed(3)
    named = load_file(folder / "model.safetensors")
    return folder, {n: t + 0.05 * torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in named.items()}


@pytest.fixture
def fake() -> Iterator[list[FakeDevice]]:
    with pretend(seed=1, eagerness=1.0) as devices:
        yield devices


def engine(folder: Path, **options: Any) -> rl.RolloutEngine:
    return rl.RolloutEngine(str(folder), **engine_options(max_running=2, **options))


def tokens(engine: rl.RolloutEngine, prompt: tuple[int, ...] = (5, 9, 11)) -> list[int]:
    return list(engine.rollout([list(prompt)], GREEDY).samples[0].output_ids)


@pytest.mark.parametrize("options", [{}, {"dtype": "fp8"}, {"dtype": "f16"}, {"staging": "none"}])
def test_an_update_is_a_load(
    folders: tuple[Path, dict[str, torch.Tensor]], fake: list[FakeDevice], tmp_path: Path, options: dict[str, Any]
) -> None:
    """The engine after an update is the engine that was loaded with those weights, in every format that takes numbers."""
    folder, named = folders
    small_model(tmp_path / "n")
    from safetensors.torch import save_file

    save_file(named, tmp_path / "n" / "model.safetensors", metadata={"format": "pt"})
    in_place = options.get("staging") == "none"
    with engine(folder, **options) as ours, engine(tmp_path / "n", **options) as theirs:
        before, digest = tokens(ours), ours.digest()
        if in_place:
            with ours.update(names={n: tuple(t.shape) for n, t in named.items()}) as u:
                u.load(named)
        else:
            with pytest.raises(WeightLayoutError, match="missing"), ours.update() as u:
                u.load(list(named.items())[:3])
            assert (ours.digest(), tokens(ours), ours.version) == (digest, before, 0)
            with ours.update() as u:
                u.load(named)
        assert ours.version == 1 and ours.digest() == theirs.digest() != digest
        assert tokens(ours) == tokens(theirs)
        ours.check()


def test_a_module_is_copied_and_read_anew_at_each_commit(fake: list[FakeDevice]) -> None:
    module = tiny_module(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    options: dict[str, Any] = {"device": "cuda", "max_running": 2, "kv_tokens": 512}
    with attach(module, **options) as ours:
        before = tokens(ours)
        nudge(module, scale=0.3)
        ours.commit()
        with attach(module, **options) as theirs:
            assert ours.digest() == theirs.digest() and tokens(ours) == tokens(theirs) != before
    with pytest.raises(WeightLayoutError, match="share='require'"):
        attach(module, share="require", **options)


def test_pages_go_back_and_come_again(folders: tuple[Path, dict[str, torch.Tensor]], fake: list[FakeDevice]) -> None:
    with engine(folders[0]) as ours:
        want = tokens(ours)
        with pytest.raises(ConfigError, match="keeps its weights"):
            ours.suspend({"kv", "weights"})
        assert tokens(ours) == want  # refused before anything was given up
        for _ in range(3):
            captured = len(fake[-1].graphs)
            freed = ours.suspend()
            assert freed >= 2 * 2 * 2 * 4096 * 64, "layers, K and V, bytes, tokens, width"
            ours.resume()
            assert len(fake[-1].graphs) > captured, "the old graphs point where the pages were"
            assert tokens(ours) == want
        ours.check()


def test_parts_are_rows() -> None:
    backend = Cuda(device=FakeDevice(), flashinfer=FakeFlashInfer())
    a, b, c = (torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)) for rows in (16, 32, 16))
    for kind, form in (("f32", PlainMatrix), ("f8", Fp8Matrix)):
        whole: Any = backend.pack([Weight(kind, tuple(t.shape), t) for t in (a, b)])  # type: ignore[arg-type]
        want: Any = backend.pack([Weight(kind, tuple(t.shape), t.bfloat16()) for t in (c, b)])  # type: ignore[arg-type]
        assert isinstance(whole, form)
        other: Any = backend.like(whole)
        backend.store(other, 0, Weight("f32", (16, 32), c))
        backend.store_from(other, backend.pack([Weight(kind, tuple(t.shape), t.bfloat16()) for t in (a, b)]), 1)  # type: ignore[arg-type]
        assert torch.equal(other.dequantised(), want.dequantised()) and other.shape == (48, 32)
        assert torch.equal(backend.read(other, 10, 12), want.dequantised()[10:22])


def test_four_bits_refuse() -> None:
    backend = Cuda(device=FakeDevice(), flashinfer=FakeFlashInfer())
    raw = torch.zeros(16, 128 // 32 * 18, dtype=torch.uint8)
    packed = backend.pack([Weight("q4_0", (16, 128), raw)])
    with pytest.raises(UnsupportedModelError, match="4-bit weights on a GPU"):
        backend.like(packed)
