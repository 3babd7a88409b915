"""activation(gate) * up in one pass; gate and up may be slices of one packed tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from ..model import Candidate, Match, Refusal, Region
from ..nodes import FLOATS, Emitter, Node, aten, dtype, is_call, same_shape, shape
from .activations import GATES, activation


def find(region: Region) -> Iterator[Match | Refusal]:
    for node in region.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        match = _match(node)
        if match is not None:
            yield match


def _match(node: Node) -> Match | None:
    for gated, up in (node.args[:2], node.args[1::-1]):
        found = activation(gated)
        if found is None or found.kind not in GATES or not isinstance(up, fx.Node) or len(gated.users) != 1:
            continue
        gate, kind = found.x, found.kind
        kinds = {dtype(one) for one in (gate, up, node)}
        if len(kinds) != 1 or dtype(gate) not in FLOATS or not same_shape(shape(gate), shape(up)):
            continue
        if len(shape(gate)) < 2 or (is_call(up, aten.mul.Tensor) and up.args[0] is gate):
            continue

        def emit(
            add: Emitter, at: Callable[[Node], Node], gate: Node = gate, up: Node = up, kind: str = kind
        ) -> list[Node]:
            return add.op("gated_activation", at(gate), at(up), None, None, None, None, kind, 0.0)

        return Match("gated_activation", [*found.nodes, node], [node], [Candidate("ours", emit)], kind)
    return None
