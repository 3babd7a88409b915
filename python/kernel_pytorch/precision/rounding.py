"""Rounding a weight so that the layer's outputs change least: ranges of groups by search, and GPTQ.

GPTQ: columns are rounded one after another. The rounding error of a column is taken off the columns that are still to
come, so that the outputs on the calibration data move as little as they can: with H = X^T X of those inputs, the best
update of the rest follows from the Cholesky factor of H^-1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._ops.quantized_matmul import FORMATS, QuantizedWeight, is_integer, pack_codes, quantize_weight

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 128  # columns between updates of all the rest
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)  # of a group's largest magnitude


def clipped_quantize(
    weight: Tensor, format: str, *, group: int | None = None, asymmetric: bool = False,
    importance: Tensor | None = None,
) -> QuantizedWeight:  # fmt: skip
    """`quantize_weight` with a range for every group: of several shares of its largest magnitude the one with the least
    sum of importance times squared error. What lies beyond the range saturates.

    Args:
        importance: of columns, [columns]: the diagonal of X^T X of the layer's inputs; None: all alike.
    """
    weight = weight.detach()
    rows, columns = weight.shape
    size = group or FORMATS[format][0][0]
    options: dict[str, Any] = {"group": group, "asymmetric": asymmetric}
    if format == "nvfp4":  # one scale of the tensor for all ranges, so that groups do not depend on each other
        options["tensor_scale"] = quantize_weight(weight, format).tensor_scale
    padding = -columns % size
    groups = torch.nn.functional.pad(weight.float(), (0, padding)).view(rows, -1, size)
    largest = groups.abs().amax(2, keepdim=True)
    weights = torch.ones(columns, device=weight.device) if importance is None else importance.float()
    weights = torch.nn.functional.pad(weights, (0, padding)).view(-1, size)

    def clamped(shares: Tensor | float) -> Tensor:
        limit = largest * shares
        return torch.minimum(torch.maximum(groups, -limit), limit).view(rows, -1)[:, :columns].to(weight.dtype)

    least = torch.full_like(largest, torch.inf)
    shares = torch.ones_like(largest)
    for share in _RANGES:
        values = quantize_weight(clamped(share), format, **options).dequantize(torch.float32)
        change = torch.nn.functional.pad(values, (0, padding)).view(rows, -1, size) - groups
        error = (change.square() * weights).sum(2, keepdim=True)
        shares = torch.where(error < least, share, shares)
        least = torch.minimum(error, least)
    return quantize_weight(clamped(shares), format, **options)


def gptq_quantize(
    weight: Tensor, gram: Tensor, format: str, *, group: int | None = None, asymmetric: bool = False,
    damping: float = 0.01, ranges: QuantizedWeight | None = None,
) -> QuantizedWeight:  # fmt: skip
    """`quantize_weight` with the codes that GPTQ finds; scales are those of rounding to nearest, or of `ranges`.

    Args:
        weight: [rows, columns].
        gram: X^T X of the layer's inputs, [columns, columns].
        format: all but mxfp8.
        damping: of the gram's mean diagonal, added to it, so that it has an inverse.
    """
    if format == "mxfp8":
        raise ValueError('gptq_quantize: format is "mxfp8", whose rounding is relative; round it to nearest')
    nearest = ranges or quantize_weight(weight, format, group=group, asymmetric=asymmetric)
    scales, zeros = _by_column(nearest, weight.shape[1])
    factor = _inverse_factor(gram.double(), damping).to(torch.float32)
    values = weight.detach().float().clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    for first in range(0, weight.shape[1], _BLOCK):
        last = min(first + _BLOCK, weight.shape[1])
        errors = torch.empty(weight.shape[0], last - first, device=weight.device)
        for column in range(first, last):
            code, rounded = _round(values[:, column], scales[:, column], zeros[:, column], format)
            codes[:, column] = code
            error = (values[:, column] - rounded) / factor[column, column]
            values[:, column + 1 : last] -= error[:, None] * factor[column, column + 1 : last]
            errors[:, column - first] = error
        values[:, last:] -= errors @ factor[first:last, last:]
    return replace(nearest, codes=pack_codes(codes, FORMATS[format][1]))


def _by_column(weight: QuantizedWeight, columns: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros of every column, fp32."""
    scales = weight.scales
    if weight.format == "mxfp4":
        scales = torch.exp2(scales.float() - 127)
    scales = scales.float()
    if weight.tensor_scale is not None:
        scales = scales * weight.tensor_scale
    middle = 2.0 ** (FORMATS[weight.format][1] - 1) if is_integer(weight.format) else 0.0
    zeros = torch.full_like(scales, middle) if weight.zeros is None else weight.zeros.float()
    return (
        scales.repeat_interleave(weight.group, 1)[:, :columns],
        zeros.repeat_interleave(weight.group, 1)[:, :columns],
    )


def _round(values: Tensor, scales: Tensor, zeros: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """The nearest codes of a column and what they stand for. A scale of 0 stands for zeros."""
    safe = torch.where(scales == 0, 1.0, scales)
    if is_integer(format):
        codes = torch.clamp(torch.round(values / safe) + zeros, 0, 2 ** FORMATS[format][1] - 1)
        return codes.to(torch.uint8), (codes - zeros) * scales
    table = torch.tensor(_E2M1, device=values.device)
    middles = (table[1:] + table[:-1]) / 2
    code = torch.bucketize((values / safe).abs(), middles)
    signed = torch.where(values < 0, -table[code], table[code])
    return (code + 8 * (values < 0)).to(torch.uint8), signed * scales


def _inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped gram's inverse. An input that is always 0 gets a diagonal of 1."""
    gram = gram.clone()
    diagonal = gram.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += damping * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return torch.linalg.cholesky(inverse, upper=True)  # type: ignore[no-any-return]
