"""Modules: drop-in replacements of torch.nn's, on this library's kernels."""

from __future__ import annotations

from .norms import OptimizedLayerNorm, OptimizedRMSNorm

__all__ = ["OptimizedLayerNorm", "OptimizedRMSNorm"]
