"""The keys that a query of DeepSeek's sparse attention reads."""

from __future__ import annotations

import torch
from torch import Tensor

from .support.declare import without_gradient


def lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    top_k: int = 2048,
    key_scale: Tensor | None = None,
    key_lengths: Tensor | None = None,
    block_tables: Tensor | None = None,
) -> Tensor:
    """The top_k keys of each query by sum over heads of weights * relu(query key^T), up to its own.

    Of equal scores the smaller key is taken; no scores are stored. Without gradients.

    Args:
        query: [batch, queries, heads, size]; fp32, bf16, fp16 or e4m3. The last query stands at the last key.
        key: [batch, keys, size], of the query's type, one for all heads; with block_tables [pages, page_size, size].
        weights: [batch, queries, heads]; a scale of the query is a factor of them.
        top_k: how many keys at most.
        key_scale: fp32 [batch, keys] (or [pages, page_size]), of keys in e4m3.
        key_lengths: int32 [batch], keys of each entry; None: all.
        block_tables: int32 [batch, pages of an entry]: keys lie in pages of a cache, and results are its slots (page *
            page_size + row), as `mla_decode` takes them; needs key_lengths.

    Returns:
        int32 [batch, queries, top_k], in the order of the keys, -1 behind the last. `native_sparse_attention` takes it
        as block_indices=indices[:, :, None] with block_size=1, `mla_decode` takes it as indices[:, 0] or flattened.
    """
    return _choose(query, key, weights.float(), _float(key_scale), _int(key_lengths), _int(block_tables), top_k)  # type: ignore[no-any-return]


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def _int(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int32)


_choose = without_gradient("lightning_indexer")
