"""Rotary embedding of queries and keys in one call; with the norms of each head before it as one choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..model import Candidate, Match, Refusal, Region
from ..nodes import Emitter, Node, aten, dtype, inputs_of, is_call, same, shape
from .norms import Norm, emit_norm, norms
from .rotations import Rotation, rotation


def find(region: Region) -> Iterator[Match | Refusal]:
    for pair in _pairs(region):
        yield _match("rope", pair, [None] * len(pair))


def find_with_norms(region: Region) -> Iterator[Match | Refusal]:
    """Norms of queries and keys by head, then the rotation: each alone may lose to a kernel that has both."""
    by_output = {one.output: one for one in norms(region) if isinstance(one, Norm)}
    for pair in _pairs(region):
        found = [_norm_before(one, by_output) for one in pair]
        if all(one is not None for one in found) and not any(one.problem for one in pair):
            yield _match("norm_rope", pair, found)


def _pairs(region: Region) -> Iterator[list[Rotation]]:
    """The rotation of a query with that of its key, where it can be done at the same place; others alone."""
    found: dict[tuple[Node, Node], list[Rotation]] = {}
    for node in region.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        one = rotation(node)
        if one is not None:
            found.setdefault((one.cos, one.sin), []).append(one)
    order = {node: i for i, node in enumerate(region.graph.nodes)}
    for rotations in found.values():
        rotations.sort(key=lambda one: order[one.output])
        while rotations:
            first = rotations.pop(0)
            has_second = rotations and _are_neighbours(first, rotations[0], order)
            yield [first, rotations.pop(0)] if has_second else [first]


def _are_neighbours(first: Rotation, second: Rotation, order: dict[Node, int]) -> bool:
    """Whether the key's inputs are there when the query is turned, before anything reads the result."""
    begin = min(order[node] for node in first.nodes)
    ready = all(order[node] < begin for node in inputs_of(second.nodes) if node not in first.nodes)
    of_one_kind = dtype(first.x) is dtype(second.x) and shape(first.x)[-1] == shape(second.x)[-1]
    alike = first.columns == second.columns and first.interleaved == second.interleaved
    return ready and of_one_kind and alike and same(shape(first.x)[0], shape(second.x)[0])


def _norm_before(one: Rotation, by_output: dict[Node, Norm]) -> tuple[Norm, list[Node]] | None:
    """The norm whose rows are the heads that are turned, and the nodes between: a transposition or none."""
    between: list[Node] = []
    x = one.x
    if is_call(x, aten.transpose.int) and {dim % 4 for dim in x.args[1:3]} == {1, 2}:
        between, x = [x], x.args[0]
    found = by_output.get(x)
    inside = {*one.nodes, *between}
    if found is None or found.kind != "rms_norm" or any(user not in inside for user in x.users):
        return None
    if any(user not in inside for node in between for user in node.users) or len(shape(found.x)) != 4:
        return None
    return found, between


def _match(pattern: str, pair: list[Rotation], before: list[Any]) -> Match | Refusal:
    first = pair[0]
    for one in pair:
        if one.problem:
            return Refusal(pattern, one.output, one.problem)
    inner = [node for one in before if one is not None for node in (*one[0].nodes, *one[1])]
    nodes = list(dict.fromkeys([*inner, *(node for one in pair for node in one.nodes)]))
    tables = first.tables
    normed = [one[0] for one in before if one is not None]
    candidates = [Candidate("ours", _Rotate(pair, [one and one[0] for one in before]), tables)]
    if normed and not first.interleaved and all(dtype(one.x) is dtype(one.output) for one in normed):
        candidates.insert(0, Candidate("ours, one op", _NormAndRotate(pair, normed), tables))
    outputs = [one.output for one in pair]
    derived = (*tables, first.cos, first.sin)
    return Match(pattern, nodes, outputs, candidates, first.detail, derived=derived)


class _NormAndRotate:
    """Emits one call for each of a query and its key, with its norm."""

    def __init__(self, pair: list[Rotation], normed: list[Norm]) -> None:
        self.pair, self.normed = pair, normed

    def __call__(self, add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        cos, sin = (at(one) for one in self.pair[0].tables)
        found = []
        for one, norm in zip(self.pair, self.normed):
            heads_first = not one.lies_sequence_first
            x = _in_order(add, at(norm.x), one.heads_first is (norm.output is one.x), heads_first)
            weight = None if norm.weight is None else at(norm.weight)
            numbers = (norm.eps, norm.weight_offset, one.columns, heads_first)
            (turned,) = add.op("norm_rope", x, weight, cos, sin, *numbers)
            found.append(_in_order(add, turned, heads_first, one.heads_first))
        return found


def _in_order(add: Emitter, x: Node, is_first: bool, wants_first: bool) -> Node:
    """With heads before positions or behind."""
    return x if is_first == wants_first else add.call(aten.transpose.int, x, 1, 2)


class _Rotate:
    """Emits one call for a query and its key, with calls of the norms before it."""

    def __init__(self, pair: list[Rotation], normed: list[Norm | None]) -> None:
        self.pair, self.normed = pair, normed

    def __call__(self, add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        first = self.pair[0]
        cos, sin = (at(one) for one in first.tables)
        if same(shape(cos)[0], 1) and not same(shape(first.x)[0], 1):
            cos, sin = (add.call(aten.select.int, one, 0, 0) for one in (cos, sin))
        heads_first = not all(one.lies_sequence_first for one in self.pair)
        turned = [self._operand(add, at, i, heads_first) for i in range(len(self.pair))]
        key = turned[1] if len(turned) > 1 else None
        numbers = (1.0, first.columns, first.interleaved, heads_first)
        found = add.op("rope", turned[0], key, cos, sin, None, None, *numbers)[: len(turned)]
        return [_in_order(add, one, heads_first, rotation.heads_first) for one, rotation in zip(found, self.pair)]

    def _operand(self, add: Emitter, at: Callable[[Node], Node], i: int, heads_first: bool) -> Node:
        """In the order in which it is turned; the norm of it if there is one, whose rows are the same in both."""
        one, norm = self.pair[i], self.normed[i]
        source = one.x if norm is None else norm.x
        is_first = one.heads_first if norm is None else one.heads_first is (norm.output is one.x)
        x = _in_order(add, at(source), is_first, heads_first)
        return x if norm is None else emit_norm(norm)(add, lambda node: x if node is source else at(node))[0]
