"""rms_norm and add_rms_norm for torch. The kernels are C++ (kernel_pytorch/torch/ops/rms_norm.cpp).

Three routes, by what a call costs and what it must support: the plain op where no gradient is wanted (also under
torch.compile), the registered op where a compiler traces, and an autograd.Function otherwise, which is twice as fast as
the registered op and is the one that torch.func understands.
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
_infer = _ops.rms_norm.default
_forward = _ops.rms_norm_forward.default
_add_infer = _ops.add_rms_norm.default
_add_forward = _ops.add_rms_norm_forward.default
_backward = _ops.rms_norm_backward.default

_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last dimension.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16, and fp64 on the CPU.
        weight: [columns], x's type or fp32; ones where absent. A narrower one is widened to x's type.
        residual: x's shape. With it, x + residual is normalised, and (output, x + residual) returned.
        weight_offset: added to the weight; 1.0 for models that store weight - 1.

    Returns:
        The output, contiguous, of x's shape and type; with a residual the pair (output, sum).
    """
    if residual is not None:
        return add_rms_norm(x, residual, weight, eps, weight_offset=weight_offset)
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    if (
        _is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad))
    ) or forward_ad._current_level >= 0:
        if _is_compiling():
            return _forward(x, weight, eps, weight_offset)[0]
        return RMSNormFunction.apply(x, weight, eps, weight_offset)[0]
    return _infer(x, weight, eps, weight_offset)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The sum x + residual, and its rms_norm, in one pass over memory: returns (output, sum).

    x and residual have one shape; where their types differ, both are taken in the wider one. See `rms_norm`.
    """
    if residual.dtype is not x.dtype:
        x, residual = same_type(x, residual)
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    if (
        _is_grad_enabled()
        and (x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad))
    ) or forward_ad._current_level >= 0:
        if _is_compiling():
            return _add_forward(x, residual, weight, eps, weight_offset)[:2]
        return AddRMSNormFunction.apply(x, residual, weight, eps, weight_offset)[:2]
    return _add_infer(x, residual, weight, eps, weight_offset)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, weight_offset = inputs
    rstd = output[1]
    ctx.save_for_backward(x, weight, rstd)
    ctx.weight_offset = weight_offset
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_output: Tensor | None, _: Any = None) -> tuple[Tensor | None, ...]:
    input_grad, weight_grad = ctx.needs_input_grad[:2]
    grad_input, grad_weight = _gradients(ctx, grad_output, None, input_grad, weight_grad)
    return grad_input, grad_weight, None, None


def _add_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, weight_offset = inputs
    _, sum_, rstd = output
    ctx.save_for_backward(sum_, weight, rstd)
    ctx.weight_offset = weight_offset
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _add_differentiate(
    ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, _: Any = None
) -> tuple[Tensor | None, ...]:
    x_grad, residual_grad, weight_grad = ctx.needs_input_grad[:3]
    grad_input, grad_weight = _gradients(ctx, grad_output, grad_sum, x_grad or residual_grad, weight_grad)
    return grad_input if x_grad else None, grad_input if residual_grad else None, grad_weight, None, None


def _gradients(
    ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, input_grad: bool, weight_grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    if grad_output is None:  # only the sum was used
        return grad_sum, None
    value, weight, rstd = ctx.saved_tensors
    call = RMSNormBackwardFunction.apply if _is_grad_enabled() else _backward
    grad_input, grad_weight = call(
        grad_output, value, weight, rstd, grad_sum, ctx.weight_offset, input_grad, weight_grad
    )
    return grad_input if input_grad else None, grad_weight if weight_grad else None


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> tuple[Tensor, Tensor]:
        with _BelowAutograd():
            return _forward(x, weight, eps, weight_offset)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_differentiate)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return fold(RMSNormFunction.apply, info.batch_size, in_dims, args, parameters=(1,))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise_no_forward_mode("rms_norm")


class AddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _BelowAutograd():
            return _add_forward(x, residual, weight, eps, weight_offset)

    setup_context = staticmethod(_add_setup_context)
    backward = staticmethod(_add_differentiate)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return fold(AddRMSNormFunction.apply, info.batch_size, in_dims, args, parameters=(2,))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise_no_forward_mode("rms_norm")


class RMSNormBackwardFunction(torch.autograd.Function):
    """The backward as a node of its own, so that differentiating it raises; autograd would drop the term silently."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return _backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        raise_no_second_derivative("rms_norm")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return fold(RMSNormBackwardFunction.apply, info.batch_size, in_dims, args, (2,), per_sample=args[-1])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise_no_second_derivative("rms_norm")


def _register() -> None:
    library = torch.library

    @library.register_fake("kernel_pytorch::rms_norm")
    def _(x: Tensor, weight: Any, eps: float, weight_offset: float) -> Tensor:
        return x.new_empty(x.shape)

    @library.register_fake("kernel_pytorch::rms_norm_forward")
    def _(x: Tensor, weight: Any, eps: float, weight_offset: float) -> tuple[Tensor, ...]:
        return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=statistics_dtype(x))

    @library.register_fake("kernel_pytorch::add_rms_norm")
    def _(x: Tensor, residual: Tensor, weight: Any, eps: float, weight_offset: float) -> tuple[Tensor, ...]:
        return x.new_empty(x.shape), x.new_empty(x.shape)

    @library.register_fake("kernel_pytorch::add_rms_norm_forward")
    def _(x: Tensor, residual: Tensor, weight: Any, eps: float, weight_offset: float) -> tuple[Tensor, ...]:
        return x.new_empty(x.shape), x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=statistics_dtype(x))

    @library.register_fake("kernel_pytorch::rms_norm_backward")
    def _(
        grad_output: Tensor,
        value: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        grad_sum: Tensor | None,
        weight_offset: float,
        input_grad: bool,
        weight_grad: bool,
    ) -> tuple[Tensor, ...]:
        return (
            value.new_empty(value.shape if input_grad else (0,)),
            weight.new_empty(weight.shape) if weight_grad and weight is not None else value.new_empty((0,)),
        )

    library.register_autograd("kernel_pytorch::rms_norm_forward", _differentiate, setup_context=_setup_context)
    library.register_autograd(
        "kernel_pytorch::add_rms_norm_forward", _add_differentiate, setup_context=_add_setup_context
    )

    for op, parameters in ((_infer, (1,)), (_forward, (1,)), (_add_infer, (2,)), (_add_forward, (2,))):

        def batch(info: Any, in_dims: Any, *args: Any, op: Any = op, parameters: Any = parameters) -> tuple[Any, Any]:
            return fold(op, info.batch_size, in_dims, args, parameters)

        library.register_vmap(op, batch)

    @library.register_vmap("kernel_pytorch::rms_norm_backward")
    def _(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        return fold(_backward, info.batch_size, in_dims, args, (2,), per_sample=args[-1])


_register()
