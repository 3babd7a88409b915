"""layer_norm, with or without a residual: casts and gradients."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from .activation import activation as activate
from .activation import backward_of_activation
from .support.casting import check_dtype, parameter_for, same_type, wide_first
from .support.declare import backward, differentiable


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16 and fp64.
        weight, bias: [columns], x's type or fp32; ones and zeros where absent. A narrower one is widened.
        residual: x's shape. With it, x + residual is normalised, and (output, x + residual) returned, the sum in the
            wider of the two types. A 16-bit one of the two beside fp32 is read as it is.
        out_dtype: of the output; bf16 or fp16 where x is fp32, for a product that would cast it (torch.autocast).
        activation: of the output, in the same pass: gelu, gelu_tanh, silu, relu, relu_squared, sigmoid, tanh or
            identity. With a residual it is a second pass. Its gradient computes the norm again, applies the
            activation's slope, and then is the norm's: three passes, and nothing more is kept than for the norm.

    Returns:
        The output, contiguous, of x's shape and type (or out_dtype); with a residual the pair (output, sum).
    """
    if residual is not None and residual.dtype is not x.dtype:
        x, residual = wide_first(x, residual)
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    if bias is not None and bias.dtype is not (x if weight is None else weight).dtype:
        weight, bias = _parameters_for(x, weight, bias)
    if out_dtype is not None:
        check_dtype("layer_norm", "out_dtype", out_dtype)
    if residual is not None:
        normed, total = _add_norm(x, residual, weight, bias, eps, out_dtype)
        return (normed if activation is None else activate(normed, activation)), total
    if activation is not None:
        return _activated_norm(x, weight, bias, eps, activation, out_dtype)
    return _norm(x, weight, bias, eps, out_dtype)


def _parameters_for(x: Tensor, weight: Tensor | None, bias: Tensor) -> tuple[Tensor | None, Tensor]:
    bias = parameter_for(x, bias)
    if weight is not None and torch.float64 not in (weight.dtype, bias.dtype):  # which the op refuses, by its name
        weight, bias = same_type(weight, bias)
    return weight, bias


def _activated_gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    x, weight, bias, mean, rstd, eps, kind = saved
    (grad,) = grads
    normed = _norm(x, weight, bias, eps, None if grad.dtype is x.dtype else grad.dtype)
    grad_normed = backward_of_activation(grad, normed, kind)
    return _backward(grad_normed, x, weight, bias, mean, rstd, None, *wanted)


_INSTEAD = "torch.nn.functional.layer_norm"

_backward = backward("layer_norm", instead=_INSTEAD)
_norm = differentiable("layer_norm", gradient_call=_backward, instead=_INSTEAD)
_add_norm = differentiable("add_layer_norm", gradient_call=_backward, name="layer_norm", instead=_INSTEAD)
_activated_norm = differentiable(
    "layer_norm_activation",
    saves=["x", "weight", "bias", "mean", "rstd", "eps", "activation"],
    gradient=_activated_gradient,
    name="layer_norm",
    instead=_INSTEAD,
)
