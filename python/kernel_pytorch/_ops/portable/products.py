"""Products, linear layers and MLPs, by torch operations.

Operands are multiplied in their own type: the device's matrix units take 16-bit operands and add in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .numbers import column_sums, evaluate, wide

MaybeTensor = Tensor | None


def matmul_forward(a: Tensor, b: Tensor, precision: str) -> Tensor:
    if precision == "bf16":
        a, b = a.bfloat16().to(a.dtype), b.bfloat16().to(b.dtype)
    elif precision == "tf32":  # a GPU's, in fp32
        a, b = _rounded_to_tf32(a), _rounded_to_tf32(b)
    return torch.matmul(a, b)


def _rounded_to_tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    stays_finite = (bits & 0x7FFFFFFF) < 0x7F7FF000  # others are cut off
    rounded = torch.where(stays_finite, bits + 0x1000, bits) & ~0x1FFF
    return torch.where(x.isnan(), x, rounded.view(torch.float32))


def matmul_add_(output: Tensor, a: Tensor, b: Tensor, alpha: float) -> None:
    output.copy_(wide(output) + alpha * wide(torch.matmul(a, b)))


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., ::2], x[..., 1::2]  # (gate, up, gate, up, ...)


def linear_forward(
    x: Tensor, weight: Tensor, bias: MaybeTensor, residual: MaybeTensor, activation: str, gated: bool, precision: str,
    weight_up: MaybeTensor,
) -> tuple[MaybeTensor, ...]:  # fmt: skip
    before = wide(matmul_forward(x, weight.mT, precision))
    before = before if bias is None else before + wide(bias)
    if weight_up is not None:
        out = evaluate(activation, before)[0] * wide(matmul_forward(x, weight_up.mT, precision))
    elif gated:
        gate, up = _pairs(before)
        out = evaluate(activation, gate)[0] * up
    else:
        out = evaluate(activation, before)[0]
    keeps = gated or activation != "identity"
    return out if residual is None else out + wide(residual), before if keeps else None


def _before_activation(grad: Tensor, before: Tensor, activation: str, gated: bool) -> Tensor:
    """The gradient of what the activation was taken of."""
    if gated:
        gate, up = _pairs(wide(before))
        value, slope = evaluate(activation, gate)
        return torch.stack([grad * up * slope, grad * value], -1).flatten(-2)
    return grad if activation == "identity" else grad * evaluate(activation, wide(before))[1]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def linear_backward(
    grad_output: Tensor, x: Tensor, weight: Tensor, bias: MaybeTensor, preactivation: Tensor, activation: str,
    gated: bool, precision: str, input_grad: bool, weight_grad: bool, bias_grad: bool, *_: Any,
) -> tuple[MaybeTensor, ...]:  # fmt: skip
    wide_grad = _before_activation(wide(grad_output), preactivation, activation, gated)
    grad = wide_grad.to(x.dtype)
    return (
        matmul_forward(grad, weight, precision) if input_grad else None,
        matmul_forward(_rows(grad).mT, _rows(x), precision) if weight_grad else None,
        column_sums(wide_grad) if bias_grad else None,
    )


def mlp_forward(
    x: Tensor, weight_in: Tensor, bias_in: MaybeTensor, weight_out: Tensor, bias_out: MaybeTensor,
    residual: MaybeTensor, activation: str, gated: bool, precision: str,
) -> tuple[MaybeTensor, ...]:  # fmt: skip
    hidden, before = linear_forward(x, weight_in, bias_in, None, activation, gated, precision, None)
    assert hidden is not None
    out, _ = linear_forward(hidden.to(x.dtype), weight_out, bias_out, residual, "identity", False, precision, None)
    return out, hidden, before


def mlp_backward(
    grad_output: Tensor, x: Tensor, weight_in: Tensor, bias_in: MaybeTensor, weight_out: Tensor, bias_out: MaybeTensor,
    hidden: Tensor, preactivation: Tensor, activation: str, gated: bool, precision: str, input_grad: bool,
    weight_in_grad: bool, bias_in_grad: bool, weight_out_grad: bool, bias_out_grad: bool,
) -> tuple[MaybeTensor, ...]:  # fmt: skip
    of_hidden, of_weight_out, of_bias_out = linear_backward(
        grad_output,
        hidden,
        weight_out,
        bias_out,
        hidden,
        "identity",
        False,
        precision,
        True,
        weight_out_grad,
        bias_out_grad,
    )
    assert of_hidden is not None
    inner = linear_backward(
        of_hidden,
        x,
        weight_in,
        bias_in,
        preactivation,
        activation,
        gated,
        precision,
        input_grad,
        weight_in_grad,
        bias_in_grad,
    )
    return *inner, of_weight_out, of_bias_out
