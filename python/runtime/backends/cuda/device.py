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
    """One GPU. Work is captured on a stream of its own, the same for all graphs."""

    def __init__(self, index: int = 0) -> None:
        gpu = find_gpu(index)
        assert gpu is not None, "find_gpu says that there is none: ask it first"
        self.torch_device = torch.device("cuda", index)
        self.name, self.memory_bytes, self.capability = gpu.name, gpu.memory_bytes, gpu.capability
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

    def capture(self, work: Work, beside: Graph | None = None) -> Graph:
        self.synchronize()
        # Once for real on the stream of the capture: cuBLAS keeps a workspace for each stream, and one made during a capture would
        # live in the graphs' pool and keep it alive when they are gone.
        self.run(self._capture_stream, work)
        self.synchronize()
        graph: Any = torch.cuda.CUDAGraph()
        pool = None if beside is None else beside.pool()  # type: ignore[attr-defined]
        # thread_local: what another thread of the process (a trainer) allocates meanwhile must not spoil the capture.
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._capture_stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:  # an allocation that failed spoils the capture, whose end says that alone
            if isinstance(error.__context__, torch.OutOfMemoryError):
                raise error.__context__ from None
            raise
        made: Graph = graph
        return made

    def free_bytes(self) -> int:
        """What the driver has left once torch's allocator has handed back what it holds and does not use. What a graph's pool holds is
        taken, whether a tensor lies in it now or not: no one else can have it."""
        self.release()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def settle(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()
