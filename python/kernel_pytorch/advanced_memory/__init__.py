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
from .lossy import CompressedGradient, LossyGradientCompression
from .pools import DynamicMemoryPool, FragmentationReport, MemoryFragmentationOptimizer, MemoryPoolManager
from .streaming import IncrementalSequenceCache, StreamingSequenceProcessor

__all__ = [
    "AdaptiveCheckpointing",
    "AdaptiveCompressionOptimizer",
    "CPUGPUHybridOptimizer",
    "CompressedGradient",
    "DeepOptimizerStates",
    "DynamicActivationOffloading",
    "DynamicMemoryPool",
    "FragmentationReport",
    "GradientCompressor",
    "IncrementalSequenceCache",
    "InterleaveOffloadingOptimizer",
    "LongSequenceOptimizer",
    "LossyGradientCompression",
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
    "StreamingSequenceProcessor",
    "fit_memory",
]
