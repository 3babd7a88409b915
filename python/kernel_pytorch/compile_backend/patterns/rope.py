"""Rotary embedding of queries and keys, written out as products with cos and sin: both in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..model import Candidate, Match, Refusal, Region
from ..nodes import CASTS, FLOATS, Emitter, Node, aten, dtype, inputs_of, is_call, same, shape, value

_LAST = 2**63 - 1


@dataclass
class Rotation:
    x: Node
    cos: Node
    sin: Node
    nodes: list[Node]

    @property
    def output(self) -> Node:
        return self.nodes[-1]


def find(region: Region) -> Iterator[Match | Refusal]:
    found: dict[tuple[Node, Node], list[Rotation]] = {}
    for node in region.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        rotation = _rotation(node)
        if rotation is not None:
            found.setdefault((rotation.cos, rotation.sin), []).append(rotation)
    order = {node: i for i, node in enumerate(region.graph.nodes)}
    for rotations in found.values():
        rotations.sort(key=lambda one: order[one.output])
        while rotations:
            first = rotations.pop(0)
            second = rotations[0] if rotations and _are_neighbours(first, rotations[0], order) else None
            if second is not None:
                rotations.pop(0)
            yield _match(first, second)


def _are_neighbours(first: Rotation, second: Rotation, order: dict[Node, int]) -> bool:
    """Whether the key's inputs are there when the query is turned, before anything reads the result."""
    begin = min(order[node] for node in first.nodes)
    ready = all(order[node] < begin for node in inputs_of(second.nodes))
    of_one_kind = dtype(first.x) is dtype(second.x) and shape(first.x)[-1] == shape(second.x)[-1]
    return ready and of_one_kind and same(shape(first.x)[0], shape(second.x)[0])


def _match(first: Rotation, second: Rotation | None) -> Match | Refusal:
    problem = _problem(first)
    if problem:
        return Refusal("rope", first.output, problem)
    pair = [first] if second is None else [first, second]
    outputs = [one.output for one in pair]
    nodes = list(dict.fromkeys(node for one in pair for node in one.nodes))
    tables = (_table(first.cos), _table(first.sin))

    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        cos, sin = (at(one) for one in tables)
        if same(shape(cos)[0], 1) and not same(shape(first.x)[0], 1):
            cos, sin = (add.call(aten.select.int, one, 0, 0) for one in (cos, sin))
        heads_first = not all(_lies_sequence_first(one.x) for one in pair)
        turned = [at(one.x) if heads_first else add.call(aten.transpose.int, at(one.x), 1, 2) for one in pair]
        key = None if second is None else turned[1]
        found = add.op("rope", turned[0], key, cos, sin, None, None, 1.0, 0, False, heads_first)[: len(pair)]
        return found if heads_first else [add.call(aten.transpose.int, one, 1, 2) for one in found]

    return Match("rope", nodes, outputs, [Candidate("ours", emit, tables)], derived=(*tables, first.cos, first.sin))


def _lies_sequence_first(x: Node) -> bool:
    """Whether it is a view of [batch, sequence, heads, size], as a projection gives it. The results lie so as well:
    attention keeps the order of its query, and what comes after it reads rows of all heads without a copy.
    """
    _, heads, sequence, _ = value(x).stride()
    return bool(statically_known_true(heads < sequence))


def _problem(one: Rotation) -> str:
    if len(shape(one.x)) != 4:
        return "not four dimensions"
    if dtype(one.x) not in FLOATS or dtype(one.output) is not dtype(one.x) or dtype(one.cos) is not dtype(one.x):
        return f"x is {dtype(one.x)}, cos {dtype(one.cos)}, the output {dtype(one.output)}"
    if not all(is_call(table, aten.unsqueeze.default) and table.args[1] == 1 for table in (one.cos, one.sin)):
        return "cos and sin are not [batch, 1, sequence, size]"
    if any(len(shape(_table(table))) != 3 for table in (one.cos, one.sin)):
        return "cos and sin are not [batch, sequence, size]"
    if not all(_has_equal_halves(_table(table)) for table in (one.cos, one.sin)):
        return "the graph does not show that both halves of cos and sin are equal"
    return ""


def _table(node: Node) -> Node:
    return node.args[0]


def _has_equal_halves(node: Any) -> bool:
    """Whether it comes from a concatenation of one tensor with itself, element by element."""
    while is_call(node, *CASTS, aten.cos.default, aten.sin.default, aten.mul.Tensor):
        if is_call(node, aten.mul.Tensor) and not isinstance(node.args[1], int | float):
            return False
        node = node.args[0]
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2:
        return False
    left, right = node.args[0]
    return left is right and (len(node.args) > 1 and node.args[1] in (-1, len(shape(node)) - 1))


def _rotation(node: Node) -> Rotation | None:
    """x * cos + cat(-x2, x1) * sin."""
    if node.kwargs or not all(is_call(one, aten.mul.Tensor) for one in node.args):
        return None
    for direct, turned in (node.args, node.args[::-1]):
        for x, cos in (direct.args, direct.args[::-1]):
            for half, sin in (turned.args, turned.args[::-1]):
                inner = _half_turn(half, x)
                if inner is not None and isinstance(cos, fx.Node) and isinstance(sin, fx.Node):
                    nodes = [*inner, half, direct, turned, node]
                    if all(user in nodes for one in nodes[:-1] for user in one.users):
                        return Rotation(x, cos, sin, nodes)
    return None


def _half_turn(node: Any, x: Any) -> list[Any] | None:
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2 or not isinstance(x, fx.Node):
        return None
    negated, first = node.args[0]
    if len(node.args) < 2 or node.args[1] not in (-1, len(shape(x)) - 1) or not is_call(negated, aten.neg.default):
        return None
    second = negated.args[0]
    size = shape(x)[-1]
    if not isinstance(size, int) or not (_is_slice(first, x, 0, size // 2) and _is_slice(second, x, size // 2, size)):
        return None
    return [first, second, negated]


def _is_slice(node: Any, x: Node, begin: int, end: int) -> bool:
    if not is_call(node, aten.slice.Tensor) or node.args[0] is not x or len(node.args) != 4:
        return False
    _, dim, start, stop = node.args
    return (
        dim in (-1, len(shape(x)) - 1) and start == begin and (stop == end or (stop == _LAST and end == shape(x)[-1]))
    )
