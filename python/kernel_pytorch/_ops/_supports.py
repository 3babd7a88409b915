"""The core's answer to what its kernels take, cheap enough for a call's path: asked once per request and process.

Nothing in Python knows by itself what a kernel takes. Under torch.compile the answer is a constant.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._supports import KernelSupport, supports


@functools.cache
def _best(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **options: Any
) -> KernelSupport | None:
    return next((kernel for kernel in supports(op, shape, dtype, device, **options) if kernel.supported), None)


def runs(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel takes it."""
    return _best(op, shape, dtype, device) is not None


def runs_attention(size: int, value_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels take heads of these sizes, forward and backward."""
    shape = (1, 1, 128, 128, size)
    ops = ("attention_forward", "attention_backward")
    return all(_best(op, shape, dtype, device, value_size=value_size) is not None for op in ops)


def runs_fast(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel takes it that is no fallback."""
    best = _best(op, shape, dtype, device)
    return best is not None and not best.fallback


# What torch.compiler.assume_constant_result sets; the decorator itself would import the compiler, a second.
for _question in (runs, runs_attention, runs_fast):
    _question._dynamo_marked_constant = True  # type: ignore[union-attr]
