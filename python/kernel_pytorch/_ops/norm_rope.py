"""RMS norm of heads with their rotary embedding: casts and gradients."""

from __future__ import annotations

from torch import Tensor

from .support.casting import parameter_for
from .support.declare import differentiable


def norm_rope(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rotary_dim: int | None = None,
    heads_first: bool = False,
) -> Tensor:
    """RMS norm of each head, then its rotary embedding (`rope`, pairs half of rotary_dim apart).

    Args:
        x: [batch, sequence, heads, head_dim], any strides. With heads_first: [batch, heads, sequence, head_dim].
        weight: [head_dim], of x's type or fp32; None: ones.
        cos, sin: [rows, width] or [batch or 1, sequence, width], of x's type or fp32, rotary_dim wide or half
            of that. They have no gradient.
        weight_offset: added to the weight: 1 where a model stores weight - 1.
        rotary_dim: how many columns of a head are turned, the others being normed only. None: all.

    Returns:
        x's shape and type, contiguous.
    """
    cos, sin = parameter_for(x, cos), parameter_for(x, sin)
    weight = None if weight is None else parameter_for(x, weight)
    return _norm_rope(x, weight, cos, sin, eps, weight_offset, rotary_dim or 0, heads_first)  # type: ignore[no-any-return]


_norm_rope = differentiable("norm_rope")
