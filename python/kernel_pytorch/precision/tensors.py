"""Tensors to FP8 and back, for whoever wants codes rather than layers."""

from __future__ import annotations

import torch
from torch import Tensor

from .._ops.float8 import dequantize, quantize
from .config import FP8Format


def quantize_to_fp8(
    tensor: Tensor, scale: Tensor | float | None = None, format: FP8Format = FP8Format.E4M3
) -> tuple[Tensor, Tensor]:
    """(codes, scale): tensor / scale rounded to nearest even in the format, saturated, in torch's float8 type.

    Args:
        tensor: fp32, bf16 or fp16, any shape.
        scale: what codes are multiplied by to give values back, one number; None chooses the one by which the largest
            magnitude becomes the largest of the format.
    """
    if scale is not None:
        scale = torch.as_tensor(scale, dtype=torch.float32, device=tensor.device)
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    made = quantize(matrix, dtype=FP8Format(format).dtype, scale=scale)
    assert made.codes is not None
    return made.codes.contiguous().view(tensor.shape), made.scales.reshape(())


def dequantize_from_fp8(codes: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.float32) -> Tensor:
    """scale * codes as dtype. The scale has one element, or is one of rows or blocks as quantize gives them."""
    return dequantize(codes, torch.as_tensor(scale, dtype=torch.float32, device=codes.device), dtype)
