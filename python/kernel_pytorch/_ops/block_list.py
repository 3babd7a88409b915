"""Lists of the blocks that sparse attention computes, made on the device that reads them. A choice has no gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from .._shape_rules import block_pair, longest, selection_blocks
from .mean_pooling import chunk_mean_pool, mean_pool
from .support.declare import without_gradient


@dataclasses.dataclass(frozen=True)
class BlockLists:
    """Which blocks of scores exist: what `attention(block_mask=...)` takes, with the attributes of torch's BlockMask.

    Counts are int32 [batch, heads, rows], indices [batch, heads, rows, columns], ascending, zeros behind the count;
    batch and heads may be 1 for all. The q_ ones, transposed, are what gradients need; without them they are None. Of
    packed sequences batch counts them, rows and columns are the longest's, and blocks count from where each begins.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: Any = None

    def block_map(self) -> Tensor:
        """bool [batch, heads, rows, columns]: True where a block is listed, partial or full."""
        kept = _listed(self.kv_num_blocks, self.kv_indices)
        if self.full_kv_num_blocks is not None and self.full_kv_indices is not None:
            kept = kept | _listed(self.full_kv_num_blocks, self.full_kv_indices)
        return kept

    def counts(self) -> Tensor:
        """How many blocks each row computes: [batch, heads, rows]."""
        if self.full_kv_num_blocks is None:
            return self.kv_num_blocks
        return self.kv_num_blocks + self.full_kv_num_blocks


def block_lists(block_map: Tensor, block_size: int | tuple[int, int] = 128, *, gradients: bool = True) -> BlockLists:
    """The lists of a map of blocks, both directions in one pass over it.

    Args:
        block_map: [batch, heads, rows, columns], batch and heads 1 where shared: bool, or int8 with 0 for an empty
            block, 1 for one whose conditions must be asked, 2 for a full one, where mask_mod holds everywhere.
        block_size: of queries and of keys.
        gradients: whether to make the transposed lists, which backward reads.
    """
    size = block_pair("block_lists", block_size)
    full = block_map.dtype is not torch.bool
    rows, blocks, columns, transposed, full_rows, full_blocks, full_columns, full_transposed = _block_list(
        block_map.detach(), True, gradients, full
    )
    return BlockLists(
        kv_num_blocks=rows,
        kv_indices=blocks,
        q_num_blocks=columns if gradients else None,
        q_indices=transposed if gradients else None,
        full_kv_num_blocks=full_rows if full else None,
        full_kv_indices=full_blocks if full else None,
        full_q_num_blocks=full_columns if full and gradients else None,
        full_q_indices=full_transposed if full and gradients else None,
        BLOCK_SIZE=size,
    )


def select_blocks(
    query: Tensor,
    key: Tensor,
    *,
    sparsity: float = 0.9,
    block_size: int | tuple[int, int] = 128,
    causal: bool = False,
    causal_offset: int | None = None,
    layout: str = "bhsd",
    key_parts: int = 4,
    sinks: int = 1,
    local: int = 1,
    threshold: float | None = None,
    gradients: bool = True,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> BlockLists:
    """The blocks in which queries and keys agree best: `sparsity` of those that causality leaves are left out.

    The mean query of a row of blocks meets the means of `key_parts` parts of each block of keys; the best of them is
    the block's score, without the scale of the scores. A row keeps its diagonal, `local` blocks before it (without
    causality on both sides), the first `sinks`, and of the others those with the highest scores, none below
    `threshold`, up to the same number in every row, so that short rows lose nothing.

    Args:
        query, key: [batch, heads, sequence, size], or [batch, sequence, heads, size] with layout="bshd"; any strides.
            query may have a multiple of key's heads. Their gradients do not flow here.
        causal, causal_offset: as attention's; pass attention the same.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences, [tokens, heads, size], as
            attention's (cu_seqlens_k None: the query's). The blocks of each are chosen as if it were alone.
    """
    query_block, key_block = selection_blocks(block_size, layout, key_parts)
    lengths: tuple[Tensor | None, Tensor | None] = (None, None)
    if cu_seqlens_q is None:
        query, key = (x.detach() if layout == "bshd" else x.detach().transpose(1, 2) for x in (query, key))
        queries, keys = query.shape[1], key.shape[1]
        rows, parts = chunk_mean_pool(query, query_block), chunk_mean_pool(key, key_block // key_parts)
    else:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        queries, keys = (
            longest("select_blocks", query.shape, max_seqlen_q),
            longest("select_blocks", key.shape, max_seqlen_k),
        )
        rows = pool_packed(query.detach(), cu_seqlens_q, queries, query_block)
        parts = pool_packed(key.detach(), cu_seqlens_k, keys, key_block // key_parts)
        lengths = sequence_lengths(cu_seqlens_q), sequence_lengths(cu_seqlens_k)
    tensors = (rows.transpose(1, 2), parts.transpose(1, 2), None, *lengths)
    sizes = (queries, keys, query_block, key_block, key_parts)
    return _select(tensors, sizes, causal, causal_offset, sparsity, threshold, sinks, local, gradients)


def select_by_scores(
    scores: Tensor,
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
    query_lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> BlockLists:
    """select_blocks with the caller's scores, [batch, heads, rows, columns] of blocks; NaN is below all others.

    query_lengths, key_lengths: int32 [batch], where entries of the batch (packed sequences) are shorter than `queries`
    and `keys`; without key_lengths the query's are used.
    """
    query_block, key_block = block_pair("select_by_scores", block_size)
    key_lengths = query_lengths if key_lengths is None else key_lengths
    tensors = (None, None, scores.detach().float(), query_lengths, key_lengths)
    sizes = (queries, keys, query_block, key_block, 1)
    return _select(tensors, sizes, causal, causal_offset, sparsity, threshold, sinks, local, gradients)


def _select(
    tensors: tuple[Tensor | None, ...],
    sizes: tuple[int, ...],
    causal: bool,
    causal_offset: int | None,
    sparsity: float,
    threshold: float | None,
    sinks: int,
    local: int,
    gradients: bool,
) -> BlockLists:
    lowest = -math.inf if threshold is None else threshold
    choice = (causal, causal_offset, sparsity, lowest, sinks, local, gradients)
    counts, blocks, block_map = _block_select(*tensors, *sizes, *choice)
    columns = transposed = None
    if gradients:
        _, _, columns, transposed, *_ = _block_list(block_map, False, True, False)
    return BlockLists(counts, blocks, columns, transposed, None, None, None, None, (sizes[2], sizes[3]))


def sequence_lengths(cu_seqlens: Tensor) -> Tensor:
    return cu_seqlens.diff().to(torch.int32)


def pool_packed(x: Tensor, cu_seqlens: Tensor, tokens: int, chunk: int) -> Tensor:
    """chunk_mean_pool of each packed sequence, [sequences, chunks of the longest, heads, size]."""
    begins, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    chunks = -(-tokens // chunk)
    steps = torch.arange(chunks, device=cu_seqlens.device, dtype=cu_seqlens.dtype) * chunk
    offsets = torch.cat([torch.minimum(begins + steps, ends).flatten(), cu_seqlens[-1:]])
    means = mean_pool(x, offsets)
    return means.view(begins.shape[0], chunks, *means.shape[1:])


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """Entries behind a count are 0, which may be listed too: they are added one place further, which is cut off."""
    columns = indices.shape[-1]
    is_real = torch.arange(columns, device=indices.device) < counts[..., None]
    kept = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    kept.scatter_(-1, torch.where(is_real, indices, columns).long(), torch.ones_like(is_real))
    return kept[..., :columns]


_block_list = without_gradient("block_list")
_block_select = without_gradient("block_select")
