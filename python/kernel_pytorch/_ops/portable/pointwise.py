"""Activations, gated ones and dropout, by torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .numbers import column_sums, drop, evaluate, wide

MaybeTensor = Tensor | None


def _plus(x: Tensor, bias: MaybeTensor) -> Any:
    return wide(x) if bias is None else wide(x) + wide(bias)


def activation_forward(
    x: Tensor, bias: MaybeTensor, residual: MaybeTensor, seed: MaybeTensor, kind: str, dropout_p: float
) -> Tensor:
    out = drop(evaluate(kind, _plus(x, bias))[0], seed, dropout_p)
    return out if residual is None else out + wide(residual)


def activation_backward(
    grad_output: Tensor, x: Tensor, bias: MaybeTensor, seed: MaybeTensor, kind: str, dropout_p: float, bias_grad: bool
) -> tuple[MaybeTensor, ...]:
    grad = drop(wide(grad_output), seed, dropout_p) * evaluate(kind, _plus(x, bias))[1]
    return grad, column_sums(grad) if bias_grad else None


def gated_activation_forward(
    gate: Tensor, up: Tensor, gate_bias: MaybeTensor, up_bias: MaybeTensor, residual: MaybeTensor, seed: MaybeTensor,
    kind: str, dropout_p: float,
) -> Tensor:  # fmt: skip
    out = drop(evaluate(kind, _plus(gate, gate_bias))[0] * _plus(up, up_bias), seed, dropout_p)
    return out if residual is None else out + wide(residual)


def gated_activation_backward(
    grad_output: Tensor, gate: Tensor, up: Tensor, gate_bias: MaybeTensor, up_bias: MaybeTensor, seed: MaybeTensor,
    kind: str, dropout_p: float, gate_bias_grad: bool, up_bias_grad: bool,
) -> tuple[MaybeTensor, ...]:  # fmt: skip
    grad = drop(wide(grad_output), seed, dropout_p)
    value, slope = evaluate(kind, _plus(gate, gate_bias))
    of_gate, of_up = grad * _plus(up, up_bias) * slope, grad * value
    return (
        of_gate,
        of_up,
        column_sums(of_gate) if gate_bias_grad else None,
        column_sums(of_up) if up_bias_grad else None,
    )


def _halves(x: MaybeTensor) -> tuple[Any, Any]:
    return (None, None) if x is None else tuple(x.tensor_split(2, -1))  # type: ignore[return-value]


def gated_activation_packed_forward(
    x: Tensor, bias: MaybeTensor, residual: MaybeTensor, seed: MaybeTensor, kind: str, dropout_p: float
) -> Tensor:
    return gated_activation_forward(*_halves(x), *_halves(bias), residual, seed, kind, dropout_p)


def gated_activation_packed_backward(
    grad_output: Tensor, x: Tensor, bias: MaybeTensor, seed: MaybeTensor, kind: str, dropout_p: float, bias_grad: bool
) -> tuple[MaybeTensor, ...]:
    of_gate, of_up, *_ = gated_activation_backward(
        grad_output, *_halves(x), *_halves(bias), seed, kind, dropout_p, False, False
    )
    assert of_gate is not None and of_up is not None
    grad = torch.cat([of_gate, of_up], -1)
    return grad, column_sums(grad) if bias_grad else None


def dropout_forward(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return drop(wide(x), seed, p)


dropout_backward = dropout_forward  # with the same bits
