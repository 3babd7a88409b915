"""Inputs of changing shapes: buckets, padding with masks, CUDA graphs.

>>> from kernel_pytorch.optimization_patterns import DynamicShapeModule, create_optimal_bucketing_system
>>> bucketing = create_optimal_bucketing_system(sample_inputs)
>>> model = DynamicShapeModule(model, bucketing)
"""

from __future__ import annotations

from .analysis import benchmark_dynamic_shapes, print_bucketing_analysis
from .buckets import BucketingStrategy, DynamicShapeBucketing, ShapeBucket, create_optimal_bucketing_system
from .graphs import GraphDecision, PyGraph
from .module import DynamicShapeModule
from .padding import MaskArgument, PaddingStrategy

__all__ = [
    "BucketingStrategy",
    "DynamicShapeBucketing",
    "DynamicShapeModule",
    "GraphDecision",
    "MaskArgument",
    "PaddingStrategy",
    "PyGraph",
    "ShapeBucket",
    "benchmark_dynamic_shapes",
    "create_optimal_bucketing_system",
    "print_bucketing_analysis",
]
