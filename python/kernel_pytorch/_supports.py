"""Which kernels of an op would run a request on a device: the core's answer, for code that decides by it. Works without
torch.
"""

from __future__ import annotations

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
