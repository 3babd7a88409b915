"""Modules: drop-in replacements of torch.nn's, on this library's kernels."""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .activations import (
    FusedGELU,
    FusedLayerNormActivation,
    FusedReLU,
    FusedSwiGLU,
    fused_layer_norm,
    fused_swiglu,
)
from .attention import AttentionLayer, CompilerOptimizedMultiHeadAttention, OptimizedMultiHeadAttention
from .blocks import OptimizedMLP, OptimizedTransformerBlock
from .embeddings import OptimizedEmbedding, RotaryPositionalEncoding, rotary_embedding
from .linear import FusedLinearActivation, OptimizedLinear
from .norms import OptimizedLayerNorm, OptimizedRMSNorm

__all__ = [
    "AttentionLayer",
    "CompilerOptimizedMultiHeadAttention",
    "FusedGELU",
    "FusedLayerNormActivation",
    "FusedLinearActivation",
    "FusedReLU",
    "FusedSwiGLU",
    "OptimizedEmbedding",
    "OptimizedLayerNorm",
    "OptimizedLinear",
    "OptimizedMLP",
    "OptimizedMultiHeadAttention",
    "OptimizedRMSNorm",
    "OptimizedTransformerBlock",
    "RotaryPositionalEncoding",
    "fused_layer_norm",
    "fused_swiglu",
    "rotary_embedding",
]
