"""A model against its fused form: times in turns, launches counted by the profiler, outputs compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._modules import evaluating

__all__ = ["FusionPerformanceStats", "benchmark_fusion_performance"]


@dataclass(frozen=True)
class FusionPerformanceStats:
    """A baseline and a fused model on one input; None where this device does not tell, NaN where nothing was measured.

    Attributes:
        kernel_launches_original: by torch.profiler: kernels on a GPU, operators that compute on a CPU (None for what
            torch.compile made there).
        execution_time_original_ms: medians of interleaved runs.
        memory_bandwidth_original_gb_s: bytes of all operators' arguments and results over the time.
        gpu_utilization: share of the fused model's time in which its kernels run.
        numerical_accuracy: 1 - max_relative_error.
        max_relative_error: largest difference of the outputs over the largest output.
        is_clear: whether the quartiles of the times do not overlap.
    """

    kernel_launches_original: int | None = None
    kernel_launches_fused: int | None = None
    execution_time_original_ms: float = math.nan
    execution_time_fused_ms: float = math.nan
    memory_bandwidth_original_gb_s: float | None = None
    memory_bandwidth_fused_gb_s: float | None = None
    gpu_utilization: float | None = None
    max_relative_error: float = math.nan
    is_clear: bool = False
    num_runs: int = 0
    kernels_fused: tuple[str, ...] = field(default=(), repr=False)

    @property
    def speedup(self) -> float:
        return self.execution_time_original_ms / self.execution_time_fused_ms

    @property
    def kernel_reduction_ratio(self) -> float | None:
        """The share of launches that are gone."""
        if self.kernel_launches_fused is None or self.kernel_launches_original is None:
            return None
        return 1 - self.kernel_launches_fused / max(self.kernel_launches_original, 1)

    @property
    def numerical_accuracy(self) -> float:
        return 1 - self.max_relative_error

    @property
    def fusion_efficiency(self) -> float | None:
        """The share of time gone over the share of launches gone; None where no launch is gone."""
        gone = self.kernel_reduction_ratio
        return (1 - 1 / self.speedup) / gone if gone else None


def benchmark_fusion_performance(
    baseline_model: nn.Module, fused_model: nn.Module, input_data: Any, num_runs: int = 100
) -> FusionPerformanceStats:
    """Runs both models by turns on the input, in evaluation mode without gradients, and counts and compares.

    Args:
        input_data: a tensor, or a tuple of arguments.
        num_runs: timed turns of each.
    """
    from .._optimize.costs import count  # slow to load: only who compares models waits for it
    from .._optimize.measure import kernels_of  # slow to load: only who compares models waits for it
    from ..utils.profiling import KernelProfiler  # slow to load: only who compares models waits for it

    args = input_data if isinstance(input_data, tuple) else (input_data,)
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
    with evaluating(baseline_model), evaluating(fused_model), torch.no_grad():
        fused_model(*args)  # fuses now if that has not happened yet, not in a turn
        profiler = KernelProfiler(device)
        ways = {"original": lambda: baseline_model(*args), "fused": lambda: fused_model(*args)}
        comparison = profiler.compare_implementations(ways, (), num_runs)
        compiled = {"original": _is_compiled(baseline_model), "fused": _is_compiled(fused_model)}
        counted = {name: kernels_of(way, device, compiled[name]) for name, way in ways.items()}
        moved = {name: None if compiled[name] else count(way).bytes for name, way in ways.items()}
        error = _relative_error(ways["fused"](), ways["original"]())
    original, fused = comparison.timings
    busy_us = sum(row["total_us"] for row in counted["fused"][0])
    return FusionPerformanceStats(
        kernel_launches_original=counted["original"][1],
        kernel_launches_fused=counted["fused"][1],
        execution_time_original_ms=original.median_us / 1e3,
        execution_time_fused_ms=fused.median_us / 1e3,
        memory_bandwidth_original_gb_s=_gigabytes_per_second(moved["original"], original.median_us),
        memory_bandwidth_fused_gb_s=_gigabytes_per_second(moved["fused"], fused.median_us),
        gpu_utilization=min(1.0, busy_us / fused.median_us) if device.type == "cuda" else None,
        max_relative_error=error,
        is_clear=comparison.is_clear("fused"),
        num_runs=num_runs,
        kernels_fused=tuple(row["name"] for row in counted["fused"][0]),
    )


def _is_compiled(model: nn.Module) -> bool:
    return any(hasattr(part, "_orig_mod") for part in model.modules())


def _gigabytes_per_second(moved: float | None, microseconds: float) -> float | None:
    return None if moved is None else moved / microseconds / 1e3


def _floating(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _relative_error(got: Any, want: Any) -> float:
    """The largest difference of any output over that output's largest value."""
    ours, theirs = _floating(got), _floating(want)
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        shapes = [[list(tensor.shape) for tensor in side] for side in (ours, theirs)]
        raise ValueError(f"benchmark_fusion_performance: outputs of {shapes[0]} and of {shapes[1]} cannot be compared")
    worst = 0.0
    for a, b in zip(ours, theirs):
        if b.numel():
            difference = (a.double() - b.double()).abs().max().item()
            largest = b.double().abs().max().item()
            worst = max(worst, difference / largest if largest else difference)
    return worst
