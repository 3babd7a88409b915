"""Linear layers by themselves: this library's product where it is the faster one for the layer's shapes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...core._products import runs_here
from ...functional import linear
from ..changes import SetForward, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from .context import Context, single_input, weight_reason, why_not_plain
from .norms import first_name
from .perceptrons import is_linear, weight_of

NAME = "linear"


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    if not is_linear(module) or x is None or len(call.tensors()) != 1 or not runs_here(x):
        return None
    reason = weight_reason(module) or why_not_plain("", module)
    if reason:
        return Refusal(path, NAME, reason)

    def product(self: Any, value: Tensor) -> Tensor:
        return linear(value, weight_of(self), self.bias)

    forward = mark(single_input(product, first_name(module), type(module).forward))
    rows, columns = weight_of(module).shape
    source = f"{type(module).__name__} {columns} -> {rows}"
    return Proposal(NAME, path, module, source, [Way("kernel_pytorch linear", lambda: SetForward(module, forward))])
