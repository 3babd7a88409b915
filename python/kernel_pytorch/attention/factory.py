"""Attention layers by the name of an implementation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .config import FIELDS, AttentionConfig, AttentionPatterns, config_of
from .distributed.ring_attention import RingAttentionConfig, RingAttentionLayer
from .layers import FlashAttention3, FlexAttentionLayer
from .sparse import DynamicSparseAttention

Layer = Callable[..., FlashAttention3]


def create_attention(
    config: AttentionConfig | int | None = None,
    num_heads: int | None = None,
    *,
    implementation: str | None = None,
    **options: Any,
) -> FlashAttention3:
    """The layer of a config, or of embed_dim, num_heads and the fields of AttentionConfig by name.

    Args:
        config: an AttentionConfig, or embed_dim (also by the names embed_dim and d_model).
        implementation: "flash_attention" (the default), "flex_attention" (the default with score_mod or mask_mod),
            "dynamic_sparse_attention", "ring_attention" and the other keys of IMPLEMENTATIONS.
        options: fields of AttentionConfig, device and dtype, and what the implementation takes: score_mod and mask_mod
            of "flex_attention", sparsity_ratio and the others of DynamicSparseAttention, max_sequence_length of
            "ring_attention".
    """
    call = "create_attention"
    if isinstance(config, AttentionConfig) and implementation is None:
        implementation = config.implementation
    if implementation is None:
        has_mods = options.get("score_mod") is not None or options.get("mask_mod") is not None
        implementation = "flex_attention" if has_mods else "flash_attention"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{call}: implementation is {implementation!r}; use one of {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    make, own = IMPLEMENTATIONS[implementation]
    of_layer = {name: options.pop(name) for name in ("device", "dtype", *own) if name in options}
    for name in _MODS:
        if name in options and options[name] is None:
            del options[name]
    return make(config_of(call, config, num_heads, options, ("device", "dtype", *own)), **of_layer)


def create_flex_attention(
    embed_dim: int | None = None,
    num_heads: int | None = None,
    pattern: AttentionPatterns | str = "full",
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    **options: Any,
) -> FlexAttentionLayer:
    """A FlexAttentionLayer; options are fields of AttentionConfig, `device` and `dtype`."""
    place = {name: options.pop(name) for name in ("device", "dtype") if name in options}
    config = config_of("create_flex_attention", embed_dim, num_heads, {"pattern": pattern, **options})
    return FlexAttentionLayer(config, score_mod, mask_mod, **place)


def _with_pattern(pattern: AttentionPatterns) -> Layer:
    def make(config: AttentionConfig, **options: Any) -> FlashAttention3:
        return FlexAttentionLayer(dataclasses.replace(config, pattern=pattern, causal=False), **options)

    return make


def _sparse(config: AttentionConfig, **options: Any) -> FlashAttention3:
    return DynamicSparseAttention(config, **options)


def _ring(config: AttentionConfig, device: Any = None, dtype: Any = None, **options: Any) -> FlashAttention3:
    taken = {name: getattr(config, name) for name in FIELDS if name in _RING_FIELDS}
    ring = RingAttentionLayer(
        config.embed_dim, config.num_heads, RingAttentionConfig(**taken, **options), device=device, dtype=dtype
    )
    for name in FIELDS:
        if name != "implementation" and getattr(ring.config, name) != getattr(config, name):
            raise ValueError(
                f"create_attention: {name} is {getattr(config, name)!r}, which ring_attention has not; leave it out"
            )
    return ring


_RING_FIELDS = {field.name for field in dataclasses.fields(RingAttentionConfig)}
_MODS = ("score_mod", "mask_mod")
_SPARSE = ("sparsity_ratio", "block_size", "sinks", "local", "key_parts", "seed")

# Name -> what makes the layer of a config, and the options of its own.
IMPLEMENTATIONS: dict[str, tuple[Layer, tuple[str, ...]]] = {
    "flash_attention": (FlashAttention3, ()),
    "flash_attention2": (FlashAttention3, ()),
    "flash_attention3": (FlashAttention3, ()),
    "memory_efficient_attention": (FlashAttention3, ()),
    "flex_attention": (FlexAttentionLayer, _MODS),
    "flex_attention_causal": (_with_pattern(AttentionPatterns.CAUSAL), _MODS),
    "flex_attention_sliding_window": (_with_pattern(AttentionPatterns.SLIDING_WINDOW), _MODS),
    "dynamic_sparse_attention": (_sparse, _SPARSE),
    "ring_attention": (_ring, ("max_sequence_length", "chunk_size")),
}


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
