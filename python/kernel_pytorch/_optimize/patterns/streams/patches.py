"""Convolutions of patches: where the stride is the kernel's size, no input is read twice, and the convolution is one
product of the patches, as vision transformers embed images. A library's convolution changes the images' layout before
and after; the product reads each image once and leaves rows of channels, which is what stands behind it mostly wants:
flatten(2).transpose(1, 2) of them is contiguous.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as torch_functional
from torch import Tensor, nn

from ....core._cast_linear import cast_linear
from ....core._products import runs_here
from ...changes import SetForward, mark
from ...sites import Call, Found, Proposal, Refusal, Way
from ..context import Context, single_input, weight_reason, why_not_plain
from ..linears import ALIGNMENT

NAME = "patches"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    if not isinstance(module, _CONVOLUTIONS) or x is None or len(call.tensors()) != 1 or not _is_of_patches(module, x):
        return None
    reason = why_not_plain("", module) or weight_reason(module)
    if reason:
        return Refusal(path, NAME, reason)
    original = type(module).forward

    def by(ours: bool) -> SetForward:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            fits = _is_of_patches(self, x)
            return _product(self, x, ours) if fits else original(self, x)  # type: ignore[arg-type]

        return SetForward(module, mark(single_input(forward, "input", original)))

    ways = [Way("torch's product of its patches", lambda: by(False))]
    if runs_here(x):
        ways.append(Way("kernel_pytorch product of its patches", lambda: by(True)))
    size = "x".join(map(str, module.kernel_size))
    source = f"{type(module).__name__} {module.in_channels} -> {module.out_channels}, patches of {size}"
    # opaque: what a convolution copies inside does not show
    return Proposal(NAME, path, module, source, ways, opaque=True)


def _is_of_patches(module: Any, x: Tensor) -> bool:
    """Whether every input is in one patch at most, and the call is one of a batch."""
    kernel = module.kernel_size
    return (
        type(module).forward in [kind.forward for kind in _CONVOLUTIONS]
        and kernel == module.stride
        and math.prod(kernel) > 1
        and module.groups == 1
        and module.padding in ("valid", (0,) * len(kernel))
        and all(step == 1 for step in module.dilation)
        and x.dim() == len(kernel) + 2
        and all(size >= k for size, k in zip(x.shape[2:], kernel))
    )


def _product(module: Any, x: Tensor, ours: bool) -> Tensor:
    kernel, dims = module.kernel_size, len(module.kernel_size)
    counts = [size // k for size, k in zip(x.shape[2:], kernel)]
    for dim, (count, k) in enumerate(zip(counts, kernel), start=2):
        x = x.narrow(dim, 0, count * k)  # a convolution leaves what is less than a patch
    split = [part for pair in zip(counts, kernel) for part in pair]
    patches = x.reshape(*x.shape[:2], *split)  # a view: dimensions are only split
    patches = patches.permute(0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2))
    weight, padding = module.weight, _padding(module, x)
    if padding:
        patches, weight = (torch_functional.pad(one, (0, padding)) for one in (patches, weight))
    rows = patches.reshape(x.shape[0], *counts, -1)
    return cast_linear(rows, weight.reshape(weight.shape[0], -1), module.bias, ours=ours).movedim(-1, 1)


def _padding(module: Any, x: Tensor) -> int:
    """Columns of zeros at the end of a patch's rows that make the product's rows a multiple of 16 bytes, as GPUs' fast
    kernels want them (a patch of 3 x 14 x 14 is 8 bytes longer)."""
    rows = module.in_channels * math.prod(module.kernel_size[:-1])
    if not x.is_cuda:
        return 0
    return next(more for more in range(ALIGNMENT) if rows * (module.kernel_size[-1] + more) % ALIGNMENT == 0)
