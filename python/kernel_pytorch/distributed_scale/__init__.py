"""Models on many devices, over torch.distributed: meshes, one call that parallelises a model, predicted scaling."""

from __future__ import annotations

from .estimate import Links, MeasuredStep, ScalingEstimate, ScalingRow, estimate_scaling, measure_step
from .mesh import create_device_mesh, data_mesh
from .parallel import parallelize

__all__ = [
    "Links",
    "MeasuredStep",
    "ScalingEstimate",
    "ScalingRow",
    "create_device_mesh",
    "data_mesh",
    "estimate_scaling",
    "measure_step",
    "parallelize",
]
