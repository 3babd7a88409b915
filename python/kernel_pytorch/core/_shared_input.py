"""Ops that share an input and add up its gradient themselves: linear layers, whose GEMMs add to one gradient in turn,
and a norm whose input is also used past it, whose backward adds the gradient that comes back that way.

autograd would add them in passes of their own, each two reads and a write of the whole. For eager training; under
compilers, transforms of torch.func and without gradients the layers are called one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._ops.matmul import add_product_
from .._ops.rms_norm import machine_epsilon
from .._ops.support.autograd import adds_gradients
from .._ops.support.casting import autocast, parameter_for
from ..functional import layer_norm, linear, rms_norm

_ops = torch.ops.kernel_pytorch


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, ours: bool = True
) -> tuple[Tensor, ...]:
    """linear(x, weight, bias) for each of them.

    Args:
        x: [..., in].
        weights: [out, in] each, x's type (autocast casts them); biases: [out] or None each.
        ours: this library's products, or torch's.
    """
    x, *weights = autocast(x, *weights)
    biases = [None if bias is None else parameter_for(x, bias) if ours else autocast(bias)[0] for bias in biases]
    if not adds_gradients(x, *weights, *(bias for bias in biases if bias is not None)):
        return tuple((linear if ours else torch_functional.linear)(x, w, b) for w, b in zip(weights, biases))
    return _Linears.apply(x, ours, len(weights), *weights, *biases)  # type: ignore[no-untyped-call, no-any-return]


def rms_norm_through(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x), x): the gradient of the second is added by the norm's backward."""
    if weight is not None and weight.dtype is not x.dtype:
        weight = parameter_for(x, weight)
    if not adds_gradients(x):
        return rms_norm(x, weight, eps, weight_offset=weight_offset, out_dtype=out_dtype), x
    if eps is None:
        eps = machine_epsilon(x.dtype)
    return _RmsNorm.apply(x, "rms_norm", (eps, weight_offset, out_dtype), weight)  # type: ignore[no-untyped-call, no-any-return]


def layer_norm_through(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x), x), likewise."""
    if not adds_gradients(x) or any(p is not None and p.dtype is not x.dtype for p in (weight, bias)):
        return layer_norm(x, weight, bias, eps, out_dtype=out_dtype), x
    return _LayerNorm.apply(x, "layer_norm", (eps, out_dtype), weight, bias)  # type: ignore[no-untyped-call, no-any-return]


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ours: bool, count: int, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *parameters)
        ctx.ours, ctx.count = ours, count
        ctx.set_materialize_grads(False)
        if ours:
            return tuple(_ops.linear(x, w, b, None, "identity", False, "full", None) for w, b in zip(weights, biases))
        return tuple(torch_functional.linear(x, w, b) for w, b in zip(weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        x, *parameters = ctx.saved_tensors
        needed, of = ctx.needs_input_grad[3:], [None] * len(parameters)
        rows, total = x.reshape(-1, x.shape[-1]), None
        products = _our_products if ctx.ours else _torch_products
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            j = i + ctx.count
            total, of[i], of[j] = products(
                grad.reshape(-1, grad.shape[-1]), rows, parameters[i], parameters[j], total,
                (ctx.needs_input_grad[0], needed[i], needed[j]),
            )  # fmt: skip
        return None if total is None else total.view(x.shape), None, None, *of


def _our_products(grad: Tensor, x: Tensor, weight: Tensor, bias: Any, total: Any, needed: Any) -> Any:
    """The gradients of x, to which `total` was added, of the weight and of the bias."""
    first = needed[0] and total is None
    empty = x.new_empty((0,))
    found = _ops.linear_backward(grad, x, weight, bias, empty, "identity", False, "full", first, *needed[1:])
    if first:
        total = found[0]
    elif needed[0]:
        add_product_(total, grad, weight, 1.0)
    return total, found[1] if needed[1] else None, found[2] if needed[2] else None


def _torch_products(grad: Tensor, x: Tensor, weight: Tensor, bias: Any, total: Any, needed: Any) -> Any:
    if needed[0]:
        total = torch.mm(grad, weight) if total is None else total.addmm_(grad, weight)
    of_weight = torch.mm(grad.t(), x) if needed[1] else None
    return total, of_weight, grad.sum(0) if needed[2] else None


class _Norm(torch.autograd.Function):
    """The op's forward takes x, the parameters and the numbers; its backward all but the first and last of these,
    epsilon and the output's type.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, numbers: tuple[Any, ...], *parameters: Any) -> tuple[Tensor, Tensor]:
        output, *statistics = getattr(_ops, f"{name}_forward")(x, *parameters, *numbers)
        ctx.save_for_backward(x, *parameters, *statistics)
        ctx.name, ctx.numbers = name, numbers[1:-1]
        ctx.set_materialize_grads(False)
        return output, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, past: Tensor | None) -> Any:
        needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[3:])
        if grad is None:
            return past, None, None, *(None for _ in needed[1:])
        found = getattr(_ops, f"{ctx.name}_backward")(grad, *ctx.saved_tensors, past, *ctx.numbers, *needed)
        of_x, *of_parameters = (value if wanted else None for value, wanted in zip(found, needed))
        return of_x, None, None, *of_parameters


class _RmsNorm(_Norm):
    """By this name in autograd's graph."""


class _LayerNorm(_Norm):
    """By this name in autograd's graph."""
