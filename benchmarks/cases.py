"""What a line of torch_ops.py is: an op of ours, the same in torch, the tensors both are given, the bytes they move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of the largest value

Random = Callable[..., torch.Tensor]  # random(*shape): normal, of the case's type and device


@dataclass(frozen=True)
class Op:
    name: str
    inputs: Callable[[Random, int, int], tuple[torch.Tensor, ...]]  # (random, rows, columns) -> arguments
    ours: Callable[..., Any]
    torch: Callable[..., Any]
    forward: float  # tensors of [rows, columns] that a forward must read or write; 0: not timed
    backward: float = 0
    leaves: int | None = None  # how many of the first inputs a backward differentiates; None: all floats
    checked: bool = True  # False where the two draw different random numbers
    dtypes: tuple[str, ...] = ()  # bf16 on a GPU, fp32 and bf16 on a CPU where empty
    shape_cpu: tuple[int, int] = (1024, 4096)
    shape_cuda: tuple[int, int] = (16384, 4096)

    def shape_on(self, device: torch.device) -> tuple[int, int]:
        return self.shape_cuda if device.type == "cuda" else self.shape_cpu

    def moved(self, direction: str) -> float:
        return self.forward if direction == "forward" else self.backward

    def bytes_moved(self, direction: str, dtype: torch.dtype, device: torch.device) -> int:
        rows, columns = self.shape_on(device)
        return int(self.moved(direction) * rows * columns * dtype.itemsize)
