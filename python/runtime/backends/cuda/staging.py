"""Small arrays on their way to the device: one pinned block and one copy a step, in turn over a few blocks.

    put({"ids": ..., "slots": ...})      block 0 [ids|slots|..]   block 1 [....]        waits if block 0's last copy has not run yet
    bundle.upload()   in a stream        pinned block ──one copy──► device block

A block is written again only once the event behind its last use is done. The executor collects step n-1 before it launches n+1, so
with two blocks that wait is over before it begins; it is there so that no caller's habit is what keeps memory right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phloem.runtime.backends.cuda.lanes import Device, Event, Stream

__all__ = ["Bundle", "Staging"]

ALIGN = 64  # bytes: enough for any dtype and for vector loads


class _Block:
    def __init__(self, device: Device, nbytes: int) -> None:
        self.host = device.pinned(nbytes)
        self.device = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
        self.busy: Event | None = None


class Bundle:
    """host: pinned views of the arrays, for a FlashInfer plan.   device: their twins, right after `upload` ran."""

    def __init__(self, block: _Block, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._block = block
        self.host: dict[str, Tensor] = {}
        self.device: dict[str, Tensor] = {}
        at = 0
        for name, array in arrays.items():
            source = torch.from_numpy(np.ascontiguousarray(array))
            self.host[name] = block.host[at : at + array.nbytes].view(source.dtype).view(source.shape)
            self.device[name] = block.device[at : at + array.nbytes].view(source.dtype).view(source.shape)
            self.host[name].copy_(source)
            at += -(-array.nbytes // ALIGN) * ALIGN
        self._used = at

    def upload(self) -> None:
        """Within Device.run."""
        self._block.device[: self._used].copy_(self._block.host[: self._used], non_blocking=True)


class Staging:
    """depth: blocks, so steps whose arrays may be under way at once."""

    def __init__(self, device: Device, depth: int = 2, nbytes: int = 1 << 16) -> None:
        self._device = device
        self._blocks = [_Block(device, nbytes) for _ in range(depth)]
        self._next = 0

    def put(self, arrays: Mapping[str, NDArray[Any]]) -> Bundle:
        block = self._blocks[self._next]
        if block.busy is not None:
            block.busy.wait()
            block.busy = None
        need = sum(-(-array.nbytes // ALIGN) * ALIGN for array in arrays.values())
        if need > len(block.host):
            self._device.synchronize()  # the old block's memory may be handed out again, so nothing may still read it
            block = self._blocks[self._next] = _Block(self._device, 1 << (need - 1).bit_length())
        self._next = (self._next + 1) % len(self._blocks)
        return Bundle(block, arrays)

    def used(self, bundle: Bundle, stream: Stream) -> None:
        """Everything that reads the bundle's host side is enqueued on `stream`: the block is free behind that."""
        bundle._block.busy = self._device.record(stream)
