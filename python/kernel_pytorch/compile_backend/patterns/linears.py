"""Linear layers: with the activation behind them in one product, two of them in a row as one op, those of few rows, and
large ones on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import fx

from ..model import Candidate, Match, Refusal, Region
from ..nodes import (
    FLOATS,
    VIEWS,
    Emitter,
    Node,
    aten,
    dtype,
    half_of,
    is_call,
    only_user,
    same,
    same_shape,
    shape,
    value,
)
from .activations import GATES, Activation, activation

# A product of so few rows reads its weights and does little else; ours has a kernel for that (cuda_thin).
_FEW_ROWS = 16
# On a CPU ours may be the faster one of any rows, in products that are worth a trial.
_LARGE_ON_CPU = 1 << 22


class Linear(NamedTuple):
    """x @ weight^T + bias; `weight_is_transposed`: the graph has it as [in, out] (addmm)."""

    x: Node
    weight: Node
    bias: Node | None
    weight_is_transposed: bool
    nodes: list[Node]


def linear(node: Any) -> Linear | None:
    """The linear layer whose output this node is: linear, or addmm between two views."""
    if is_call(node, aten.linear.default):
        bias = node.args[2] if len(node.args) > 2 else None
        return Linear(node.args[0], node.args[1], bias, False, [node])
    if not is_call(node, *VIEWS) or not is_call(node.args[0], aten.addmm.default):
        return None
    product = node.args[0]
    bias, rows, weight = product.args
    if product.kwargs or len(shape(bias)) != 1 or len(product.users) != 1:
        return None
    if not is_call(rows, *VIEWS) or len(rows.users) != 1:
        return None
    x = rows.args[0]
    fits = same_shape(shape(x)[:-1], shape(node)[:-1]) and same(shape(x)[-1], shape(weight)[0])
    return Linear(x, weight, bias, True, [rows, product, node]) if fits else None


def find_activations(region: Region) -> Iterator[Match | Refusal]:
    for node in list(region.graph.nodes):
        found = _activated(node)
        if found is None:
            continue
        layer, function = found
        nodes = [*layer.nodes, *function.nodes]
        yield Match("linear_activation", nodes, [node], [Candidate("ours", _emit(layer, function.kind))], function.kind)


def find_mlps(region: Region) -> Iterator[Match | Refusal]:
    for node in list(region.graph.nodes):
        second = linear(node)
        if second is None:
            continue
        found = _activated(second.x)
        if found is None or any(user not in second.nodes for user in second.x.users):
            continue
        first, function = found
        if {dtype(second.weight), dtype(node)} != {dtype(first.x)} or not _fits_bias(second):
            continue
        nodes = [*first.nodes, *function.nodes, *second.nodes]
        emit = _emit_mlp(first, function.kind, second)
        yield Match("mlp", nodes, [node], [Candidate("ours", emit)], function.kind)


class Gated(NamedTuple):
    """activation(x @ gate^T + bias) * (x @ up^T); `packed`: gate and up are the halves of one weight, in this order."""

    gate: Linear
    up: Linear
    kind: str
    nodes: list[Node]
    packed: tuple[int, int] | None = None


def gated(node: Any) -> Gated | None:
    """The gated layer whose product this node is."""
    if not is_call(node, aten.mul.Tensor):
        return None
    for activated, product in (node.args[:2], node.args[1::-1]):
        function = activation(activated)
        if function is None or function.kind not in GATES or not isinstance(product, fx.Node):
            continue
        if len(activated.users) != 1 or len(product.users) != 1:
            continue
        found = _of_two(activated, product, node) or _of_halves(function, product, node)
        if found is not None:
            return found
    return None


def _of_two(activated: Node, product: Node, node: Node) -> Gated | None:
    found, up = _activated(activated), linear(product)
    if found is None or up is None:
        return None
    gate, function = found
    if up.x is not gate.x or up.bias is not None or up.weight_is_transposed != gate.weight_is_transposed:
        return None
    if not dtype(up.weight) is dtype(node) is dtype(product) or not same_shape(shape(up.weight), shape(gate.weight)):
        return None
    return Gated(gate, up, function.kind, list(dict.fromkeys([*gate.nodes, *function.nodes, *up.nodes, node])))


def _of_halves(function: Activation, product: Node, node: Node) -> Gated | None:
    """Both halves of one linear layer's output."""
    gate, up = half_of(function.x), half_of(product)
    if gate is None or up is None or gate[0] is not up[0] or gate[1] == up[1]:
        return None
    layer = linear(gate[0])
    if layer is None or layer.bias is not None or layer.weight_is_transposed:
        return None
    parts = [function.x, product]
    cut = [one.args[0] for one in parts if not is_call(one, aten.slice.Tensor)]
    inner = [*layer.nodes, *dict.fromkeys(cut), *parts, *function.nodes, node]
    if any(user not in inner for one in inner[:-1] for user in one.users):
        return None
    kinds = {dtype(layer.x), dtype(layer.weight), dtype(node)}
    if len(kinds) != 1 or dtype(node) not in FLOATS:
        return None
    return Gated(layer, layer, function.kind, inner, (gate[1], up[1]))


def find_gated(region: Region) -> Iterator[Match | Refusal]:
    """Both products in one; the op has no gradient of its own."""
    for node in region.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        found = None if node in region.differentiable else gated(node)
        if found is not None:
            yield Match("gated_linear", found.nodes, [node], [Candidate("ours", _emit_gated(found))], found.kind)


def find_gated_mlps(region: Region) -> Iterator[Match | Refusal]:
    """With gradients: a gated MLP as one op, which is given its two weights as one, row by row in turns."""
    for node in list(region.graph.nodes):
        second = linear(node)
        if second is None or node not in region.differentiable or not isinstance(second.x, fx.Node):
            continue
        found = gated(second.x)
        if found is None or found.gate.bias is not None or found.gate.weight_is_transposed:
            continue
        if any(user not in second.nodes for user in second.x.users) or not _fits_bias(second):
            continue
        if {dtype(second.weight), dtype(node)} == {dtype(found.gate.x)}:
            emit = _emit_gated_mlp(found, second)
            yield Match("gated_mlp", [*found.nodes, *second.nodes], [node], [Candidate("ours", emit)], found.kind)


def find_residuals(region: Region) -> Iterator[Match | Refusal]:
    """linear(x) + residual."""
    for total in region.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if total.kwargs.get("alpha", 1) != 1 or not all(isinstance(one, fx.Node) for one in total.args[:2]):
            continue
        for product, residual in (total.args[:2], total.args[1::-1]):
            layer = linear(product)
            if layer is None or len(product.users) != 1 or not _may_win(region, layer, total):
                continue
            if dtype(residual) is dtype(total) and same_shape(shape(residual), shape(total)):
                emit = _emit(layer, "identity", residual)
                yield Match("linear_residual", [*layer.nodes, total], [total], [Candidate("ours", emit)])
                break


def find_plain(region: Region) -> Iterator[Match | Refusal]:
    for node in list(region.graph.nodes):
        layer = linear(node)
        if layer is not None and _may_win(region, layer, node):
            yield Match("linear", layer.nodes, [node], [Candidate("ours", _emit(layer, "identity"))])


def _may_win(region: Region, layer: Linear, output: Node) -> bool:
    sizes = shape(layer.x)[:-1]
    if output in region.differentiable or not all(isinstance(size, int) for size in sizes):
        return False
    kinds = {dtype(layer.x), dtype(layer.weight), dtype(output)}
    rows = math.prod(sizes)
    fits = 0 < rows <= _FEW_ROWS or (not value(output).is_cuda and rows * value(layer.weight).numel() >= _LARGE_ON_CPU)
    return fits and len(kinds) == 1 and dtype(output) in FLOATS and _fits_bias(layer)


def _activated(node: Any) -> tuple[Linear, Activation] | None:
    function = activation(node)
    if function is None or function.kind == "tanh":
        return None
    layer = linear(function.x)
    if layer is None or any(user not in function.nodes for user in function.x.users):
        return None
    if len(function.nodes) == 1 and only_user(function.x) is None:
        return None
    kinds = {dtype(layer.x), dtype(layer.weight), dtype(node)}
    return (layer, function) if len(kinds) == 1 and dtype(node) in FLOATS and _fits_bias(layer) else None


def _fits_bias(layer: Linear) -> bool:
    return layer.bias is None or dtype(layer.bias) is dtype(layer.x)


def _operands(layer: Linear, add: Emitter, at: Callable[[Node], Node]) -> tuple[Node, Node | None]:
    weight = at(layer.weight)
    weight = add.call(aten.t.default, weight) if layer.weight_is_transposed else weight
    return weight, None if layer.bias is None else at(layer.bias)


def _emit(layer: Linear, kind: str, residual: Node | None = None) -> Any:
    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        more = None if residual is None else at(residual)
        return add.op("linear", at(layer.x), *_operands(layer, add, at), more, kind, False, "full", None)

    return emit


def _gated_weights(found: Gated, add: Emitter, at: Callable[[Node], Node]) -> tuple[Node, Node]:
    if found.packed is None:
        return _operands(found.gate, add, at)[0], _operands(found.up, add, at)[0]
    weight = at(found.gate.weight)
    half = shape(weight)[0] // 2
    halves = [add.call(aten.slice.Tensor, weight, 0, i * half, (i + 1) * half) for i in (0, 1)]
    return halves[found.packed[0]], halves[found.packed[1]]


def _emit_gated(found: Gated) -> Any:
    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        gate, up = _gated_weights(found, add, at)
        bias = None if found.gate.bias is None else at(found.gate.bias)
        return add.op("linear", at(found.gate.x), gate, bias, None, found.kind, False, "full", up)

    return emit


def _emit_gated_mlp(found: Gated, second: Linear) -> Any:
    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        gate, up = _gated_weights(found, add, at)
        rows = [2 * shape(gate)[0], shape(gate)[1]]
        weight = add.call(aten.reshape.default, add.call(aten.stack.default, [gate, up], 1), rows)
        operands = (weight, None, *_operands(second, add, at), None, found.kind, True, "full")
        return add.op("mlp", at(found.gate.x), *operands)

    return emit


def _emit_mlp(first: Linear, kind: str, second: Linear) -> Any:
    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        operands = (*_operands(first, add, at), *_operands(second, add, at))
        return add.op("mlp", at(first.x), *operands, None, kind, False, "full")

    return emit
