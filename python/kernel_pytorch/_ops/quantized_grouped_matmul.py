"""quantized_grouped_matmul: products of groups of rows with weights in few bits, the experts of a mixture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .grouped_matmul import activation_of, apply_activation, ends_of, group_sums
from .quantized_matmul import QuantizedWeight, check_matrix, columns_of, is_integer, parts_of, values_of
from .support.autograd import wants_gradient
from .support.casting import autocast
from .support.declare import differentiable

_ops = torch.ops.kernel_pytorch


def quantized_grouped_matmul(
    x: Tensor,
    weight: QuantizedWeight,
    offsets: Tensor,
    *,
    groups: int | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    gather: Tensor | None = None,
    limit: float = 7.0,
    slope: float = 1.702,
) -> Tensor:
    """Row r of x times the matrix of r's group, which is kept in few bits and decoded on its way to the multipliers.

    Args:
        x: [rows, k], or with gather [any, k]. fp32, bf16 or fp16, under autocast its type. Gradients of x and bias
            exist.
        weight: what `quantize_weight` made of [groups * n, k]: the groups' matrices, as linear layers store theirs,
            behind each other. Every format.
        offsets: [groups], where each group ends, or [groups + 1] with a 0 in front, as in `grouped_matmul`.
        groups: how many there are; None: as many as offsets has elements.
        bias: [groups, n].
        activation: as in `grouped_matmul`: an activation, or a gate of the columns.
        gather: [rows], int32: row r is x[gather[r]].
        limit, slope: of swiglu_clamped.

    Returns:
        [rows, n], with a gate [rows, n / 2], of x's type; zeros for rows behind the last group.
    """
    check_matrix("quantized_grouped_matmul", weight)
    (x,) = autocast(x)
    if x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"quantized_grouped_matmul: x has shape {list(x.shape)}, the weight has {list(weight.shape)}; their last "
            "sizes must be equal"
        )
    count = offsets.shape[0] if groups is None else groups
    if count <= 0 or weight.shape[0] % count:
        raise ValueError(
            f"quantized_grouped_matmul: the weight has {weight.shape[0]} rows, and there are {count} groups; each has "
            "as many rows"
        )
    ends = ends_of(offsets, count)
    gather = None if gather is None else gather.int()
    rows = x.shape[0] if gather is None else gather.shape[0]
    chosen = activation_of("quantized_grouped_matmul", activation, limit, slope)
    codes, scales, zeros, tensor_scale = parts_of(weight)
    if is_integer(weight.format) and scales.dtype is not x.dtype:
        scales = scales.to(x.dtype)
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        bias = bias.to(x.dtype)
    missing = columns_of(weight.format, codes.shape[1]) - weight.shape[1]
    if missing:  # the gradient knows a row's bytes alone
        x = torch.nn.functional.pad(x, (0, missing))
    apart = chosen.form != "plain" or (activation is not None and wants_gradient(x, bias))
    kind = "identity" if apart else chosen.kind
    made = _product(x, codes, scales, ends, zeros, tensor_scale, gather, bias, weight.format, weight.group, kind, rows)
    return apply_activation(made, chosen) if apart else made


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    codes, scales, offsets, zeros, tensor_scale, gather, bias, source, format, group = saved
    grad = grads[0]
    of_x = of_bias = None
    groups = offsets.shape[0]
    if wanted[0]:
        values = values_of(codes, scales, zeros, tensor_scale, format, group, grad.dtype)
        matrices = values.view(groups, codes.shape[0] // groups, values.shape[1])
        plain = activation_of("grouped_matmul", None)
        of_x = _ops.grouped_matmul(grad, matrices, offsets, None, None, *plain, grad.shape[0], None)
        if gather is not None:  # rows in no group are zeros, whatever their index is
            of_x = _ops.embedding_backward(of_x, gather.clamp(min=0).long(), source.shape[0], -1)
    if wanted[7]:
        of_bias = group_sums(grad, offsets, None, None, bias.dtype)
    return of_x, None, None, None, None, None, None, of_bias


_product = differentiable(
    "quantized_grouped_matmul",
    saves=["codes", "scales", "offsets", "zeros", "tensor_scale", "gather", "bias", "x", "format", "group"],
    gradient=_gradient,
    instead="grouped_matmul of dequantize_weight",
)
