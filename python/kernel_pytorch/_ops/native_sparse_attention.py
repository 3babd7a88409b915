"""Native sparse attention: forms of gates and of lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .support.casting import autocast
from .support.declare import differentiable

Gate = Tensor | float | None


def native_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gates: Tensor | Sequence[Gate],
    block_size: int = 64,
    blocks: int = 16,
    window: int = 512,
    form: str = "paper",
    block_indices: Tensor | None = None,
    compressed_key: Tensor | None = None,
    compressed_value: Tensor | None = None,
    compress_block: int | None = None,
    compress_stride: int | None = None,
    first_blocks: int | None = None,
    local_blocks: int | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    return_indices: bool = False,
) -> Any:
    """Causal attention to means of blocks of keys, to the few blocks that these means choose, and to a window.

    The three branches are attentions of their own, which the gates add. The heads that read one key head choose the
    same blocks: those whose compressed probabilities, summed over the heads, are highest; of equal ones the smaller.
    What is missing early in a sequence is skipped. The last query stands at the last key.

    Args:
        query: [batch, queries, heads, size]; fp32, bf16, fp16 and fp64. Under autocast query, key, value and compressed
            ones are cast to its type.
        key: [batch, keys, key_heads, size]; the heads of query are a multiple of key_heads.
        value: [batch, keys, key_heads, value_size].
        gates: of the compressed, the selected and the window branch: [batch, queries, heads, 3], or three of [batch,
            queries, heads], a number, or None, which leaves the branch out; the query's type or fp32.
        block_size: keys of a block that can be chosen.
        blocks: how many blocks a query reads, those that it always reads included.
        window: keys of the window, the query's own included.
        form: "paper" (means of 32 keys, 16 apart; the first block and the two latest are always read) or "ejkernel"
            (means of block_size keys; the query's own block is always read). The options below change its numbers.
        block_indices: int32 or int64 [batch, queries, key_heads, any]: blocks to read instead of choosing them, in any
            order. Those below 0 or behind the query are skipped; one that is named twice counts twice.
        compressed_key: [batch, compressed, key_heads, size], instead of means, one for each whole block of
            compress_block keys.
        compressed_value: [batch, compressed, key_heads, value_size], with compressed_key.
        compress_block: keys of a mean.
        compress_stride: keys from one mean to the next; divides compress_block and block_size.
        first_blocks: how many blocks from the first on are always read.
        local_blocks: how many blocks up to the query's own are always read, at least 1.
        scale: of the scores; None: 1 / sqrt(size).
        cu_seqlens: [sequences + 1], int32 or int64, on the device: the batch is 1, and sequence i is tokens
            cu_seqlens[i] up to cu_seqlens[i + 1].
        return_indices: return (output, blocks): int32 [batch, queries, key_heads, blocks], ascending, -1 behind the
            last; all -1 where block_indices are given.

    Returns:
        [batch, queries, heads, value_size], contiguous. Gradients of query, key, value, compressed ones and gates; the
        choice has none.
    """
    query, key, value = autocast(query, key, value)
    if compressed_key is not None and compressed_value is not None:
        compressed_key, compressed_value = autocast(compressed_key, compressed_value)
    by_branch = _branches(gates, query)
    indices = None if block_indices is None else block_indices.to(torch.int32)
    output, selected = _forward(
        query,
        key,
        value,
        compressed_key,
        compressed_value,
        *by_branch,
        indices,
        cu_seqlens,
        scale,
        form,
        block_size,
        blocks if return_indices or indices is None else 0,
        window,
        compress_block,
        compress_stride,
        first_blocks,
        local_blocks,
    )
    return (output, selected) if return_indices else output


def _branches(gates: Tensor | Sequence[Gate], query: Tensor) -> list[Tensor | None]:
    if isinstance(gates, Tensor):
        if gates.dim() != 4 or gates.shape[-1] != 3:
            raise RuntimeError(
                f"native_sparse_attention: gates have shape {list(gates.shape)}; "
                "they must be [batch, queries, heads, 3], or three tensors"
            )
        return list(gates.unbind(-1))
    if len(gates) != 3:
        raise RuntimeError(
            f"native_sparse_attention: {len(gates)} gates are given; there are three: "
            "of the compressed, the selected and the window branch (None leaves one out)"
        )
    return [
        torch.full(query.shape[:3], gate, dtype=query.dtype, device=query.device)
        if isinstance(gate, int | float)
        else gate
        for gate in gates
    ]


_forward = differentiable("native_sparse_attention")
