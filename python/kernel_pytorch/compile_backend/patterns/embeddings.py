"""Embeddings whose table wants a gradient: ours is written once, in the table's type; Inductor adds in a table of fp32.

Without a gradient there is nothing to gain: Inductor reads the rows in the kernel that needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..model import Candidate, Match, Refusal, Region
from ..nodes import FLOATS, Emitter, Node, argument, aten, dtype, shape


def find(region: Region) -> Iterator[Match | Refusal]:
    for node in region.graph.find_nodes(op="call_function", target=aten.embedding.default):
        weight, indices = node.args[:2]
        if weight not in region.differentiable:
            continue
        rows = shape(weight)[0]
        if argument(node, 3, "scale_grad_by_freq", False) or argument(node, 4, "sparse", False):
            yield Refusal("embedding", node, "a gradient that is sparse or scaled by how often a row is read")
        elif dtype(weight) not in FLOATS or dtype(indices) not in (torch.int64, torch.int32):
            yield Refusal("embedding", node, f"a table of type {dtype(weight)}, indices of type {dtype(indices)}")
        elif not isinstance(rows, int) or rows == 0:
            yield Refusal("embedding", node, "a table of no or of any number of rows")
        else:
            padding = argument(node, 2, "padding_idx", -1)
            emit = _emit(indices, weight, rows, padding)
            yield Match("embedding", [node], [node], [Candidate("ours", emit)], indices={indices: rows})


def _emit(indices: Node, weight: Node, rows: int, padding: int) -> Callable[..., list[Node]]:
    def emit(add: Emitter, at: Callable[[Node], Node]) -> list[Node]:
        return add.op("embedding", at(indices), at(weight), rows, padding)

    return emit
