"""Casts by role: what autocast means for a norm. Activations keep their type, fp32 parameters stay fp32."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDTHS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4, torch.float64: 8}


def parameter_for(x: Tensor, parameter: Tensor) -> Tensor:
    """A weight or bias of another type than x's: a narrower one is widened to x's type, fp32 stays.

    What remains unequal is left to the op, which says what is wrong.
    """
    return parameter.to(x.dtype) if _WIDTHS.get(parameter.dtype, 8) < _WIDTHS.get(x.dtype, 0) else parameter


def same_type(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their types (fp32 for bf16 with fp16)."""
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
