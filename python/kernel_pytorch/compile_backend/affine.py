"""Index tensors and masks as formulas: what a graph's nodes say about positions, for every size that it serves.

An integer tensor is `sum(slope * index of a dimension) + constant + base`, dimensions being counted from the right and
`base` a node with one element. A mask is a conjunction of conditions `formula <= 0` and of nodes that stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from .nodes import CASTS, VIEWS, Node, aten, is_call, same, shape, value

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Formula:
    slopes: dict[int, Any] = field(default_factory=dict)
    constant: Any = sympy.S.Zero
    base: Node | None = None

    def __neg__(self) -> Formula:
        return self.times(-1)

    def times(self, factor: Any) -> Formula:
        if self.base is not None and factor != 1:
            raise Unknown("a multiple of an input")
        return Formula({dim: slope * factor for dim, slope in self.slopes.items()}, self.constant * factor, self.base)


@dataclass(frozen=True)
class Difference:
    """left - right <= 0, where each may have a base of its own."""

    slopes: dict[int, Any]
    constant: Any
    plus: Node | None
    minus: Node | None


@dataclass(frozen=True)
class Mask:
    """All conditions hold; `opaque` are nodes that broadcast to the mask's shape. None: never."""

    conditions: tuple[Difference, ...] = ()
    opaque: tuple[Node, ...] = ()


class Unknown(Exception):
    """What no formula describes."""


class Reader:
    """Formulas of one graph's nodes. A node that no rule knows is itself: a base, or an opaque mask."""

    def __init__(self) -> None:
        self._read: dict[Node, Formula | Mask | bool] = {}

    def mask(self, node: Node) -> Mask | bool:
        found = self.read(node)
        return found if isinstance(found, Mask | bool) else Mask((), (node,))

    def read(self, node: Any) -> Formula | Mask | bool:
        if not isinstance(node, fx.Node):
            return _number(node)
        if node not in self._read:
            try:
                self._read[node] = _squeezed(self._rule(node), node)
            except Unknown:
                self._read[node] = _itself(node)
        return self._read[node]

    def _formula(self, node: Any) -> Formula:
        found = self.read(node)
        if isinstance(found, Formula):
            return found
        raise Unknown

    def _rule(self, node: Node) -> Formula | Mask | bool:
        if not isinstance(value(node), Tensor):
            return _number(value(node))
        if node.op != "call_function":
            raise Unknown
        rule = _RULES.get(node.target)
        if rule is None:
            raise Unknown
        return rule(self, node)  # type: ignore[no-any-return]


def _expression(number: Any) -> Any:
    if isinstance(number, fx.Node):
        number = value(number)
    if isinstance(number, torch.SymInt):
        return number.node.expr
    if isinstance(number, bool) or not isinstance(number, int):
        raise Unknown
    return sympy.Integer(number)


def _number(number: Any) -> Formula | bool:
    return number if isinstance(number, bool) else Formula({}, _expression(number))


def _itself(node: Node) -> Formula | Mask:
    found = value(node)
    if isinstance(found, Tensor) and found.dtype is torch.bool:
        return Mask((), (node,))
    if isinstance(found, Tensor) and found.dtype in _INTEGERS and all(same(size, 1) for size in found.shape):
        return Formula({}, sympy.S.Zero, node)
    return _NOT_A_FORMULA  # type: ignore[no-any-return]


_NOT_A_FORMULA: Any = object()


def _squeezed(found: Any, node: Node) -> Any:
    """Without slopes along dimensions of one element, which would be wrong once they are expanded."""
    if not isinstance(found, Formula):
        return found
    sizes = shape(node)
    kept = {dim: s for dim, s in found.slopes.items() if s != 0 and -dim <= len(sizes) and not same(sizes[dim], 1)}
    return Formula(kept, found.constant, found.base)


def _arange(reader: Reader, node: Node) -> Formula:
    if is_call(node, aten.arange.default):
        return Formula({-1: sympy.S.One})
    start = _expression(node.args[0])
    step = _expression(node.args[2]) if is_call(node, aten.arange.start_step) and len(node.args) > 2 else sympy.S.One
    return Formula({-1: step}, start)


def _filled(number: int) -> Callable[[Reader, Node], Formula | bool]:
    def rule(reader: Reader, node: Node) -> Formula | bool:
        return bool(number) if value(node).dtype is torch.bool else Formula({}, sympy.Integer(number))

    return rule


def _full(reader: Reader, node: Node) -> Formula | bool:
    position = 2 if is_call(node, aten.new_full.default) else 1
    number = node.args[position]
    return bool(number) if value(node).dtype is torch.bool else _number(number)


def _sum(sign: int) -> Callable[[Reader, Node], Formula]:
    def rule(reader: Reader, node: Node) -> Formula:
        if node.kwargs.get("alpha", 1) != 1:
            raise Unknown
        left, right = (reader._formula(one) for one in node.args[:2])
        right = right.times(sign)
        if left.base is not None and right.base is not None:
            raise Unknown
        dims = {*left.slopes, *right.slopes}
        slopes = {dim: left.slopes.get(dim, 0) + right.slopes.get(dim, 0) for dim in dims}
        return Formula(slopes, left.constant + right.constant, left.base or right.base)

    return rule


def _same_as_input(reader: Reader, node: Node) -> Formula | Mask | bool:
    """Casts among integers, expansions and copies: dimensions are counted from the right, so that nothing moves."""
    found = reader.read(node.args[0])
    to_bool = value(node).dtype is torch.bool
    if isinstance(found, Formula) == to_bool or (isinstance(found, Formula) and value(node).dtype not in _INTEGERS):
        raise Unknown
    return found


def _moved(found: Any, new_dim: Callable[[int], int]) -> Any:
    if isinstance(found, Formula):
        return Formula({new_dim(dim): slope for dim, slope in found.slopes.items()}, found.constant, found.base)
    if isinstance(found, bool):
        return found
    raise Unknown  # conditions of masks are not moved: a mask has its final form when it is compared


def _unsqueeze(reader: Reader, node: Node) -> Any:
    dim, rank = int(node.args[1]), len(shape(node))
    at = dim - rank if dim >= 0 else dim
    found = reader.read(node.args[0])
    if isinstance(found, Mask) and at < -2 and not found.opaque:
        return found  # its conditions are about queries and keys, the last two dimensions
    return _moved(found, lambda old: old - 1 if old <= at else old)


def _view(reader: Reader, node: Node) -> Any:
    """Views that add or drop dimensions of one element."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    old, new = ([i for i, size in enumerate(shape(one)) if not same(size, 1)] for one in (source, node))
    pairs = list(zip(old, new))
    if len(old) != len(new) or not all(same(shape(source)[a], shape(node)[b]) for a, b in pairs):
        raise Unknown
    places = {a - len(shape(source)): b - len(shape(node)) for a, b in pairs}
    return _moved(reader.read(source), lambda dim: places[dim])


def _slice(reader: Reader, node: Node) -> Any:
    given: list[Any] = [*node.args, *[0, 0][: max(0, 3 - len(node.args))]]
    source, dim, start, rest = given[0], int(given[1]), given[2] or 0, given[3:]
    if not isinstance(start, int) or start < 0 or (len(rest) > 1 and rest[1] != 1):
        raise Unknown
    found = reader._formula(source)
    place = dim - len(shape(node)) if dim >= 0 else dim
    constant = found.constant + found.slopes.get(place, 0) * start
    return Formula(found.slopes, constant, found.base)


def _compare(strict: bool, swapped: bool) -> Callable[[Reader, Node], Mask | bool]:
    """left <= right (or <), with the sides swapped for >= and >."""

    def rule(reader: Reader, node: Node) -> Mask | bool:
        first, second = node.args[1::-1] if swapped else node.args[:2]
        if is_call(first, aten.abs.default):
            return _within(reader, first.args[0], reader._formula(second), strict)
        left, right = reader._formula(first), reader._formula(second)
        dims = {*left.slopes, *right.slopes}
        slopes = {dim: left.slopes.get(dim, 0) - right.slopes.get(dim, 0) for dim in dims}
        slopes = {dim: slope for dim, slope in slopes.items() if slope != 0}
        constant = sympy.expand(left.constant - right.constant + (1 if strict else 0))
        plus, minus = (None, None) if left.base is right.base else (left.base, right.base)
        if plus is None and minus is None:
            least, most = _range(slopes, constant, shape(node))
            if most is not None and most <= 0:
                return True
            if least is not None and least > 0:
                return False
        return Mask((Difference(slopes, constant, plus, minus),))

    return rule


def _range(slopes: dict[int, Any], constant: Any, sizes: tuple[Any, ...]) -> tuple[Any, Any]:
    """The least and the largest value of a formula over the indices of a tensor; None where they are not numbers."""
    bounds = [constant, constant]
    for dim, slope in slopes.items():
        last = sizes[dim] - 1 if isinstance(sizes[dim], int) else sympy.oo
        ends = sorted((sympy.S.Zero, sympy.sympify(slope) * last)) if sympy.sympify(slope).is_Integer else (None, None)
        bounds = [None if a is None or b is None else a + b for a, b in zip(bounds, ends)]
    least, most = (one if one is not None and (one.is_Integer or one.is_infinite) else None for one in bounds)
    return least, most


def _within(reader: Reader, node: Any, limit: Formula, strict: bool) -> Mask:
    """|node| <= limit, as two conditions."""
    found = reader._formula(node)
    if found.base is not None or limit.base is not None or limit.slopes:
        raise Unknown
    sides = ((one.slopes, one.constant) for one in (found, -found))
    more = 1 if strict else 0
    return Mask(tuple(Difference(s, sympy.expand(c - limit.constant + more), None, None) for s, c in sides))


def _equal(expected: bool) -> Callable[[Reader, Node], bool]:
    def rule(reader: Reader, node: Node) -> bool:
        left, right = (reader._formula(one) for one in node.args[:2])
        difference = sympy.expand(left.constant - right.constant)
        if left.base is not right.base or left.slopes != right.slopes or not difference.is_Integer:
            raise Unknown
        return (difference == 0) is expected

    return rule


def _and(reader: Reader, node: Node) -> Mask | bool:
    conditions: list[Difference] = []
    opaque: list[Node] = []
    for one in node.args[:2]:
        found = reader.mask(one) if isinstance(one, fx.Node) else reader.read(one)
        if found is False:
            return False
        if isinstance(found, Formula):
            raise Unknown
        if isinstance(found, Mask):
            conditions.extend(found.conditions)
            opaque.extend(found.opaque)
    return Mask(tuple(conditions), tuple(dict.fromkeys(opaque))) if conditions or opaque else True


def _diff(reader: Reader, node: Node) -> Formula:
    """Differences of neighbours along the last dimension, the first one to a value put in front."""
    source, order, dim, front = [*node.args, *[1, -1, None][len(node.args) - 1 :]][:4]
    found = reader._formula(source)
    if order != 1 or dim not in (-1, len(shape(node)) - 1) or len(node.args) > 4 or node.kwargs:
        raise Unknown
    slope = found.slopes.get(-1, sympy.S.Zero)
    if front is not None:
        before = reader._formula(front)
        rest = {dim: one for dim, one in found.slopes.items() if dim != -1}
        if before.base is not found.base or before.slopes != rest:
            raise Unknown
        if sympy.expand(found.constant - before.constant - slope) != 0:
            raise Unknown
    return Formula({}, slope)


def _cumulative_sum(reader: Reader, node: Node) -> Formula:
    if reader.read(node.args[0]) is not False:
        raise Unknown
    return Formula()


def _index(reader: Reader, node: Node) -> Formula | Mask | bool:
    """table[i, j, ...]: of a formula the formula at these places; of a mask the mask, where the places are the dims."""
    table, places = node.args[:2]
    assert isinstance(table, fx.Node)
    found = reader.read(table)
    if isinstance(found, bool):
        return found
    if not isinstance(found, Formula) or len(places) != len(shape(table)):
        raise Unknown
    result = Formula({}, found.constant, found.base)
    for i, place in enumerate(places):
        slope = found.slopes.get(i - len(shape(table)), 0)
        if slope == 0:
            continue
        at = reader._formula(place)
        if at.base is not None:
            raise Unknown
        dims = {*result.slopes, *at.slopes}
        slopes = {dim: result.slopes.get(dim, 0) + slope * at.slopes.get(dim, 0) for dim in dims}
        result = Formula(slopes, result.constant + slope * at.constant, result.base)
    return result


_RULES: dict[Any, Callable[[Reader, Node], Any]] = {
    **dict.fromkeys((aten.arange.default, aten.arange.start, aten.arange.start_step), _arange),
    **dict.fromkeys((aten.ones.default, aten.new_ones.default, aten.ones_like.default), _filled(1)),
    **dict.fromkeys((aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default), _filled(0)),
    **dict.fromkeys((aten.full.default, aten.new_full.default), _full),
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _sum(1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _sum(-1)),
    **dict.fromkeys((*CASTS, aten.expand.default, aten.clone.default, aten.contiguous.default), _same_as_input),
    **dict.fromkeys(VIEWS, _view),
    aten.unsqueeze.default: _unsqueeze,
    aten.slice.Tensor: _slice,
    **dict.fromkeys((aten.le.Tensor, aten.le.Scalar), _compare(False, False)),
    **dict.fromkeys((aten.lt.Tensor, aten.lt.Scalar), _compare(True, False)),
    **dict.fromkeys((aten.ge.Tensor, aten.ge.Scalar), _compare(False, True)),
    **dict.fromkeys((aten.gt.Tensor, aten.gt.Scalar), _compare(True, True)),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _equal(True)),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _equal(False)),
    **dict.fromkeys((aten.__and__.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor), _and),
    aten.diff.default: _diff,
    aten.cumsum.default: _cumulative_sum,
    aten.index.Tensor: _index,
}
