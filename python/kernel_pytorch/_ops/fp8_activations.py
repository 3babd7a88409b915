"""W4A8: products of rows in FP8 with a weight in mxfp4, whose values E4M3 holds exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .float8 import quantize, scaled_matmul
from .matmul import matmul
from .quantized_matmul import QuantizedWeight, dequantize_weight, parts_of

_BIAS = 127  # of E8M0
_ROOM = 6  # 6 * 2^6 = 384: the largest power by which E2M1's largest value stays within E4M3
_CACHE = "_fp8_scales"


def fp8_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias with x rounded to E4M3 by rows; the gradient of x is that without rounding."""
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        return _Straight.apply(x, bias, weight)  # type: ignore[no-any-return, no-untyped-call]
    return _product(x, weight, bias)


def row_scales(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """E8M0 scales relative to their row's largest, and a factor for each row; kept with the weight."""
    scales = weight.scales.view(torch.uint8)
    version = scales._version if not scales.is_inference() else 0
    kept = weight.__dict__.get(_CACHE)
    if kept is not None and kept[0] == version:
        return kept[1], kept[2]
    powers = scales.to(torch.int32)
    is_nan = powers == 255
    largest = (
        powers.masked_fill(is_nan, 0).amax(1, keepdim=True) if scales.numel() else powers.new_zeros(len(scales), 1)
    )
    relative = (powers - largest + (_BIAS + _ROOM)).clamp_(0, 254).masked_fill_(is_nan, 255).to(torch.uint8)
    factors = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), largest - (_BIAS + _ROOM)).float().squeeze(1)
    object.__setattr__(weight, _CACHE, (version, relative, factors))
    return relative, factors


def _product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    relative, factors = row_scales(weight)
    plain = replace(weight, scales=relative, zeros=None, tensor_scale=None)
    rows = x.reshape(-1, x.shape[-1])
    quantized = quantize(rows, granularity="row")
    values = dequantize_weight(plain, torch.float8_e4m3fn)
    product = scaled_matmul(quantized.codes, values, quantized.scales, factors, bias=bias, dtype=x.dtype)
    return product.reshape(*x.shape[:-1], weight.shape[0])


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: QuantizedWeight) -> Tensor:
        ctx.weight, ctx.dtype = weight, None if bias is None else bias.dtype
        ctx.save_for_backward(*(part for part in parts_of(weight) if part is not None))
        return _product(x.detach(), weight, None if bias is None else bias.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x = matmul(grad, ctx.weight.dequantize(grad.dtype)) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0, dtype=torch.float32).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, None
