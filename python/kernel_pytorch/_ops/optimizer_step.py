"""The ops of `kernel_pytorch.optim`: steps over lists of tensors, and the norm of a list."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .support.declare import without_gradient

optimizer_step_: Any = without_gradient("optimizer_step_")
_reduce_norm: Any = without_gradient("reduce_norm")


def reduce_norm(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of all elements of all tensors (of one device), a scalar fp32 tensor (fp64 where a tensor is).

    Chunks are summed in a fixed order: bitwise repeatable. Nothing waits for the device.
    """
    if not tensors:
        return torch.zeros(())
    with torch.no_grad():
        return _reduce_norm([_filled(tensor.detach()) for tensor in tensors])  # type: ignore[no-any-return]


def _filled(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its elements have gaps between them or share memory."""
    # empty_like keeps strides exactly where they have neither.
    if tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return tensor
    return tensor.contiguous()
