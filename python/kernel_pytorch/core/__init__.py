"""Modules: drop-in replacements of torch.nn's, on this library's kernels."""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .norms import OptimizedLayerNorm, OptimizedRMSNorm

__all__ = ["OptimizedLayerNorm", "OptimizedRMSNorm"]
