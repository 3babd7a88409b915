"""layer_norm for torch, with or without a residual: casts, gradients, shapes, batching. The kernels are C++
(kernel_pytorch/torch/ops/layer_norm.cpp), the routes of a call are explained in _autograd.py.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _torch as _torch  # loads the library
from ._autograd import (
    differentiable,
    eager,
    eager_apply,
    last_derivative,
    route,
    transformed_apply,
    transforms_active,
    wants_gradient,
)
from ._batching import fold, register_folding
from ._casting import parameter_for, same_type, statistics_dtype

_ops: Any = torch.ops.kernel_pytorch
_infer = _ops.layer_norm.default
_forward = _ops.layer_norm_forward.default
_add_infer = _ops.add_layer_norm.default
_add_forward = _ops.add_layer_norm_forward.default
_backward = _ops.layer_norm_backward.default

_infer_eager = eager(_infer)
_add_infer_eager = eager(_add_infer)
_backward_eager = eager(_backward)

_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_transforms_active: Any = torch._C._are_functorch_transforms_active


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: None = None,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor,
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16, and fp64 on the CPU.
        weight, bias: [columns], x's type or fp32; ones and zeros where absent. A narrower one is widened.
        residual: x's shape. With it, x + residual is normalised, and (output, x + residual) returned.

    Returns:
        The output, contiguous, of x's shape and type; with a residual the pair (output, sum).
    """
    if residual is not None:
        return _add_layer_norm(x, residual, weight, bias, eps)
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
        )
    ) or forward_ad._current_level >= 0:
        return route(_transformed, _forward, _apply)(x, weight, bias, eps)[0]
    if _is_compiling() and not transforms_active():
        return _infer(x, weight, bias, eps)
    if _transforms_active():
        return _transformed(x, weight, bias, eps)[0]
    return _infer_eager(x, weight, bias, eps)


def _add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    if residual.dtype is not x.dtype:
        x, residual = same_type(x, residual)
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    if bias is not None and bias.dtype is not (x if weight is None else weight).dtype:
        weight, bias = _parameters_for(x, weight, bias)
    if wants_gradient(x, residual, weight, bias) or forward_ad._current_level >= 0:
        return route(_add_transformed, _add_forward, _add_apply)(x, residual, weight, bias, eps)[:2]
    if _is_compiling() and not transforms_active():
        return _add_infer(x, residual, weight, bias, eps)
    if _transforms_active():
        return _add_transformed(x, residual, weight, bias, eps)[:2]
    return _add_infer_eager(x, residual, weight, bias, eps)


def _parameters_for(x: Tensor, weight: Tensor | None, bias: Tensor) -> tuple[Tensor | None, Tensor]:
    bias = parameter_for(x, bias)
    if weight is not None and weight.dtype is not bias.dtype:
        weight, bias = same_type(weight, bias)
    return weight, bias


def _save(ctx: Any, value: Tensor, weight: Any, bias: Any, mean: Tensor, rstd: Tensor) -> None:
    ctx.save_for_backward(value, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    _save(ctx, x, weight, bias, output[1], output[2])


def _add_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, bias, _ = inputs
    _save(ctx, output[1], weight, bias, output[2], output[3])


def _differentiate(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, grad_output, None, *ctx.needs_input_grad[:3]), None


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
    call = _LastDerivative.apply if _is_grad_enabled() else _backward_eager
    grad_input, grad_weight, grad_bias = call(
        grad_output, value, weight, bias, mean, rstd, grad_sum, input_grad, weight_grad, bias_grad
    )
    return (
        grad_input if input_grad else None,
        grad_weight if weight_grad else None,
        grad_bias if bias_grad else None,
    )


def _wants_parameter_grads(*args: Any) -> bool:
    return any(args[-2:])


_Function = differentiable("layer_norm", _forward, _setup_context, _differentiate, (1, 2))
_AddFunction = differentiable("layer_norm", _add_forward, _add_setup_context, _add_differentiate, (2, 3))
_LastDerivative = last_derivative("layer_norm", _backward, (2, 3), _wants_parameter_grads)
_apply, _transformed = eager_apply(_Function), transformed_apply(_Function)
_add_apply, _add_transformed = eager_apply(_AddFunction), transformed_apply(_AddFunction)


def _fake_infer(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_forward(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    statistics = [x.new_empty(x.shape[:-1], dtype=statistics_dtype(x)) for _ in range(2)]
    return x.new_empty(x.shape), *statistics


def _fake_add_infer(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_add_forward(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), *_fake_forward(x)


def _fake_backward(
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


def _batch_backward(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    return fold(_backward, info.batch_size, in_dims, args, (2, 3), per_sample=_wants_parameter_grads(*args))


# Below a vmap gradients may be wanted although the mapped tensor says that they are not.
def _infer_below_vmap(*args: Any) -> Any:
    return _forward(*args)[0] if wants_gradient(*args) else _infer(*args)


def _add_infer_below_vmap(*args: Any) -> Any:
    return _add_forward(*args)[:2] if wants_gradient(*args) else _add_infer(*args)


def _register() -> None:
    library: Any = torch.library
    library.register_fake(_infer, _fake_infer)
    library.register_fake(_forward, _fake_forward)
    library.register_fake(_add_infer, _fake_add_infer)
    library.register_fake(_add_forward, _fake_add_forward)
    library.register_fake(_backward, _fake_backward)
    library.register_autograd(_forward, _differentiate, setup_context=_setup_context)
    library.register_autograd(_add_forward, _add_differentiate, setup_context=_add_setup_context)
    register_folding(_infer, _infer_below_vmap, (1, 2))
    register_folding(_forward, _forward, (1, 2))
    register_folding(_add_infer, _add_infer_below_vmap, (2, 3))
    register_folding(_add_forward, _add_forward, (2, 3))
    library.register_vmap(_backward, _batch_backward)


_register()
