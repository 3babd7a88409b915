"""flash_attn's functions: [batch, sequence, heads, size] tensors, packed sequences by cu_seqlens.

With return_attn_probs the lse comes back as second result and None as third: probabilities are never stored.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..functional import attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q [batch, queries, heads, size], k and v [batch, keys, key heads, size] -> q's shape."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return _attend(q, k, v, return_attn_probs, layout="bshd", **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """qkv [batch, tokens, 3, heads, size]; further arguments as flash_attn_func."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """kv [batch, keys, 2, key heads, size]; further arguments as flash_attn_func."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q [queries of all sequences, heads, size], k and v likewise; cu_seqlens int32 [sequences + 1] on the device."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    sequences = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _attend(q, k, v, return_attn_probs, **sequences, **lengths, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """qkv [tokens, 3, heads, size]; further arguments as flash_attn_varlen_func from dropout_p on."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """kv [keys, 2, key heads, size]; further arguments as flash_attn_varlen_func from cu_seqlens_q on."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *args, **kwargs)


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """In functional.attention's words: what flash_attn says by -1, 0 and False is None there."""
    return {
        "dropout_p": dropout_p,
        "scale": softmax_scale,
        "causal": causal,
        "window": None if tuple(window_size) == (-1, -1) else (window_size[0], window_size[1]),
        "softcap": softcap or None,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic or None,
    }


def _attend(q: Tensor, k: Tensor, v: Tensor, with_lse: bool, **options: Any) -> Any:
    if not with_lse:
        return attention(q, k, v, **options)
    output, lse = attention(q, k, v, return_lse=True, **options)
    return output, lse, None
