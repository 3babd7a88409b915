"""A linear layer whose output goes to an activation, both children of a module that does more with them (BART's and
Whisper's layers): the layer's product waits for the activation, which then is part of it. Anybody else who looks at
the product gets it. One run of the sample says which layer an activation follows. For inference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...._modules import evaluating
from ....core._products import runs_here
from ....functional import activation, linear
from ...changes import Change, SetForward, Several, mark
from ...sites import Call, Found, Proposal, Refusal, Way
from ..context import Context, single_input, weight_reason, why_not_plain
from ..deferred.summed import Late, is_elsewhere
from ..norms import first_name
from ..perceptrons import is_linear, weight_of

NAME = "linear + activation"


class Multiplied(Late):
    """A linear layer's output."""

    x: Tensor
    layer: Any

    @staticmethod
    def make(layer: Any, x: Tensor) -> Multiplied:
        shape = (*x.shape[:-1], weight_of(layer).shape[0])
        made: Multiplied = Tensor._make_wrapper_subclass(Multiplied, shape, dtype=x.dtype, device=x.device)
        made.x, made.layer = x, layer
        made.begin((), x, layer.weight, layer.bias)
        return made

    def computed(self) -> Tensor:
        return linear(self.x, weight_of(self.layer), self.layer.bias)

    def activated(self, kind: str) -> Tensor:
        if self.value is not None:
            return activation(self.value, kind)
        self.check()
        return linear(self.x, weight_of(self.layer), self.layer.bias, activation=kind)


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    if context.trains or context.compiled or not _has_both(context, module) or module in context.perceptrons:
        return None
    if context.flows is None:
        context.flows = _flows(context)
    pairs = [(first, second) for first, second in context.flows.items() if _are_children(module, first, second)]
    if len(pairs) != 1:
        return None
    layer, function = pairs[0]
    names = {child: name for name, child in module.named_children()}
    reason = weight_reason(layer) or why_not_plain(names[layer], layer) or why_not_plain(names[function], function)
    if reason:
        return Refusal(path, NAME, reason)
    kind = context.activations[function]

    def change() -> Change:
        waits = single_input(_waiting, first_name(layer), type(layer).forward)
        joins = single_input(
            lambda self, x: x.activated(kind) if type(x) is Multiplied else activation(x, kind),
            first_name(function),
            type(function).forward,
            takes_late=True,
        )
        return Several(SetForward(layer, mark(waits)), SetForward(function, mark(joins)))

    source = f"{type(module).__name__}, {names[layer]} and {kind}"
    way = Way("kernel_pytorch product with the activation inside", change)
    covers = [f"{path}.{names[one]}".lstrip(".") for one in (layer, function)]
    return Proposal(NAME, path, module, source, [way], covers=covers)


def _waiting(layer: nn.Module, x: Tensor) -> Tensor:
    is_plain = not torch.is_grad_enabled() and x.dtype is layer.weight.dtype and not torch.compiler.is_compiling()
    if is_plain and not is_elsewhere():
        return Multiplied.make(layer, x)
    return type(layer).forward(layer, x)  # type: ignore[no-any-return]


def _has_both(context: Context, module: nn.Module) -> bool:
    children = list(module.children())
    return any(map(is_linear, children)) and any(child in context.activations for child in children)


def _are_children(module: nn.Module, *parts: nn.Module) -> bool:
    return all(any(part is child for child in module.children()) for part in parts)


def _flows(context: Context) -> dict[nn.Module, nn.Module]:
    """By layer, the activation that gets its output, of those that are called once."""
    found: dict[nn.Module, nn.Module] = {}
    newest: list[tuple[nn.Module, Any]] = []
    counts = context.recording.counts
    once = {part for path, part in context.model.named_modules() if counts.get(path) == 1}

    def noted(module: nn.Module, args: Any, output: Any) -> None:
        newest[:] = [(module, output)]

    def asked(module: nn.Module, args: Any) -> None:
        if newest and len(args) == 1 and args[0] is newest[0][1]:
            found[newest[0][0]] = module

    layers = [part for part in once if is_linear(part) and not part._forward_hooks]
    handles = [layer.register_forward_hook(noted) for layer in layers]
    handles += [part.register_forward_pre_hook(asked) for part in once if part in context.activations]
    call = context.recording.call("")
    assert call is not None
    first = call.first()
    try:
        if first is not None and runs_here(first):
            with torch.no_grad(), evaluating(context.model):
                call.fresh().run(context.model)
    finally:
        for handle in handles:
            handle.remove()
    return found
