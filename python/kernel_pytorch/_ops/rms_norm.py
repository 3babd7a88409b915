"""rms_norm and add_rms_norm: casts and gradients."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from .activation import activation as activate
from .activation import backward_of_activation
from .support.casting import check_dtype, parameter_for, wide_first
from .support.declare import backward, differentiable


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    residual: None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    residual: Tensor,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
) -> Any:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last dimension.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16 and fp64.
        weight: [columns], x's type or fp32; ones where absent. A narrower one is widened to x's type.
        eps: None is the machine epsilon of fp32, of fp64 for fp64, as in torch.
        residual: x's shape. With it, x + residual is normalised, and (output, x + residual) returned, the sum in the
            wider of the two types. If one of the two is fp32, the other may be bf16 or fp16.
        weight_offset: added to the weight, where there is one; 1.0 for models that store weight - 1.
        out_dtype: type of the output: bf16 or fp16 if x is fp32, for a GEMM that would cast it (torch.autocast).
        activation: of the output, in the same pass: gelu, gelu_tanh, silu, relu, relu_squared, sigmoid, tanh or
            identity. With a residual it is a second pass. Its gradient computes the norm again, applies the
            activation's slope, and then is the norm's: three passes, and nothing more is kept than for the norm.

    Returns:
        The output, contiguous, of x's shape and type (or out_dtype); with a residual the pair (output, sum).
    """
    if residual is not None:
        normed, total = add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset, out_dtype=out_dtype)
        return (normed if activation is None else activate(normed, activation)), total
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    if out_dtype is not None:
        check_dtype("rms_norm", "out_dtype", out_dtype)
    if eps is None:
        eps = machine_epsilon(x.dtype)
    if activation is not None:
        return _activated_norm(x, weight, eps, weight_offset, activation, out_dtype)
    return _norm(x, weight, eps, weight_offset, out_dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum x + residual, and its rms_norm, in one pass over memory: returns (output, sum).

    x and residual have one shape; where their types differ, the sum is of the wider one. See `rms_norm`.
    """
    if residual.dtype is not x.dtype:
        x, residual = wide_first(x, residual)
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    if out_dtype is not None:
        check_dtype("rms_norm", "out_dtype", out_dtype)
    if eps is None:
        eps = machine_epsilon(x.dtype)
    return _add_norm(x, residual, weight, eps, weight_offset, out_dtype)  # type: ignore[no-any-return]


def machine_epsilon(dtype: torch.dtype) -> float:
    """Of the type in which a norm of `dtype` is computed, which is what torch adds where no eps is given."""
    return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps


def _activated_gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    x, weight, rstd, eps, weight_offset, kind = saved
    (grad,) = grads
    normed = _norm(x, weight, eps, weight_offset, None if grad.dtype is x.dtype else grad.dtype)
    grad_normed = backward_of_activation(grad, normed, kind)
    return _backward(grad_normed, x, weight, rstd, None, weight_offset, *wanted)


_INSTEAD = "torch.nn.functional.rms_norm"

_backward = backward("rms_norm", instead=_INSTEAD)
_norm = differentiable("rms_norm", gradient_call=_backward, instead=_INSTEAD)
_add_norm = differentiable("add_rms_norm", gradient_call=_backward, name="rms_norm", instead=_INSTEAD)
_activated_norm = differentiable(
    "rms_norm_activation",
    saves=["x", "weight", "rstd", "eps", "weight_offset", "activation"],
    gradient=_activated_gradient,
    name="rms_norm",
    instead=_INSTEAD,
)
