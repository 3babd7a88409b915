"""Products of 8-bit integers (W8A8): activations rounded by rows on their way, weights by rows or groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .activation import activation as _activate
from .matmul import matmul
from .support.autograd import wants_gradient
from .support.casting import packed_operands
from .support.declare import differentiable

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_GROUPS = (128, 64, 32)


def int8_matmul(
    x: Tensor,
    weight: Tensor,
    scale_weight: Tensor,
    *,
    scale_x: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(scales * (x @ weight.T) + bias) of 8-bit integers, whose products are summed exactly in int32.

    Args:
        x: [..., k]: fp32, bf16 or fp16, which is rounded to 8 bits on its way, each row by its largest magnitude / 127
            (under autocast its type); or int8 codes with scale_x.
        weight: [rows, k], int8.
        scale_weight: fp32: [rows], [rows, 1], or [rows, ceil(k / group)] with groups of 32, 64 or 128 columns.
        scale_x: fp32, of x's shape less the last dimension; with codes, and only then.
        bias: [rows], of the result's type or fp32.
        activation: a name that `activation` takes, or None.
        dtype: of the result: fp32, bf16 or fp16; None: x's, of codes bf16.

    Returns:
        [..., rows]. Gradients of x (numbers) and bias exist; that of x is the one without rounding x (straight
        through).
    """
    if weight.dim() != 2 or weight.dtype is not torch.int8:
        raise ValueError(f"int8_matmul: weight is {weight.dtype} {list(weight.shape)}; it must be int8 [rows, k]")
    is_codes = x.dtype is torch.int8
    if is_codes != (scale_x is not None):
        raise ValueError(
            f"int8_matmul: x is {x.dtype} and scale_x is {'given' if scale_x is not None else 'missing'}; int8 codes "
            "need one scale for each row, other types are rounded with one of their own"
        )
    if is_codes:
        if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"int8_matmul: x has shape {list(x.shape)}, the weight has {list(weight.shape)}; their last sizes must "
                "be equal"
            )
        made = torch.bfloat16 if dtype is None else dtype
        if bias is not None and bias.dtype not in (made, torch.float32):
            bias = bias.to(made)
    else:
        x, bias = packed_operands("int8_matmul", x, weight.shape, bias)
        made = x.dtype
    if made not in _NAMES:
        raise ValueError(f"int8_matmul: dtype is {made}; it must be fp32, bf16 or fp16")
    if activation is not None and wants_gradient(x, bias):  # the activation's own gradient needs its input
        sums = int8_matmul(x, weight, scale_weight, scale_x=scale_x, bias=bias, dtype=made)
        return _cast(_activate(sums, activation), dtype)
    scales = scale_weight.float()
    scales = scales[:, None] if scales.dim() == 1 else scales
    group = _group_of(scales, weight)
    kind = "identity" if activation is None else activation
    return _cast(_product(x, weight, scales, scale_x, bias, group, kind, _NAMES[made]), dtype)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes of a weight [rows, columns] and fp32 scales [rows]: a row's largest magnitude is 127."""
    values = weight.detach().float()
    scales = values.abs().amax(1) / 127.0 if values.shape[1] else values.new_zeros(len(values))
    codes = torch.where(scales[:, None] > 0, values / scales[:, None], 0.0).round().clamp(-127, 127)
    return codes.to(torch.int8), scales


def _cast(output: Tensor, dtype: torch.dtype | None) -> Tensor:
    return output if dtype is None else output.to(dtype)


def _group_of(scales: Tensor, weight: Tensor) -> int:
    """The group by the number of scales of a row: 0 for one."""
    columns = weight.shape[1]
    found = 0 if scales.shape[-1] == 1 else next((g for g in _GROUPS if -(-columns // g) == scales.shape[-1]), -1)
    if scales.dim() != 2 or len(scales) != len(weight) or found < 0:
        raise ValueError(
            f"int8_matmul: scale_weight has shape {list(scales.shape)}, weight has {list(weight.shape)}; it must be "
            f"[{len(weight)}], or [{len(weight)}, groups] with groups of 32, 64 or 128 columns"
        )
    return found


def _gradient(grads: Any, saved: Any, wanted: Any) -> Any:
    weight, scales, bias, group = saved
    grad = grads[0]
    grad_x = grad_bias = None
    if wanted[0]:
        each = scales.repeat_interleave(group, 1)[:, : weight.shape[1]] if group else scales
        grad_x = matmul(grad, (weight.float() * each).to(grad.dtype))
    if wanted[4]:
        rows = grad.flatten(0, -2) if grad.dim() > 1 else grad[None]
        grad_bias = rows.sum(0, dtype=torch.float32).to(bias.dtype)
    return grad_x, None, None, None, grad_bias


_product = differentiable(
    "int8_matmul",
    saves=["weight", "scale_weight", "bias", "group"],
    gradient=_gradient,
    instead="torch.nn.functional.linear of the weight's values",
)
