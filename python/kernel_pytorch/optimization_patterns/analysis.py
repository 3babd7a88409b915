"""What bucketing does to a model and to its inputs, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..utils.profiling import KernelProfiler
from .buckets import BucketingStrategy, DynamicShapeBucketing, create_optimal_bucketing_system
from .module import DynamicShapeModule

__all__ = ["benchmark_dynamic_shapes", "print_bucketing_analysis"]


def benchmark_dynamic_shapes(
    model: nn.Module,
    input_shapes: Sequence[Sequence[int]],
    num_iterations: int = 100,
    warmup_iterations: int = 10,
    strategy: BucketingStrategy = BucketingStrategy.HARDWARE_AWARE,
) -> dict[str, Any]:
    """The model on random inputs of these shapes, as it is and bucketed, in turns; medians of a pass over all shapes.

    Runs where the model's parameters are, in their type. The model is measured for inference and left in its mode.
    """
    parameter = next(model.parameters(), torch.empty(0))
    inputs = [torch.randn(tuple(shape), device=parameter.device, dtype=parameter.dtype) for shape in input_shapes]
    bucketed = DynamicShapeModule(model, create_optimal_bucketing_system(inputs, strategy))
    was_training = model.training
    bucketed.eval()
    try:
        with torch.no_grad():
            comparison = KernelProfiler(parameter.device).compare_implementations(
                {
                    "plain": lambda: [model(value) for value in inputs],
                    "bucketed": lambda: [bucketed(value) for value in inputs],
                },
                iterations=max(num_iterations, 2),
                warmup=max(warmup_iterations, 2),
            )
    finally:
        model.train(was_training)
    plain, ours = comparison.timings
    return {
        "plain_us": plain.median_us,
        "bucketed_us": ours.median_us,
        "speedup": comparison.speedup("bucketed"),
        "is_clear": comparison.is_clear("bucketed"),
        "refusals": bucketed.refusals(),
        **bucketed.statistics(),
    }


def print_bucketing_analysis(bucketing: DynamicShapeBucketing) -> None:
    """The buckets, most used first, and why they are what they are."""
    stats, analysis = bucketing.get_performance_stats(), bucketing.get_bucket_analysis()
    print(f"{stats['strategy']}: {stats['observations']} shapes seen, padding {100 * stats['padding_overhead']:.1f} %")
    for dim, sizes in analysis["sizes"].items():
        print(f"  dimension {dim}: {sizes}\n    {analysis['reasons'].get(dim, '')}")
    for bucket in analysis["buckets"]:
        overhead = 100 * bucket["padding_overhead"]
        print(f"  {bucket['shape']}: {bucket['usage']} uses, padding {overhead:.1f} %")
