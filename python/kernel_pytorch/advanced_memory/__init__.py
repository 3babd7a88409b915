"""Training in less memory: activations kept, recomputed or moved by a plan, optimizer states on the host, gradients in
fewer bytes between processes, pools of torch's allocator; and long sequences by segments."""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from ..optim import (
    CPUGPUHybridOptimizer,
    DeepOptimizerStates,
    InterleaveOffloadingOptimizer,
    MemoryConfig,
    PerformanceModel,
)
from .checkpointing import (
    AdaptiveCheckpointing,
    DynamicActivationOffloading,
    MemoryEfficientBackprop,
    SelectiveGradientCheckpointing,
)
from .fit import MemoryFit, fit_memory
from .gradients import AdaptiveCompressionOptimizer, GradientCompressor, QuantizedGradientAccumulation
from .long_sequence import LongSequenceOptimizer, SegmentedAttentionMemory, SegmentState
from .pools import DynamicMemoryPool, FragmentationReport, MemoryFragmentationOptimizer, MemoryPoolManager

__all__ = [
    "AdaptiveCheckpointing",
    "AdaptiveCompressionOptimizer",
    "CPUGPUHybridOptimizer",
    "DeepOptimizerStates",
    "DynamicActivationOffloading",
    "DynamicMemoryPool",
    "FragmentationReport",
    "GradientCompressor",
    "InterleaveOffloadingOptimizer",
    "LongSequenceOptimizer",
    "MemoryConfig",
    "MemoryEfficientBackprop",
    "MemoryFit",
    "MemoryFragmentationOptimizer",
    "MemoryPoolManager",
    "PerformanceModel",
    "QuantizedGradientAccumulation",
    "SegmentState",
    "SegmentedAttentionMemory",
    "SelectiveGradientCheckpointing",
    "fit_memory",
]
