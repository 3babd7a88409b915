"""MLPs, plain and gated, separate or packed projections: what a module does with its two or three linear layers.

The module is tried with every arrangement that its shapes allow (which layer gates, which activation, where a dropout
stands) until one gives its numbers. While it is tried, each dropout multiplies by a number of its own, so that their
places are proved too; the replacement calls them where they stood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as torch_functional
from torch import Tensor, nn

from ..._modules import evaluating
from ...core._shared_input import linears
from ...functional import activation as activate
from ...functional import gated_activation, gated_activation_packed, linear
from ...functional import mlp as fused_mlp
from ..changes import Change, SetForward, Several, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import row_error
from . import float8
from .activations import KINDS, kind_of
from .context import (
    Context,
    is_plain,
    owners,
    probe,
    silent,
    single_input,
    undisturbed,
    weight_reason,
    why_not_plain,
)
from .norms import TOLERANCE, first_name
from .packs import PACK_KEY, Pack, wants_gradient

NAME = "mlp"
_QUICK = 1.702  # x * sigmoid(1.702 x), which some call quick GELU
_GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")


@dataclass(frozen=True)
class Perceptron:
    """Names of a module's layers by their role, and what stands between them."""

    kind: str  # "plain", "gated", "packed" or "layer" (one linear layer and its activation)
    activation: str
    layers: tuple[str, ...]  # in, out; gate, up, out; gate and up packed, out; in
    up_first: bool = False  # of a packed one: the gate is the second half
    inner_dropout: str | None = None
    outer_dropout: str | None = None
    classes: tuple[type[nn.Module], ...] = ()  # of the layers: others may stand in their places later (adapters)

    @property
    def called(self) -> tuple[str, ...]:
        """The children that run as modules, in one way or another; the others are computed without them."""
        return (*self.layers, *(name for name in (self.inner_dropout, self.outer_dropout) if name is not None))

    def __call__(self, module: Any, x: Tensor, products: str = "ours", residual: Tensor | None = None) -> Tensor:
        """`products` are "ours"; "torch's", gate and up with one gradient of their input; or those of the "layers"."""
        parts = module._modules
        first, last = parts[self.layers[0]], parts[self.layers[-1]]
        if self._fuses(module, products):
            return fused_mlp(
                x,
                weight_of(first),
                weight_of(last),
                first.bias,
                last.bias,
                activation=self.activation,
                residual=residual,
            )
        hidden = self._hidden(module, x, products)
        if self.inner_dropout is not None:
            hidden = parts[self.inner_dropout](hidden)
        if self.kind == "layer":
            return hidden
        if products != "layers" and residual is not None and self.outer_dropout is None:
            return linear(hidden, weight_of(last), last.bias, residual=residual)
        output: Tensor = linear(hidden, weight_of(last), last.bias) if products == "ours" else last(hidden)
        if self.outer_dropout is not None:
            output = parts[self.outer_dropout](output)
        return output if residual is None else output + residual

    def _fuses(self, module: nn.Module, products: str) -> bool:
        """Whether both products and their backward are one op."""
        return products == "ours" and self.kind == "plain" and self.activation in KINDS and not self._drops(module)

    def _drops(self, module: nn.Module) -> bool:
        dropouts = (self.inner_dropout, self.outer_dropout)
        return any(name is not None and _drops(module._modules[name]) for name in dropouts)

    def _hidden(self, module: Any, x: Tensor, products: str) -> Tensor:
        parts = module._modules
        first = parts[self.layers[0]]
        if products == "layers" or (products != "ours" and self.kind != "gated"):
            if self.kind == "gated":
                return gated_activation(first(x), parts[self.layers[1]](x), self.activation)
            if self.kind == "packed":
                return self._packed(first(x))
            return self._activated(first(x))
        if self.kind == "gated":
            up = parts[self.layers[1]]
            # Where weights lie is nothing that a compiler can ask.
            pack: Pack | None = None if torch.compiler.is_compiling() else module.__dict__.get(PACK_KEY)
            if pack is not None and pack.holds() and not wants_gradient(x, first.weight):
                return gated_activation_packed(linear(x, pack.weight, pack.bias), self.activation)
            weights = [weight_of(first), weight_of(up)]
            if products == "ours" and first.bias is None and up.bias is None and not wants_gradient(x, first.weight):
                return linear(x, weights[0], activation=self.activation, weight_up=weights[1])
            gate_rows, up_rows = linears(x, weights, [None, None], ours=products == "ours")
            return gated_activation(gate_rows, up_rows, self.activation, gate_bias=first.bias, up_bias=up.bias)
        if self.kind == "packed":
            if first.bias is None and not wants_gradient(x, first.weight):
                gate, up_half = weight_of(first).chunk(2)[:: -1 if self.up_first else 1]
                return linear(x, gate, activation=self.activation, weight_up=up_half)
            return self._packed(linear(x, weight_of(first), first.bias))
        if self.activation == "quick_gelu":  # silu inside the product of a scaled input
            bias = None if first.bias is None else first.bias * _QUICK
            return linear(x * _QUICK, weight_of(first), bias, activation="silu") * (1 / _QUICK)
        return linear(x, weight_of(first), first.bias, activation=self.activation)

    def _activated(self, x: Tensor) -> Tensor:
        if self.activation == "quick_gelu":
            return gated_activation(x * _QUICK, x, "sigmoid")
        return activate(x, self.activation)

    def _packed(self, both: Tensor) -> Tensor:
        if not self.up_first:
            return gated_activation_packed(both, self.activation)
        up, gate = both.chunk(2, -1)
        return gated_activation(gate, up, self.activation)


def _drops(module: nn.Module | None) -> bool:
    """Whether a dropout has to be called: it drops, or somebody listens to it."""
    if not isinstance(module, nn.Dropout):
        return False
    return (module.training and module.p > 0.0) or not is_plain(module)


def is_linear(module: nn.Module | None) -> bool:
    """nn.Linear, a class derived from it with the same numbers, or transformers' Conv1D, which keeps the weight
    transposed."""
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    return type(module).forward is nn.Linear.forward or _has_linear_numbers(module)


def _has_linear_numbers(layer: nn.Linear) -> bool:
    weight = layer.weight
    if type(weight.data) is not Tensor or weight.dtype not in TOLERANCE or weight.is_meta:
        return False
    with undisturbed():
        x = probe(3, layer.in_features, like=weight)
        try:
            found = type(layer).forward(layer, x)
        except Exception:  # another layer's weights, which may refuse in any way
            return False
        expected = torch_functional.linear(x, weight, layer.bias)
        is_alike = isinstance(found, Tensor) and found.shape == expected.shape
        return is_alike and row_error(found, expected)[1] <= TOLERANCE[weight.dtype]


def weight_of(layer: Any) -> Tensor:
    """[out, in], a view."""
    weight: Tensor = layer.weight
    return weight if isinstance(layer, nn.Linear) else weight.t()


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    x = call.first()
    layers = {name: child for name, child in module.named_children() if is_linear(child)}
    if x is None or len(call.tensors()) != 1 or not 1 <= len(layers) <= 3 or x.dim() < 2:
        return None
    others = [child for name, child in module.named_children() if name not in layers]
    if any(True for other in others for _ in other.parameters()):
        return None
    if x.shape[-1] not in {weight_of(layer).shape[1] for layer in layers.values()}:
        return None
    found = recognise(module, layers, x)
    if found is None:
        return None
    passed = [(name, module._modules[name]) for name in found.layers]
    reason = why_not_plain("", module) or weight_reason(module)
    if reason is None and not silent(module, found.called):
        reason = "a part between its layers has hooks, which a fused one would pass by"
    if reason:
        return Refusal(path, NAME, reason)
    context.perceptrons[module] = found
    hooked = next((why for name, part in passed if part is not None and (why := why_not_plain(name, part))), None)
    ways = _ways(context, path, module, found, hooked is None, x)
    covers = [_join(path, name) for name, child in module.named_children() if child in context.activations]
    name = {"plain": "mlp", "layer": "linear + activation"}.get(found.kind, "gated mlp")
    source = f"{type(module).__name__} ({found.kind}, {found.activation})"
    return Proposal(name, path, module, source, ways, covers=covers, approximate=any(way.narrow for way in ways))


def _ways(context: Context, path: str, module: nn.Module, found: Perceptron, passable: bool, x: Tensor) -> list[Way]:
    original = type(module).forward
    name = first_name(module)

    def by(products: str) -> SetForward:
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            if not silent(self, found.called):
                return original(self, x)  # type: ignore[no-any-return]
            if products == "float8":
                kept = float8.of_module(self) if silent(self) else None
                return found(self, x, "layers") if kept is None else kept(self, x)
            plain = products == "layers" or has_plain_layers(self, found)
            return found(self, x, products if plain else "layers")

        return SetForward(module, mark(single_input(forward, name, original)))

    layers = tuple(_join(path, layer) for layer in found.layers)  # whose weights are read where they are not called
    made = [Way("the module's own layers, kernel_pytorch activation", lambda: by("layers"))]
    if passable and context.trains and found.kind == "gated":
        words = "torch's products with one gradient of their input, kernel_pytorch activation"
        made.insert(0, Way(words, lambda: by("torch's"), layers))
    if passable:
        words = "kernel_pytorch products with the activation inside"
        if context.trains and found.kind == "gated":
            words = "kernel_pytorch products with one gradient of their input, and activation"
        made.insert(0, Way(words, lambda: by("ours"), layers))
    if passable and _takes_float8(context, module, found, x.numel() // x.shape[-1]):
        parts = [module._modules[layer] for layer in found.layers]

        def narrow() -> Change:
            packs = float8.packs_of(parts[:2])
            return Several(*packs, float8.KeepMlp(module, parts, packs, found.activation), by("float8"))

        words = "FP8 products, the input of gate and up rounded once, the others where they are made"
        made.insert(0, Way(words, narrow, layers, narrow=True))
    if passable and not context.trains and found.kind == "gated" and _can_pack(context, module, found):
        gate, up = (module._modules[layer] for layer in found.layers[:2])
        words = "one kernel_pytorch product for gate and up, kernel_pytorch activation"
        made.insert(0, Way(words, lambda: Several(Pack(module, gate, up), by("ours")), layers))
    return made


def _takes_float8(context: Context, module: nn.Module, found: Perceptron, tokens: int) -> bool:
    if context.accuracy != "tolerant" or not context.trains or found.kind != "gated" or context.compiled:
        return False
    layers: list[Any] = [module._modules[layer] for layer in found.layers]
    if found.inner_dropout or found.outer_dropout or not float8.can_join(context, layers[:2]):
        return False
    shapes = [float8.joined_shape(layers[:2]), float8.joined_shape(layers[2:])]
    return type(layers[2]) is nn.Linear and float8.why_not(context, shapes, tokens) is None


def has_plain_layers(module: nn.Module, found: Perceptron) -> bool:
    """Whether reading the layers' weights computes what calling them would, and what stands between has no hooks."""
    parts = map(module._modules.get, found.layers)
    return silent(module, found.called) and all(
        part is not None and is_plain(part, kind) for part, kind in zip(parts, found.classes)
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _can_pack(context: Context, module: nn.Module, found: Perceptron) -> bool:
    """Whether gate and up can lie in one matrix: plain weights, alike, and not shared."""
    gate, up = (module._modules[name] for name in found.layers[:2])
    if type(gate) is not nn.Linear or type(up) is not nn.Linear or (gate.bias is None) != (up.bias is None):
        return False
    alike = gate.weight.dtype is up.weight.dtype and gate.weight.device == up.weight.device
    return alike and all(len(owners(context.model, layer.weight)) == 1 for layer in (gate, up))


@contextmanager
def marked_dropouts(module: nn.Module) -> Iterator[dict[str | None, float]]:
    """Every dropout of the module multiplies by a number of its own, for a while; the numbers by name."""
    marks: dict[str | None, float] = {None: 1.0}
    with ExitStack() as stack:
        for name, part in module.named_modules():
            if isinstance(part, nn.Dropout):
                marks[name] = 1.5 + 0.7 * len(marks)
                change = SetForward(part, lambda self, x, mark=marks[name]: x * mark)
                change.apply()
                stack.callback(change.undo)
        yield marks


def recognise(module: nn.Module, layers: dict[str, nn.Module], x: Tensor) -> Perceptron | None:
    """The arrangement that gives the module's numbers, or None."""
    like = next(module.parameters())
    if like.dtype not in TOLERANCE or type(like.data) is not Tensor or like.is_meta:
        return None
    with undisturbed(), evaluating(module), marked_dropouts(module) as marks:
        inputs = probe(4, x.shape[-1], like=like)
        try:
            expected = type(module).forward(module, inputs)
        except Exception:  # what is no MLP may refuse two dimensions, in any way
            return None
        if not isinstance(expected, Tensor):
            return None
        for candidate in _arrangements(module, layers, x.shape[-1]):
            found = _evaluate(candidate, module, inputs, marks)
            if found.shape == expected.shape and row_error(found, expected)[1] <= TOLERANCE[like.dtype]:
                return replace(candidate, classes=tuple(type(layers[name]) for name in candidate.layers))
    return None


def _arrangements(module: nn.Module, layers: dict[str, nn.Module], features: int) -> Iterator[Perceptron]:
    dropouts: list[str | None] = [name for name, child in module.named_children() if isinstance(child, nn.Dropout)]
    places: list[tuple[str | None, str | None]] = [(None, None)] if not dropouts else []
    for name in dropouts:
        places += [(None, name), (name, None), (name, name)]
    if len(dropouts) > 1:
        places += [(a, b) for a in dropouts for b in dropouts if a != b]
    kinds = _kinds_of(module)
    for kind, names, flag in _roles(layers, features):
        for activation in kinds if kind in ("plain", "layer") else [k for k in kinds if k in _GATES]:
            for inner, outer in places:
                if kind != "layer" or outer is None:
                    yield Perceptron(kind, activation, names, flag, inner, outer)


def _kinds_of(module: nn.Module) -> list[str]:
    """The activation among the module's parts if there is one, else all of them."""
    parts = [*module.children(), *(value for value in vars(module).values() if callable(value))]
    functions = [part for part in parts if not is_linear(part)]
    known = [kind for part in functions if (kind := kind_of(part) or _quick_gelu(part)) is not None]
    return known or [*KINDS, "quick_gelu"]


def _quick_gelu(function: Any) -> str | None:
    """The name where a module or function is that, by its values."""
    with undisturbed():
        grid = torch.linspace(-8, 8, 129)
        try:
            values = function(grid.clone())
        except Exception:  # whatever it is, it is no activation
            return None
        is_it = isinstance(values, Tensor) and values.shape == grid.shape
        return "quick_gelu" if is_it and torch.allclose(values, _FUNCTIONS["quick_gelu"](grid), atol=2e-6) else None


def _roles(layers: dict[str, nn.Module], features: int) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    shapes = {name: tuple(weight_of(layer).shape) for name, layer in layers.items()}
    names = list(layers)
    if len(names) == 1 and shapes[names[0]][1] == features:
        yield "layer", (names[0],), False
    for first in names:
        for last in names:
            if first == last or shapes[first][1] != features or len(names) == 1:
                continue
            if len(names) == 2 and shapes[first][0] == shapes[last][1]:
                yield "plain", (first, last), False
            if len(names) == 2 and shapes[first][0] == 2 * shapes[last][1]:
                yield "packed", (first, last), False
                yield "packed", (first, last), True
            for up in names:
                pairs = len(names) == 3 and up not in (first, last) and shapes[up] == shapes[first]
                if pairs and shapes[last][1] == shapes[first][0]:
                    yield "gated", (first, up, last), False


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch_functional.gelu,
    "gelu_tanh": lambda x: torch_functional.gelu(x, approximate="tanh"),
    "silu": torch_functional.silu,
    "relu": torch_functional.relu,
    "relu_squared": lambda x: torch_functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(_QUICK * x),
}


def _evaluate(candidate: Perceptron, module: nn.Module, x: Tensor, marks: dict[str | None, float]) -> Tensor:
    """The arrangement in torch's own functions."""
    parts: Any = module._modules
    function = _FUNCTIONS[candidate.activation]
    first = parts[candidate.layers[0]](x)
    if candidate.kind == "gated":
        hidden = function(first) * parts[candidate.layers[1]](x)
    elif candidate.kind == "packed":
        gate, up = first.chunk(2, -1)
        hidden = function(up) * gate if candidate.up_first else function(gate) * up
    else:
        hidden = function(first)
    hidden = hidden * marks[candidate.inner_dropout]
    if candidate.kind == "layer":
        return hidden  # type: ignore[no-any-return]
    return parts[candidate.layers[-1]](hidden) * marks[candidate.outer_dropout]  # type: ignore[no-any-return]
