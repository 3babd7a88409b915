"""Query, key and value: three products of one input become one, for inference.

The weights of the three layers are laid side by side in memory (the parameters stay, see PackRows); the first of the
layers to be called computes all three, the others hand out their columns. So the attention's own code stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from ...functional import linear
from ..changes import PackRows, SetForward, Several, mark
from ..record import copied
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import evaluating
from .context import Context, owners, weight_reason, why_not_plain

NAME = "qkv"
SPELLINGS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("wq", "wk", "wv"))


class Shared:
    """The one product, from the first layer that asks for it to the last."""

    def __init__(self, weights: PackRows, biases: PackRows | None, sizes: list[int], ours: bool) -> None:
        self.weights, self.biases, self.ours = weights, biases, ours
        self.ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self.held: tuple[Tensor, int, Tensor] | None = None
        self.works = True  # no longer, once layers were called with different inputs

    def columns(self, index: int, x: Tensor) -> Tensor | None:
        """Of layer `index`; None where it must compute its own."""
        if not self.works or not self.weights.holds() or (self.biases is not None and not self.biases.holds()):
            return None
        version = 0 if x.is_inference() else x._version
        if index == 0:
            weight, bias = self.weights.packed, None if self.biases is None else self.biases.packed
            assert weight is not None
            product = (linear if self.ours else torch_functional.linear)(x, weight, bias)
            self.held = (x, version, product)
        if self.held is None or self.held[0] is not x or self.held[1] != version:
            self.works, self.held = index == 0, None
            return None
        product = self.held[2]
        if index == len(self.ends) - 1:
            self.held = None
        return product[..., self.ends[index - 1] if index else 0 : self.ends[index]]


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    names = next((n for n in SPELLINGS if all(type(module._modules.get(name)) is nn.Linear for name in n)), None)
    if names is None:
        return None
    layers: list[Any] = [module._modules[name] for name in names]
    if context.trains:
        return Refusal(path, NAME, "one product in place of three is for inference: each weight has its own gradient")
    reason = weight_reason(module)
    for name, layer in zip(names, layers):
        reason = reason or why_not_plain(name, layer)
    reason = reason or _unequal(layers) or _shared(context, names, layers) or _other_inputs(module, names, call)
    if reason:
        return Refusal(path, NAME, reason)
    ways = [
        Way("one product of kernel_pytorch", lambda: _change(layers, True)),
        Way("one product of torch", lambda: _change(layers, False)),
    ]
    source = f"{type(module).__name__}, three products of one input"
    return Proposal(NAME, path, module, source, ways, covers=[f"{path}.{name}".lstrip(".") for name in names])


def _unequal(layers: list[Any]) -> str | None:
    weights = [layer.weight for layer in layers]
    if len({(weight.shape[1], weight.dtype, weight.device) for weight in weights}) > 1:
        return "the three weights differ in their inputs, type or device"
    if len({layer.bias is None for layer in layers}) > 1:
        return "some of the three have a bias, and some none"
    return None if all(weight.is_contiguous() for weight in weights) else "a weight is no plain matrix in memory"


def _shared(context: Context, names: tuple[str, ...], layers: list[Any]) -> str | None:
    for name, layer in zip(names, layers):
        if len(owners(context.model, layer.weight)) > 1:
            return f"the weight of {name} is shared with another layer"
    return None


def _other_inputs(module: nn.Module, names: tuple[str, ...], call: Call) -> str | None:
    """In words, if the three do not get the same tensor, in this order, once each."""
    seen: list[tuple[str, Any]] = []
    handles = []
    for name in names:
        layer: Any = module._modules[name]
        handles.append(layer.register_forward_pre_hook(lambda _, args, name=name: seen.append((name, args[0]))))
    try:
        with torch.no_grad(), evaluating(module):
            Call(copied(call.args), copied(call.kwargs)).run(module)
    finally:
        for handle in handles:
            handle.remove()
    if [name for name, _ in seen] != list(names):
        return f"they run as {', '.join(name for name, _ in seen) or 'nothing'}, not {', '.join(names)}"
    return None if all(x is seen[0][1] for _, x in seen) else "their inputs differ"


def _change(layers: list[Any], ours: bool) -> Several:
    weights = PackRows([layer.weight for layer in layers])
    biases = None if layers[0].bias is None else PackRows([layer.bias for layer in layers])
    shared = Shared(weights, biases, [layer.out_features for layer in layers], ours)
    packs = [weights] if biases is None else [weights, biases]
    return Several(*packs, *(SetForward(layer, mark(_forward(shared, i))) for i, layer in enumerate(layers)))


def _forward(shared: Shared, index: int) -> Any:
    def forward(self: Any, input: Tensor) -> Tensor:
        needs_gradient = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if not needs_gradient and not torch.compiler.is_compiling() and type(input) is Tensor:
            found = shared.columns(index, input)
            if found is not None:
                return found
        return torch_functional.linear(input, self.weight, self.bias)

    return forward
