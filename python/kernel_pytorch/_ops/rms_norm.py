"""rms_norm and add_rms_norm for torch: casts, gradients, shapes, batching. The kernels are C++
(kernel_pytorch/torch/ops/rms_norm.cpp), the routes of a call are explained in _autograd.py.
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
_infer = _ops.rms_norm.default
_forward = _ops.rms_norm_forward.default
_add_infer = _ops.add_rms_norm.default
_add_forward = _ops.add_rms_norm_forward.default
_backward = _ops.rms_norm_backward.default

_infer_eager = eager(_infer)
_add_infer_eager = eager(_add_infer)
_backward_eager = eager(_backward)

_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_compiling
_transforms_active: Any = torch._C._are_functorch_transforms_active


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: None = None,
    weight_offset: float = 0.0,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
) -> Any:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset), over the last dimension.

    Args:
        x: [..., columns], any strides; fp32, bf16, fp16, and fp64 on the CPU.
        weight: [columns], x's type or fp32; ones where absent. A narrower one is widened to x's type.
        residual: x's shape. With it, x + residual is normalised, and (output, x + residual) returned.
        weight_offset: added to the weight, where there is one; 1.0 for models that store weight - 1.

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
        return route(_transformed, _forward, _apply)(x, weight, eps, weight_offset)[0]
    if _is_compiling() and not transforms_active():
        return _infer(x, weight, eps, weight_offset)
    if _transforms_active():
        return _transformed(x, weight, eps, weight_offset)[0]
    return _infer_eager(x, weight, eps, weight_offset)


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
    result: Any
    if (
        _is_grad_enabled()
        and (x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad))
    ) or forward_ad._current_level >= 0:
        result = route(_add_transformed, _add_forward, _add_apply)(x, residual, weight, eps, weight_offset)[:2]
    elif _is_compiling() and not transforms_active():
        result = _add_infer(x, residual, weight, eps, weight_offset)
    elif _transforms_active():
        result = _add_transformed(x, residual, weight, eps, weight_offset)[:2]
    else:
        result = _add_infer_eager(x, residual, weight, eps, weight_offset)
    return result  # type: ignore[no-any-return]


def _save(ctx: Any, value: Tensor, weight: Tensor | None, rstd: Tensor, weight_offset: float) -> None:
    ctx.save_for_backward(value, weight, rstd)
    ctx.weight_offset = weight_offset
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, weight_offset = inputs
    _save(ctx, x, weight, output[1], weight_offset)


def _add_setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, weight, _, weight_offset = inputs
    _save(ctx, output[1], weight, output[2], weight_offset)


def _differentiate(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    input_grad, weight_grad = ctx.needs_input_grad[:2]
    return *_gradients(ctx, grad_output, None, input_grad, weight_grad), None, None


def _add_differentiate(
    ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, *_: Any
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
    call = _LastDerivative.apply if _is_grad_enabled() else _backward_eager
    grad_input, grad_weight = call(
        grad_output, value, weight, rstd, grad_sum, ctx.weight_offset, input_grad, weight_grad
    )
    return grad_input if input_grad else None, grad_weight if weight_grad else None


def _wants_weight_grad(*args: Any) -> bool:
    return bool(args[-1])


_Function = differentiable("rms_norm", _forward, _setup_context, _differentiate, (1,))
_AddFunction = differentiable("rms_norm", _add_forward, _add_setup_context, _add_differentiate, (2,))
_LastDerivative = last_derivative("rms_norm", _backward, (2,), _wants_weight_grad)
_apply, _transformed = eager_apply(_Function), transformed_apply(_Function)
_add_apply, _add_transformed = eager_apply(_AddFunction), transformed_apply(_AddFunction)


def _fake_infer(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_forward(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=statistics_dtype(x))


def _fake_add_infer(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_add_forward(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), *_fake_forward(x)


def _fake_backward(
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


def _batch_backward(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    return fold(_backward, info.batch_size, in_dims, args, (2,), per_sample=_wants_weight_grad(*args))


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
    register_folding(_infer, _infer_below_vmap, (1,))
    register_folding(_forward, _forward, (1,))
    register_folding(_add_infer, _add_infer_below_vmap, (2,))
    register_folding(_add_forward, _add_forward, (2,))
    library.register_vmap(_backward, _batch_backward)


_register()
