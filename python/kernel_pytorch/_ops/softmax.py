"""softmax and log_softmax: masks and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .support.casting import parameter_for
from .support.declare import backward, differentiable, without_gradient


def softmax(x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(scale * x + mask) over the last dimension, in one pass over memory.

    Args:
        x: [..., queries, keys] or any other shape, any strides; fp32, bf16, fp16 and fp64.
        scale: what x is multiplied with; 1 / temperature.
        mask: broadcastable to x's shape. Boolean: True keeps a score, False removes it. Otherwise it is added, in x's
            type or fp32, and may want a gradient.
        causal: query i sees keys j <= i + keys - queries: aligned at the bottom right, as for a cache of past keys.

    Returns:
        The output, contiguous, of x's shape and type. A row whose scores are all removed is zero, and has no gradient.
    """
    return _softmax(x, None if mask is None else _mask_for(x, mask), scale, causal, False)  # type: ignore[no-any-return]


def log_softmax(x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """The logarithm of `softmax`, computed as score - max - log(sum): no digits are lost. Removed scores give -inf."""
    return _softmax(x, None if mask is None else _mask_for(x, mask), scale, causal, True)  # type: ignore[no-any-return]


def softmax_(x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """`softmax` into x's own memory; x is contiguous and no part of a graph. Returns x."""
    _in_place(x, None if mask is None else _mask_for(x, mask), scale, causal, False)
    return x


def log_softmax_(x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """`log_softmax` into x's own memory; x is contiguous and no part of a graph. Returns x."""
    _in_place(x, None if mask is None else _mask_for(x, mask), scale, causal, True)
    return x


def _mask_for(x: Tensor, mask: Tensor) -> Tensor:
    """The mask in a type that the op takes, with x's shape by strides of 0; autograd sums its gradient over them."""
    if mask.dtype is not torch.bool and mask.dtype is not x.dtype:
        mask = parameter_for(x, mask)
        if mask.dtype in (torch.float16, torch.bfloat16):  # the other of the two 16-bit types
            mask = mask.float()
    if mask.shape == x.shape:
        return mask
    sizes = zip(reversed(mask.shape), reversed(x.shape))
    if mask.dim() > x.dim() or any(one != 1 and one != other for one, other in sizes):
        raise RuntimeError(
            f"softmax: mask has shape {list(mask.shape)}, x has {list(x.shape)}; sizes must be equal, or 1 to expand"
        )
    return mask.expand(x.shape)


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    output, mask, scale, log, causal = saved
    masked = causal or mask is not None
    if mask is None or not wanted[1]:
        return _backward(grads[0], output, scale, log, masked), None
    of_scores = _backward(grads[0], output, 1.0, log, masked)
    return of_scores * scale if wanted[0] else None, of_scores.to(mask.dtype)


_INSTEAD = "torch.nn.functional.softmax or log_softmax"

_backward = backward("softmax", instead=_INSTEAD)
_softmax = differentiable("softmax", gradient=_gradient, saves=["mask", "causal"], instead=_INSTEAD)
_in_place = without_gradient("softmax_")
