"""Capturing a call as a CUDA graph and timing both, with what torch leaves to its callers.

A capture that breaks off leaves torch on the capturing stream, its allocator pointing at the graph and its random
generator waiting for the capture's end. So calls are looked at first for what a graph cannot hold, and where a capture
fails nevertheless all three are put right.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ambient", "autocast_as", "capture", "eager_us", "replay_us", "uncached_autocast", "waits_for_device"]

_WARM_CALLS, _TIMED_CALLS = 3, 5
# Their results' shapes or values are needed on the host.
_WAITING = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
)

_capture_lock = threading.Lock()  # torch allows one at a time in a process
_broken_off: list[Any] = []  # torch's allocators keep pointers to them


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in _WAITING or (name == "_to_copy" and args[0].is_cuda and not result.is_cuda):
            self.found = self.found or f"aten::{name}"
        return result


def waits_for_device(call: Callable[[], Any]) -> str:
    """The first op of a call by which the host waits for the device, or "". Runs it once."""
    mode = _Waits()
    with mode:
        call()
    return mode.found


def capture(
    call: Callable[[], Any], device: torch.device, pool: Any, stream: torch.cuda.Stream
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a call, and what it returned: memory that replays write to."""
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.current_stream(device)
    with _capture_lock:
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                output = call()
        except BaseException:
            _broken_off.append(graph)
            torch.cuda.set_stream(before)
            # Where the capture ended in order, allocation has ended too.
            with contextlib.suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(device.index or 0, pool)
            torch.cuda.synchronize(device)
            _end_for_generators(device)
            raise
    return graph, output


def _end_for_generators(device: torch.device) -> None:
    """A small capture that ends in order: the device's generator then takes none for under way any more. Its state
    stays the same object, so that earlier graphs go on drawing from it."""
    with torch.cuda.device(device):
        cell = torch.zeros(1, device=device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            cell.zero_()


def ambient() -> tuple[bool, torch.dtype | None]:
    """Autocast on GPUs, which a capture depends on besides its arguments."""
    enabled = torch.is_autocast_enabled("cuda")
    return (enabled, torch.get_autocast_dtype("cuda") if enabled else None)


def uncached_autocast() -> Any:
    """The caller's autocast without its cache of cast weights."""
    enabled = torch.is_autocast_enabled("cuda")
    return torch.autocast("cuda", dtype=torch.get_autocast_dtype("cuda"), enabled=enabled, cache_enabled=False)


def autocast_as(state: tuple[bool, torch.dtype | None]) -> Any:
    """Autocast on GPUs as `ambient` found it elsewhere."""
    enabled, dtype = state
    if not enabled and not torch.is_autocast_enabled("cuda"):
        return contextlib.nullcontext()
    return torch.autocast("cuda", dtype=dtype or torch.get_autocast_dtype("cuda"), enabled=enabled)


def copied(output: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, output)


def eager_us(call: Callable[[], Any]) -> float:
    """Microseconds of a call as it is, host and device together; the first ones, which compile and choose, are on a
    stream of their own, as captures want it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(_TIMED_CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / _TIMED_CALLS * 1e6


def replay_us(graph: Any) -> float:
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(_TIMED_CALLS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / _TIMED_CALLS * 1e3
