"""Attention layers and the functions that change their scores; kernel_pytorch.functional.attention is underneath."""

from __future__ import annotations

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .config import AttentionConfig, AttentionPatterns
from .distributed import (
    ContextParallelAttention,
    RingAttentionLayer,
    create_context_parallel_attention,
    create_ring_attention,
)
from .factory import create_attention, create_flex_attention
from .fp8 import FP8AttentionConfig
from .fusion import (
    FusionConfig,
    FusionStrategy,
    OptimizationLevel,
    UnifiedAttentionFusion,
    create_unified_attention_fusion,
)
from .layers import FlashAttention3, FlexAttentionLayer
from .linear import GatedDeltaNet, GatedLinearAttention, LightningAttention
from .native_sparse import NativeSparseAttention
from .score_mods import FlexAttentionMaskMods, FlexAttentionScoreMods, alibi_slopes
from .sparse import DynamicSparseAttention, create_sparse_attention
from .sparse_patterns import SparsePattern

__all__ = [
    "AttentionConfig",
    "AttentionPatterns",
    "ContextParallelAttention",
    "DynamicSparseAttention",
    "FP8AttentionConfig",
    "FlashAttention3",
    "FlexAttentionLayer",
    "FlexAttentionMaskMods",
    "FlexAttentionScoreMods",
    "FusionConfig",
    "FusionStrategy",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "LightningAttention",
    "NativeSparseAttention",
    "OptimizationLevel",
    "RingAttentionLayer",
    "SparsePattern",
    "UnifiedAttentionFusion",
    "alibi_slopes",
    "create_attention",
    "create_context_parallel_attention",
    "create_flex_attention",
    "create_ring_attention",
    "create_sparse_attention",
    "create_unified_attention_fusion",
]
