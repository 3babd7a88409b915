"""Tensors to FP8 and back, for whoever wants codes rather than layers.

value = inverse_scale * code. Both functions take the factor by that name alone: elsewhere a `scale` in the same place
multiplies values, and a number of the wrong convention is not seen to be one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ops.float8 import dequantize, quantize
from .config import FP8Format


def quantize_to_fp8(
    tensor: Tensor,
    *ambiguous: Any,
    inverse_scale: Tensor | float | None = None,
    format: FP8Format = FP8Format.E4M3,
    scale: Any = None,
) -> tuple[Tensor, Tensor]:
    """(codes, inverse_scale): tensor / inverse_scale rounded to nearest even in the format, saturated.

    Args:
        tensor: fp32, bf16 or fp16, any shape.
        inverse_scale: what codes are multiplied by to give values back, one number; None chooses the one by which the
            largest magnitude becomes the largest of the format.
        ambiguous, scale: refused: by position, or by the name scale, the factor's convention would not be named.
    """
    _refuse("quantize_to_fp8", ambiguous, scale)
    if inverse_scale is not None:
        inverse_scale = torch.as_tensor(inverse_scale, dtype=torch.float32, device=tensor.device)
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    made = quantize(matrix, dtype=FP8Format(format).dtype, scale=inverse_scale)
    assert made.codes is not None
    return made.codes.contiguous().view(tensor.shape), made.scales.reshape(())


def dequantize_from_fp8(
    codes: Tensor,
    *ambiguous: Any,
    inverse_scale: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
    scale: Any = None,
) -> Tensor:
    """inverse_scale * codes as dtype. It has one element, or is one of rows or blocks as functional.quantize's.

    Args:
        inverse_scale: needed; as quantize_to_fp8 returns it.
        ambiguous, scale: refused, as by quantize_to_fp8.
    """
    _refuse("dequantize_from_fp8", ambiguous, scale)
    if inverse_scale is None:
        raise TypeError("dequantize_from_fp8: inverse_scale is missing; give the one that quantize_to_fp8 returned")
    return dequantize(codes, torch.as_tensor(inverse_scale, dtype=torch.float32, device=codes.device), dtype)


def _refuse(function: str, ambiguous: tuple[Any, ...], scale: Any) -> None:
    if ambiguous or scale is not None:
        given = "a scale by position" if ambiguous else "scale="
        raise TypeError(
            f"{function}: {given} does not say which way it scales; give inverse_scale=, with value = inverse_scale * "
            "code (of a factor that multiplies values before they are rounded, that is 1 / factor)"
        )
