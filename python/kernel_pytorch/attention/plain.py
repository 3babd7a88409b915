"""functional.attention in plain torch operations, with the whole matrix of scores: for checks, and for derivatives of
every order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor

from .._ops.support.masks import Sizes, join_masks
from ..functional import BlockLists


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout_p: float = 0.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    attention_mask: Tensor | None = None,
    block_mask: BlockLists | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    captured: Sequence[Tensor] = (),
) -> Tensor:
    """query [batch, queries, heads, size], key and value alike (with a divisor of the heads) -> the output.

    The options are those that attention layers use, with functional.attention's meaning.
    """
    batch, queries, heads, size = query.shape
    keys = key.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask, bias = join_masks("attention", mask, bias, attention_mask, Sizes(batch, heads, queries, keys))
    if bias is not None:
        scores = scores + bias
    b, h, i, j = _places(scores)
    offset: Any = keys - queries
    if key_lengths is not None:  # as functional.attention aligns them
        offset = (key_lengths.view(-1, 1, 1, 1) - queries).clamp(min=min(0, keys - queries))
    distance = j - (i + offset)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(scores)[:, None, None] * distance.abs()
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j, *captured)
    kept = j < (keys if key_lengths is None else key_lengths.view(-1, 1, 1, 1))
    if causal:
        kept = kept & (distance <= 0)
    left, right = window or (-1, -1)
    kept = kept & (distance >= -left) if left >= 0 else kept
    kept = kept & (distance <= right) if right >= 0 else kept
    if mask_mod is not None:
        kept = kept & mask_mod(b, h, i, j, *captured)
    if mask is not None:
        kept = kept & mask
    if block_mask is not None:
        kept = kept & _expanded(block_mask, queries, keys)
    scores = scores.masked_fill(~kept, -math.inf)
    sees_any = (scores > -math.inf).any(-1, keepdim=True)
    weights = torch.where(sees_any, scores, 0.0).softmax(-1) * sees_any  # a row that sees nothing is 0
    return (torch_functional.dropout(weights, dropout_p) @ v).transpose(1, 2)


def _places(scores: Tensor) -> tuple[Tensor, ...]:
    """Batch, head, query and key of each score, each along its own dimension."""
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    return tuple(
        torch.arange(size, device=scores.device).view(shape) for size, shape in zip(scores.shape, shapes, strict=True)
    )


def _expanded(lists: BlockLists, queries: int, keys: int) -> Tensor:
    query_block, key_block = lists.BLOCK_SIZE
    wide = lists.block_map().repeat_interleave(query_block, -2).repeat_interleave(key_block, -1)
    return wide[..., :queries, :keys]
