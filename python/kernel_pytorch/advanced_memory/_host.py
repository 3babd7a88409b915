"""Host memory that activations wait in: one pinned slab, one stream for each direction, events between them.

The device's memory is taken and given back on the stream that computes, so that the allocator needs no record_stream:
a copy waits for an event of that stream, and the stream waits for the copy before the memory is given back. On a CPU
the copies happen at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["HostSlab", "Slot", "measure_link"]

_ALIGNMENT = 512


def raw(storage: torch.UntypedStorage) -> Tensor:
    """All bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Slot:
    """A place in the slab. It is free again when what it holds has been fetched or given up."""

    def __init__(self, slab: HostSlab, first: int, size: int) -> None:
        self._slab, self._first, self.size = slab, first, size
        self.busy = False
        self._left: Any = None  # event: a copy from or to this place has ended

    def put(self, source: Tensor) -> Any:
        """Starts the copy of `source` (bytes on the device) and returns the event of its end; None on a CPU."""
        self.busy = True
        memory = self._slab.memory()[self._first : self._first + self.size]
        if source.device.type != "cuda":
            memory.copy_(source)
            return None
        compute, stream = torch.cuda.current_stream(source.device), self._slab.to_host
        stream.wait_event(compute.record_event())
        if self._left is not None:
            stream.wait_event(self._left)
        with torch.cuda.stream(stream):
            memory.copy_(source, non_blocking=True)
        self._left = stream.record_event()
        return self._left

    def get(self, device: torch.device) -> tuple[Tensor, Any]:
        """The bytes on the device, and the event to wait for before they are read; None on a CPU."""
        memory = self._slab.memory()[self._first : self._first + self.size]
        if device.type != "cuda":
            return memory.clone(), None
        target = torch.empty(self.size, dtype=torch.uint8, device=device)  # of the stream that computes
        compute, stream = torch.cuda.current_stream(device), self._slab.to_device
        stream.wait_event(compute.record_event())
        if self._left is not None:
            stream.wait_event(self._left)
        with torch.cuda.stream(stream):
            target.copy_(memory, non_blocking=True)
        self._left = stream.record_event()
        return target, self._left

    def release(self) -> None:
        self.busy = False


class HostSlab:
    """One piece of pinned memory, allocated when first used: allocating it in a step would stop the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self._memory: Tensor | None = None
        if device.type == "cuda":
            self.to_host = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.to_device = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def reserve(self, size: int) -> Slot:
        """A place of `size` bytes; all places have to be reserved before the first is used."""
        if self._memory is not None:
            raise RuntimeError(f"HostSlab: {self.size} bytes are in use and cannot grow by {size}; reserve all first")
        slot = Slot(self, self.size, size)
        self.size += -(-size // _ALIGNMENT) * _ALIGNMENT
        return slot

    def memory(self) -> Tensor:
        if self._memory is None:
            self._memory = torch.empty(self.size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return self._memory


def measure_link(device: torch.device) -> tuple[float, float]:
    """Bytes per second from the device to pinned memory and back, measured; on a CPU those of a copy."""
    size = (64 if device.type == "cuda" else 4) << 20
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((host, there), (there, host)):
        seconds = min(_copy_seconds(target, source, device) for _ in range(4))
        rates.append(size / seconds)
    return rates[0], rates[1]


def _copy_seconds(target: Tensor, source: Tensor, device: torch.device) -> float:
    if device.type != "cuda":
        import time  # of CPUs alone

        start = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    events[0].record()
    target.copy_(source, non_blocking=True)
    events[1].record()
    torch.cuda.synchronize(device)
    return float(events[0].elapsed_time(events[1])) / 1e3
