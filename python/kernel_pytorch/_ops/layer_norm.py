"""layer_norm for torch, with or without a residual: casts, shapes, gradients. The kernels are C++ (kernel_pytorch/
torch/ops/layer_norm.cpp); how a call reaches them is in _declare.py.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from ._casting import check_dtype, parameter_for, same_type, statistics_dtype, wide_first
from ._declare import backward, differentiable


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: None = None,
    out_dtype: torch.dtype | None = None,
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
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16, and fp64 on the CPU.
        weight, bias: [columns], x's type or fp32; ones and zeros where absent. A narrower one is widened.
        residual: x's shape. With it, x + residual is normalised, and (output, x + residual) returned, the sum in the
            wider of the two types. A 16-bit one of the two beside fp32 is read as it is.
        out_dtype: of the output; bf16 or fp16 where x is fp32, for a product that would cast it (torch.autocast).

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
    if residual is None:
        return _norm(x, weight, bias, eps, out_dtype)
    return _add_norm(x, residual, weight, bias, eps, out_dtype)


def _parameters_for(x: Tensor, weight: Tensor | None, bias: Tensor) -> tuple[Tensor | None, Tensor]:
    bias = parameter_for(x, bias)
    if weight is not None and torch.float64 not in (weight.dtype, bias.dtype):  # which the op refuses, by its name
        weight, bias = same_type(weight, bias)
    return weight, bias


def _shapes(
    x: Tensor, weight: Any, bias: Any, eps: float, output_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape, dtype=output_dtype or x.dtype), *_statistics(x)


def _add_shapes(
    x: Tensor, residual: Any, weight: Any, bias: Any, eps: float, output_dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape, dtype=output_dtype or x.dtype), x.new_empty(x.shape), *_statistics(x)


def _statistics(x: Tensor) -> list[Tensor]:
    return [x.new_empty(x.shape[:-1], dtype=statistics_dtype(x)) for _ in range(2)]


def _backward_shapes(
    grad_output: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    grad_sum: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    return (
        value.new_empty(value.shape if input_grad else (0,)),
        weight.new_empty(weight.shape) if weight_grad and weight is not None else value.new_empty((0,)),
        bias.new_empty(bias.shape) if bias_grad and bias is not None else value.new_empty((0,)),
    )


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    return _backward(grads[0], *saved, None, *wanted)


def _add_gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    grad_output, grad_sum = grads
    x_wanted, residual_wanted, weight_wanted, bias_wanted = wanted
    if grad_output is None:  # only the sum was used
        return grad_sum, grad_sum, None, None
    grad_input, grad_weight, grad_bias = _backward(
        grad_output, *saved, grad_sum, x_wanted or residual_wanted, weight_wanted, bias_wanted
    )
    return grad_input, grad_input, grad_weight, grad_bias  # autograd casts for a 16-bit residual


_INSTEAD = "torch.nn.functional.layer_norm"

_backward = backward(
    "layer_norm",
    shapes=_backward_shapes,
    parameters=["weight", "bias"],
    per_sample=["weight_grad", "bias_grad"],
    instead=_INSTEAD,
)
_norm = differentiable(
    "layer_norm",
    shapes=_shapes,
    saves=["x", "weight", "bias", "mean", "rstd"],
    gradient=_gradient,
    parameters=["weight", "bias"],
    instead=_INSTEAD,
)
_add_norm = differentiable(
    "add_layer_norm",
    shapes=_add_shapes,
    saves=["sum", "weight", "bias", "mean", "rstd"],
    gradient=_add_gradient,
    parameters=["weight", "bias"],
    name="layer_norm",
    instead=_INSTEAD,
)
