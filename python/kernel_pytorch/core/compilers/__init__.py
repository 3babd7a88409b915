"""Import paths of the seeds: CUDA graphs by name, which are kernel_pytorch.optimization_patterns.named_graphs."""

from __future__ import annotations

from ...optimization_patterns.named_graphs import (
    CUDAGraphState,
    GraphDeploymentStrategy,
    PyGraphCUDAOptimizer,
    WorkloadAnalysis,
)

__all__ = ["CUDAGraphState", "GraphDeploymentStrategy", "PyGraphCUDAOptimizer", "WorkloadAnalysis"]
