"""Attention written out: softmax(query key^T * scale + mask) value, as products."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from ..nodes import CASTS, FLOATS, Node, argument, aten, dtype, is_call, only_user, same, shape

_LAST = (-1, 3)


class Attention(NamedTuple):
    """What attends, and the nodes that do so, of which the last is the output."""

    query: Node
    key: Node
    value: Node
    mask: Node | None
    is_causal: bool
    scale: float | None
    nodes: list[Node]
    dropout: float = 0.0


def written(output: Node) -> Attention | None:
    """The attention whose second product this node is."""
    if not is_call(output, aten.matmul.default):
        return None
    one, value = output.args
    nodes = [output]
    if is_call(one, *CASTS):
        nodes.insert(0, one)
        one = one.args[0]
    if not is_call(one, aten.softmax.int, aten._softmax.default) or one.args[1] not in _LAST:
        return None
    if argument(one, 2, "dtype") not in (None, False, torch.float32, dtype(one.args[0])):
        return None
    nodes.insert(0, one)
    scores, mask = one.args[0], None
    if is_call(scores, aten.add.Tensor) and scores.kwargs.get("alpha", 1) == 1 and _is_mask(scores.args[1], scores):
        nodes.insert(0, scores)
        scores, mask = scores.args
    scale = 1.0
    while is_call(scores, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        number = scores.args[1]
        if not isinstance(number, int | float) or isinstance(number, bool) or number == 0:
            return None
        scale = scale / number if is_call(scores, aten.div.Tensor, aten.div.Scalar) else scale * number
        nodes.insert(0, scores)
        scores = scores.args[0]
    if not is_call(scores, aten.matmul.default):
        return None
    query, turned = scores.args
    if not is_call(turned, aten.transpose.int) or {one % 4 for one in turned.args[1:3]} != {2, 3}:
        return None
    key = turned.args[0]
    nodes = [scores, *nodes]
    if only_user(turned) is not None:
        nodes.insert(0, turned)
    fits = all(isinstance(part, fx.Node) and len(shape(part)) == 4 for part in (query, key, value))
    if not fits or dtype(output) not in FLOATS or any(only_user(part) is None for part in nodes[:-1]):
        return None
    same_heads = all(same(shape(part)[1], shape(query)[1]) for part in (key, value))
    return Attention(query, key, value, mask, False, scale, nodes) if same_heads else None


def _is_mask(mask: Any, scores: Node) -> bool:
    """Numbers that are added to the scores and are no scores themselves."""
    return isinstance(mask, fx.Node) and len(shape(mask)) == 4 and not is_call(mask, aten.matmul.default)
