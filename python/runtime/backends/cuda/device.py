"""The NVIDIA device: streams, events, pinned memory and graphs of torch.cuda. The only file that says `torch.cuda`.

Nothing of this file has run on a GPU yet: docs/gpu.md keeps the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phloem.runtime.backends.cuda.lanes import Event, Graph, Stream, Work

__all__ = ["CudaDevice", "Gpu", "find_gpu"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory_bytes: of the whole device, not what is free.   capability: (9, 0) is Hopper."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


def find_gpu(index: int = 0) -> Gpu | None:
    """The GPU that torch sees, or None: no device, no driver, or a torch built without CUDA."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(index)
    return Gpu(found.name, int(found.total_memory), (found.major, found.minor))


class _CudaEvent:
    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def wait(self) -> None:
        self.raw.synchronize()

    def done(self) -> bool:
        return bool(self.raw.query())

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.raw.elapsed_time(self.raw)) / 1000


class CudaDevice:
    """One GPU. Graphs share one memory pool, so that a small one lives in what a large one has taken."""

    def __init__(self, index: int = 0) -> None:
        gpu = find_gpu(index)
        assert gpu is not None, "find_gpu says that there is none: ask it first"
        self.torch_device = torch.device("cuda", index)
        self.name, self.memory_bytes, self.capability = gpu.name, gpu.memory_bytes, gpu.capability
        self._pool: Any = None
        self._capture_stream: Any = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def stream(self, name: str) -> Stream:
        made: Stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        return made

    def run(self, stream: Stream, work: Work) -> None:
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            work()

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(stream)  # type: ignore[arg-type]
        return _CudaEvent(event)

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        stream.wait_event(event.raw)  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, work: Work) -> Graph:
        self.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capture_stream):
            work()
        self._pool = graph.pool()
        made: Graph = graph
        return made

    def free_bytes(self) -> int:
        """What the driver has left plus what torch's allocator holds and does not use."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        held = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(free + held)
