"""What this machine does at best: bytes copied and operations of a large product in a second.

A roof is the fastest of several turns: others' work only adds time. Where turns differ much, others were at work and
even the fastest may be too slow; such a roof is measured again at the next chance, and a report says what it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .agreement import alone
from .costs import synchronize
from .measure import once_us

__all__ = ["roofs"]

_TURNS, _SECONDS = 9, 0.4
_QUIET = 1.25  # the median over the fastest turn, at most
_known: dict[tuple[torch.device, torch.dtype], dict[str, Any]] = {}


def roofs(device: torch.device, dtype: torch.dtype, again: bool = True) -> dict[str, Any]:
    """Once per process, and, where there is time to do it again, as long as the machine was busy; the higher of all
    measured stays."""
    known = _known.get((device, dtype))
    if known is None or (known["busy"] and again):
        _known[device, dtype] = _higher(known, _measured(device, dtype))
    return _known[device, dtype]


def _measured(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    elements = (1 << 28) if on_gpu else (1 << 24)
    source = torch.empty(elements, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    size = 8192 if on_gpu else 512
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    copy_us, copy_busy = _fastest(lambda: target.copy_(source), device)
    product_us, product_busy = _fastest(lambda: a @ b, device)
    return {
        "copy_bytes_per_second": 2 * elements / copy_us * 1e6,
        "matmul_flops_per_second": 2 * size**3 / product_us * 1e6,
        "dtype": str(dtype).removeprefix("torch."),
        "busy": copy_busy or product_busy,
    }


def _fastest(run: Callable[[], object], device: torch.device) -> tuple[float, bool]:
    """Microseconds of the fastest turn, and whether the turns differ too much."""
    run()
    synchronize(device)
    deadline = time.monotonic() + _SECONDS / 2
    taken: list[float] = []
    with alone():
        while len(taken) < _TURNS and (len(taken) < 3 or time.monotonic() < deadline):
            taken.append(once_us(run, device))
    return min(taken), statistics.median(taken) > _QUIET * min(taken)


def _higher(known: dict[str, Any] | None, found: dict[str, Any]) -> dict[str, Any]:
    if known is None:
        return found
    rates = ("copy_bytes_per_second", "matmul_flops_per_second")
    return {**found, **{name: max(known[name], found[name]) for name in rates}}
