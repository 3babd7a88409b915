"""ejKernel's native sparse attention: compressed and selected branches, means and choice by blocks of one size."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._call import Array
from ..attentions.native_sparse import native_sparse_attention as _attend
from ._common import checked, run
from ._configs import NativeSparseAttentionConfig
from ._registry import registered


@registered
def native_sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    g_cmp: Array | None = None,
    g_slc: Array | None = None,
    block_indices: Array | None = None,
    block_counts: int | Array = 16,
    cu_seqlens: Array | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """g_slc * attention to the chosen blocks + g_cmp * attention to the means of whole blocks.

    Args:
        query: [batch, tokens, heads, size]; key, value: [batch, tokens, key_heads, size].
        g_cmp: [batch, tokens, heads]; None leaves the compressed branch out.
        g_slc: [batch, tokens, heads]; None: 1.
        block_indices: [batch, tokens, key_heads, any] instead of choosing; those below 0 or behind a token are skipped.
        block_counts: how many blocks a token reads, its own included; with block_indices how many of them count, a
            number or [batch, tokens, key_heads]. Missing blocks are skipped, never doubled.
        cu_seqlens: [sequences + 1], the batch being 1.
        cfg: NativeSparseAttentionConfig(block_size=64): a part of the meaning, which nothing tunes.
    """
    name = "native_sparse_attention"
    checked(name, platform, cfg, NativeSparseAttentionConfig)
    block_size = 64 if cfg is None else cfg.block_size
    if block_indices is None and not isinstance(block_counts, int):
        raise ValueError(f"{name}: block_counts is an array and block_indices is None; give one number of blocks")

    def local(q: Any, k: Any, v: Any, of_means: Any, of_blocks: Any, indices: Any, counts: Any, offsets: Any) -> Any:
        if indices is not None:
            limits = counts[..., None] if counts is not None else block_counts
            indices = jnp.where(jnp.arange(indices.shape[-1]) < limits, indices, -1)
        return _attend(
            q,
            k,
            v,
            gates=(of_means, 1.0 if of_blocks is None else of_blocks, None),
            block_size=block_size,
            blocks=block_counts if isinstance(block_counts, int) else 0,
            form="ejkernel",
            block_indices=indices,
            scale=softmax_scale,
            cu_seqlens=offsets,
        )

    counts = None if isinstance(block_counts, int) else jnp.asarray(block_counts)
    return run(name, local, (query, key, value, g_cmp, g_slc, block_indices, counts, cu_seqlens), cfg)  # type: ignore[no-any-return]


@registered
def apply_native_sparse_attention(
    query: Array,
    key: Array,
    value: Array,
    block_indices: Array,
    block_counts: int | Array = 16,
    cu_seqlens: Array | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """Attention to the blocks that block_indices name, up to each token; arguments as native_sparse_attention's."""
    return native_sparse_attention(  # type: ignore[no-any-return]
        query,
        key,
        value,
        None,
        None,
        block_indices,
        block_counts,
        cu_seqlens,
        softmax_scale=softmax_scale,
        platform=platform,
        cfg=cfg,
    )
