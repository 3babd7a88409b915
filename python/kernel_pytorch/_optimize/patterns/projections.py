"""Query, key and value, products of one input, by whatever names and in whatever order a module calls them. For
inference they become one product of weights laid one after the other in memory (the parameters stay, see PackRows).
For training each weight has its own product and gradient, and the products of the backward add to one gradient of the
input; with accuracy="tolerant" also one FP8 layer of them all.

The first of the layers to be called computes them all, the others hand out theirs. So the attention's own code stays as
it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from ..._modules import evaluating
from ...core._products import runs_here
from ...core._shared_input import linears
from ...functional import linear
from ..changes import OfThisProcess, PackRows, SetAttribute, SetForward, Several, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from . import float8
from .context import Context, owners, weight_reason, why_not_plain

NAME = "qkv"
_KEY = "_kernel_pytorch_shared"
_FEWEST = 3  # layers: gate and up of an MLP, which are two, are that pattern's


class Shared(OfThisProcess):
    """The outputs, from the first layer that asks for its own to the last. Kept beside each of the layers: a
    copied model has one of its own."""

    def __init__(self, layers: list[Any], ours: bool) -> None:
        self.layers, self.ours = layers, ours
        self.held: tuple[Tensor, int, list[Tensor | None]] | None = None
        self.works = True  # no longer, once layers were called with different inputs

    def compute(self, x: Tensor) -> Sequence[Tensor] | None:
        """None where the layers must compute their own."""
        weights, biases = [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]
        return linears(x, weights, biases, ours=self.ours)

    def output(self, index: int, x: Tensor) -> Tensor | None:
        """The output of layer `index`; None if the layer must compute its own."""
        if not self.works:
            return None
        version = 0 if x.is_inference() else x._version
        if index == 0:
            found = self.compute(x)
            self.held = None if found is None else (x, version, list(found))
        if self.held is None:
            return None
        if self.held[0] is not x or self.held[1] != version:
            self.works, self.held = index == 0, None
            return None
        outputs = self.held[2]
        output, outputs[index] = outputs[index], None
        if index == len(self.layers) - 1:
            self.held = None
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        memo[id(self)] = made
        made.held = None
        made.__dict__.update({name: copy.deepcopy(self.__dict__[name], memo) for name in self._PARTS})
        return made

    _PARTS: tuple[str, ...] = ("layers",)


class OneProduct(Shared):
    """For inference, of weights that lie side by side; those of a copied model do not."""

    def __init__(self, layers: list[Any], packs: list[PackRows], ours: bool) -> None:
        super().__init__(layers, ours)
        self.packs = packs
        self.sizes = [layer.out_features for layer in layers]

    def compute(self, x: Tensor) -> Sequence[Tensor] | None:
        wants_gradient = torch.is_grad_enabled() and (x.requires_grad or self.layers[0].weight.requires_grad)
        if wants_gradient or not all(pack.holds() for pack in self.packs):
            return None
        weight, bias = self.packs[0].packed, self.packs[1].packed if len(self.packs) > 1 else None
        assert weight is not None
        product: Any = (linear if self.ours else torch_functional.linear)(x, weight, bias)
        return torch.split_with_sizes(product, self.sizes, -1)

    _PARTS = ("layers", "packs")


class OneFloat8(Shared):
    """For training, of weights that lie side by side."""

    def __init__(self, layers: list[Any], joined: float8.JoinedLayer) -> None:
        super().__init__(layers, True)
        self.joined = joined

    def compute(self, x: Tensor) -> Sequence[Tensor] | None:
        if not self.joined.holds():
            return None
        product: Any = float8.ready(self.joined, x, self.layers[0].training)(x)
        return product.split([layer.out_features for layer in self.layers], -1)  # type: ignore[no-any-return]

    _PARTS = ("layers", "joined")


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    named = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    inputs = [layer.in_features for layer in named.values()]
    if module in context.perceptrons or not any(inputs.count(one) >= _FEWEST for one in inputs):
        return None
    names = _sharing(module, named, call)
    if names is None:
        return None
    layers: list[Any] = [module._modules[name] for name in names]
    if context.trains and context.compiled:
        return Refusal(path, NAME, "under torch.compile its products are the compiler's")
    reason = weight_reason(module)
    for name, layer in zip(names, layers):
        reason = reason or why_not_plain(name, layer)
    reason = reason or _unequal(layers) or _shared(context, names, layers)
    if reason:
        return Refusal(path, NAME, reason)
    if context.trains:
        ways = _ways_to_train(context, layers, call)
    else:
        ways = [
            Way("one product of kernel_pytorch", lambda: _one_product(layers, True)),
            Way("one product of torch", lambda: _one_product(layers, False)),
        ]
    covers = [f"{path}.{name}".lstrip(".") for name in names]
    source = f"{type(module).__name__}, {', '.join(names)}: products of one input"
    narrow = any(way.narrow for way in ways)
    return Proposal(NAME, path, module, source, ways, covers=covers, approximate=narrow)


def _ways_to_train(context: Context, layers: list[Any], call: Call) -> list[Way]:
    words = "products with one gradient of their input"
    ways = [Way(f"torch's {words}", lambda: _one_gradient(layers, False))]
    x = call.first()
    if x is None:
        return ways
    if runs_here(x):
        # On a GPU at its limit of power torch's came out ahead by less than a trial can tell, so they come first there.
        ways.insert(int(x.is_cuda), Way(f"kernel_pytorch {words}", lambda: _one_gradient(layers, True)))
    narrow = context.accuracy == "tolerant" and float8.can_join(context, layers)
    if narrow and float8.why_not(context, [float8.joined_shape(layers)], x.numel() // x.shape[-1]) is None:
        ways.insert(0, Way("one FP8 product, their input rounded once", lambda: _one_float8(layers), narrow=True))
    return ways


def _unequal(layers: list[Any]) -> str | None:
    weights = [layer.weight for layer in layers]
    if len({(weight.shape[1], weight.dtype, weight.device) for weight in weights}) > 1:
        return "the weights differ in their inputs, type or device"
    if len({layer.bias.dtype for layer in layers if layer.bias is not None}) > 1:
        return "their biases differ in type"
    return None if all(weight.is_contiguous() for weight in weights) else "a weight is no plain matrix in memory"


def _shared(context: Context, names: Sequence[str], layers: list[Any]) -> str | None:
    for name, layer in zip(names, layers):
        if len(owners(context.model, layer.weight)) > 1:
            return f"the weight of {name} is shared with another layer"
    return None


def _sharing(module: nn.Module, layers: dict[str, Any], call: Call) -> tuple[str, ...] | None:
    """Names of the layers that get the very same tensor, once each, as they are called; the largest such set."""
    seen: list[tuple[str, Any]] = []
    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: seen.append((name, args[0] if args else None)))
        for name, layer in layers.items()
    ]
    try:
        with torch.no_grad(), evaluating(module):
            call.fresh().run(module)
    finally:
        for handle in handles:
            handle.remove()
    called = [name for name, _ in seen]
    sets: dict[int, list[str]] = {}
    for name, x in seen:
        if called.count(name) == 1 and isinstance(x, Tensor):
            sets.setdefault(id(x), []).append(name)  # `seen` keeps the inputs, so that ids are their own
    found = max(sets.values(), key=len, default=[])
    return tuple(found) if len(found) >= _FEWEST else None


def _one_product(layers: list[Any], ours: bool) -> Several:
    packs = float8.packs_of(layers)
    return _change(layers, OneProduct(layers, packs, ours), packs)


def _one_gradient(layers: list[Any], ours: bool) -> Several:
    return _change(layers, Shared(layers, ours), [])


def _one_float8(layers: list[Any]) -> Several:
    packs = float8.packs_of(layers)
    return _change(layers, OneFloat8(layers, float8.JoinedLayer.of(layers, packs)), packs)


def _change(layers: list[Any], shared: Shared, packs: list[PackRows]) -> Several:
    kept = [SetAttribute(layer, _KEY, (shared, i)) for i, layer in enumerate(layers)]
    return Several(*packs, *kept, *(SetForward(layer, mark(_forward)) for layer in layers))


def _forward(self: Any, input: Tensor) -> Tensor:
    if not torch.compiler.is_compiling() and type(input) is Tensor:
        shared, index = self.__dict__[_KEY]
        found: Tensor | None = shared.output(index, input)
        if found is not None:
            return found
    return torch_functional.linear(input, self.weight, self.bias)
