"""Which kernels of an op would run a request on a device: the core's answer, for code that decides by it. Works without
torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _library

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KernelSupport:
    """A kernel that was asked. `reason` says why not; a `fallback` takes what faster kernels do not."""

    kernel: str
    origin: str
    supported: bool
    reason: str
    fallback: bool


def problem(
    op: str, shape: Sequence[int], dtype: str | torch.dtype, device: str | torch.device, options: Mapping[str, Any]
) -> dict[str, Any]:
    """A request of the C interface."""
    return {
        "op": op,
        "shape": [int(size) for size in shape],
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "options": {
            name: value if isinstance(value, (bool, int, float)) else str(value).removeprefix("torch.")
            for name, value in options.items()
        },
    }


def supports(
    op: str,
    shape: Sequence[int],
    dtype: str | torch.dtype = "fp32",
    device: str | torch.device = "cpu",
    **options: Any,
) -> tuple[KernelSupport, ...]:
    """The op's kernels, in the order in which they are asked. A request that the op refuses raises its message."""
    answer = _library.call("supports", request=problem(op, shape, dtype, device, options))
    return tuple(KernelSupport(**kernel) for kernel in answer["kernels"])


@functools.cache
def _best(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **options: Any
) -> KernelSupport | None:
    return next((kernel for kernel in supports(op, shape, dtype, device, **options) if kernel.supported), None)


def runs_attention(size: int, value_size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels take heads of these sizes, forward and backward. Asked once per request and process."""
    shape = (1, 1, 128, 128, size)
    ops = ("attention_forward", "attention_backward")
    return all(_best(op, shape, dtype, device, value_size=value_size) is not None for op in ops)


def runs_fast(op: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel takes it that is no fallback. Asked once per request and process."""
    best = _best(op, shape, dtype, device)
    return best is not None and not best.fallback


# What torch.compiler.assume_constant_result sets; the decorator itself would import the compiler, a second.
for _question in (runs_attention, runs_fast):
    _question._dynamo_marked_constant = True  # type: ignore[union-attr]
