"""layer_norm for torch, with or without a residual. The kernels are C++ (kernel_pytorch/torch/ops/layer_norm.cpp).

The routes of a call are rms_norm's: plain op, registered op under a compiler, autograd.Function otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _torch as _torch  # loads the library
from ._common import (
    fold,
    parameter_for,
    raise_no_forward_mode,
    raise_no_second_derivative,
    same_type,
    statistics_dtype,
)

_ops = torch.ops.kernel_pytorch
_infer = _ops.layer_norm.default
_forward = _ops.layer_norm_forward.default
_add_infer = _ops.add_layer_norm.default
_add_forward = _ops.add_layer_norm_forward.default
_backward = _ops.layer_norm_backward.default

_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16, and fp64 on the CPU.
        weight, bias: [columns], x's type or fp32; ones and zeros where absent. A narrower one is widened.
        residual: x's shape. With it, x + residual is normalised, and (output, x + residual) returned.

    Returns:
        The output, contiguous, of x's shape and type; with a residual the pair (output, sum).
    """
    if residual is not None and residual.dtype is not x.dtype:
        x, residual = same_type(x, residual)
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    if bias is not None and bias.dtype is not (x if weight is None else weight).dtype:
        weight, bias = _parameters_for(x, weight, bias)
    if (
        _is_grad_enabled()
        and (
            x.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (residual is not None and residual.requires_grad)
        )
    ) or forward_ad._current_level >= 0:
        return _differentiable(x, residual, weight, bias, eps)
    if residual is not None:
        return _add_infer(x, residual, weight, bias, eps)
    return _infer(x, weight, bias, eps)


def _parameters_for(x: Tensor, weight: Tensor | None, bias: Tensor) -> tuple[Tensor | None, Tensor]:
    bias = parameter_for(x, bias)
    if weight is not None and weight.dtype is not bias.dtype:
        weight, bias = same_type(weight, bias)
    return weight, bias


def _differentiable(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor | tuple[Tensor, Tensor]:
    compiling = _is_compiling()
    if residual is None:
        call = _forward if compiling else LayerNormFunction.apply
        return call(x, weight, bias, eps)[0]
    call = _add_forward if compiling else AddLayerNormFunction.apply
    return call(x, residual, weight, bias, eps)[:2]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads = _gradients(ctx, grad_output, None, *ctx.needs_input_grad[:3])
    return *grads, None


def _add_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _ = inputs
    _, sum_, mean, rstd = output
    ctx.save_for_backward(sum_, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _add_differentiate(
    ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    x_grad, residual_grad, weight_grad, bias_grad = ctx.needs_input_grad[:4]
    grad_input, grad_weight, grad_bias = _gradients(
        ctx, grad_output, grad_sum, x_grad or residual_grad, weight_grad, bias_grad
    )
    return grad_input if x_grad else None, grad_input if residual_grad else None, grad_weight, grad_bias, None


def _gradients(
    ctx: Any,
    grad_output: Tensor | None,
    grad_sum: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad_output is None:  # only the sum was used
        return grad_sum, None, None
    value, weight, bias, mean, rstd = ctx.saved_tensors
    call = LayerNormBackwardFunction.apply if _is_grad_enabled() else _backward
    grad_input, grad_weight, grad_bias = call(
        grad_output, value, weight, bias, mean, rstd, grad_sum, input_grad, weight_grad, bias_grad
    )
    return (
        grad_input if input_grad else None,
        grad_weight if weight_grad else None,
        grad_bias if bias_grad else None,
    )


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _BelowAutograd():
            return _forward(x, weight, bias, eps)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_differentiate)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return fold(LayerNormFunction.apply, info.batch_size, in_dims, args, parameters=(1, 2))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise_no_forward_mode("layer_norm")


class AddLayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with _BelowAutograd():
            return _add_forward(x, residual, weight, bias, eps)

    setup_context = staticmethod(_add_setup_context)
    backward = staticmethod(_add_differentiate)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return fold(AddLayerNormFunction.apply, info.batch_size, in_dims, args, parameters=(2, 3))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise_no_forward_mode("layer_norm")


class LayerNormBackwardFunction(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it raises; autograd would drop the term silently."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise_no_second_derivative("layer_norm")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return fold(LayerNormBackwardFunction.apply, info.batch_size, in_dims, args, (2, 3), any(args[-2:]))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise_no_second_derivative("layer_norm")


def _register() -> None:
    library = torch.library

    def rows(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[:-1], dtype=statistics_dtype(x))

    @library.register_fake("kernel_pytorch::layer_norm")
    def _(x: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
        return x.new_empty(x.shape)

    @library.register_fake("kernel_pytorch::layer_norm_forward")
    def _(x: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
        return x.new_empty(x.shape), rows(x), rows(x)

    @library.register_fake("kernel_pytorch::add_layer_norm")
    def _(x: Tensor, residual: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
        return x.new_empty(x.shape), x.new_empty(x.shape)

    @library.register_fake("kernel_pytorch::add_layer_norm_forward")
    def _(x: Tensor, residual: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, ...]:
        return x.new_empty(x.shape), x.new_empty(x.shape), rows(x), rows(x)

    @library.register_fake("kernel_pytorch::layer_norm_backward")
    def _(
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

    library.register_autograd("kernel_pytorch::layer_norm_forward", _differentiate, setup_context=_setup_context)
    library.register_autograd(
        "kernel_pytorch::add_layer_norm_forward", _add_differentiate, setup_context=_add_setup_context
    )

    for op, parameters in ((_infer, (1, 2)), (_forward, (1, 2)), (_add_infer, (2, 3)), (_add_forward, (2, 3))):

        def batch(info: Any, in_dims: Any, *args: Any, op: Any = op, parameters: Any = parameters) -> tuple[Any, Any]:
            return fold(op, info.batch_size, in_dims, args, parameters)

        library.register_vmap(op, batch)

    @library.register_vmap("kernel_pytorch::layer_norm_backward")
    def _(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        return fold(_backward, info.batch_size, in_dims, args, (2, 3), any(args[-2:]))


_register()
