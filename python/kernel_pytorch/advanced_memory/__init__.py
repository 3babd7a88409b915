"""Memory of long sequences: segments that attend to the keys of their own past."""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .fit import MemoryFit, fit_memory
from .long_sequence import LongSequenceOptimizer, SegmentedAttentionMemory, SegmentState

__all__ = ["LongSequenceOptimizer", "MemoryFit", "SegmentState", "SegmentedAttentionMemory", "fit_memory"]
