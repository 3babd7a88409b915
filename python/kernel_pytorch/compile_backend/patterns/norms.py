"""RMS norm, written out or as one call, and layer norm; each also with the residual sum before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..model import Candidate, Match, Refusal, Region
from ..nodes import CASTS, FLOATS, Emitter, Node, argument, aten, dtype, is_call, only_user, same, same_shape, shape


@dataclass
class Norm:
    """x, parameters and numbers of a norm, with the nodes that compute it, the last one being its output."""

    kind: str
    x: Node
    weight: Node | None
    bias: Node | None
    eps: float
    weight_offset: float
    nodes: list[Node]

    @property
    def output(self) -> Node:
        return self.nodes[-1]


def find(region: Region) -> Iterator[Match | Refusal]:
    for norm in norms(region):
        if isinstance(norm, Refusal):
            yield norm
        else:
            yield Match("norm", norm.nodes, [norm.output], [Candidate("ours", emit_norm(norm))], norm.kind)


def find_with_sum(region: Region) -> Iterator[Match | Refusal]:
    for norm in norms(region):
        if isinstance(norm, Refusal):
            continue  # `find` says it
        total = norm.x
        if not is_call(total, aten.add.Tensor) or total.kwargs.get("alpha", 1) != 1:
            continue
        x, residual = total.args[:2]
        if not isinstance(x, fx.Node) or not isinstance(residual, fx.Node):
            continue
        if not same_shape(shape(x), shape(residual)) or dtype(x) is not dtype(total) or dtype(residual) is not dtype(x):
            continue
        emit = _emit_with_sum(norm, x, residual)
        yield Match("add_norm", [total, *norm.nodes], [total, norm.output], [Candidate("ours", emit)], norm.kind)


def norms(region: Region) -> Iterator[Norm | Refusal]:
    for node in list(region.graph.nodes):
        found = None
        if is_call(node, aten.rsqrt.default):
            found = _written_out(node)
        elif is_call(node, aten.rms_norm.default):
            found = _rms_norm_call(node)
        elif is_call(node, aten.layer_norm.default):
            found = _layer_norm_call(node)
        if found is not None:
            problem = _problem(found)
            yield Refusal("norm", found.output, problem) if problem else found


def _problem(norm: Norm) -> str:
    kind, to = dtype(norm.x), dtype(norm.output)
    if kind not in FLOATS:
        return f"x is {kind}"
    if to is not kind and not (kind is torch.float32 and to in (torch.bfloat16, torch.float16)):
        return f"x is {kind} and the output {to}"
    for parameter in (norm.weight, norm.bias):
        if parameter is not None and dtype(parameter) not in (kind, torch.float32):
            return f"x is {kind} and a parameter {dtype(parameter)}"
    if norm.weight is not None and norm.bias is not None and dtype(norm.weight) is not dtype(norm.bias):
        return "weight and bias have two types"
    return ""


def _layer_norm_call(node: Node) -> Norm | None:
    x, sizes = node.args[:2]
    if len(sizes) != 1 or not isinstance(x, fx.Node):
        return None
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    return Norm("layer_norm", x, weight, bias, argument(node, 4, "eps", 1e-5), 0.0, [node])


def _rms_norm_call(node: Node) -> Norm | None:
    x, sizes = node.args[:2]
    eps = argument(node, 3, "eps")
    if len(sizes) != 1 or not isinstance(x, fx.Node) or not isinstance(eps, float):
        return None
    return Norm("rms_norm", x, argument(node, 2, "weight"), None, eps, 0.0, [node])


def _written_out(rsqrt: Node) -> Norm | None:
    """x * rsqrt(mean(x^2) + eps), then casts and the weight in either order."""
    shifted = rsqrt.args[0]
    if not is_call(shifted, aten.add.Tensor, aten.add.Scalar) or not isinstance(shifted.args[1], float):
        return None
    mean = shifted.args[0]
    if not is_call(mean, aten.mean.dim) or not argument(mean, 2, "keepdim", False):
        return None
    square = mean.args[0]
    wide = _squared(square)
    if wide is None or list(mean.args[1]) not in ([-1], [len(shape(wide)) - 1]):
        return None
    scaled = only_user(rsqrt)
    if scaled is None or not is_call(scaled, aten.mul.Tensor) or wide not in scaled.args:
        return None
    nodes = [square, mean, shifted, rsqrt, scaled]
    if any(len(one.users) != 1 for one in nodes[:4]):
        return None
    x = wide
    if is_call(wide, *CASTS) and isinstance(wide.args[0], fx.Node) and dtype(wide) is torch.float32:
        x = wide.args[0]
        if all(user in nodes for user in wide.users):
            nodes.insert(0, wide)
    return _with_weight(x, nodes, float(shifted.args[1]))


def _squared(node: Any) -> Node | None:
    if is_call(node, aten.pow.Tensor_Scalar) and node.args[1] == 2:
        return node.args[0]
    if is_call(node, aten.square.default):
        return node.args[0]
    if is_call(node, aten.mul.Tensor) and node.args[0] is node.args[1]:
        return node.args[0]
    return None


def _with_weight(x: Node, nodes: list[Node], eps: float) -> Norm:
    """Takes in the cast, the product with a row of weights (plus one, perhaps), and the cast after it."""
    weight: Node | None = None
    offset = 0.0
    end = len(nodes)
    node = nodes[-1]
    while (user := only_user(node)) is not None:
        if is_call(user, *CASTS) and user.args[0] is node and dtype(user) in FLOATS:
            nodes.append(user)
        elif weight is None and is_call(user, aten.mul.Tensor) and (found := _row(user, node, x)) is not None:
            weight, offset, before = found
            nodes.extend([*before, user])
            end = len(nodes)
        else:
            break
        node = user
    # A cast behind the weight belongs to the norm where it returns to x's type; another one is the next layer's.
    while len(nodes) > end and dtype(nodes[-1]) is not dtype(x):
        nodes.pop()
    return Norm("rms_norm", x, weight, None, eps, offset, nodes)


def _row(product: Node, node: Node, x: Node) -> tuple[Node, float, list[Node]] | None:
    other = product.args[1] if product.args[0] is node else product.args[0]
    if not isinstance(other, fx.Node) or len(shape(other)) != 1 or not same(shape(other)[0], shape(x)[-1]):
        return None
    before: list[Node] = []
    offset = 0.0
    if is_call(other, aten.add.Tensor, aten.add.Scalar) and isinstance(other.args[1], int | float):
        before, offset, other = [other], float(other.args[1]), other.args[0]
    if offset == 0.0 and before:
        return None
    if is_call(other, *CASTS) and dtype(other.args[0]) in (dtype(x), torch.float32):
        before, other = [other, *before], other.args[0]
    if any(len(one.users) != 1 for one in before):
        before = []
    return other, offset, before


def emit_norm(norm: Norm) -> Any:
    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        to = None if dtype(norm.output) is dtype(norm.x) else dtype(norm.output)
        parameters = [None if one is None else at(one) for one in (norm.weight, norm.bias)]
        if norm.kind == "rms_norm":
            return add.op("rms_norm", at(norm.x), parameters[0], norm.eps, norm.weight_offset, to)
        return add.op("layer_norm", at(norm.x), *parameters, norm.eps, to)

    return emit


def _emit_with_sum(norm: Norm, x: Node, residual: Node) -> Any:
    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        to = None if dtype(norm.output) is dtype(norm.x) else dtype(norm.output)
        parameters = [None if one is None else at(one) for one in (norm.weight, norm.bias)]
        if norm.kind == "rms_norm":
            found = add.op("add_rms_norm", at(x), at(residual), parameters[0], norm.eps, norm.weight_offset, to)
        else:
            found = add.op("add_layer_norm", at(x), at(residual), *parameters, norm.eps, to)
        return [found[1], found[0]]

    return emit
