"""Casts by role: what autocast means for a norm. Activations keep their type, fp32 parameters stay fp32."""

from __future__ import annotations

from collections.abc import Sequence

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


def wide_first(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The two of a sum, as the ops take them: of one type, or fp32 before a 16-bit one."""
    if residual.dtype is torch.float32 and x.dtype in (torch.bfloat16, torch.float16):
        return residual, x
    if x.dtype is torch.float32 and residual.dtype in (torch.bfloat16, torch.float16):
        return x, residual
    return same_type(x, residual)


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which a product with x is computed: autocast's where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if _is_autocast_on(kind) else x.dtype


def autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """What a product's operands are under torch.autocast: its type, fp64 aside."""
    kind = tensors[0].device.type
    if not _is_autocast_on(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors]


def _is_autocast_on(kind: str) -> bool:
    """Meta tensors have no autocast of their own, and torch raises where it is asked for one."""
    return kind != "meta" and torch.is_autocast_enabled(kind)
