"""What Inductor would compile together with a match: a part is timed with these neighbours.

Alone, an op of ours may look faster than the same part of a kernel that Inductor makes anyway: there it costs nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .nodes import Node, is_write, value

_LARGEST = 80
# What Inductor fuses nothing into, by the names of ATen.
_PRODUCTS = ("linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "einsum", "scaled_dot_product_attention")
_CONVOLUTIONS = ("convolution", "conv1d", "conv2d", "conv3d", "conv_transpose2d")
_ORDERINGS = ("sort", "topk", "multinomial", "nonzero", "masked_select", "unique_consecutive")
# What reads or writes where an index says: a trial has no indices, and one out of range ends a process on a GPU.
_INDEXED = (
    "embedding",
    "index",
    "index_select",
    "gather",
    "take",
    "take_along_dim",
    "scatter",
    "scatter_add",
    "index_add",
)
_WALLS = frozenset((*_PRODUCTS, *_CONVOLUTIONS, *_ORDERINGS, *_INDEXED))


def is_wall(node: Node) -> bool:
    """Whether a trial ends here, as a kernel of Inductor's mostly does: products, attention, ops of ours, writes."""
    if node.op != "call_function":
        return node.op not in ("placeholder", "output")
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return True  # one of several results, which a trial is given as a tensor
    space, name = schema.name.split("::")
    return space != "aten" or name in _WALLS or is_write(node)


def cluster(graph: fx.Graph, nodes: list[Node]) -> list[Node]:
    """The nodes with those around them that no wall divides from them, in the graph's order.

    Of nodes with a wall among them only what comes after: whoever computes the product reads what came before as it
    lies. The nodes alone, where something outside lies between what was found.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    depth = _depths(graph)
    found = dict.fromkeys(nodes)
    queue = list(nodes)
    looks_back = not any(is_wall(node) for node in nodes)

    def belongs(node: Node, to: int) -> bool:
        """Whether it is of this depth and not a table that is made once for all layers."""
        return depth.get(node) == to and len({depth[user] for user in node.users}) <= 2

    while queue and len(found) < _LARGEST:
        node = queue.pop(0)
        step = 1 if is_wall(node) else 0
        after = [user for user in node.users if belongs(user, depth[node] + step)]
        before = [one for one in node.all_input_nodes if belongs(one, depth[node])] if looks_back else []
        for one in (*after, *before):
            if one not in found and _is_fusible(one):
                found[one] = None
                queue.append(one)
    made = sorted(found, key=lambda node: order[node])
    return made if _is_convex(graph, found) else sorted(nodes, key=lambda node: order[node])


def _is_fusible(node: Node) -> bool:
    return node.op == "call_function" and isinstance(value(node), Tensor) and not is_wall(node)


def _depths(graph: fx.Graph) -> dict[Node, int]:
    """How many walls lie before each node."""
    found: dict[Node, int] = {}
    for node in graph.nodes:
        found[node] = max((found[one] + (1 if is_wall(one) else 0) for one in node.all_input_nodes), default=0)
    return found


def _is_convex(graph: fx.Graph, nodes: Any) -> bool:
    """Whether no node outside reads from inside and is read there."""
    after: set[Node] = set()
    for node in graph.nodes:
        if node in nodes:
            if any(one in after for one in node.all_input_nodes):
                return False
        elif any(one in nodes or one in after for one in node.all_input_nodes):
            after.add(node)
    return True
