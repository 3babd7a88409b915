"""Memory in training: optimizer states on the host, long sequences by segments that attend to keys of their past."""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from ..optim import (
    CPUGPUHybridOptimizer,
    DeepOptimizerStates,
    InterleaveOffloadingOptimizer,
    MemoryConfig,
    PerformanceModel,
)
from .long_sequence import LongSequenceOptimizer, SegmentedAttentionMemory, SegmentState

__all__ = [
    "CPUGPUHybridOptimizer",
    "DeepOptimizerStates",
    "InterleaveOffloadingOptimizer",
    "LongSequenceOptimizer",
    "MemoryConfig",
    "PerformanceModel",
    "SegmentState",
    "SegmentedAttentionMemory",
]
