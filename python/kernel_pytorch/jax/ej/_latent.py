"""ejKernel's multi-head latent attention, whose own kernels raise: keys and values are products of latent rows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from .._call import Array
from ..attention import attention as _attention
from ._common import checked, run
from ._registry import Backend, Platform, kernel_registry, registered


def _rope_rows(name: str, rows: Array, batch: int, tokens: int, heads: int) -> Array:
    """[batch, tokens, size] for all heads, or [batch, tokens, heads, size]."""
    if rows.ndim == 3:
        rows = rows[:, :, None]
    if rows.ndim != 4 or rows.shape[:2] != (batch, tokens) or rows.shape[2] not in (1, heads):
        raise ValueError(
            f"{name}: b_q or b_k has shape {rows.shape}; it is [{batch}, {tokens}, size], or with {heads} heads"
        )
    return jnp.broadcast_to(rows, (batch, tokens, heads, rows.shape[-1]))


@registered
def mla_attention(
    query: Array,
    key_value: Array,
    w_kc: Array,
    w_vc: Array,
    b_q: Array | None = None,
    b_k: Array | None = None,
    cu_seqlens: Array | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    platform: Any = None,
    cfg: Any = None,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Array:
    """Attention [batch, tokens, heads, size] over keys key_value @ w_kc and values key_value @ w_vc, with gradients.

    key_value: [batch, tokens, rank] latent rows; w_kc, w_vc: [rank, key heads, size]. b_q, b_k: rope rows, [batch,
    tokens, size] or of each head; scores are softmax_scale * (query . key + b_q . b_k), softmax_scale None is query's
    size ** -0.5. cu_seqlens [sequences + 1] packs sequences into a batch of one. Decoding over a cache of latent rows
    is `kernel_pytorch.jax.mla_decode`.
    """
    name = "mla_attention"
    checked(name, platform, cfg)
    if (b_q is None) != (b_k is None):
        raise ValueError(f"{name}: one of b_q and b_k is given; give both or none")
    batch, _, heads, size = query.shape
    key_heads = w_kc.shape[1]
    if key_value.shape[-1] != w_kc.shape[0] or w_kc.shape[:2] != w_vc.shape[:2] or heads % max(key_heads, 1):
        raise ValueError(
            f"{name}: key_value has shape {key_value.shape}, w_kc {w_kc.shape}, w_vc {w_vc.shape}, query has {heads} "
            "heads; the weights are [rank, key heads, size], and heads a multiple of key heads"
        )
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"{name}: cu_seqlens with a batch of {batch}; packed sequences are a batch of one")
    scale = size**-0.5 if softmax_scale is None else softmax_scale

    def local(query: Array, latent: Array, w_kc: Array, w_vc: Array, b_q: Any, b_k: Any, cu_seqlens: Any) -> Array:
        rows = query.shape[0]
        key, value = (jnp.einsum("btr,rhd->bthd", latent, weight.astype(latent.dtype)) for weight in (w_kc, w_vc))
        if b_q is not None:
            query = jnp.concatenate([query, _rope_rows(name, b_q, rows, query.shape[1], query.shape[2])], -1)
            key = jnp.concatenate([key, _rope_rows(name, b_k, rows, key.shape[1], key.shape[2])], -1)
        options: dict[str, Any] = {}
        if cu_seqlens is not None:
            places = jnp.arange(query.shape[1], dtype=jnp.int32)
            segment = jnp.searchsorted(cu_seqlens[1:].astype(jnp.int32), places, side="right").astype(jnp.int32)
            segment = jnp.where(places < cu_seqlens[-1], segment, -1)[None]
            options = {"query_segment_ids": segment, "key_segment_ids": segment}
        output: Array = _attention(query, key.astype(query.dtype), value, scale=scale, causal=causal, **options)
        return output

    tensors = (query, key_value, w_kc, w_vc, b_q, b_k, cu_seqlens)
    return run(name, local, tensors, cfg, mesh, in_specs, out_specs)  # type: ignore[no-any-return]


kernel_registry.register("flash_mla", Platform.CUDA, Backend.GPU)(mla_attention)
kernel_registry.register("flash_mla", Platform.XLA, Backend.CPU)(mla_attention)
flash_mla = mla_attention
