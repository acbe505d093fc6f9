"""`with engine.update() as u: u.load(named)`: new weights beside the served ones, all or nothing (rl W4, W5).

named: a state dict, (name, tensor) pairs, a generator of either, or a folder or file of safetensors. Any number of calls, any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.models.safetensors_file import INDEX, SINGLE, read_safetensors, read_sharded

__all__ = ["Update", "named_tensors"]

AT_ONCE = 16  # tensors to one turn between two steps: requests in flight go on in between

Named = "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Mapping[str, Tensor]] | str | Path"


class Update:
    """What `engine.update()` gives. `version`: of the weights once it has ended well."""

    def __init__(self, load: Callable[[list[tuple[str, Tensor]]], None]) -> None:
        self._load = load
        self.num_tensors = 0
        self.version: int | None = None

    def load(self, named: Any) -> None:
        """Some of the tensors, or all. Each is checked before a byte of it is written. Raises WeightLayoutError, ModelLoadError."""
        pairs = named_tensors(named)
        while some := list(islice(pairs, AT_ONCE)):
            self._load(some)
            self.num_tensors += len(some)


def named_tensors(named: Any) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of whatever `load` takes. DTensors are gathered: every rank has to iterate."""
    if isinstance(named, (str, Path)):
        yield from _from_files(Path(named))
        return
    items: Iterable[Any] = named.items() if isinstance(named, Mapping) else named
    for item in items:
        if isinstance(item, Mapping):  # a generator of buckets
            yield from named_tensors(item)
            continue
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str) or not isinstance(item[1], Tensor):
            raise InvalidRequestError(
                f"load takes a state dict, (name, tensor) pairs, buckets of them, or a safetensors path; it got a {type(item).__name__}.",
                param="named",
            )
        name, tensor = item
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _from_files(path: Path) -> Iterator[tuple[str, Tensor]]:
    if path.is_dir():
        sharded = (path / INDEX).is_file()
        stored = read_sharded(path / INDEX) if sharded else read_safetensors(path / SINGLE)
    else:
        stored = read_safetensors(path)
    for name, tensor in stored.items():
        yield name, tensor.read()
