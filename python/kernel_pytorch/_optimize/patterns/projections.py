"""Query, key and value, three products of one input. For inference they become one product of weights laid side by side
in memory (the parameters stay, see PackRows). For training each weight has its own product and gradient, and the
products of the backward add to one gradient of the input; with accuracy="tolerant" also one FP8 layer of all three.

The first of the layers to be called computes all three, the others hand out theirs. So the attention's own code stays
as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from ..._ops.one_input import linears
from ...core._products import runs_here
from ...functional import linear
from ..changes import PackRows, SetForward, Several, mark
from ..record import copied
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import evaluating
from . import float8
from .context import Context, owners, weight_reason, why_not_plain

NAME = "qkv"
SPELLINGS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("wq", "wk", "wv"))


class Shared:
    """The three outputs, from the first layer that asks for its own to the last."""

    def __init__(self, layers: list[Any], compute: Callable[[Tensor], Sequence[Tensor] | None]) -> None:
        self.layers, self.compute = layers, compute  # None where the layers must compute their own
        self.held: tuple[Tensor, int, list[Tensor | None]] | None = None
        self.works = True  # no longer, once layers were called with different inputs

    def output(self, index: int, x: Tensor) -> Tensor | None:
        """Of layer `index`; None where it must compute its own."""
        if not self.works:
            return None
        version = 0 if x.is_inference() else x._version
        if index == 0:
            found = self.compute(x)
            self.held = None if found is None else (x, version, list(found))
            if found is None:
                return None
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


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    names = next((n for n in SPELLINGS if all(type(module._modules.get(name)) is nn.Linear for name in n)), None)
    if names is None:
        return None
    layers: list[Any] = [module._modules[name] for name in names]
    if context.trains and context.compiled:
        return Refusal(path, NAME, "under torch.compile its three products are the compiler's")
    reason = weight_reason(module)
    for name, layer in zip(names, layers):
        reason = reason or why_not_plain(name, layer)
    reason = reason or _unequal(layers) or _shared(context, names, layers) or _other_inputs(module, names, call)
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
    source = f"{type(module).__name__}, three products of one input"
    narrow = any(way.narrow for way in ways)
    return Proposal(NAME, path, module, source, ways, covers=covers, approximate=narrow)


def _ways_to_train(context: Context, layers: list[Any], call: Call) -> list[Way]:
    words = "products with one gradient of their input"
    ways = [Way(f"torch's {words}", lambda: _one_gradient(layers, False))]
    x = call.first()
    if x is None:
        return ways
    if runs_here(x):
        ways.insert(0, Way(f"kernel_pytorch {words}", lambda: _one_gradient(layers, True)))
    narrow = context.accuracy == "tolerant" and float8.can_join(context, layers)
    if narrow and float8.why_not(context, [float8.joined_shape(layers)], x.numel() // x.shape[-1]) is None:
        ways.insert(0, Way("one FP8 product, their input rounded once", lambda: _one_float8(layers), narrow=True))
    return ways


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


def _one_product(layers: list[Any], ours: bool) -> Several:
    packs = float8.packs_of(layers)
    sizes = [layer.out_features for layer in layers]

    def compute(x: Tensor) -> Sequence[Tensor] | None:
        wants_gradient = torch.is_grad_enabled() and (x.requires_grad or layers[0].weight.requires_grad)
        if wants_gradient or not all(pack.holds() for pack in packs):
            return None
        weight, bias = packs[0].packed, packs[1].packed if len(packs) > 1 else None
        assert weight is not None
        product: Any = (linear if ours else torch_functional.linear)(x, weight, bias)
        return product.split(sizes, -1)  # type: ignore[no-any-return]

    return _change(layers, compute, packs)


def _one_gradient(layers: list[Any], ours: bool) -> Several:
    def compute(x: Tensor) -> Sequence[Tensor]:
        return linears(x, [layer.weight for layer in layers], [layer.bias for layer in layers], ours=ours)

    return _change(layers, compute, [])


def _one_float8(layers: list[Any]) -> Several:
    packs = float8.packs_of(layers)
    joined = float8.JoinedLayer.of(layers, packs)
    sizes = [layer.out_features for layer in layers]

    def compute(x: Tensor) -> Sequence[Tensor] | None:
        if not joined.holds():
            return None
        return float8.ready(joined, x, layers[0].training)(x).split(sizes, -1)  # type: ignore[no-any-return]

    return _change(layers, compute, packs)


def _change(layers: list[Any], compute: Callable[[Tensor], Sequence[Tensor] | None], packs: list[PackRows]) -> Several:
    shared = Shared(layers, compute)
    return Several(*packs, *(SetForward(layer, mark(_forward(shared, i))) for i, layer in enumerate(layers)))


def _forward(shared: Shared, index: int) -> Any:
    def forward(self: Any, input: Tensor) -> Tensor:
        is_own = self is shared.layers[index]  # and not a layer of a copied model
        if is_own and not torch.compiler.is_compiling() and type(input) is Tensor:
            found = shared.output(index, input)
            if found is not None:
                return found
        return torch_functional.linear(input, self.weight, self.bias)

    return forward
