"""`load_format="dummy"`: a shape without weights runs, the same each time, and nothing else is ever random."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import phloem as ph
from phloem.runtime.errors import ConfigError, ModelLoadError
from phloem.runtime.models.dummy import open_dummy
from tests.tiny_models import tiny_config, tiny_tensors


def shape_only(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("qwen3", **changes)))
    return folder


def test_every_tensor_of_the_architecture_is_there_and_no_other(tmp_path: Path) -> None:
    folder = shape_only(tmp_path / "m")
    opened = open_dummy(str(folder))
    want = {name: tuple(t.shape) for name, t in tiny_tensors(tiny_config("qwen3")).items()}
    got = {t.name: t for a in opened.assignments for t in a.tensors}
    assert {name: t.shape for name, t in got.items()} == want
    for name, stored in got.items():
        values = stored.read()
        assert values.dtype == torch.bfloat16 and tuple(values.shape) == stored.shape and stored.nbytes == 2 * values.numel()
        assert torch.equal(values, stored.read())
        if "norm" in name:
            assert (values == 1).all()
        else:
            assert 0.01 < float(values.float().std()) < 0.03
    assert not torch.equal(got["model.layers.0.mlp.up_proj.weight"].read(), got["model.layers.1.mlp.up_proj.weight"].read())


def test_a_matrix_larger_than_the_noise(tmp_path: Path) -> None:
    opened = open_dummy(str(shape_only(tmp_path / "m", vocab_size=70_000)))
    values = opened.assignments[0].tensors[0].read()
    assert values.shape == (70_000, 64) and float(values[-1].float().std()) > 0.01


def test_weights_are_not_asked_for_and_without_a_shape_it_is_an_error(tmp_path: Path) -> None:
    for model in (None, str(tmp_path)):
        with pytest.raises(ModelLoadError, match=r'load_format="dummy" needs a directory with config\.json'):
            open_dummy(model)
    with pytest.raises(ModelLoadError, match=r"expected model\.safetensors"):
        ph.Engine(str(shape_only(tmp_path / "m")))
    with pytest.raises(ConfigError, match="load_format is 'random'"):
        ph.Engine(str(tmp_path / "m"), load_format="random")  # type: ignore[arg-type]
