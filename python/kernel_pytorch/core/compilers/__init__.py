"""Import paths of the seeds: CUDA graphs by name. Below them is kernel_pytorch.optimization_patterns.PyGraph."""

from __future__ import annotations

from .pygraph import CUDAGraphState, GraphDeploymentStrategy, PyGraphCUDAOptimizer, WorkloadAnalysis

__all__ = ["CUDAGraphState", "GraphDeploymentStrategy", "PyGraphCUDAOptimizer", "WorkloadAnalysis"]
