"""ejKernel's functions on these kernels: its names, argument order and registry.

Where ejKernel's own backends disagree or are wrong, this is what holds: causal and windows are aligned at the ends
(query i sees keys up to i + keys - queries), a row that sees nothing is 0, sinks count once and are neither scaled nor
capped, biases and sinks have gradients, key heads may be any divisor of query heads. Options that would have no effect
raise.
"""

from __future__ import annotations

from ._functions import (
    MaskInfo,
    attention,
    block_sparse_attention,
    blocksparse_attention,
    flash_attention,
    mean_pooling,
    ring_attention,
    scaled_dot_product_attention,
)
from ._registry import Backend, KernelRegistry, KernelSpec, Platform, kernel_registry

__all__ = [
    "Backend",
    "KernelRegistry",
    "KernelSpec",
    "MaskInfo",
    "Platform",
    "attention",
    "block_sparse_attention",
    "blocksparse_attention",
    "flash_attention",
    "kernel_registry",
    "mean_pooling",
    "ring_attention",
    "scaled_dot_product_attention",
]
