"""Import paths of the seeds."""

from __future__ import annotations

from ...attention.factory import create_advanced_flex_attention
from ...attention.flashlight import CompiledAttention, FlashLightKernelCompiler
from ...optimization_patterns.named_graphs import PyGraphCUDAOptimizer
from ...precision import AdaptivePrecisionAllocator, FP4Quantizer, StructuredSparsity24

__all__ = [
    "AdaptivePrecisionAllocator",
    "CompiledAttention",
    "FP4Quantizer",
    "FlashLightKernelCompiler",
    "PyGraphCUDAOptimizer",
    "StructuredSparsity24",
    "create_advanced_flex_attention",
]
