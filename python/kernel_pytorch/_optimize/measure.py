"""Times before and after, taken in turns in one process, and what ran meanwhile: launches, peak memory, kernels."""

from __future__ import annotations

import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .._ops.float8 import quantize, scaled_matmul
from .._supports import runs_fast
from .agreement import agreed, alone
from .attribution import costs_by_kernel, outermost, total_of
from .costs import counted, synchronize
from .state import prepare


@dataclass(frozen=True)
class Timing:
    """Microseconds of one run: the median and the quartiles of the turns, and the turns themselves."""

    median_us: float
    low_us: float
    high_us: float
    samples: int
    turns: tuple[float, ...] = field(default=(), repr=False, compare=False)


@contextmanager
def profiled(activities: list[ProfilerActivity], profile_memory: bool = False) -> Iterator[Any]:
    """torch's profiler without its lines on standard error: it reads how much to say at its first start, and tells of
    memory that the collector frees and it did not see made."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "6")
    try:
        with _quiet(), profile(activities=activities, profile_memory=profile_memory, acc_events=True) as profiler:
            yield profiler
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


_LOG_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the collector's pauses."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


_CYCLES_PER_US = 2000  # of a GPU, or a few less: it then waits longer than asked


def clock_of(device: torch.device) -> Callable[[], int]:
    """What work on the device is timed by, in nanoseconds. One thread of a CPU has a clock of its own, which stands
    still while others have the processor."""
    alone_on_cpu = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time_ns if alone_on_cpu else time.perf_counter_ns


def once_us(
    run: Callable[[], object],
    device: torch.device,
    repeats: int = 1,
    queued_us: float = 0.0,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> float:
    """Microseconds of one run, the average of `repeats` runs on end. A GPU waits for `queued_us` first, so that what
    the host needs no longer to ask for the runs is not counted: the device's own time, as in a CUDA graph.
    """
    prepare(run, repeats)
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if queued_us:
            torch.cuda._sleep(int(queued_us * _CYCLES_PER_US))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return agreed(float(begin.elapsed_time(end)) * 1e3 / repeats)
    start = clock()
    for _ in range(repeats):
        run()
    return agreed((clock() - start) / 1e3 / repeats)


Switch = Callable[[], None]


def switches(off: Switch, on: Switch) -> tuple[Switch, Switch]:
    """(off, on), each of which acts only where the other was the last; `on` is in force at first."""
    state = {"on": True}

    def turn(to: bool) -> None:
        if state["on"] != to:
            (on if to else off)()
            state["on"] = to

    return (lambda: turn(False)), (lambda: turn(True))


FEWEST, LEAST, MOST = 3, 5, 60  # turns
_LONG_US = 1e4
_BUSY = 4.0
_QUEUE_US = 2500.0  # of the host's calls ahead of a GPU, which holds about a thousand launches


def interleaved(
    ways: dict[str, tuple[Switch, Callable[[], object]]],
    device: torch.device,
    seconds: float,
    queued: bool = False,
    most_seconds: float = 0.0,
) -> dict[str, Timing]:
    """Times each way in turns, after its switch; as many turns as the seconds allow, between LEAST and MOST, and FEWEST
    of runs so long that LEAST would take twice the seconds, or `most_seconds` where these are more. `queued` is the
    device's own time, for which it is given all calls of a turn before it begins; where one run asks for more than it
    can hold, or waits for the device inside, that is the sum of its kernels. Where a thread's own clock tells the time,
    the seconds are its too, up to _BUSY of them for each: a machine that others use gives as many turns.
    """
    repeats: dict[str, int] = {}
    asked: dict[str, float] = {}
    once: dict[str, float] = {}
    first: dict[str, float] = {}
    clock = clock_of(device)
    began, own, longest = time.monotonic(), clock(), max(2 * seconds, most_seconds)

    def late_by() -> float:
        passed = time.monotonic() - began
        return (
            max((clock() - own) / 1e9, passed / _BUSY) - seconds if clock is time.thread_time_ns else passed - seconds
        )

    for name, (switch, run) in ways.items():
        switch()
        run()  # the first call compiles, tunes or allocates
        synchronize(device)
        prepare(run)
        begin = clock()
        once[name] = once_us(run, device)
        first[name] = (clock() - begin) / 1e3
        repeats[name] = max(1, min(50, int(2e3 / max(once[name], 1e-3))))  # turns of some milliseconds
        asked[name] = _asking_us(run, device) if queued else 0.0
    count = max(repeats.values())
    by_kernels = queued and max(asked.values()) > _QUEUE_US
    if queued:
        count = max(1, min(count, int(_QUEUE_US / max(*asked.values(), 1.0))))
    is_long = min(once.values()) > _LONG_US  # its caches and clocks are those of the run itself
    samples: dict[str, list[float]] = {name: [first[name]] if is_long and not queued else [] for name in ways}
    with _quiet():
        while min(map(len, samples.values())) < MOST:
            taken = min(map(len, samples.values()))
            late = late_by()
            if agreed((late > 0 and taken >= LEAST) or (late > longest - seconds and taken >= FEWEST)):
                break
            for name, (switch, run) in ways.items():
                switch()
                if not is_long:
                    run()  # caches and clocks as they are in a run of this way
                taken_us = kernels_us(run, device) if by_kernels else None
                samples[name].append(taken_us or once_us(run, device, count, 1.5 * count * asked[name], clock))
    return {name: timing_of(values) for name, values in samples.items()}


def _asking_us(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds until the host has asked for one run."""
    prepare(run)
    begin = time.perf_counter_ns()
    run()
    taken = (time.perf_counter_ns() - begin) / 1e3
    synchronize(device)
    return agreed(taken)


def warm_up() -> None:
    """What torch does at the first use of its profiler and of a dispatch mode, which takes seconds."""
    counted(lambda: None)
    with profiled([ProfilerActivity.CPU]):
        pass


def kernels_us(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds that a GPU's kernels take in one run, whatever the host does between them; 0 where no profiler
    sees them."""
    prepare(run)
    synchronize(device)
    with profiled([ProfilerActivity.CUDA]) as profiler:
        run()
        synchronize(device)
    ended: dict[Any, float] = {}
    return agreed(sum(own_us(event, ended) for event in device_events(profiler, on_gpu=True)))


def device_events(profiler: profile, on_gpu: bool) -> list[Any]:
    """What ran on a GPU, or on the CPU, as it began."""
    found = [e for e in profiler.events() if (e.device_type.name == "CUDA") == on_gpu]  # type: ignore[no-untyped-call]
    return sorted(
        (e for e in found if not getattr(e, "is_user_annotation", False)), key=lambda event: event.time_range.start
    )


def timing_of(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    # Of two values the quartiles would be extrapolated, to less than nothing.
    return Timing(median, max(low, min(values)), min(high, max(values)), len(values), tuple(values))


def sure_gain(before: Timing, after: Timing) -> float:
    """What the median of before / after, turn by turn, is at least: by a sign test one is wrong in forty times. Turns
    side by side share a machine's noise, which blurs the quartiles of each. 0 where the turns are unknown or few."""
    ratios = sorted(one / other for one, other in zip(before.turns, after.turns) if other > 0.0)
    if len(ratios) < LEAST:
        return 0.0
    return ratios[max(0, int(len(ratios) / 2 - math.sqrt(len(ratios))))]


def peak_bytes(run: Callable[[], object], device: torch.device) -> int | None:
    """Memory at the peak of one run beyond what was there before, by torch's allocator."""
    prepare(run)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    with profiled([ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        return None
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    held, peak = 0, 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        held += change
        peak = max(peak, held)
    return peak if changes else None


def own_us(event: Any, ended: dict[Any, float]) -> float:
    """Microseconds of a kernel since the one before it in its stream: launched ahead, it waits for that one's end."""
    stream, span = getattr(event, "device_resource_id", 0), event.time_range
    begin = max(span.start, ended.get(stream, span.start))
    ended[stream] = max(span.end, begin)
    return float(max(span.end - begin, 0.0))


def kernels_of(
    run: Callable[[], object], device: torch.device, compiled: bool = False
) -> tuple[list[dict[str, Any]], int]:
    """Where the time of one run goes, longest first, and how many kernels it launches (on a CPU: ops, views aside;
    0 of compiled code, where they are unknown)."""
    on_gpu = device.type == "cuda"
    prepare(run, 2)
    cost, by_op = counted(run) if not compiled else (None, {})
    synchronize(device)
    with profiled([ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        run()
        synchronize(device)
    found: dict[str, list[float]] = {}
    ended: dict[Any, float] = {}  # by stream
    for event in device_events(profiler, on_gpu):
        owner = event if on_gpu else outermost(event, by_op) or event
        entry = found.setdefault(owner.name, [0, 0.0])
        entry[0] += owner is event
        entry[1] += own_us(event, ended) if on_gpu else event.self_cpu_time_total
    launches = int(sum(entry[0] for name, entry in found.items() if not name.startswith(("Memcpy", "Memset"))))
    if on_gpu:
        costs = costs_by_kernel(profiler.events(), by_op)
    else:
        launches = 0 if cost is None else cost.launches
        costs = {name: total_of(calls) for name, calls in by_op.items()}
    rows = []
    for name, (calls, total) in sorted(found.items(), key=lambda item: -item[1][1])[:40]:
        _, moved, flops = costs.get(name, (0, None, None))
        ours = name.startswith(("kernel_pytorch::", "kp_")) or "kernel_pytorch" in name
        rows.append(
            {"name": name, "calls": int(calls), "total_us": total, "bytes": moved, "flops": flops, "ours": ours}
        )
    return rows, launches


@functools.cache
def float8_rate(device: torch.device) -> float:
    """Operations of a large product of FP8 in a second; 0 where there are no units for it. Once per process."""
    size = 8192
    if device.type != "cuda" or not runs_fast("scaled_matmul", (size, size, size), torch.bfloat16, device):
        return 0.0
    a, b = (quantize(torch.randn(size, size, device=device, dtype=torch.bfloat16)) for _ in range(2))
    job = (lambda: None, lambda: scaled_matmul(a.codes, b.codes, a.scales, b.scales))
    with alone():
        return 2 * size**3 / interleaved({"product": job}, device, 0.1)["product"].median_us * 1e6
