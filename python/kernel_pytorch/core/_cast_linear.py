"""linear under torch.autocast, of fp32 parameters whose gradients are made in fp32.

autograd would make them in autocast's type, round, and cast them back in passes of their own: here a product of 16-bit
operands writes the sums of its fp32 accumulators, and the bias' gradient is summed once. For eager training; under
compilers, transforms of torch.func and without gradients it is the plain layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._ops.support.autograd import adds_gradients
from .._ops.support.casting import autocast, is_autocast
from ..functional import linear

_ops = torch.ops.kernel_pytorch


def cast_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, ours: bool = True) -> Tensor:
    """linear(x, weight, bias); `ours` are this library's products, otherwise torch's."""
    if ours and not is_autocast(x):
        return linear(x, weight, bias)
    x = autocast(x)[0]
    if not _casts(x, weight, bias):
        return linear(x, weight, bias) if ours else torch_functional.linear(x, weight, bias)
    return _CastLinear.apply(x, weight, bias, ours, 0)  # type: ignore[no-untyped-call, no-any-return]


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """torch's product with so many columns of minus infinity behind it."""
    x = autocast(x)[0]
    if not _casts(x, weight, bias):
        return torch_functional.linear(x, *_padded(x, weight, bias, padding))
    return _CastLinear.apply(x, weight, bias, False, padding)  # type: ignore[no-untyped-call, no-any-return]


def _casts(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    parameters = [weight] if bias is None else [weight, bias]
    is_cast = x.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(x.device.type)
    return is_cast and all(p.dtype is torch.float32 for p in parameters) and adds_gradients(x, *parameters)


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in x's type, with rows of zeros and minus infinity behind them."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    if not padding:
        return weight, bias
    bias = x.new_zeros(weight.shape[0]) if bias is None else bias
    return (
        torch_functional.pad(weight, (0, 0, 0, padding)),
        torch_functional.pad(bias, (0, padding), value=-torch.inf),
    )


class _CastLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ours: bool, padding: int) -> Tensor:
        narrow, narrow_bias = _padded(x, weight, None if ours else bias, padding)
        ctx.save_for_backward(x, narrow, bias)
        ctx.ours, ctx.rows = ours, weight.shape[0]
        if ours:
            return _ops.linear(x, narrow, bias, None, "identity", False, "full", None)  # type: ignore[no-any-return]
        return torch_functional.linear(x, narrow, narrow_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        ours = needed if ctx.ours else (False, False, needed[2])
        of_x, of_weight, of_bias = _ops.linear_backward(
            grad[:, : ctx.rows], rows, weight[: ctx.rows], bias, x.new_empty((0,)), "identity", False, "full", *ours,
            torch.float32,
        )  # fmt: skip
        if not ctx.ours:
            of_x = torch.mm(grad, weight) if needed[0] else None
            of_weight = _wide_gradient(grad, rows, weight)[: ctx.rows] if needed[1] else None
        found = (of_x.view(x.shape) if needed[0] else None, of_weight, of_bias)
        return *(value if wanted else None for value, wanted in zip(found, needed)), None, None


def _wide_gradient(grad: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """In fp32, and in memory as the weight lies there."""
    if weight.stride(0) == 1 and weight.stride(1) != 1:
        return _wide_product(rows.t(), grad).t()
    return _wide_product(grad.t(), rows)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b).float()
