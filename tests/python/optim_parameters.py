"""Parameters and gradients that the tests of kernel_pytorch.optim share."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = [(), (1,), (7,), (3, 5), (130,), (64, 33), (0, 4), (40000,)]


def make_parameters(dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).to(device, dtype)) for size in SIZES]


def set_gradients(step: int, *lists: list[Tensor], scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for together in zip(*lists, strict=True):
        gradient = torch.randn(together[0].shape, generator=generator) * scale
        for parameter in together:
            parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)


def assert_same(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach().float(), other.detach().float(), **tolerance)
