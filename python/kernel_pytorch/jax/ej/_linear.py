"""ejKernel's recurrent attentions, with gradients that are those of the recurrence (upstream's are not)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .._call import Array
from ..attentions.linear import linear_attention
from ._common import checked, run
from ._configs import GLAttentionConfig, LightningAttentionConfig, RecurrentAttentionConfig
from ._registry import Backend, Platform, kernel_registry


def _registered(algorithm: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        kernel_registry.register(algorithm, Platform.CUDA, Backend.GPU)(function)
        return kernel_registry.register(algorithm, Platform.XLA, Backend.CPU)(function)

    return add


@_registered("recurrent")
def recurrent_attention(
    query: Array,
    key: Array,
    value: Array,
    g: Array | None = None,
    g_gamma: Array | None = None,
    gk: Array | None = None,
    gv: Array | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: Any = None,
    cfg: Any = None,
) -> Any:
    """h_t = e^(g_t + g_gamma + gk_t) h_(t-1) + key_t value_t^T, output_t = softmax_scale * query_t^T h_t.

    Args:
        query, key, value: [batch, tokens, heads, size]; key's and query's heads may divide those of the value.
        g, gk: logarithms, [batch, tokens, heads] or [batch, tokens, heads, size of the key].
        g_gamma: [heads], likewise. All gates have gradients.
        gv: gates of the value's channels, which no kernel here takes: it must be None.
        initial_state: [sequences, heads, size of the key, size of the value].
        reverse: from the last token to the first.
        return_state: return (output, final state).
    """
    name = "recurrent"
    checked(name, platform, cfg, RecurrentAttentionConfig, gv=gv is not None)
    if reverse and cu_seqlens is not None:
        raise ValueError(f"{name}: reverse with cu_seqlens is not supported; reverse each sequence first")

    def local(query: Any, key: Any, value: Any, g: Any, gamma: Any, gk: Any, start: Any, offsets: Any) -> Any:
        gate = _sum_of(g, gk)
        parts: list[Any] = [None if x is None else jnp.flip(x, 1) if reverse else x for x in (query, key, value, gate)]
        results = linear_attention(
            parts[0],
            parts[1],
            parts[2],
            gate=parts[3],
            decay=gamma,
            scale=softmax_scale,
            initial_state=start,
            return_state=True,
            cu_seqlens=offsets,
        )
        output = jnp.flip(results[0], 1) if reverse else results[0]
        return (output, results[1]) if return_state else output

    return run(name, local, (query, key, value, g, g_gamma, gk, initial_state, cu_seqlens), cfg)


@_registered("gla")
def gla_attention(
    query: Array,
    key: Array,
    value: Array,
    g: Array | None = None,
    g_gamma: Array | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: Any = None,
    cfg: Any = None,
) -> Any:
    """`recurrent_attention` with g and g_gamma alone: gated linear attention."""
    checked("gla", platform, cfg, GLAttentionConfig)
    return recurrent_attention(
        query,
        key,
        value,
        g,
        g_gamma,
        None,
        None,
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
    )


@_registered("lightning_attn")
def lightning_attention(
    query: Array,
    key: Array,
    value: Array,
    layer_idx: int,
    num_layers: int,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
    return_state: bool = False,
    platform: Any = None,
    cfg: Any = None,
) -> Any:
    """`recurrent_attention` with the decay -(8 / heads) * (1 - layer_idx / num_layers) * head of each head.

    That is ejKernel's list, in which head 0 does not decay.
    """
    checked("lightning_attn", platform, cfg, LightningAttentionConfig)
    heads = value.shape[2]
    decay = -(8 / heads) * (1 - layer_idx / num_layers) * jnp.arange(heads, dtype=jnp.float32)
    return recurrent_attention(
        query,
        key,
        value,
        None,
        decay,
        None,
        None,
        initial_state,
        cu_seqlens,
        softmax_scale=softmax_scale,
        reverse=reverse,
        return_state=return_state,
    )


def _sum_of(one: Any, other: Any) -> Any:
    """The sum of two gates, a gate of a token being one of each of its channels."""
    if one is None or other is None:
        return other if one is None else one
    if one.ndim == other.ndim:
        return one + other
    return one[..., None] + other if one.ndim == 3 else one + other[..., None]
