"""ejKernel's functions on these kernels: its names, argument order and registry.

Where ejKernel's own backends disagree or are wrong, this is what holds: causal and windows are aligned at the ends
(query i sees keys up to i + keys - queries), a row that sees nothing is 0, sinks count once and are neither scaled nor
capped, biases and sinks have gradients, key heads may be any divisor of query heads. Options that would have no effect
raise.
"""

from __future__ import annotations

from .._static_options import check_options as _check_options
from ._common import MaskInfo
from ._configs import (
    AttentionConfig,
    BlockSparseAttentionConfig,
    BwdParams,
    FlashAttentionConfig,
    FwdParams,
    GLAttentionConfig,
    GroupedMatmulConfig,
    KernelConfig,
    LightningAttentionConfig,
    MeanPoolingConfig,
    NativeSparseAttentionConfig,
    OperationConfig,
    RecurrentAttentionConfig,
    RingAttentionConfig,
    ScaledDotProductAttentionConfig,
)
from ._executor import (
    TIERS,
    AutotunePolicy,
    Choice,
    ConfigCache,
    Executor,
    device_fingerprint,
    executor,
    overlay_cache,
    policy_override,
)
from ._functions import (
    attention,
    block_sparse_attention,
    blocksparse_attention,
    flash_attention,
    mean_pooling,
    ring_attention,
    scaled_dot_product_attention,
)
from ._grouped import grouped_matmul, grouped_matmulv2
from ._latent import flash_mla, mla_attention
from ._linear import gla_attention, lightning_attention, recurrent_attention
from ._registry import Backend, KernelRegistry, KernelSpec, Platform, kernel_registry
from ._serving import (
    page_attention,
    ragged_decode_attention,
    ragged_page_attention,
    ragged_page_attention_v3,
)
from ._sparse import apply_native_sparse_attention, native_sparse_attention

__all__ = [
    "TIERS",
    "AttentionConfig",
    "AutotunePolicy",
    "Backend",
    "BlockSparseAttentionConfig",
    "BwdParams",
    "Choice",
    "ConfigCache",
    "Executor",
    "FlashAttentionConfig",
    "FwdParams",
    "GLAttentionConfig",
    "GroupedMatmulConfig",
    "KernelConfig",
    "KernelRegistry",
    "KernelSpec",
    "LightningAttentionConfig",
    "MaskInfo",
    "MeanPoolingConfig",
    "NativeSparseAttentionConfig",
    "OperationConfig",
    "Platform",
    "RecurrentAttentionConfig",
    "RingAttentionConfig",
    "ScaledDotProductAttentionConfig",
    "apply_native_sparse_attention",
    "attention",
    "block_sparse_attention",
    "blocksparse_attention",
    "device_fingerprint",
    "executor",
    "flash_attention",
    "flash_mla",
    "gla_attention",
    "grouped_matmul",
    "grouped_matmulv2",
    "kernel_registry",
    "lightning_attention",
    "mean_pooling",
    "mla_attention",
    "native_sparse_attention",
    "overlay_cache",
    "page_attention",
    "policy_override",
    "ragged_decode_attention",
    "ragged_page_attention",
    "ragged_page_attention_v3",
    "recurrent_attention",
    "ring_attention",
    "scaled_dot_product_attention",
]

_unchecked = {name: globals()[name] for name in __all__}
_check_options(globals(), __all__)
for _name, _function in _unchecked.items():
    kernel_registry.replace(_function, globals()[_name])
