"""Rotary embedding as models write it out: x * cos + cat(-x2, x1) * sin, of all columns or of the first ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..nodes import CASTS, FLOATS, VIEWS, Node, aten, dtype, is_call, only_user, same, shape, value

_LAST = 2**63 - 1
_HALVES = (torch.bfloat16, torch.float16)


@dataclass
class Rotation:
    """`columns`: how many of each head are turned; the tables are as wide. The last of the nodes is the output."""

    x: Node
    cos: Node
    sin: Node
    nodes: list[Node]
    columns: int
    interleaved: bool = False

    @property
    def output(self) -> Node:
        return self.nodes[-1]

    @property
    def tables(self) -> tuple[Node, Node]:
        """cos and sin as [batch, sequence, columns]."""
        return self.cos.args[0], self.sin.args[0]

    @property
    def heads_first(self) -> bool:
        """Whether x is [batch, heads, sequence, size]."""
        return self.cos.args[1] in (1, -3)

    @property
    def detail(self) -> str:
        is_part = self.columns != shape(self.x)[-1]
        return ", ".join(["some columns"] * is_part + ["interleaved"] * self.interleaved)

    @property
    def problem(self) -> str:
        if len(shape(self.x)) != 4:
            return "not four dimensions"
        if dtype(self.x) not in FLOATS or dtype(self.output) is not dtype(self.x):
            return f"x is {dtype(self.x)}, cos {dtype(self.cos)}, the output {dtype(self.output)}"
        if any(dtype(one) not in (dtype(self.x), torch.float32) for one in (self.cos, self.sin)):
            return f"x is {dtype(self.x)}, cos {dtype(self.cos)}, sin {dtype(self.sin)}"
        if not all(is_call(one, aten.unsqueeze.default) for one in (self.cos, self.sin)):
            return "cos and sin are not [batch, 1, sequence, size]"
        if self.cos.args[1] != self.sin.args[1] or self.cos.args[1] not in (1, 2, -2, -3):
            return "cos and sin have another order than x"
        if any(len(shape(table)) != 3 for table in self.tables):
            return "cos and sin are not [batch, sequence, size]"
        if not all(_has_pairs(table, self.interleaved) for table in self.tables):
            return "the graph does not show that both values of a pair of cos and sin are equal"
        return ""

    @property
    def lies_sequence_first(self) -> bool:
        """Whether it is a view of [batch, sequence, heads, size], as a projection gives it. The results lie so as well:
        attention keeps the order of its query, and what comes after it reads rows of all heads without a copy.
        """
        if not self.heads_first:
            return True
        _, heads, sequence, _ = value(self.x).stride()
        return bool(statically_known_true(heads < sequence))


def rotation(node: Node) -> Rotation | None:
    """The rotation whose sum this node is, with the casts around it and the columns that it leaves alone."""
    found = _sum_of_products(node)
    if found is None:
        return None
    found = _with_casts(found)
    return _with_other_columns(found)


def _sum_of_products(node: Node) -> Rotation | None:
    if node.kwargs or not all(is_call(one, aten.mul.Tensor) for one in node.args):
        return None
    for direct, turned in (node.args, node.args[::-1]):
        for x, cos in (direct.args, direct.args[::-1]):
            for half, sin in (turned.args, turned.args[::-1]):
                if not all(isinstance(one, fx.Node) and shape(one) for one in (x, cos, sin)):
                    continue
                if not isinstance(shape(x)[-1], int):
                    continue
                for interleaved, inner in ((False, _half_turn(half, x)), (True, _pair_turn(half, x))):
                    if inner is None:
                        continue
                    nodes = [*inner, direct, turned, node]
                    if all(user in nodes for one in nodes[:-1] for user in one.users):
                        return Rotation(x, cos, sin, nodes, shape(x)[-1], interleaved)
    return None


def _half_turn(node: Any, x: Any) -> list[Any] | None:
    """cat(-x2, x1)."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2:
        return None
    negated, first = node.args[0]
    if len(node.args) < 2 or node.args[1] not in (-1, len(shape(x)) - 1) or not is_call(negated, aten.neg.default):
        return None
    second = negated.args[0]
    size = shape(x)[-1]
    if not (is_slice(first, x, 0, size // 2) and is_slice(second, x, size // 2, size)):
        return None
    return [first, second, negated, node]


def _pair_turn(node: Any, x: Any) -> list[Any] | None:
    """stack(-x[1::2], x[::2]) as one row."""
    if not is_call(node, *VIEWS, aten.flatten.using_ints) or not is_call(node.args[0], aten.stack.default):
        return None
    stacked = node.args[0]
    parts = stacked.args[0]
    is_last = len(stacked.args) > 1 and stacked.args[1] in (-1, len(shape(x)))
    if len(parts) != 2 or not is_last or len(shape(node)) != len(shape(x)) or shape(node)[-1] != shape(x)[-1]:
        return None
    negated, first = parts
    if not is_call(negated, aten.neg.default):
        return None
    second = negated.args[0]
    if not (_is_every_second(first, x, 0) and _is_every_second(second, x, 1)):
        return None
    return [first, second, negated, stacked, node]


def is_slice(node: Any, x: Node, begin: int, end: int) -> bool:
    """Whether it is x[..., begin:end]."""
    if not is_call(node, aten.slice.Tensor) or node.args[0] is not x or len(node.args) != 4:
        return False
    _, dim, start, stop = node.args
    stops = stop == end or (isinstance(stop, int) and stop >= shape(x)[-1] and end == shape(x)[-1])
    return dim in (-1, len(shape(x)) - 1) and (start or 0) == begin and stops


def _is_every_second(node: Any, x: Node, begin: int) -> bool:
    if not is_call(node, aten.slice.Tensor) or node.args[0] is not x or len(node.args) != 5:
        return False
    _, dim, start, stop, step = node.args
    return dim in (-1, len(shape(x)) - 1) and (start or 0) == begin and stop == _LAST and step == 2


def _has_pairs(node: Any, interleaved: bool) -> bool:
    """Whether each value stands twice: in both halves of a row, or in neighbours."""
    while is_call(node, *CASTS, aten.cos.default, aten.sin.default, aten.mul.Tensor):
        if is_call(node, aten.mul.Tensor) and not isinstance(node.args[1], int | float):
            return False
        node = node.args[0]
    if interleaved:
        return is_call(node, aten.repeat_interleave.self_int) and node.args[1:] in ((2, -1), (2, len(shape(node)) - 1))
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2:
        return False
    left, right = node.args[0]
    return left is right and (len(node.args) > 1 and node.args[1] in (-1, len(shape(node)) - 1))


def _with_casts(found: Rotation) -> Rotation:
    """In fp32 between 16-bit tensors: our op computes so, and rounds once."""
    x, nodes = found.x, found.nodes
    if dtype(found.output) is not torch.float32:
        return found
    back = only_user(found.output)
    if back is None or not is_call(back, *CASTS) or dtype(back) not in _HALVES:
        return found
    if is_call(x, *CASTS) and dtype(x) is torch.float32 and all(user in nodes for user in x.users):
        x, nodes = x.args[0], [x, *nodes]
    return replace(found, x=x, nodes=[*nodes, back]) if dtype(x) is dtype(back) else found


def _with_other_columns(found: Rotation) -> Rotation:
    """cat(turned, rest), both being columns of one tensor; all of it may be turned and the rest be empty."""
    joined = only_user(found.output)
    if joined is None or not is_call(joined, aten.cat.default) or len(joined.args[0]) != 2:
        return found
    turned, rest = joined.args[0]
    is_last = len(joined.args) > 1 and joined.args[1] in (-1, len(shape(joined)) - 1)
    if turned is not found.output or not is_last or not is_call(rest, aten.slice.Tensor) or only_user(rest) is None:
        return found
    whole, columns = rest.args[0], found.columns
    if not same(shape(whole)[-1], shape(joined)[-1]) or not is_slice(rest, whole, columns, shape(whole)[-1]):
        return found
    if found.x is whole:
        return replace(found, nodes=[rest, *found.nodes, joined])
    if not is_slice(found.x, whole, 0, columns) or any(user not in found.nodes for user in found.x.users):
        return found
    return replace(found, x=whole, nodes=[found.x, rest, *found.nodes, joined])
