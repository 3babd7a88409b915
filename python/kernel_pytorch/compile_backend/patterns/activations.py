"""Activations of a graph by the names that our ops know, one call or written out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import fx

from ..nodes import Node, argument, aten, is_call

_CALLS = {
    aten.silu.default: "silu",
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
}

GATES = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")  # what our gated ops know


class Activation(NamedTuple):
    kind: str
    x: Node
    nodes: list[Node]


def activation(node: Any) -> Activation | None:
    """The activation whose output this node is."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_function" and node.target in _CALLS:
        return Activation(_CALLS[node.target], node.args[0], [node])
    if is_call(node, aten.gelu.default):
        kind = "gelu_tanh" if argument(node, 1, "approximate", "none") == "tanh" else "gelu"
        return Activation(kind, node.args[0], [node])
    return _written_gelu(node)


def _written_gelu(node: Node) -> Activation | None:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as transformers writes it."""
    if not is_call(node, aten.mul.Tensor):
        return None
    half, shifted = node.args
    x = _times(half, 0.5)
    tanh = _plus(shifted, 1.0)
    if x is None or tanh is None or not is_call(tanh, aten.tanh.default):
        return None
    inside = _times(tanh.args[0], math.sqrt(2 / math.pi))
    if inside is None or not is_call(inside, aten.add.Tensor) or inside.args[0] is not x:
        return None
    cube = _times(inside.args[1], 0.044715)
    if cube is None or not is_call(cube, aten.pow.Tensor_Scalar) or cube.args[0] is not x or cube.args[1] != 3:
        return None
    nodes = [cube, inside.args[1], inside, tanh.args[0], tanh, shifted, half, node]
    if any(user not in nodes for one in nodes[:-1] for user in one.users):
        return None
    return Activation("gelu_tanh", x, nodes)


def _times(node: Any, factor: float) -> Node | None:
    if not is_call(node, aten.mul.Tensor, aten.mul.Scalar) or not isinstance(node.args[1], float):
        return None
    return node.args[0] if math.isclose(node.args[1], factor, rel_tol=1e-6) else None


def _plus(node: Any, number: float) -> Node | None:
    if not is_call(node, aten.add.Tensor, aten.add.Scalar) or node.args[1] != number:
        return None
    return node.args[0]
