"""ejKernel's functions. What holds where its backends disagree is in __init__.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import tables as _tables
from .._call import Array
from ..attention import attention as _attention
from ..attentions import ring as _ring
from ..attentions.block_masks import create_block_mask
from ._common import MaskInfo, allows_tf32, checked, masks_of, run, segments_of, sinks_of, window_of
from ._configs import (
    AttentionConfig,
    BlockSparseAttentionConfig,
    FlashAttentionConfig,
    MeanPoolingConfig,
    RingAttentionConfig,
    ScaledDotProductAttentionConfig,
)
from ._registry import Backend, Platform, kernel_registry, registered


@registered
def flash_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    cum_seqlens_q: Array | None = None,
    cum_seqlens_k: Array | None = None,
    softmax_aux: Array | None = None,
    /,
    *,
    mask_info: MaskInfo | None = None,
    softmax_scale: float | None = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    dropout_seed: Any = None,
    sliding_window: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    normalize_output: bool = True,
    precision: Any = None,
    logits_dtype: Any = jnp.float32,
    platform: Any = None,
    cfg: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Array:
    """Attention [batch, sequence, heads, size], tiled. The cap follows the bias, as ejKernel has it.

    With cum_seqlens [batch + 1], the first cum[i + 1] - cum[i] tokens of a row are real and query i stands at key i.
    """
    name = "flash_attention"
    unsupported = {"normalize_output=False": not normalize_output}
    unsupported["a logits_dtype but fp32"] = logits_dtype != jnp.float32
    checked(name, platform, cfg, FlashAttentionConfig, **unsupported)
    allow_tf32 = allows_tf32(name, precision)
    if (cum_seqlens_q is None) != (cum_seqlens_k is None):
        raise ValueError(f"{name}: one of cum_seqlens_q and cum_seqlens_k is given; give both or none")

    def local(query: Any, key: Any, value: Any, bias: Any, cum_q: Any, cum_k: Any, aux: Any) -> Array:
        options = masks_of(mask_info)
        if cum_q is not None:
            if options.get("query_segment_ids") is not None:
                raise ValueError(f"{name}: lengths are given by cum_seqlens and by segment ids; give one of them")
            options["query_segment_ids"] = segments_of(jnp.diff(cum_q), query.shape[1])
            options["key_segment_ids"] = segments_of(jnp.diff(cum_k), key.shape[1])
            options["causal_offset"] = 0
        return _attention(  # type: ignore[no-any-return]
            query,
            key,
            value,
            bias=bias,
            sinks=sinks_of(aux, query.shape[2]),
            scale=softmax_scale,
            causal=causal,
            window=window_of(sliding_window, causal),
            softcap=logits_soft_cap,
            softcap_after_bias=logits_soft_cap is not None and bias is not None,
            dropout_p=dropout_prob,
            seed=jax.random.key(dropout_seed) if isinstance(dropout_seed, int) else dropout_seed,
            allow_tf32=allow_tf32,
            **options,
        )

    tensors = (query, key, value, bias, cum_seqlens_q, cum_seqlens_k, softmax_aux)
    return run(name, local, tensors, cfg, mesh, in_specs, out_specs)  # type: ignore[no-any-return]


@kernel_registry.register("attention", Platform.XLA, Backend.ANY)
def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    dropout_rng: Any = None,
    softmax_aux: Array | None = None,
    /,
    *,
    mask_info: MaskInfo | None = None,
    init_bias: Callable[[], Array] | None = None,
    deterministic: bool = True,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    dtype: Any = jnp.bfloat16,
    softmax_dtype: Any = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    platform: Any = None,
    cfg: Any = None,
) -> tuple[Array, Array]:
    """Attention and its weights [batch, heads, queries, keys], in plain jnp, since weights are stored.

    Inputs are cast to dtype, which is bf16 by default as in ejKernel. bias and mask hold together.
    """
    checked("attention", platform, cfg, AttentionConfig, **{"dropout": dropout_prob > 0.0 and not deterministic})
    query, key, value = (jnp.asarray(one, dtype) for one in (query, key, value))
    if bias is None and init_bias is not None:
        bias = init_bias()
    key, value = (jnp.repeat(one, query.shape[2] // key.shape[2], 2) for one in (key, value))
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide = softmax_dtype or jnp.float32
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=wide) * scale
    if logits_soft_cap is not None:
        scores = logits_soft_cap * jnp.tanh(scores / logits_soft_cap)
    if bias is not None:
        scores = scores + bias.astype(wide)
    kept = _kept(query.shape[1], key.shape[1], causal, window_of(sliding_window, causal), mask_info)
    scores = jnp.where(kept, scores, -jnp.inf)
    sinks = sinks_of(softmax_aux, query.shape[2])
    extra = jnp.full((query.shape[2],), -jnp.inf) if sinks is None else sinks
    most = jnp.maximum(scores.max(-1, keepdims=True), extra[None, :, None, None])
    most = jnp.where(most == -jnp.inf, 0, most)
    weights = jnp.exp(scores - most)
    total = weights.sum(-1, keepdims=True) + jnp.exp(extra[None, :, None, None] - most)
    weights = (weights / jnp.where(total == 0, 1, total)).astype(dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value), weights


def _kept(queries: int, keys: int, causal: bool, window: Any, mask_info: MaskInfo | None) -> Any:
    distance = jnp.arange(keys)[None] - jnp.arange(queries)[:, None] - (keys - queries)
    kept = jnp.ones((1, 1, queries, keys), bool)
    if causal:
        kept = kept & (distance <= 0)
    if window is not None:
        left, right = window
        kept = kept & (distance >= -left if left >= 0 else True) & (distance <= right if right >= 0 else True)
    if mask_info is None:
        return kept
    if mask_info.attention_mask is not None:
        kept = kept & mask_info.attention_mask
    if mask_info.q_segment_ids is not None:
        first, second = mask_info.q_segment_ids[:, None, :, None], mask_info.kv_segment_ids[:, None, None]  # type: ignore[index]
        kept = kept & (first == second) & (first >= 0)
    return kept


@registered
def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    cum_seqlens_q: Array | None = None,
    cum_seqlens_k: Array | None = None,
    /,
    *,
    mask_info: MaskInfo | None = None,
    init_bias: Callable[[], Array] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """Attention [batch, sequence, heads, size]. cum_seqlens are lengths [batch] of the sequences, as in ejKernel."""
    name = "scaled_dot_product_attention"
    checked(name, platform, cfg, ScaledDotProductAttentionConfig)
    options = masks_of(mask_info)
    if cum_seqlens_q is not None or cum_seqlens_k is not None:
        if options.get("query_segment_ids") is not None:
            raise ValueError(f"{name}: lengths and segment ids are given; give one of them")
        whole = jnp.full(query.shape[0], max(query.shape[1], key.shape[1]))
        options["query_segment_ids"] = segments_of(whole if cum_seqlens_q is None else cum_seqlens_q, query.shape[1])
        options["key_segment_ids"] = segments_of(whole if cum_seqlens_k is None else cum_seqlens_k, key.shape[1])
        options["causal_offset"] = 0
    if bias is None and init_bias is not None:
        bias = init_bias()

    def local(query: Any, key: Any, value: Any, bias: Any) -> Any:
        window = window_of(sliding_window, causal)
        return _attention(query, key, value, bias=bias, scale=softmax_scale, causal=causal, window=window, **options)

    return run(name, local, (query, key, value, bias), cfg)  # type: ignore[no-any-return]


@registered
def blocksparse_attention(
    query: Array,
    key: Array,
    value: Array,
    softmax_aux: Array | None = None,
    bias: Array | None = None,
    /,
    *,
    mask_info: MaskInfo | None = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    chunk_size: int | None = None,
    mask_mod: Any = None,
    block_size: int = 128,
    causal: bool = True,
    fused_backward: bool = False,
    platform: Any = None,
    cfg: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Array:
    """Attention [batch, heads, sequence, size] that skips the tiles that its masks leave empty.

    Args:
        chunk_size: of Llama 4: a query sees keys of its own chunk up to itself.
        mask_mod: (batch, head, query, key) -> whether a score is kept, in place of ejKernel's mask_builder; with
            chunk_size and mask_mod the tiles of block_size are found before the call.
    """
    name = "blocksparse_attention"
    checked(name, platform, cfg, BlockSparseAttentionConfig, fused_backward=fused_backward)

    def local(query: Any, key: Any, value: Any, aux: Any, bias: Any) -> Array:
        mods = [mask_mod] if mask_mod is not None else []
        if chunk_size is not None:
            mods.append(lambda batch, head, q, k: (q // chunk_size == k // chunk_size) & (k <= q))

        def every(batch: Any, head: Any, q: Any, k: Any) -> Any:
            kept = True
            for mod in mods:
                kept = kept & mod(batch, head, q, k)
            return kept

        batch, heads = (query.shape[0], query.shape[1]) if mask_mod is not None else (None, None)
        sizes = (query.shape[2], key.shape[2])
        blocks = create_block_mask(every, batch, heads, *sizes, block_size) if mods else None
        return _attention(  # type: ignore[no-any-return]
            query,
            key,
            value,
            layout="bhsd",
            bias=bias,
            sinks=sinks_of(aux, query.shape[1]),
            scale=softmax_scale,
            causal=causal,
            window=window_of(sliding_window, causal),
            softcap=logits_soft_cap,
            block_mask=blocks,
            **masks_of(mask_info),
        )

    return run(name, local, (query, key, value, softmax_aux, bias), cfg, mesh, in_specs, out_specs)  # type: ignore[no-any-return]


block_sparse_attention = blocksparse_attention


@registered
def mean_pooling(
    x: Array,
    cu_seqlens: Array | None = None,
    /,
    *,
    chunk_size: int = 32,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """The mean of sequences, [batch, tokens, columns] or packed [tokens, columns] with cu_seqlens; of [batch, tokens,
    heads, columns] the means of chunks. ejKernel has both under this name, one per backend."""
    name = "mean_pooling"
    checked(name, platform, cfg, MeanPoolingConfig)
    if x.ndim == 4 and cu_seqlens is None:
        return run(name, lambda x: _tables.chunk_mean_pool(x, chunk_size), (x,), cfg)  # type: ignore[no-any-return]
    return run(name, _tables.mean_pool, (x, cu_seqlens), cfg)  # type: ignore[no-any-return]


@registered
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    softmax_aux: Array | None = None,
    dropout_rng: Any = None,
    /,
    *,
    axis_name: str | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    pdrop: float = 0.0,
    mask_info: MaskInfo | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """Attention of a sequence in parts on the devices of axis_name, inside shard_map; of whole ones without it."""
    name = "ring_attention"
    if axis_name is None:
        checked(name, platform, cfg, RingAttentionConfig, dropout=pdrop > 0.0)
        tiles = {} if cfg is None else {"fwd_params": cfg.fwd_params, "bwd_params": cfg.bwd_params}
        return flash_attention(  # type: ignore[no-any-return]
            *(query, key, value, bias, None, None, softmax_aux),
            mask_info=mask_info,
            softmax_scale=softmax_scale,
            causal=causal,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            cfg=FlashAttentionConfig(**tiles) if tiles else None,
        )
    unsupported = {
        "a cfg over several devices": cfg,
        "bias": bias,
        "softmax_aux": softmax_aux,
        "mask_info": mask_info,
        "sliding_window": sliding_window,
    }
    others = {"dropout": pdrop > 0.0, **{key: one is not None for key, one in unsupported.items()}}
    checked(name, platform, None, RingAttentionConfig, **others)
    return _ring.ring_attention(
        query, key, value, axis_name=axis_name, causal=causal, scale=softmax_scale, softcap=logits_soft_cap
    )
