"""The GGUF reader: equal to the `gguf` package on sound files, one line and no memory on damaged ones."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.embedded import find_embedded
from phloem.runtime.models.gguf import GgufFile
from tests.tiny_models import tiny_config, write_gguf


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(
        tmp_path / "small.gguf",
        tiny_config("llama", num_hidden_layers=1),
        metadata={".a_float": 0.5, "a.bool": True, "text": "né\n"},
    )


def test_metadata_and_tensors_equal_the_gguf_packages(small: Path) -> None:
    ours, theirs = GgufFile(small), gguf.GGUFReader(small)
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.tensors[tensor.name].float32().numpy(), tensor.data)


def test_the_embedded_file_equals_the_gguf_packages_reading() -> None:
    ours, theirs = GgufFile(find_embedded()), gguf.GGUFReader(find_embedded())
    assert ours.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors[1:12]:
        got = ours.tensors[tensor.name]
        assert got.kind == tensor.tensor_type.name.lower() and got.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(got.float32().numpy(), dequantize(tensor.data, tensor.tensor_type))


def refused(path: Path) -> str:
    """The error's text: one line, with the file's name, and without having taken memory."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError) as caught:
            GgufFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000
    assert path.name in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.case("C-LOAD-05")
@pytest.mark.parametrize("cut", ["one byte", "half", "4096 bytes", "7 bytes left", "3 bytes left", "nothing left"])
def test_truncated(small: Path, cut: str) -> None:
    data = small.read_bytes()
    keep = {
        "one byte": len(data) - 1,
        "half": len(data) // 2,
        "4096 bytes": len(data) - 4096,
        "7 bytes left": 7,
        "3 bytes left": 3,
    }.get(cut, 0)
    small.write_bytes(data[:keep])
    refused(small)


@pytest.mark.case("C-LOAD-05")
@pytest.mark.parametrize(
    "at, value, word",
    [
        (0, b"GGML", "no GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack("<I", 99), "version 99"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**60), "tensors"),
        (16, struct.pack("<Q", 2**60), "keys"),
        (24, struct.pack("<Q", 2**60), "string of"),
    ],
)
def test_a_damaged_header(small: Path, at: int, value: bytes, word: str) -> None:
    data = bytearray(small.read_bytes())
    data[at : at + len(value)] = value
    small.write_bytes(data)
    assert word in refused(small)


@pytest.mark.case("C-LOAD-05")
def test_a_git_lfs_pointer_says_so(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98000000\n")
    assert "git lfs pull" in refused(path)


@pytest.mark.case("C-LOAD-05")
@pytest.mark.parametrize("field", ["offset", "dims", "type", "extent"])
def test_a_damaged_tensor_entry(small: Path, field: str) -> None:
    data = bytearray(small.read_bytes())
    name = b"output_norm.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    where, value = {
        "dims": (at, struct.pack("<I", 2**31)),
        "extent": (at + 4, struct.pack("<Q", 2**61)),
        "type": (at + 12, struct.pack("<I", 7777)),
        "offset": (at + 16, struct.pack("<Q", 2**62)),
    }[field]
    data[where : where + len(value)] = value
    small.write_bytes(data)
    assert "output_norm.weight" in refused(small)


@pytest.mark.case("C-LOAD-05")
def test_two_tensors_of_one_place_and_two_of_one_name(small: Path) -> None:
    data = small.read_bytes()
    one, other = (data.index(struct.pack("<Q", len(n)) + n) + 8 for n in (b"blk.0.attn_q.weight", b"blk.0.attn_output.weight"))
    at = {
        name: place + len(name) + 4 + 16 + 4
        for name, place in ((b"blk.0.attn_q.weight", one), (b"blk.0.attn_output.weight", other))
    }
    offset = data[at[b"blk.0.attn_q.weight"] :][:8]
    place = at[b"blk.0.attn_output.weight"]
    small.write_bytes(data[:place] + offset + data[place + 8 :])
    assert "overlaps" in refused(small)
    small.write_bytes(data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    assert "'blk.0.attn_q.weight' occurs twice" in refused(small)
    small.write_bytes(data.replace(b"llama.context_length", b"general.architecture"))
    assert "'general.architecture' occurs twice" in refused(small)


def test_a_split_file_and_a_missing_one_are_named(tmp_path: Path) -> None:
    split = write_gguf(tmp_path / "split.gguf", tiny_config(), metadata={"split.count": 3})
    assert "one of 3 parts" in refused(split)
    assert "cannot be read" in refused(tmp_path / "absent.gguf")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 3500), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_crash_the_reader(small: Path, flips: list[tuple[int, int]]) -> None:
    """Any damage to the first bytes either is refused as a ModelLoadError or leaves tensors inside the file."""
    data = bytearray(small.read_bytes())
    for at, value in flips:
        data[at] = value
    path = small.with_suffix(".flipped")
    path.write_bytes(data)
    try:
        file = GgufFile(path)
    except ModelLoadError:
        return
    assert all(t.offset + t.nbytes <= len(data) for t in file.tensors.values())
