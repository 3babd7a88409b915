"""Linear layers of one input: their products add to its gradient, where autograd would add up whole tensors.

Only where the input comes from an op that Inductor fuses nothing into: elsewhere the sum is part of the kernel that
computes the next gradient, and free.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

from torch import fx

from .. import products
from ..cluster import is_wall
from ..model import Candidate, Match, Refusal, Region
from ..nodes import FLOATS, Emitter, Node, aten, dtype, is_call


def find(region: Region) -> Iterator[Match | Refusal]:
    layers: dict[Node, list[Node]] = {}
    for node in region.graph.find_nodes(op="call_function", target=aten.linear.default):
        x, weight = node.args[:2]
        has_bias = len(node.args) > 2 and node.args[2] is not None
        if x in region.differentiable and not has_bias and {dtype(x), dtype(weight)} == {dtype(node)}:
            layers.setdefault(x, []).append(node)
    for x, nodes in layers.items():
        if len(nodes) > 1 and dtype(x) in FLOATS and _is_made_by_an_op(x):
            yield Match("linears", nodes, list(nodes), [Candidate("torch's, adding up", _emit(x, nodes))])


def _is_made_by_an_op(x: Node) -> bool:
    source = x.args[0] if is_call(x, operator.getitem) else x
    return isinstance(source, fx.Node) and source.op == "call_function" and is_wall(source)


def _emit(x: Node, nodes: list[Node]) -> Callable[..., list[Node]]:
    weights = [node.args[1] for node in nodes]

    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        made = add.call(products.OPS.linears.default, at(x), [at(one) for one in weights])
        return [add.item(made, i) for i in range(len(weights))]

    return emit
