"""Memory pools on torch's own allocator: private pools, what they hold, and how broken up the memory is.

There is one allocator here, torch's; these classes use its interfaces (torch.cuda.MemPool, snapshots, settings) and
allocate nothing behind its back. On a CPU tensors come from the system's allocator, which keeps what is given back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["DynamicMemoryPool", "FragmentationReport", "MemoryFragmentationOptimizer", "MemoryPoolManager"]

_MIB = 1 << 20


def _checked(owner: str, device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f'{owner}: torch sees no CUDA device here; give device="cpu"')
    return device


class DynamicMemoryPool:
    """A pool of its own: what is allocated inside `use()` shares no segment with the rest.

    Large tensors that live long go well into one: the pieces they would leave in the common pool stay whole.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = _checked("DynamicMemoryPool", device)
        self._pool: Any = torch.cuda.MemPool() if self.device.type == "cuda" else None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        if self._pool is None:
            yield
            return
        with torch.cuda.use_mem_pool(self._pool, self.device):
            yield

    def get_tensor(self, shape: Sequence[int] | int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A new tensor in the pool. Its values are whatever was there. It goes back when its last reference does."""
        with self.use():
            return torch.empty(shape, dtype=dtype, device=self.device)

    def reserved_bytes(self) -> int:
        """That the pool has taken from the device; 0 on a CPU."""
        if self._pool is None:
            return 0
        return sum(segment["total_size"] for segment in self._pool.snapshot())


class MemoryPoolManager:
    """Pools by name, made when first asked for."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = _checked("MemoryPoolManager", device)
        self._pools: dict[str, DynamicMemoryPool] = {}

    def pool(self, name: str) -> DynamicMemoryPool:
        if name not in self._pools:
            self._pools[name] = DynamicMemoryPool(self.device)
        return self._pools[name]

    def release(self, name: str) -> None:
        """Forgets a pool; its memory goes back to the device when its tensors are gone."""
        if name not in self._pools:
            raise KeyError(f'MemoryPoolManager: no pool is called "{name}"; there are {sorted(self._pools)}')
        del self._pools[name]

    def reserved_bytes(self) -> dict[str, int]:
        return {name: pool.reserved_bytes() for name, pool in self._pools.items()}


@dataclass(frozen=True)
class FragmentationReport:
    """Of one device: bytes that torch took, that tensors use, and how the rest lies."""

    reserved: int
    allocated: int
    free: int  # reserved and unused
    largest_free: int  # the largest piece of it
    pieces: int  # of the free memory
    expandable: bool  # whether segments can grow

    @property
    def fragmentation(self) -> float:
        """Share of the free memory that the largest allocation still possible without new memory cannot use."""
        return 1 - self.largest_free / self.free if self.free else 0.0


class MemoryFragmentationOptimizer:
    """Measures how broken up torch's memory is, says what would help, and does what is safe.

    Args:
        threshold: share of the reserved memory that is free and broken up, from which on it is worth a word.
    """

    def __init__(self, device: torch.device | str = "cuda", threshold: float = 0.1) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"MemoryFragmentationOptimizer: threshold is {threshold}; it must be a share, from 0 to 1")
        self.device, self.threshold = _checked("MemoryFragmentationOptimizer", device), threshold

    def analyze(self, segments: Sequence[dict[str, Any]] | None = None) -> FragmentationReport:
        """Of the device now, or of `segments` as torch.cuda.memory_snapshot() gives them."""
        if segments is None:
            if self.device.type != "cuda":
                raise ValueError(
                    f"MemoryFragmentationOptimizer: torch has no record of the memory of {self.device}; give segments "
                    "of torch.cuda.memory_snapshot(), or a CUDA device"
                )
            index = self.device.index if self.device.index is not None else torch.cuda.current_device()
            segments = [one for one in torch.cuda.memory_snapshot() if one["device"] == index]  # type: ignore[no-untyped-call]
        pieces = [
            block["size"]
            for segment in segments
            for block in segment["blocks"]
            if not block["state"].startswith("active")
        ]
        reserved = sum(segment["total_size"] for segment in segments)
        return FragmentationReport(
            reserved=reserved,
            allocated=reserved - sum(pieces),
            free=sum(pieces),
            largest_free=max(pieces, default=0),
            pieces=len(pieces),
            expandable=any(segment.get("is_expandable", False) for segment in segments),
        )

    def advise(self, report: FragmentationReport | None = None) -> list[str]:
        """What would help, in order; empty: nothing is worth it."""
        report = report or self.analyze()
        broken = report.fragmentation * report.free
        if report.reserved == 0 or broken < self.threshold * report.reserved:
            return []
        advice = [
            f"{broken / _MIB:.0f} of {report.reserved / _MIB:.0f} MiB are free in {report.pieces} pieces of which none "
            f"exceeds {report.largest_free / _MIB:.0f} MiB"
        ]
        if not report.expandable:
            advice.append(
                "start with PYTORCH_ALLOC_CONF=expandable_segments:True, or call apply() before tensors are made"
            )
        advice.append("empty_cache() gives segments without tensors back to the device; apply() does")
        return advice

    def apply(self) -> FragmentationReport:
        """Lets segments grow from now on, and gives those without tensors back. Tensors stay where they are."""
        if self.device.type != "cuda":
            raise ValueError(f"MemoryFragmentationOptimizer: apply is for CUDA devices, this is {self.device}")
        setting = "expandable_segments:True"
        set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (set_settings or torch.cuda.memory._set_allocator_settings)(setting)
        torch.cuda.empty_cache()
        return self.analyze()
