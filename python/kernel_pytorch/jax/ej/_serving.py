"""ejKernel's attention over pages and over ragged caches. Forward only; keys outside a request are never read.

A window of W counts the token itself (W keys) in the paged functions; (l, r) keeps -l <= key - query <= r. Sinks enter
the denominator once. A request without keys has the output 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._call import Array
from ..attentions.pages import paged_attention
from ._common import checked, run
from ._registry import registered


def _sinks(name: str, sinks: Array | None, heads: int) -> Array | None:
    """One logit of each head that counts for all of them: [S], [heads, S] or [key heads, S]."""
    if sinks is None:
        return None
    rows = jnp.broadcast_to(sinks, (heads, sinks.shape[0])) if sinks.ndim == 1 else sinks
    if rows.ndim != 2 or heads % rows.shape[0]:
        raise ValueError(f"{name}: softmax_aux has shape {sinks.shape}; it is [S], or [heads, S] of {heads} heads")
    total: Array = jax.nn.logsumexp(rows.astype(jnp.float32), axis=-1)
    return jnp.repeat(total, heads // rows.shape[0])


def _by_head(cache: Array) -> Array:
    """[pages, heads, page_size, size] as pages of one head: no copy."""
    pages, heads, page_size, size = cache.shape
    return cache.reshape(pages * heads, page_size, 1, size)


@registered
def page_attention(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    context_lens: Array,
    block_tables: Array,
    /,
    *,
    attn_scale: float | None = None,
    max_context_len: int | None = None,
    num_splits: int = 0,
    mask_value: float = -2.38e38,
    attn_logits_soft_cap: float | None = None,
    pages_per_compute_block: int | None = None,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """One query of each sequence, [sequences, heads, size], over caches [pages, key heads, page_size, size].

    block_tables [sequences, pages of a sequence] int32, -1 is none; context_lens [sequences] int32. How work is split
    follows from shapes: max_context_len, num_splits, pages_per_compute_block, megacore_mode, inline_seq_dim and
    mask_value change nothing.
    """
    name = "page_attention"
    checked(name, platform, cfg)
    del max_context_len, num_splits, mask_value, pages_per_compute_block, megacore_mode, inline_seq_dim
    sequences, heads, size = query.shape
    key_heads = key_cache.shape[1]
    if heads % key_heads:
        raise ValueError(f"{name}: {heads} heads of queries, {key_heads} of keys; they must be a multiple")

    def attend(query: Array, key_cache: Array, value_cache: Array, context_lens: Array, block_tables: Array) -> Array:
        # A head of a sequence is a request of its own, over pages of that head alone.
        tables = block_tables[:, None, :] * key_heads + jnp.arange(key_heads, dtype=jnp.int32)[:, None]
        tables = jnp.where(block_tables[:, None, :] < 0, -1, tables).reshape(sequences * key_heads, -1)
        output: Array = paged_attention(
            query.reshape(sequences * key_heads, heads // key_heads, size),
            _by_head(key_cache),
            _by_head(value_cache),
            tables.astype(jnp.int32),
            jnp.repeat(context_lens.astype(jnp.int32), key_heads),
            scale=attn_scale,
            softcap=attn_logits_soft_cap,
        )
        return output.reshape(sequences, heads, value_cache.shape[-1])

    return run(name, attend, (query, key_cache, value_cache, context_lens, block_tables), cfg)  # type: ignore[no-any-return]


@registered
def ragged_decode_attention(
    query: Array,
    key: Array,
    value: Array,
    sequence_start: Array,
    sequence_end: Array,
    softmax_aux: Array | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    sliding_window: tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """One query of each sequence, [batch, heads, size] or [batch, 1, heads, size], over its keys [start, end) of caches
    [batch, longest, key heads, size]; it stands at end - 1."""
    name = "ragged_decode_attention"
    checked(name, platform, cfg)
    is_flat = query.ndim == 3
    batch, longest, key_heads, size = key.shape
    rows = query if is_flat else query.reshape(batch, *query.shape[2:])
    sinks = _sinks(name, softmax_aux, rows.shape[1])
    left, right = (-1, -1) if sliding_window is None else sliding_window

    def attend(rows: Array, key: Array, value: Array, start: Array, end: Array, sinks: Array | None) -> Array:
        # Pages of one row: a sequence's table begins at its first key.
        start, end = start.astype(jnp.int32), end.astype(jnp.int32)
        places = start[:, None] + jnp.arange(longest, dtype=jnp.int32)
        tables = jnp.arange(batch, dtype=jnp.int32)[:, None] * longest + jnp.minimum(places, longest - 1)
        output: Array = paged_attention(
            rows,
            key.reshape(batch * longest, 1, key_heads, size),
            value.reshape(batch * longest, 1, key_heads, value.shape[-1]),
            tables.astype(jnp.int32),
            jnp.maximum(end - start, 0),
            scale=softmax_scale,
            window=None if sliding_window is None else (left, right),
            softcap=logits_soft_cap,
            sinks=sinks,
        )
        return output

    tensors = (rows, key, value, sequence_start, sequence_end, sinks)
    output: Array = run(name, attend, tensors, cfg)
    return output if is_flat else output[:, None]


def _interleaved_attention(
    queries: Array,
    pages: Array,
    tables: Array,
    lengths: Array,
    starts: Array,
    sinks: Array | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Array:
    """Over pages [pages, page_size, key heads, 2 * size] whose rows are a key and its value. XLA has no slice without a
    copy, so the kernel takes whole rows: queries have zeros behind them, and of the output the values' part counts."""
    size = queries.shape[-1]
    wide = jnp.concatenate([queries, jnp.zeros_like(queries)], -1)
    scale = size**-0.5 if scale is None else scale
    output: Array = paged_attention(
        wide,
        pages,
        pages,
        tables.astype(jnp.int32),
        lengths.astype(jnp.int32),
        cu_seqlens_q=starts.astype(jnp.int32),
        scale=scale,
        window=None if window is None else (window - 1, 0),
        softcap=softcap,
        sinks=sinks,
    )
    return output[..., size:]


def _only(count: Array, lengths: Array, starts: Array) -> tuple[Array, Array]:
    """Lengths and starts of the first `count` sequences; the others have no queries and no keys."""
    number = jnp.arange(lengths.shape[0])
    last = starts[jnp.clip(count, 0, lengths.shape[0])]
    return jnp.where(number < count, lengths, 0), jnp.minimum(starts, last)


@registered
def ragged_page_attention(
    queries: Array,
    kv_pages: Array,
    context_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    num_seqs: Array,
    softmax_aux: Array | None = None,
    /,
    *,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    compute_dtype: Any = None,
    optimized: bool = False,
    sliding_window: int | None = None,
    mask_value: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    platform: Any = None,
    cfg: Any = None,
) -> Array:
    """Queries of many sequences behind each other, [tokens, heads, size], over pages [pages, page_size, 2 * key heads,
    size] of keys and values in turns, which hold the new ones already.

    num_seqs: int32 [1], how many sequences count. Sums are fp32 whatever compute_dtype asks for; block sizes follow
    from shapes, so the options about them, optimized and mask_value change nothing.
    """
    name = "ragged_page_attention"
    checked(name, platform, cfg)
    del compute_dtype, optimized, mask_value, num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    pages, page_size, both, size = kv_pages.shape
    sinks = _sinks(name, softmax_aux, queries.shape[1])

    def attend(q: Array, kv: Array, lengths: Array, tables: Array, starts: Array, count: Array, aux: Any) -> Array:
        lengths, starts = _only(count.reshape(-1)[0], lengths, starts)
        rows = kv.reshape(pages, page_size, both // 2, 2 * size)
        options = (softmax_scale, sliding_window, logits_soft_cap)
        return _interleaved_attention(q, rows, tables, lengths, starts, aux, *options)

    tensors = (queries, kv_pages, context_lens, block_tables, query_start_loc, num_seqs, sinks)
    return run(name, attend, tensors, cfg)  # type: ignore[no-any-return]


@registered
def ragged_page_attention_v3(
    queries: Array,
    keys: Array,
    values: Array,
    kv_cache: Array,
    kv_lens: Array,
    block_tables: Array,
    query_start_loc: Array,
    distribution: Array,
    /,
    *,
    softmax_scale: float = 1.0,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    chunk_prefill_size: int | None = None,
    vmem_limit_bytes: int | None = None,
    platform: Any = None,
    cfg: Any = None,
) -> tuple[Array, Array]:
    """Writes new keys and values into the cache, then attends: (output, the cache). A donated one is written in place.

    kv_cache: [pages, page_size, ceil(2 * key heads / packing), packing, size], rows of keys and values in turns; size
    is that of the queries (caches that pad it to 128 are not taken, nor is the variant for 64). block_tables: flat,
    [sequences * pages of a sequence]. distribution: int32 [3], of which the last is the number of sequences. A query is
    not rounded to FP8: q_scale is refused.
    """
    name = "ragged_page_attention_v3"
    checked(name, platform, cfg, q_scale=q_scale)
    del chunk_prefill_size, vmem_limit_bytes
    tokens, key_heads, size = keys.shape
    pages, page_size = kv_cache.shape[:2]
    rows = kv_cache.shape[2] * kv_cache.shape[3]
    if rows != 2 * key_heads or kv_cache.shape[4] != size:
        raise ValueError(
            f"{name}: kv_cache has shape {kv_cache.shape}, keys have {keys.shape}; its dimensions 2 and 3 must hold "
            f"{2 * key_heads} rows of {size}"
        )
    sequences = kv_lens.shape[0]

    def attend(q: Array, k: Array, v: Array, cache: Array, lens: Array, table: Array, begin: Array, d: Array) -> Any:
        lens, begin = _only(d.reshape(-1)[2], lens.astype(jnp.int32), begin.astype(jnp.int32))
        tables = table.reshape(sequences, -1).astype(jnp.int32)
        token = jnp.arange(tokens, dtype=jnp.int32)
        owner = jnp.clip(jnp.searchsorted(begin, token, side="right") - 1, 0, sequences - 1)
        position = lens[owner] - (begin[owner + 1] - begin[owner]) + token - begin[owner]
        page = tables[owner, jnp.clip(position // page_size, 0, tables.shape[1] - 1)]
        is_kept = (token < begin[-1]) & (position >= 0) & (page >= 0)
        new = jnp.stack([k, v], 2).reshape(tokens, *kv_cache.shape[2:]).astype(cache.dtype)
        # XLA's own scatter: it writes a donated cache in place in this shape, where a call of append_kv would want
        # another one, for which XLA copies. As bits: on CPUs XLA widens the whole cache to scatter bf16.
        bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[cache.dtype.itemsize]
        cast = jax.lax.bitcast_convert_type
        places = jnp.where(is_kept, page, pages), position % page_size
        written = cast(cast(cache, bits).at[places].set(cast(new, bits), mode="drop"), cache.dtype)
        scale = softmax_scale * (1.0 if k_scale is None else k_scale)
        pairs = written.reshape(pages, page_size, key_heads, 2 * size)
        out = _interleaved_attention(q, pairs, tables, lens, begin, None, scale, sliding_window, logits_soft_cap)
        return out if v_scale is None else (out * v_scale).astype(out.dtype), written

    tensors = (queries, keys, values, kv_cache, kv_lens, block_tables, query_start_loc, distribution)
    return run(name, attend, tensors, cfg)  # type: ignore[no-any-return]
