"""Serving: attention over a cache of pages, the writing of such a cache, the draw of the next token. Forward only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..._shape_rules import window_sides
from .._call import call

Array = jax.Array


def _cache(op: str, cache: Array, layout: str) -> Array:
    if layout not in ("nhd", "hnd"):
        raise ValueError(f'{op}: cache_layout is "{layout}"; it is "nhd" or "hnd"')
    return cache if layout == "nhd" else jnp.swapaxes(cache, 1, 2)


def _scale(scale: Any, layout: str) -> Array | None:
    if scale is None:
        return None
    factors: Array = jnp.asarray(scale, jnp.float32)
    if factors.ndim == 0:
        return factors[None]
    return jnp.swapaxes(factors, 1, 2) if factors.ndim == 3 and layout == "hnd" else factors


def paged_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    plan: Array | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    mask: Array | None = None,
    key_scale: Any = None,
    value_scale: Any = None,
    batch_invariant: bool = False,
    cache_layout: str = "nhd",
    return_lse: bool = False,
) -> Any:
    """Attention of new tokens over keys and values in pages; arguments as in `functional.paged_attention`.

    Args:
        query: [tokens, heads, size].
        key_cache, value_cache: [pages, page_size, key_heads, size]; with cache_layout="hnd" (heads before rows) XLA
            transposes the cache, which is a copy.
        block_tables, seq_lens: int32 [requests, pages of a request] and [requests].
        cu_seqlens_q, max_seqlen_q: int32 [requests + 1] and a bound, for requests of different numbers of tokens.
        plan: of `plan_decode`.
        window: (left, right), -1 is unbounded; a number is both.
        key_scale, value_scale: of caches in float8_e4m3fn or int8.
        return_lse: also fp32 [heads, tokens].
    """
    left, right = window_sides("paged_attention", window)
    tensors = {
        "query": jax.lax.stop_gradient(query),
        "key_cache": _cache("paged_attention", key_cache, cache_layout),
        "value_cache": _cache("paged_attention", value_cache, cache_layout),
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "plan": plan,
        "mask": mask,
        "sinks": sinks,
        "alibi_slopes": alibi_slopes,
        "key_scale": _scale(key_scale, cache_layout),
        "value_scale": _scale(value_scale, cache_layout),
    }
    options = {
        "causal": causal,
        "scale": scale,
        "softcap": 0.0 if softcap is None else softcap,
        "window_left": left,
        "window_right": right,
        "max_seqlen_q": 0 if max_seqlen_q is None else max_seqlen_q,
        "batch_invariant": batch_invariant,
    }
    made = call("paged_attention", tensors, options, wanted=("return_lse",) if return_lse else ())
    return (made["output"], made["lse"]) if return_lse else made["output"]


def plan_decode(
    seq_lens: Array,
    *,
    heads: int,
    key_heads: int,
    queries: int = 1,
    cu_seqlens_q: Array | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    policy: str = "fill",
    max_keys: int | None = None,
    max_requests: int | None = None,
) -> Array:
    """How keys are shared out, for `paged_attention` of all layers of a step; arguments as in `functional.plan_decode`.

    Args:
        seq_lens: int32 [requests].
        policy: "fill", or "invariant": requests are cut each by itself.
        max_requests: of the largest batch; None: of this one.
    """
    if policy not in ("fill", "invariant"):
        raise ValueError(f'plan_decode: policy is "{policy}"; it is "fill" or "invariant"')
    left, right = window_sides("plan_decode", window)
    options = {
        "heads": heads,
        "key_heads": key_heads,
        "queries": queries,
        "causal": causal,
        "window_left": left,
        "window_right": right,
        "batch_invariant": policy == "invariant",
        "most_keys": 0 if max_keys is None else max_keys,
        "unit_keys": 0,
        "tile_rows": 0,
        "tile_heads": 0,
        "capacity": 9 + (seq_lens.shape[0] if max_requests is None else max_requests),
    }
    plan: Array = call("plan_decode", {"seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}, options)["plan"]
    return plan


def mla_decode(
    query: Array,
    cache: Any,
    block_tables: Array | None = None,
    seq_lens: Array | None = None,
    *,
    head_size_v: int = 512,
    indices: Array | None = None,
    cu_seqlens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention of multi-head latent attention over its cache; arguments as in `functional.mla_decode`.

    Args:
        query: [tokens, heads, head_size_v + rope columns], absorbed.
        cache: [pages, page_size, head_size_v + rope columns], which XLA slices (a copy); (latent, rope) or, with latent
            rows in float8_e4m3fn, (latent, rope, scale [pages, page_size, head_size_v / 128]) are taken as they are.
        block_tables, seq_lens: int32 [requests, pages of a request] and [requests].
        indices: int32 [tokens, top]: slots that each token sees alone, in place of tables and lengths.
        return_lse: also fp32 [heads, tokens].
    """
    if isinstance(cache, tuple):
        latent, rope, latent_scale = (*cache, None) if len(cache) == 2 else cache
    else:
        latent, rope, latent_scale = cache[..., :head_size_v], cache[..., head_size_v:], None
    tensors = {
        "query": jax.lax.stop_gradient(query),
        "latent_cache": latent,
        "rope_cache": rope,
        "latent_scale": latent_scale,
        "block_tables": block_tables,
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "indices": indices,
    }
    options = {
        "causal": causal,
        "scale": scale,
        "max_seqlen_q": 0 if max_seqlen_q is None else max_seqlen_q,
        "batch_invariant": batch_invariant,
    }
    made = call("mla_decode", tensors, options, wanted=("return_lse",) if return_lse else ())
    return (made["output"], made["lse"]) if return_lse else made["output"]


def append_kv(
    key: Array,
    value: Array,
    key_cache: Array,
    value_cache: Array,
    slots: Array,
    *,
    cos: Array | None = None,
    sin: Array | None = None,
    positions: Array | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    key_scale: Any = None,
    value_scale: Any = None,
) -> tuple[Array, Array]:
    """The caches with new keys and values in their slots; donated caches are written in place, others are copied.

    With cos and sin keys are turned first, as by `rope`, and rounded once.

    Args:
        key, value: [tokens, key_heads, size].
        key_cache, value_cache: [pages, page_size, key_heads, size].
        slots: int32 [tokens]: page * page_size + row, or -1 for a token that is not kept.
        cos, sin: [rows, rotary_dim] with each value twice, or [rows, rotary_dim / 2].
        positions: int32 [tokens], rows of cos and sin; None: 0, 1, 2 and so on.
        rotary_dim: how many columns of a key are turned; None: from the width of the tables.
        interleaved: pairs are neighbours and not half of rotary_dim apart.
    """
    tensors = {
        "key": key,
        "value": value,
        "slots": slots,
        "key_scale": _scale(key_scale, "nhd"),
        "value_scale": _scale(value_scale, "nhd"),
        "cos": cos,
        "sin": sin,
        "positions": positions,
        "key_cache": key_cache,
        "value_cache": value_cache,
    }
    options = {"rotary_dim": 0 if rotary_dim is None else rotary_dim, "interleaved": interleaved}
    made = call("append_kv", tensors, options)
    return made["key_cache"], made["value_cache"]


def _row(value: Any, rows: int, dtype: Any) -> Array | None:
    if value is None:
        return None
    numbers = jnp.asarray(value)
    is_whole = jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(numbers.dtype, jnp.integer)
    numbers = numbers if is_whole and numbers.dtype in (jnp.int32, jnp.int64) else numbers.astype(dtype)
    return jnp.broadcast_to(numbers, (rows,))


def sample(
    logits: Array,
    *,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    seeds: Any = None,
    positions: Any = None,
) -> Array:
    """The next token of each row, int32 [rows]; numbers as in `functional.sample`, one for all rows or one for each.

    Args:
        logits: [rows, vocabulary].
        seeds: whole numbers; JAX has no generator of its own, so that None is refused unless the temperature is 0.
        positions: whole numbers, the place of the token in its text.
    """
    if seeds is None and not (isinstance(temperature, int | float) and temperature == 0):
        raise ValueError("sample: seeds are missing; give whole numbers, or temperature=0 for the largest logits")
    rows = logits.shape[0]
    tensors = {
        "logits": jax.lax.stop_gradient(logits),
        "temperature": _row(temperature, rows, jnp.float32),
        "top_k": None if top_k is None else jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), (rows,)),
        "top_p": _row(top_p, rows, jnp.float32),
        "min_p": _row(min_p, rows, jnp.float32),
        "seeds": _row(seeds, rows, jnp.int32),
        "positions": _row(positions, rows, jnp.int32),
    }
    tokens: Array = call("sample", tensors)["tokens"]
    return tokens
