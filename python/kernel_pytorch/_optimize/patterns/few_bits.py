"""Linear layers and experts whose weights are read in 4 bits, for inference with accuracy="tolerant" and `weights`.

The layer keeps its parameters; codes lie next to them and are made again where the weight has changed. Each kind of
layer is measured: with many rows decoding may cost more than it saves, and such layers stay.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ...functional import QuantizedWeight, quantize_weight, quantized_matmul
from ...mixture_of_experts.layers import FEW_BITS as EXPERTS
from ...mixture_of_experts.layers import MoELayer
from ..changes import Change, SetForward, Several
from ..sites import Call, Found, Proposal, Refusal, Way
from .context import Context, weight_reason, why_not_plain

NAME = "few bits"
FORMATS = ("nvfp4", "mxfp4", "int4")
_KEY = "_kernel_pytorch_few_bits"


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    if context.weights is None or x is None or len(call.tensors()) != 1:
        return None
    formats = FORMATS if context.weights == "auto" else (context.weights,)
    if isinstance(module, MoELayer):
        return _find_experts(path, module, formats)
    if type(module) is not nn.Linear:
        return None
    reason = why_not_plain("", module) or weight_reason(module)
    if reason is None and not module.weight.numel():
        reason = f"its weight has shape {list(module.weight.shape)}: nothing is multiplied"
    if reason:
        return Refusal(path, NAME, reason)
    ways = [Way(f"the weight in {format}", partial(_change, module, format)) for format in formats]
    source = f"nn.Linear {module.in_features} -> {module.out_features}"
    return Proposal(NAME, path, module, source, ways, approximate=True)


def _find_experts(path: str, module: MoELayer, formats: tuple[str, ...]) -> Found:
    weights = (module.gate_up, module.down)
    if module.group is not None or not all(isinstance(one, nn.Parameter) and one.numel() for one in weights):
        return Refusal(path, NAME, "its experts are on several ranks, in few bits already or computed before each use")
    ways = [Way(f"the experts in {format}", partial(_KeepExperts, module, format)) for format in formats]
    source = f"MoELayer of {len(module.gate_up)} experts"
    return Proposal(NAME, path, module, source, ways, approximate=True)


class _Codes:
    """A weight's codes, and what they were made of."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.made: QuantizedWeight | None = None
        self.of: tuple[Any, ...] = ()

    def get(self, weight: Tensor) -> QuantizedWeight:
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.device)
        if self.made is None or self.of != key:
            self.made, self.of = quantize_weight(weight.reshape(-1, weight.shape[-1]), self.format), key
        return self.made


class _Keep(Change):
    """Codes next to the module."""

    def __init__(self, module: nn.Linear, format: str) -> None:
        self.module, self.format = module, format

    def apply(self) -> None:
        codes = _Codes(self.format)
        codes.get(self.module.weight)
        self.module.__dict__[_KEY] = codes

    def undo(self) -> None:
        self.module.__dict__.pop(_KEY, None)


class _KeepExperts(Change):
    """Codes next to a layer of experts, which then multiplies by them."""

    def __init__(self, module: MoELayer, format: str) -> None:
        self.module, self.format = module, format

    def apply(self) -> None:
        codes = _Codes(self.format), _Codes(self.format)
        self.module.__dict__[EXPERTS] = lambda gate_up, down: (codes[0].get(gate_up), codes[1].get(down))
        self.module.expert_weights()

    def undo(self) -> None:
        self.module.__dict__.pop(EXPERTS, None)


def _change(module: nn.Linear, format: str) -> Change:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        return quantized_matmul(input, self.__dict__[_KEY].get(self.weight), bias=self.bias)

    forward.kernel_pytorch = "layer"  # type: ignore[attr-defined]  # larger parts must call it and not pass by
    return Several(_Keep(module, format), SetForward(module, forward))
