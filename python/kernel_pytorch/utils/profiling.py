"""Timing that can be believed: warm-up first, then medians and quartiles of many turns, never a best or a mean.

What is compared takes turns in one process, so that a change of clock or of a neighbour's load meets all of it. On CUDA
a turn is timed by events on the current stream, and the host waits only at the end. Inputs are used again and again:
what fits into the last-level cache stays there, which benchmarks/measure.py avoids by rotating buffers.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .._devices import LaunchCounts, launch_counts

import torch  # isort: skip


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    name: str
    median_us: float
    p25_us: float
    p75_us: float
    turns: int

    @property
    def spread_us(self) -> float:
        """Half the distance between the quartiles."""
        return (self.p75_us - self.p25_us) / 2

    def __str__(self) -> str:
        return f"{self.name}: {self.median_us:.1f} us ({self.p25_us:.1f} to {self.p75_us:.1f}, {self.turns} turns)"


@dataclass(frozen=True)
class Comparison:
    """Timings of ways to do the same work; the first is the baseline."""

    timings: tuple[Timing, ...]

    def speedup(self, name: str) -> float:
        """How many times faster than the baseline, by the medians."""
        return self.timings[0].median_us / self._of(name).median_us

    def is_clear(self, name: str) -> bool:
        """Whether its quartiles and the baseline's do not overlap: otherwise the speedup may be noise."""
        one, base = self._of(name), self.timings[0]
        return one.p75_us < base.p25_us or base.p75_us < one.p25_us

    def _of(self, name: str) -> Timing:
        for timing in self.timings:
            if timing.name == name:
                return timing
        raise KeyError(f"nothing called {name!r} was timed, only {[timing.name for timing in self.timings]}")

    def __str__(self) -> str:
        lines = [str(self.timings[0])]
        for timing in self.timings[1:]:
            doubt = "" if self.is_clear(timing.name) else ", within the spread"
            lines.append(f"{timing}, {self.speedup(timing.name):.2f}x{doubt}")
        return "\n".join(lines)


class KernelProfiler:
    """Times functions on one device and remembers what it timed.

    Args:
        device: "cpu" or "cuda"; the default is CUDA where torch has it.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"KernelProfiler: device is {self.device}; only cpu and cuda can be timed")
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"KernelProfiler: device is {self.device}, but torch {torch.__version__} sees no CUDA device"
            )
        self.timings: list[Timing] = []

    def __repr__(self) -> str:
        return f"KernelProfiler({str(self.device)!r}, {len(self.timings)} timings)"

    def benchmark_function(
        self,
        function: Callable[..., object],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        iterations: int = 100,
        warmup: int = 10,
        name: str | None = None,
    ) -> Timing:
        """Times function(*args, **kwargs)."""
        label = str(name or getattr(function, "__name__", type(function).__name__))
        keywords = dict(kwargs or {})
        comparison = self.compare_implementations({label: lambda: function(*args, **keywords)}, (), iterations, warmup)
        return comparison.timings[0]

    def compare_implementations(
        self,
        ways: Mapping[str, Callable[..., object]],
        args: Sequence[Any] = (),
        iterations: int = 100,
        warmup: int = 10,
    ) -> Comparison:
        """Times way(*args) of each, in turns; the first is what the others are compared with."""
        samples = self.sample(ways, args, iterations, warmup)
        comparison = Comparison(tuple(_summary(name, values) for name, values in samples.items()))
        self.timings.extend(comparison.timings)
        return comparison

    def sample(
        self,
        ways: Mapping[str, Callable[..., object]],
        args: Sequence[Any] = (),
        iterations: int = 100,
        warmup: int = 10,
    ) -> dict[str, list[float]]:
        """Microseconds of way(*args) of each, one a turn; kernel_pytorch.utils.performance keeps and compares them."""
        if not ways or iterations < 2:
            raise ValueError(f"profiling: {len(ways)} functions and {iterations} iterations; one and two are the least")
        for way in ways.values():
            for _ in range(warmup):
                way(*args)
        take = self._device_turns if self.device.type == "cuda" else self._host_turns
        collecting = gc.isenabled()
        gc.disable()
        try:
            return take(ways, args, iterations)
        finally:
            if collecting:
                gc.enable()

    def profile_memory_usage(self, function: Callable[..., object], *args: Any) -> int:
        """Bytes that torch's CUDA allocator had in use at the peak of function(*args), beyond what it had before."""
        if self.device.type != "cuda":
            raise ValueError("profile_memory_usage: torch counts memory on CUDA only; this profiler is for the cpu")
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = function(*args)
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del result
        return peak

    def generate_report(self) -> str:
        """Everything timed so far, a line each."""
        return "\n".join(map(str, self.timings))

    def _host_turns(
        self, ways: Mapping[str, Callable[..., object]], args: Sequence[Any], turns: int
    ) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(turns):
            for name, way in ways.items():
                begin = time.perf_counter_ns()
                way(*args)
                samples[name].append((time.perf_counter_ns() - begin) / 1e3)
        return samples

    def _device_turns(
        self, ways: Mapping[str, Callable[..., object]], args: Sequence[Any], turns: int
    ) -> dict[str, list[float]]:
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in ways}
        with torch.cuda.device(self.device):
            for _ in range(turns):
                for name, way in ways.items():
                    begin, end = (_timing_event() for _ in range(2))
                    begin.record()
                    way(*args)
                    end.record()
                    events[name].append((begin, end))
            torch.cuda.synchronize(self.device)
        return {name: [a.elapsed_time(b) * 1e3 for a, b in pairs] for name, pairs in events.items()}


def quick_benchmark(function: Callable[..., object], *args: Any, iterations: int = 50) -> Timing:
    """Times function(*args) on the device of its first tensor argument."""
    return KernelProfiler(_device_of(args)).benchmark_function(function, args, iterations=iterations)


def compare_functions(ways: Mapping[str, Callable[..., object]], *args: Any, iterations: int = 50) -> Comparison:
    """Times way(*args) of each, in turns, on the device of the first tensor argument."""
    return KernelProfiler(_device_of(args)).compare_implementations(ways, args, iterations)


def profile_model_inference(model: torch.nn.Module, *inputs: Any, iterations: int = 50) -> Timing:
    """Times model(*inputs) in evaluation mode without gradients; the model's mode is restored."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            timing = quick_benchmark(model, *inputs, iterations=iterations)
    finally:
        model.train(was_training)
    return timing


def count_launches(function: Callable[..., object], *args: Any) -> LaunchCounts:
    """Kernels of ours that function(*args) launches; zero on a CPU. Exact where no other thread launches meanwhile."""
    before = launch_counts()
    function(*args)
    return launch_counts() - before


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _device_of(args: Sequence[Any]) -> torch.device:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device
    return torch.device("cpu")


def _summary(name: str, samples: list[float]) -> Timing:
    p25, median, p75 = statistics.quantiles(samples, n=4)
    return Timing(name, median, p25, p75, len(samples))
