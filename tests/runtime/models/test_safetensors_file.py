"""safetensors: sound files as the library reads them; damaged ones refused in one line, before memory is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.safetensors_file import INDEX, SINGLE, read_safetensors, read_sharded
from tests.tiny_models import tiny_config, tiny_tensors, write_hf

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7).half(),
    "c": torch.randn(2, 2, 3).bfloat16(),
    "d": torch.arange(4),
    "e": torch.zeros(0, 8),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    return tmp_path / SINGLE


def test_names_kinds_and_values(file: Path) -> None:
    stored = read_safetensors(file)
    assert {n: (s.kind, s.shape) for n, s in stored.items()} == {
        "a": ("f32", (3, 5)), "b": ("f16", (7,)), "c": ("bf16", (2, 2, 3)), "d": ("I64", (4,)), "e": ("f32", (0, 8)),
    }  # fmt: skip
    for name in "abce":
        assert torch.equal(stored[name].read(), TENSORS[name])
        assert torch.equal(stored[name].float32(), TENSORS[name].float())


def test_an_unaligned_tensor_is_read(tmp_path: Path) -> None:
    """The format does not align its data when the header's length is odd."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (1 - len(header) % 2)
    (tmp_path / "odd").write_bytes(len(header).to_bytes(8, "little") + header + torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert len(header) % 2 == 1
    assert read_safetensors(tmp_path / "odd")["x"].read().tolist() == [1.5, -2.0]


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read_safetensors(path)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.case("C-LOAD-05")
@pytest.mark.parametrize("keep", [-1, -40, 200, 9, 8, 7, 0])
def test_truncated(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])
    refused(file)


@pytest.mark.case("C-LOAD-05")
def test_a_header_of_2_to_the_60_bytes_and_one_that_is_not_json(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes((2**60).to_bytes(8, "little") + data[8:])
    assert str(2**60) in refused(file)
    file.write_bytes(data[:8] + b"x" + data[9:])
    assert "not JSON" in refused(file)
    file.write_bytes((4).to_bytes(8, "little") + b"[1] ")
    assert "not a JSON object" in refused(file)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refused(file)
    assert "cannot be read" in refused(file.with_name("absent"))


@pytest.mark.case("C-LOAD-05")
@pytest.mark.parametrize(
    "entry, word",
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "needs 8"),
        ({"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}, "truncated"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}, "malformed"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "malformed"),
        ({"dtype": "F32", "shape": [2]}, "malformed"),
        ({"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}, "F33"),
        ("nothing", "malformed"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "holes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "4 bytes follow"),
    ],
)
def test_a_damaged_entry(tmp_path: Path, entry: object, word: str) -> None:
    header = json.dumps({"x": entry}).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert word in refused(path)


def test_shards(tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config(), shards=3)
    stored = read_sharded(tmp_path / INDEX)
    for name, tensor in tiny_tensors(tiny_config()).items():
        assert torch.equal(stored[name].read(), tensor)


def refused_index(path: Path) -> str:
    with pytest.raises(ModelLoadError, match=INDEX) as caught:
        read_sharded(path)
    return str(caught.value)


def test_missing_shards_are_all_named_and_the_index_is_not_believed(tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config(), shards=4)
    index = json.loads((tmp_path / INDEX).read_text())
    for mutate, word in (
        (lambda m: m.update({"model.norm.weight": "model-00004-of-00004.safetensors"}), "but the index says"),
        (lambda m: m.pop("model.norm.weight"), "but the index says nowhere"),
        (lambda m: m.update({"ghost": "model-00001-of-00004.safetensors"}), "ghost"),
        (lambda m: m.update({"ghost": "../elsewhere.safetensors"}), "outside its folder"),
    ):
        changed = json.loads(json.dumps(index))
        mutate(changed["weight_map"])
        (tmp_path / INDEX).write_text(json.dumps(changed))
        assert word in refused_index(tmp_path / INDEX)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": []}))
    assert "weight_map" in refused_index(tmp_path / INDEX)
    (tmp_path / INDEX).write_text(json.dumps(index))
    for number in (2, 4):
        (tmp_path / f"model-{number:05}-of-00004.safetensors").unlink()
    text = refused_index(tmp_path / INDEX)
    assert "2 of 4 shards" in text and "model-00002-of-00004" in text and "model-00004-of-00004" in text
