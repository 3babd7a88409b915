"""Gate and up of a gated MLP as one matrix in memory, kept in the module. The parameters stay (see PackRows)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..changes import PackRows, Several

PACK_KEY = "_kernel_pytorch_pack"


def wants_gradient(x: Tensor, weight: Tensor) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)


class Pack(Several):
    """Gate and up as one matrix, the rows of up after those of the gate."""

    def __init__(self, module: nn.Module, gate: Any, up: Any) -> None:
        self.module = module
        self.weights = PackRows([gate.weight, up.weight])
        self.biases = None if gate.bias is None else PackRows([gate.bias, up.bias])
        super().__init__(self.weights, *([] if self.biases is None else [self.biases]))

    def apply(self) -> None:
        super().apply()
        self.module.__dict__[PACK_KEY] = self

    def undo(self) -> None:
        self.module.__dict__.pop(PACK_KEY, None)
        super().undo()

    def holds(self) -> bool:
        return self.weights.holds() and (self.biases is None or self.biases.holds())

    @property
    def weight(self) -> Tensor:
        assert self.weights.packed is not None
        return self.weights.packed

    @property
    def bias(self) -> Tensor | None:
        return None if self.biases is None else self.biases.packed
