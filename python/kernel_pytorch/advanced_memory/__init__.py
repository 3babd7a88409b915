"""Training in less memory: activations kept, recomputed or moved by a plan, gradients in fewer bytes between processes,
pools of torch's allocator; and long sequences by segments."""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
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
    "DynamicActivationOffloading",
    "DynamicMemoryPool",
    "FragmentationReport",
    "GradientCompressor",
    "LongSequenceOptimizer",
    "MemoryEfficientBackprop",
    "MemoryFit",
    "MemoryFragmentationOptimizer",
    "MemoryPoolManager",
    "QuantizedGradientAccumulation",
    "SegmentState",
    "SegmentedAttentionMemory",
    "SelectiveGradientCheckpointing",
    "fit_memory",
]
