"""Attention of one sequence on many devices, over a torch.distributed process group; one process streams over keys."""

from __future__ import annotations

from ._exchange import ContextParallelError
from .context_parallel import ContextParallelAttention, ContextParallelConfig, create_context_parallel_attention
from .functional import context_parallel_attention, gather_sequence, shard_sequence
from .linear import context_parallel_delta_rule, context_parallel_linear_attention
from .plan import ContextParallelPlan, plan_context_parallel
from .ring_attention import RingAttentionConfig, RingAttentionLayer, create_ring_attention

__all__ = [
    "ContextParallelAttention",
    "ContextParallelConfig",
    "ContextParallelError",
    "ContextParallelPlan",
    "RingAttentionConfig",
    "RingAttentionLayer",
    "context_parallel_attention",
    "context_parallel_delta_rule",
    "context_parallel_linear_attention",
    "create_context_parallel_attention",
    "create_ring_attention",
    "gather_sequence",
    "plan_context_parallel",
    "shard_sequence",
]
