"""linear_cross_entropy: the loss of a head without its logits.

The op returns the mean over all rows together with its gradients; here it becomes the mean (or sum) of those that
count, and gradients are multiplied in place where that factor, or the loss' gradient, is not 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cross_entropy import _cap, _target_for, loss_with_gradients
from .support.autograd import adds_gradients, eager
from .support.casting import autocast, parameter_for, statistics_dtype
from .support.declare import differentiable

_ops = torch.ops.kernel_pytorch
_CHUNK_BYTES = 252 << 20


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    accumulate_dtype: torch.dtype | None = None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> Tensor:
    """cross_entropy(hidden @ weight.T, target): loss and gradients with one chunk of the logits in memory at a time.

    The gradients are computed with the loss, by chunks of rows; beyond them a call takes `chunk_bytes` and little else.

    Args:
        hidden: [..., size], any strides; fp32, bf16, fp16 and fp64.
        weight: [classes, size], hidden's type (autocast casts both).
        target, class_weight, ignore_index, label_smoothing, z_loss, softcap: as cross_entropy's (class_weight is its
            weight).
        reduction: "mean" or "sum".
        accumulate_dtype: what the weight's gradient is added up in over the chunks; None is its own type, in which
            every chunk rounds once; torch.float32 takes memory of its size in fp32.
        chunk_bytes: the most that a chunk of logits may take, which chooses how many rows that is.

    Returns:
        The loss in fp32 (fp64 for fp64).
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'linear_cross_entropy: reduction is "{reduction}"; it is "mean" or "sum"')
    if accumulate_dtype not in (None, weight.dtype, torch.float32):
        raise ValueError(
            f"linear_cross_entropy: accumulate_dtype is {accumulate_dtype}; "
            f"it is None, the weight's {weight.dtype} or torch.float32"
        )
    hidden, weight = autocast(hidden, weight)
    if hidden.dtype is not weight.dtype:
        raise TypeError(
            f"linear_cross_entropy: hidden is {hidden.dtype}, weight is {weight.dtype}; convert one of them, "
            f"or call it under torch.autocast"
        )
    if reduction == "sum" and target.numel() == 0 and hidden.shape[:-1] == target.shape:
        return hidden.sum(dtype=statistics_dtype(hidden)) + weight[:0].sum(dtype=statistics_dtype(hidden))
    target, class_weight = _target_for(hidden, target, "linear_cross_entropy"), parameter_for(hidden, class_weight)
    tracks = torch.is_grad_enabled()
    wanted = (tracks and hidden.requires_grad, tracks and weight.requires_grad)
    wide = accumulate_dtype is torch.float32
    options = (int(ignore_index), label_smoothing, z_loss, _cap(softcap), int(chunk_bytes), *wanted, wide)
    mean = _mean_of_rows(hidden, weight, target, class_weight, *options)
    if reduction == "sum":
        return mean * target.numel()
    return mean * (target.numel() / _counted(mean, target, class_weight, ignore_index))


def _counted(mean: Tensor, target: Tensor, class_weight: Tensor | None, ignore_index: int) -> Tensor:
    """What the mean divides by: how many rows count, or the sum of their targets' weights."""
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum().to(mean.dtype)
    weights = class_weight.detach().to(mean.dtype)[target.masked_fill(~counts, 0)]
    return torch.where(counts, weights, 0).sum()


def _mean_of_rows(hidden: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    if adds_gradients(hidden, weight):
        return loss_with_gradients(_forward, hidden, weight, *arguments)
    return _traced(hidden, weight, *arguments)  # type: ignore[no-any-return]


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    weight, grad_hidden, grad_weight = saved
    scale = grads[0]
    return (
        (grad_hidden * scale).to(grad_hidden.dtype) if wanted[0] else None,
        (grad_weight * scale).to(weight.dtype) if wanted[1] else None,
        None,
        None,
    )


_forward = eager(_ops.linear_cross_entropy_forward.plain)
_traced = differentiable(
    "linear_cross_entropy",
    saves=["weight", "grad_hidden", "grad_weight"],
    gradient=_gradient,
    instead="torch.nn.functional.linear and cross_entropy",
)
