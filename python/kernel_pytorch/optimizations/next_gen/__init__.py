"""Import paths of the seeds; what they name lives in kernel_pytorch.attention and its neighbours."""

from __future__ import annotations

from typing import Any

from ...attention import FlashAttention3, create_attention

__all__ = ["create_advanced_flex_attention"]


def create_advanced_flex_attention(
    embed_dim: int,
    num_heads: int,
    pattern: str = "standard",
    enable_gqa: bool = False,
    kv_heads: int | None = None,
    **options: Any,
) -> FlashAttention3:
    """An attention layer by pattern: any of AttentionConfig's, also "standard" (full), "alibi", "soft_cap".

    Args:
        enable_gqa: grouped-query attention with kv_heads heads of keys and values (num_heads / 4 where not given).
        options: fields of AttentionConfig (sliding_window_size, soft_cap, ...), score_mod, mask_mod, device, dtype.
    """
    if enable_gqa and kv_heads is None:
        kv_heads = max(num_heads // 4, 1)
    return create_attention(embed_dim, num_heads, pattern=pattern, kv_heads=kv_heads, **options)
