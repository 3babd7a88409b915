"""Times several ways of doing the same work against each other, in one process.

The ways take turns, so a change of clock or of a neighbour's load meets all of them, in an order that is drawn anew for
each turn, so that nobody always comes after the one who leaves the caches full of unwritten lines; each turn works on
the next of several buffers that together exceed the last-level cache; medians and quartiles are kept, never a best.
On a CPU the ways must not share inputs: who comes second would find them in the cache.
On a GPU a turn is a replay of a CUDA graph over all buffers, so that no way is charged for the host's launches.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import random
import time
from collections.abc import Callable

import torch
from timing import Timing, summarised

# One call on buffer i. What it returns is kept until the same buffer's next turn, so outputs rotate too.
Way = Callable[[int], object]


def keep_freed_memory() -> None:
    """Makes malloc keep what is freed: otherwise every large output is fresh pages, and their zeroing is timed."""
    trim_threshold, mmap_max = -1, -4
    libc = ctypes.CDLL(None)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, 2**31 - 1)


def last_level_cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    try:
        from pathlib import Path

        levels = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        return max(int(level.read_text().strip().rstrip("K")) * 1024 for level in levels)
    except (OSError, ValueError):
        return 64 * 1024 * 1024


def buffers_needed(bytes_each: int, device: torch.device) -> int:
    """How many buffers exceed the last-level cache twice over; at least two, at most what any machine can hold."""
    return max(2, min(16, -(-2 * last_level_cache_bytes(device) // bytes_each)))


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """The stream that ways are captured on. What a backward differentiates must have been computed on it too."""
    return torch.cuda.Stream()


def compare(ways: dict[str, Way], buffers: int, device: torch.device, seconds: float) -> dict[str, Timing]:
    """Times the ways in turns for about `seconds` each."""
    take = _graph_turns(ways, buffers) if device.type == "cuda" else _host_turns(ways, buffers)
    for name in ways:  # warm: compile, choose, fault pages in
        for turn in range(2 * buffers):
            take(name, turn)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds * len(ways)
    turn = 0
    order, draw = list(ways), random.Random(0)
    while time.perf_counter() < end or turn < 15:
        draw.shuffle(order)
        for name in order:
            samples[name].append(take(name, turn))
        turn += 1
    gc.enable()
    return {name: summarised(values) for name, values in samples.items()}


def _host_turns(ways: dict[str, Way], buffers: int) -> Callable[[str, int], float]:
    kept: dict[str, list[object]] = {name: [None] * buffers for name in ways}

    def take(name: str, turn: int) -> float:
        buffer = turn % buffers
        begin = time.perf_counter_ns()
        result = ways[name](buffer)
        elapsed = time.perf_counter_ns() - begin
        kept[name][buffer] = result
        return elapsed / 1e3

    return take


def _graph_turns(ways: dict[str, Way], buffers: int) -> Callable[[str, int], float]:
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    kept: list[object] = []
    stream = capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for way in ways.values():
            for buffer in range(buffers):
                way(buffer)
    torch.cuda.synchronize()
    for name, way in ways.items():
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name], stream=stream):
            kept.extend(way(buffer) for buffer in range(buffers))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def take(name: str, turn: int) -> float:
        del turn  # a replay covers every buffer
        begin.record()
        graphs[name].replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / buffers

    # The graphs write into what was captured: it lives as long as they do.
    take.kept = kept  # type: ignore[attr-defined]
    return take
