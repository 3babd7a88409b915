"""Attention over all keys from attention over two parts of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .support.declare import without_gradient


def merge_attention(
    o1: Tensor,
    lse1: Tensor,
    o2: Tensor,
    lse2: Tensor,
    *,
    return_lse: bool = True,
) -> Any:
    """Attention over two parts of the keys as one: over a prefix that requests share, and over each one's own keys.

    Without gradients.

    Args:
        o1, o2: results of attention, [tokens, heads, size], of one type.
        lse1, lse2: fp32 [heads, tokens], the natural logarithms that `paged_attention` returns. -inf: the part saw no
            key, and what it holds is not read.
        return_lse: also the merged logarithms, for a third part.
    """
    output, lse = _merge(o1, lse1, o2, lse2, return_lse)
    return (output, lse) if return_lse else output


_merge = without_gradient("merge_attention")
