"""What the GPU half asks of a device: ordered streams, events between them, pinned memory, captured work.

    host     stage n+1 ......... record ── wait ──► ids of n
    compute  ── upload n ── forward n ── draw n ──●── upload n+1 ── forward n+1 ──
    copies                                        └─► ids of n to pinned memory ──●

Nothing reaches the device but through `run`, so who waits for whom can be read off the calls, and a stand-in (tests/fake_device.py)
can run everything as late and in as strange an order as the events allow. `CudaDevice` (device.py) is the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Device", "Event", "Graph", "Stream", "Work"]

Work = Callable[[], None]


class Stream(Protocol):
    """A queue of work that runs in order. Two streams are unordered but for the events between them."""


class Event(Protocol):
    """A mark in a stream."""

    def wait(self) -> None:
        """Block the host until everything in front of the mark has run. Raises what the device raised."""
        ...

    def done(self) -> bool: ...

    def seconds_since(self, earlier: Event) -> float:
        """Device time between two timed marks, both done."""
        ...


class Graph(Protocol):
    """Captured work: the same kernels on the same addresses."""

    def replay(self) -> None:
        """Within `Device.run`: enqueue it."""
        ...


class Device(Protocol):
    """capability: (9, 0) is Hopper.   memory_bytes: of the whole device."""

    torch_device: torch.device
    name: str
    capability: tuple[int, int]
    memory_bytes: int

    def stream(self, name: str) -> Stream: ...

    def run(self, stream: Stream, work: Work) -> None:
        """Enqueue what `work` does with tensors of this device. `work` may run at once, but what it enqueues runs in stream order,
        so pinned memory that it reads must stay as it is until an event recorded behind it is done."""
        ...

    def record(self, stream: Stream, *, timed: bool = False) -> Event: ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is enqueued on `stream` from here on runs after `event`. The host does not wait."""
        ...

    def synchronize(self) -> None:
        """The host waits for everything."""
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """uint8 host memory that copies may read and write while the host goes on."""
        ...

    def capture(self, work: Work, beside: Graph | None = None) -> Graph:
        """Run `work` once, then record it. Nothing else may be enqueued meanwhile. beside: a graph that is alive and never runs at the
        same time: the new one lives in the memory that it has taken. Raises torch.OutOfMemoryError, and then nothing was made."""
        ...

    def free_bytes(self) -> int:
        """What is left for others: memory that graphs keep for themselves is not."""
        ...

    def release(self) -> None:
        """Hand back to the system what no tensor holds."""
        ...

    def settle(self) -> None:
        """The host waits for what it enqueued outside of `run`: copies into weights, say. What runs on the streams goes on."""
        ...
