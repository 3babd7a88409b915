"""The concatenation of a new, empty cache with the first keys or values: it is these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..model import Candidate, Match, Refusal, Region
from ..nodes import Node, aten, dtype, is_call, is_write, same, same_shape, shape, value


def find_empty_cats(region: Region) -> Iterator[Match | Refusal]:
    """An alias takes the place of a copy: only in a graph that writes nothing, and never of a tensor from outside."""
    writes = any(is_write(node) and not is_call(node, torch._C._set_grad_enabled) for node in region.graph.nodes)
    for node in region.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = node.args[0]
        full = [one for one in parts if isinstance(value(one), Tensor) and not any(same(n, 0) for n in shape(one))]
        if len(full) != 1 or len(parts) == 1:
            continue
        if dtype(full[0]) is not dtype(node) or not same_shape(shape(full[0]), shape(node)):
            continue
        if writes:
            yield Refusal("empty_cat", node, "the graph writes into tensors")
        elif _is_from_outside(full[0]) or any(user.op == "output" for user in full[0].users):
            yield Refusal("empty_cat", node, "the tensor is known outside the graph")
        else:
            yield Match("empty_cat", [node], [node], [Candidate("the tensor itself", _the_tensor(full[0]))])


def _the_tensor(node: Node) -> Any:
    return lambda add, at: [at(node)]


def _is_from_outside(node: Node) -> bool:
    """Whether it may be a view of an input: what follows views and casts back to a placeholder."""
    seen = 0
    while node.op == "call_function" and seen < 20:
        schema = getattr(node.target, "_schema", None)
        is_alias = schema is None or any(one.alias_info is not None for one in schema.arguments)
        if not is_alias:
            return False
        node, seen = node.all_input_nodes[0], seen + 1
    return True
