"""torch.nn.attention.flex_attention's function: score mods and block masks, compiled into this library's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..functional import attention

__all__ = ["flex_attention"]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
) -> Any:
    """query [batch, heads, queries, size], key and value [batch, key heads, keys, size] -> query's shape.

    `block_mask` is torch's BlockMask. `kernel_options` steer torch's own kernels and are not read here.
    """
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"flex_attention: query has {query.shape[-3]} heads, key {key.shape[-3]}; pass enable_gqa=True"
        )
    return attention(query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale, return_lse=return_lse)
