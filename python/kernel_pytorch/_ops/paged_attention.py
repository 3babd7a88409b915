"""Attention over a cache of pages, writing such a cache, and merging attention over parts of the keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._shape_rules import window_sides
from .support.declare import without_gradient

_LAYOUTS = ("nhd", "hnd")


def _cache(name: str, op: str, cache: Tensor, layout: str) -> Tensor:
    if layout not in _LAYOUTS:
        raise ValueError(f'{op}: cache_layout is "{layout}"; it is "nhd" or "hnd"')
    if cache.dim() != 4:
        raise ValueError(f"{op}: {name} has shape {list(cache.shape)}; it must have four dimensions, one of them pages")
    return cache if layout == "nhd" else cache.transpose(1, 2)


def _scale(scale: Tensor | float | None, cache: Tensor, layout: str) -> Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, Tensor):
        return torch.full((1,), scale, dtype=torch.float32, device=cache.device)
    return scale.transpose(1, 2) if scale.dim() == 3 and layout == "hnd" else scale


def _rows(table: Tensor | None) -> Tensor | None:
    """Hugging Face's tables have a batch of one in front."""
    return table[0] if table is not None and table.dim() == 3 and table.shape[0] == 1 else table


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    plan: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Tensor | None = None,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
    batch_invariant: bool = False,
    cache_layout: str = "nhd",
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of new tokens over keys and values in pages; decoding, drafts and chunks of prompts in one call.

    It allocates its results alone, waits for nothing and reads lengths on the device: one CUDA graph serves all
    lengths. Without gradients: training uses `attention`.

    Args:
        query: [tokens, heads, size]; heads are a multiple of the caches' heads.
        key_cache, value_cache: [pages, page_size, key_heads, size], or [pages, key_heads, page_size, size] with
            cache_layout="hnd"; any strides with a dense last dimension. The query's type, float8_e4m3fn or int8.
        block_tables: int32 [requests, pages of a request]: the page of each page_size keys in turn; -1 is none.
        seq_lens: int32 [requests]: keys of each request, its new tokens included.
        cu_seqlens_q: int32 [requests + 1]: where the new tokens of each request begin in query; None: all have as many.
        max_seqlen_q: no request has more new tokens; None: all tokens. Small values let decoding use small tiles.
        plan: of `plan_decode` for the same lengths, heads and windows. The CPU cuts requests as it says and refuses
            one that was made for others; a GPU's kernels share out keys inside their launches and do not read it.
        causal: a token sees the keys up to its own position, seq_len - new tokens + its number among them.
        scale: of the scores; None is size ** -0.5.
        window: (left, right), keeps -left <= key - position <= right, -1 is unbounded; a number is both.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: fp32 [heads], logits in the denominator alone.
        alibi_slopes: fp32 [heads], subtracts slope * |key - position|.
        mask: bool [requests, n, n] for drafts that form a tree: whether new token i sees new token j.
        key_scale, value_scale: of caches in few bits: a number, [key_heads], or [pages, page_size, key_heads].
        batch_invariant: the bits of a request do not depend on the others in the batch; on the CPU a row's bits do not
            on how many queries its request has either, for which prompts take longer.
        out: where the result is written, [tokens, heads, value size].
        cache_layout: "nhd" (rows of a page before heads) or "hnd".
        return_lse: also the logarithms of the sums of exponentials, fp32 [heads, tokens], natural.
    """
    left, right = window_sides("paged_attention", window)
    arguments = (
        query,
        _cache("key_cache", "paged_attention", key_cache, cache_layout),
        _cache("value_cache", "paged_attention", value_cache, cache_layout),
        block_tables,
        seq_lens,
        cu_seqlens_q,
        plan,
        mask,
        sinks,
        alibi_slopes,
        _scale(key_scale, key_cache, cache_layout),
        _scale(value_scale, value_cache, cache_layout),
        causal,
        scale,
        0.0 if softcap is None else softcap,
        left,
        right,
        0 if max_seqlen_q is None else max_seqlen_q,
        batch_invariant,
    )
    if out is None:
        output, lse = _attend(*arguments, return_lse)
    else:
        output, lse = out, None
        if return_lse:
            lse = torch.empty(query.shape[1], query.shape[0], dtype=torch.float32, device=query.device)
        _attend_into(*arguments, output, lse)
    return (output, lse) if return_lse else output


PLAN_HEADER = 8  # numbers of a plan before its requests' (kernel_pytorch/ops/paged_attention/plan/plan_cuda.h)
_POLICIES = ("fill", "invariant")


def plan_decode(
    seq_lens: Tensor,
    *,
    heads: int,
    key_heads: int,
    queries: int = 1,
    cu_seqlens_q: Tensor | None = None,
    causal: bool = True,
    window: int | tuple[int, int] | None = None,
    policy: str = "fill",
    max_keys: int | None = None,
    max_requests: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """How the keys of a step's requests are shared out: a plan for `paged_attention` of all layers of this step.

    It is computed where the lengths are, waits for nothing, and its size depends on max_requests alone, so that it can
    be made inside a CUDA graph. Numbers: 8 about the plan, then each request's first unit, then how many there are.

    Args:
        seq_lens: int32 [requests], as in `paged_attention`.
        heads, key_heads: of queries and of the caches.
        queries: new tokens of each request, without cu_seqlens_q.
        cu_seqlens_q: int32 [requests + 1], as in `paged_attention`.
        causal, window: as in `paged_attention`.
        policy: "fill" shares the work of the batch out among all workers; "invariant" cuts every request by itself, so
            that the bits of its result do not depend on the others.
        max_keys: what a request's table can name, to which its length is clamped.
        max_requests: of the largest batch that the plan's memory will be used for; None: of this one.
        out: an older plan, written in place.

    Returns:
        int32 [9 + max_requests].
    """
    if policy not in _POLICIES:
        raise ValueError(f'plan_decode: policy is "{policy}"; it is "fill" or "invariant"')
    left, right = window_sides("plan_decode", window)
    requests = seq_lens.shape[0]
    capacity = PLAN_HEADER + 1 + (requests if max_requests is None else max_requests)
    if out is not None:
        capacity = out.shape[0]
    keys = 0 if max_keys is None else max_keys
    numbers = (heads, key_heads, queries, causal, left, right, policy == "invariant", keys, 0, 0, 0, capacity)
    if out is None:
        return _plan(seq_lens, cu_seqlens_q, *numbers)  # type: ignore[no-any-return]
    _plan_into(seq_lens, cu_seqlens_q, *numbers, out)
    return out


def mla_decode(
    query: Tensor,
    cache: Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor],
    block_tables: Tensor | None = None,
    seq_lens: Tensor | None = None,
    *,
    head_size_v: int = 512,
    indices: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
) -> Any:
    """Attention of multi-head latent attention over its cache of latent rows, all heads sharing one key.

    A key is a latent row followed by its rope columns; the latent row is the value too. `query` is absorbed: its first
    head_size_v columns are the query times the up-projection of keys. Without gradients.

    Args:
        query: [tokens, heads, head_size_v + rope columns], 576 for DeepSeek's layers.
        cache: [pages, page_size, 576] of the query's type; or uint8 [pages, page_size, 656]: 512 codes in e4m3, a float
            scale for each 128 of them, 64 rope columns of the query's type; or (latent, rope) or (codes, rope, scale).
        block_tables, seq_lens: int32 [requests, pages of a request] and [requests], as in `paged_attention`.
        head_size_v: columns of the latent row.
        indices: int32 [tokens, top]: slots (page * page_size + row) that each token sees alone, -1 is none; in place of
            block_tables and seq_lens.
        cu_seqlens_q, max_seqlen_q: as in `paged_attention`.
        causal: a token sees the keys up to its own position; indices say themselves what is seen.
        scale: of the scores; None is (head_size_v + rope columns) ** -0.5. DeepSeek's is 192 ** -0.5.
        batch_invariant: the bits of a request do not depend on the others in the batch.
        return_lse: also the logarithms of the sums of exponentials, fp32 [heads, tokens], natural.
    """
    latent, rope, latent_scale = _latent_parts(cache, head_size_v, query.dtype)
    output, lse = _attend_latent(
        query,
        latent,
        rope,
        latent_scale,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        indices,
        causal,
        scale,
        0 if max_seqlen_q is None else max_seqlen_q,
        batch_invariant,
        return_lse,
    )
    return (output, lse) if return_lse else output


def _latent_parts(cache: Any, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
    if isinstance(cache, tuple):
        return (*cache, None) if len(cache) == 2 else cache
    if cache.dtype != torch.uint8:
        return cache[..., :size], cache[..., size:], None
    scales = size + size // 128 * 4
    if cache.shape[-1] <= scales or size % 128:
        raise ValueError(
            f"mla_decode: cache is uint8 {list(cache.shape)}; a token has head_size_v codes ({size}, a multiple of "
            f"128), a scale for each 128 and rope columns, 656 bytes for 512 and 64"
        )
    return (
        cache[..., :size].view(torch.float8_e4m3fn),
        cache[..., scales:].view(dtype),
        cache[..., size:scales].view(torch.float32),
    )


def append_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    key_scale: Tensor | float | None = None,
    value_scale: Tensor | float | None = None,
    cache_layout: str = "nhd",
) -> None:
    """Writes new keys and values into their slots of the caches, turned and in few bits if asked, in one pass.

    With cos and sin keys are turned as by `rope`, and what is written is rounded once: to the cache's type, after the
    rotation and the scale. Every device writes the same bits.

    Args:
        key, value: the new rows, [tokens, key_heads, size].
        key_cache, value_cache: as in `paged_attention`; caches in few bits hold value / scale.
        slots: int32 or int64 [tokens]: page * page_size + row, or -1 for a token that is not kept. None twice.
        cos, sin: [rows, rotary_dim] with each value twice, or [rows, rotary_dim / 2], fp32 or the keys' type.
        positions: int32 or int64 [tokens], rows of cos and sin; None: 0, 1, 2 and so on.
        rotary_dim: how many columns of a key are turned; None: as in `rope`, from the width of the tables.
        interleaved: pairs are neighbours (GPT-J) and not elements half of rotary_dim apart (Llama).
        key_scale, value_scale: a number, [key_heads], or [pages, page_size, key_heads].
        cache_layout: "nhd" (rows of a page before heads) or "hnd".
    """
    _append(
        key,
        value,
        slots,
        _scale(key_scale, key_cache, cache_layout),
        _scale(value_scale, value_cache, cache_layout),
        _rows(cos),
        _rows(sin),
        positions,
        0 if rotary_dim is None else rotary_dim,
        interleaved,
        _cache("key_cache", "append_kv", key_cache, cache_layout),
        _cache("value_cache", "append_kv", value_cache, cache_layout),
    )


_attend = without_gradient("paged_attention")
_attend_into = without_gradient("paged_attention_", name="paged_attention")
_append = without_gradient("append_kv")
_plan = without_gradient("plan_decode")
_plan_into = without_gradient("plan_decode_", name="plan_decode")
_attend_latent = without_gradient("mla_decode")
