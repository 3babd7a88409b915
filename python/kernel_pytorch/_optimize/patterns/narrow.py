"""Linear layers in narrower types, with accuracy="tolerant": FP8 on GPUs that have it, bf16 on CPUs that have AMX.

The layer keeps its parameters and their type; the product rounds its operands. Each kind of layer is measured, so that
a machine without such units keeps what it has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...functional import matmul
from ...precision import FP8LinearLayer
from ..changes import Change, SetForward, Several
from ..sites import Call, Found, Proposal, Refusal, Way
from . import float8
from .context import Context, weight_reason, why_not_plain

NAME = "narrow product"
_KEY = "_kernel_pytorch_narrow"
_HEADS = ("lm_head", "head", "classifier", "score")  # logits span more magnitudes than one scale covers


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    if context.accuracy != "tolerant" or type(module) is not nn.Linear or x is None or len(call.tensors()) != 1:
        return None
    if path.rsplit(".", 1)[-1] in _HEADS:
        return Refusal(path, NAME, "it makes logits, which span more magnitudes than one scale covers")
    reason = why_not_plain("", module) or weight_reason(module)
    if reason is None and context.device.type == "cuda":
        tokens = x.numel() // module.in_features
        reason = float8.why_not(context, [(module.in_features, module.out_features)], tokens)
    elif reason is None and module.weight.dtype is not torch.float32:
        reason = f"it is {module.weight.dtype} already"
    if reason:
        return Refusal(path, NAME, reason)
    on_gpu = context.device.type == "cuda"
    words = "FP8 operands, scaled as they come" if on_gpu else "bf16 operands, sums in fp32"
    change = _float8 if on_gpu else _bfloat16
    source = f"nn.Linear {module.in_features} -> {module.out_features}"
    return Proposal(NAME, path, module, source, [Way(words, lambda: change(module))], approximate=True)


def _layer(function: Any) -> Any:
    """A forward that larger parts must call and not pass by."""
    function.kernel_pytorch = "layer"
    return function


def _bfloat16(module: nn.Linear) -> Change:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        output = matmul(input, self.weight.t(), precision="bf16")
        return output if self.bias is None else output + self.bias

    return SetForward(module, _layer(forward))


class _Keep(Change):
    """An FP8 layer next to the module, on the same parameters."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def apply(self) -> None:
        layer = FP8LinearLayer.from_linear(self.module, float8.config())
        layer._parameters = self.module._parameters  # whatever becomes of them
        self.module.__dict__[_KEY] = layer

    def undo(self) -> None:
        self.module.__dict__.pop(_KEY, None)


def _float8(module: nn.Linear) -> Change:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        return float8.ready(self.__dict__[_KEY], input, self.training).forward(input)

    return Several(_Keep(module), SetForward(module, _layer(forward)))
