"""safetensors files, single or sharded by an index: tensors as `Stored`. Every header is checked against its file's size.

    header length u64 | header: JSON, name -> dtype, shape, data_offsets | data, the tensors side by side, nothing else

Its own reader, because the errors must name file and tensor, and because the data stays mapped until it is packed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from phloem.runtime.errors import ModelLoadError
from phloem.runtime.models.stored import Stored, map_file

__all__ = ["INDEX", "SINGLE", "read_safetensors", "read_sharded"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_KINDS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the format's own limit
_LFS = b"version https://git-lfs"


def read_safetensors(path: Path) -> dict[str, Stored]:
    """name -> Stored. Raises ModelLoadError, one line with the file's name, for anything malformed or truncated."""
    buffer, size = map_file(path)

    def bad(reason: str) -> NoReturn:
        raise ModelLoadError(f"{path}: {reason}.")

    if buffer[: len(_LFS)] == _LFS:
        bad("a Git LFS pointer, not the weights: fetch them with `git lfs pull`")
    if size < 8:
        bad(f"{size} bytes are no safetensors file: truncated")
    length = int.from_bytes(buffer[:8], "little")
    if length > min(_MAX_HEADER, size - 8):
        bad(f"its header should take {length} bytes, but {size - 8} follow: truncated, or no safetensors file")
    try:
        header = json.loads(buffer[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        bad(f"its header is not JSON ({error})")
    if not isinstance(header, dict):
        bad("its header is not a JSON object")
    header.pop("__metadata__", None)
    start, room = 8 + length, size - 8 - length
    out: dict[str, Stored] = {}
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(entry)
        if dtype is None:
            bad(f"the header's entry of {name!r} is malformed")
        if dtype not in _ITEM_BYTES:
            bad(f"tensor {name!r} has the unknown dtype {dtype!r}")
        if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
            bad(
                f"tensor {name!r} takes {end - begin} bytes, but {dtype} {list(shape)} needs {math.prod(shape) * _ITEM_BYTES[dtype]}"
            )
        if end > room:
            bad(f"tensor {name!r} should end at byte {start + end}, but the file has {size}: truncated")
        out[name] = Stored(name, _KINDS.get(dtype, dtype), shape, path, buffer, start + begin, end - begin)
    at = start
    for tensor in sorted(out.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            bad(f"tensor {tensor.name!r} starts at byte {tensor.offset}, expected {at}: the file has holes or overlaps")
        at += tensor.nbytes
    if at != size:
        bad(f"{size - at} bytes follow the last tensor: damaged")
    return out


def read_sharded(index: Path) -> dict[str, Stored]:
    """All shards that `index` names. Raises ModelLoadError that lists missing shards, or tensors that are not where it says."""
    raw = read_json(index)
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelLoadError(f"{index}: weight_map is missing or malformed; expected tensor names and their files.")
    folder = index.parent
    shards = sorted(set(weight_map.values()))
    outside = [name for name in shards if Path(name).name != name]
    if outside:
        raise ModelLoadError(f"{index}: it names files outside its folder: {', '.join(outside)}.")
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{index}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}. Download them again."
        )
    out: dict[str, Stored] = {}
    for shard in shards:
        for name, stored in read_safetensors(folder / shard).items():
            if weight_map.get(name) != shard:
                said = weight_map.get(name, "nowhere")
                raise ModelLoadError(f"{index}: tensor {name!r} is in {shard}, but the index says {said}.")
            out[name] = stored
    absent = [name for name in weight_map if name not in out]
    if absent:
        raise ModelLoadError(f"{index}: its shards lack {len(absent)} tensors it lists: {', '.join(absent)}.")
    return out


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelLoadError, one line with the file's name."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror or error}).") from error
    if text.startswith(_LFS):
        raise ModelLoadError(f"{path}: a Git LFS pointer, not the file: fetch it with `git lfs pull`.")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not JSON ({error}): truncated or damaged.") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def _entry(entry: Any) -> tuple[str | None, tuple[int, ...], int, int]:
    if isinstance(entry, dict) and isinstance(entry.get("dtype"), str):
        shape, offsets = entry.get("shape"), entry.get("data_offsets")
        if isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2:
            numbers = [*shape, *offsets]
            if (
                all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**62 for n in numbers)
                and offsets[0] <= offsets[1]
            ):
                return entry["dtype"], tuple(shape), offsets[0], offsets[1]
    return None, (), 0, 0
