"""Attention of requests that begin alike: over the common keys once for all of them, over each one's own, merged."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..functional import merge_attention, paged_attention


def shared_prefix_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    prefix_table: Tensor,
    prefix_length: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """`paged_attention` of requests whose first keys are the same pages, each of which is read once for all.

    The common keys are one request with the tokens of all; without windows and ALiBi, which count positions, it may see
    all of them.

    Args:
        query: [tokens, heads, size].
        key_cache, value_cache: as in `paged_attention`.
        prefix_table: int32 [1, pages], the pages that all requests begin with.
        prefix_length: int32 [1], keys in them.
        block_tables: int32 [requests, pages of a request], the pages of each request's own keys.
        seq_lens: int32 [requests], own keys of each request, its new tokens included.
        cu_seqlens_q, max_seqlen_q, scale, softcap: as in `paged_attention`.
        sinks: fp32 [heads]; they count once, with the own keys.
        return_lse: also fp32 [heads, tokens].
    """
    both: dict[str, Any] = {"scale": scale, "softcap": softcap, "return_lse": True}
    common = paged_attention(query, key_cache, value_cache, prefix_table, prefix_length, causal=False, **both)
    own = paged_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        sinks=sinks,
        **both,
    )
    return merge_attention(*common, *own, return_lse=return_lse)
