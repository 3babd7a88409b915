"""Block masks: which tiles of attention's scores exist. Kernels skip the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._shape_rules import block_pair, longest, selection_blocks
from .._call import Array, call
from .._mods import Mod
from ..tables import chunk_mean_pool, mean_pool


class BlockMask(NamedTuple):
    """Lists of tiles, as `block_mask` and `create_block_mask` make them."""

    lists: tuple[Array, ...]
    block_size: tuple[int, int]
    mask_mod: Mod | None = None


jax.tree_util.register_pytree_node(
    BlockMask,
    lambda mask: (mask.lists, (mask.block_size, mask.mask_mod)),
    lambda static, lists: BlockMask(tuple(lists), *static),
)


def block_mask(blocks: Array, block_size: int | tuple[int, int] = 128, mask_mod: Mod | None = None) -> BlockMask:
    """The lists of a map of tiles.

    Args:
        blocks: [batch, heads, rows, columns], batch and heads 1 where shared: bool, or int8 with 0 for an empty tile, 1
            for one where mask_mod is asked, 2 for a full one, where it holds everywhere.
        block_size: of queries and of keys.
        mask_mod: (batch, head, query, key) -> whether a score in a tile of 1 is kept.
    """
    blocks = jnp.asarray(blocks)
    if blocks.dtype != jnp.bool_:
        blocks = blocks.astype(jnp.int8)
    size = block_pair("block_mask", block_size)
    has_full = blocks.dtype != jnp.bool_
    made = call("block_list", {"map": blocks}, wanted=("rows", "columns", *(("full",) if has_full else ())))
    names = [f"{line}_{what}" for line in ("row", "column") for what in ("counts", "blocks")]
    if has_full:
        names += [f"full_{name}" for name in names]
    return BlockMask(tuple(made[name] for name in names), size, mask_mod)


def block_lists(block_map: Array, block_size: int | tuple[int, int] = 128, *, gradients: bool = True) -> BlockMask:
    """`block_mask` under the name of kernel_pytorch.functional; `gradients`: whether to make the lists of backward."""
    made = block_mask(block_map, block_size)
    return made if gradients else made._replace(lists=made.lists[:2])


def select_blocks(
    query: Array,
    key: Array,
    *,
    sparsity: float = 0.9,
    block_size: int | tuple[int, int] = 128,
    causal: bool = False,
    causal_offset: int | None = None,
    layout: str = "bshd",
    key_parts: int = 4,
    sinks: int = 1,
    local: int = 1,
    threshold: float | None = None,
    gradients: bool = True,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> BlockMask:
    """The blocks in which queries and keys agree best: `sparsity` of those that causality leaves are left out.

    The mean query of a row of blocks meets the means of `key_parts` parts of each block of keys; the best of them is
    the block's score. A row keeps its diagonal, `local` blocks before it (without causality on both sides), the first
    `sinks`, and of the others those with the highest scores, none below `threshold`, up to the same number per row.

    Args:
        query, key: as attention's, of either layout. No gradient flows here.
        causal, causal_offset: as attention's; pass attention the same.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences, [tokens, heads, size], as
            attention's (cu_seqlens_k None: the query's). The blocks of each are chosen as if it were alone.
    """
    query_block, key_block = selection_blocks(block_size, layout, key_parts)
    query, key = (jax.lax.stop_gradient(jnp.asarray(one)) for one in (query, key))
    lengths: dict[str, Array] = {}
    if cu_seqlens_q is None:
        if layout == "bhsd":
            query, key = jnp.swapaxes(query, 1, 2), jnp.swapaxes(key, 1, 2)
        queries, keys = query.shape[1], key.shape[1]
        rows, parts = chunk_mean_pool(query, query_block), chunk_mean_pool(key, key_block // key_parts)
    else:
        begins_q = jnp.asarray(cu_seqlens_q, jnp.int32)
        begins_k = begins_q if cu_seqlens_k is None else jnp.asarray(cu_seqlens_k, jnp.int32)
        queries = longest("select_blocks", query.shape, max_seqlen_q)
        keys = longest("select_blocks", key.shape, max_seqlen_k)
        rows = _pooled(query, begins_q, queries, query_block)
        parts = _pooled(key, begins_k, keys, key_block // key_parts)
        lengths = {"query_lengths": jnp.diff(begins_q), "key_lengths": jnp.diff(begins_k)}
    tensors = {"query": jnp.swapaxes(rows, 1, 2), "key": jnp.swapaxes(parts, 1, 2), **lengths}
    sizes = (queries, keys, query_block, key_block, key_parts)
    return _selected(tensors, sizes, causal, causal_offset, sparsity, threshold, sinks, local, gradients)


def select_by_scores(
    scores: Array,
    queries: int,
    keys: int,
    *,
    sparsity: float = 0.9,
    block_size: int | tuple[int, int] = 128,
    causal: bool = False,
    causal_offset: int | None = None,
    sinks: int = 1,
    local: int = 1,
    threshold: float | None = None,
    gradients: bool = True,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
) -> BlockMask:
    """select_blocks with the caller's scores, [batch, heads, rows, columns] of blocks; NaN is below all others.

    query_lengths, key_lengths: [batch], where entries of the batch are shorter than `queries` and `keys`; without
    key_lengths the query's are used.
    """
    key_lengths = query_lengths if key_lengths is None else key_lengths
    tensors = {
        "scores": jax.lax.stop_gradient(jnp.asarray(scores, jnp.float32)),
        "query_lengths": None if query_lengths is None else jnp.asarray(query_lengths, jnp.int32),
        "key_lengths": None if key_lengths is None else jnp.asarray(key_lengths, jnp.int32),
    }
    sizes = (queries, keys, *block_pair("select_by_scores", block_size), 1)
    return _selected(tensors, sizes, causal, causal_offset, sparsity, threshold, sinks, local, gradients)


def _pooled(x: Array, begins: Array, tokens: int, chunk: int) -> Array:
    """chunk_mean_pool of each packed sequence, [sequences, chunks of the longest, heads, size]."""
    chunks = -(-tokens // chunk)
    firsts = jnp.minimum(begins[:-1, None] + jnp.arange(chunks) * chunk, begins[1:, None])
    means = mean_pool(x, jnp.concatenate([firsts.ravel(), begins[-1:]]))
    return means.reshape(begins.shape[0] - 1, chunks, *means.shape[1:])


def _selected(
    tensors: Any,
    sizes: tuple[int, ...],
    causal: bool,
    causal_offset: int | None,
    sparsity: float,
    threshold: float | None,
    sinks: int,
    local: int,
    gradients: bool,
) -> BlockMask:
    names = ("queries", "keys", "query_block", "key_block", "key_parts")
    options = {
        **dict(zip(names, sizes)),
        "causal": bool(causal),
        "causal_offset": causal_offset,
        "sparsity": float(sparsity),
        "threshold": None if threshold is None else float(threshold),
        "sinks": int(sinks),
        "local": int(local),
    }
    made = call("block_select", tensors, options, wanted=("with_map",) if gradients else ())
    lists: tuple[Array, ...] = (made["counts"], made["blocks"])
    if gradients:
        across = call("block_list", {"map": made["map"]}, wanted=("columns",))
        lists += (across["column_counts"], across["column_blocks"])
    return BlockMask(lists, (sizes[2], sizes[3]))


def create_block_mask(
    mask_mod: Mod,
    batch: int | None,
    heads: int | None,
    queries: int,
    keys: int,
    block_size: int | tuple[int, int] = 128,
) -> BlockMask:
    """The block mask of a mask function, found by asking it for every pair of positions.

    Args:
        mask_mod: (batch, head, query, key) -> whether the score is kept.
        batch, heads: None where the function does not depend on it.
    """
    size = block_pair("block_mask", block_size)
    asked: Any = mask_mod
    for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        asked = jax.vmap(asked, axes)
    kept = asked(*(jnp.arange(count) for count in (batch or 1, heads or 1, queries, keys)))
    rows, columns = -(-queries // size[0]), -(-keys // size[1])
    padding = [(0, 0), (0, 0), (0, rows * size[0] - queries), (0, columns * size[1] - keys)]

    def tiles(fill: bool) -> Any:
        whole = jnp.pad(kept, padding, constant_values=fill)
        return whole.reshape(*whole.shape[:2], rows, size[0], columns, size[1])

    some, every = tiles(False).any((3, 5)), tiles(True).all((3, 5))
    return block_mask(jnp.where(every, 2, some).astype(jnp.int8), size, mask_mod)


def masked(score_mod: Mod | None, mask_mod: Mod) -> Mod:
    """A score function that is -inf where the mask function does not keep: a mask that holds in full tiles too."""

    def changed(score: Any, batch: Any, head: Any, query: Any, key: Any, *captured: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, batch, head, query, key, *captured)
        return jnp.where(mask_mod(batch, head, query, key, *captured), score, -jnp.inf)

    return changed
