"""Facts about the nodes of a canonical graph (pre-dispatch ATen), and how new nodes are added to one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

aten = torch.ops.aten
Node: TypeAlias = Any  # fx.Node, whose arguments are unions of everything: what they are is checked where they are read
ours = torch.ops.kernel_pytorch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
    aten._to_copy.default,
)
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_GRADIENT_SWITCH = torch._C._set_grad_enabled


def value(node: Node) -> Any:
    """What the node gave while tracing: a fake tensor, a number or a sequence of them."""
    return node.meta.get("val")


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument, wherever it was written; `default` is the schema's."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def dtype(node: Any) -> torch.dtype | None:
    found = value(node) if isinstance(node, fx.Node) else None
    return found.dtype if isinstance(found, Tensor) else None


def shape(node: Node) -> tuple[Any, ...]:
    found = value(node)
    return tuple(found.shape) if isinstance(found, Tensor) else ()


def same(left: Any, right: Any) -> bool:
    """Whether two sizes are equal for every size that this graph serves."""
    return bool(statically_known_true(left == right))


def same_shape(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right))


def without_casts(node: Node) -> Node:
    while is_call(node, *CASTS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def half_of(node: Any) -> tuple[Node, int] | None:
    """Of which tensor this node is the first (0) or second (1) half of the last dimension."""
    if is_call(node, operator.getitem) and is_call(
        node.args[0], aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default
    ):
        source, index = node.args[0].args[0], node.args[1]
        dim = argument(node.args[0], 2, "dim", 0)
        parts, begin = len(value(node.args[0])), index
    elif is_call(node, aten.slice.Tensor) and len(node.args) == 4 and isinstance(node.args[0], fx.Node):
        source, dim, start, _ = node.args
        parts, begin = 2, 1 if start else 0
        if start and not same(2 * start, shape(source)[-1]):
            return None
    else:
        return None
    fits = parts == 2 and shape(source) and dim in (-1, len(shape(source)) - 1)
    return (source, begin) if fits and same(2 * shape(node)[-1], shape(source)[-1]) else None


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_write(node: Node) -> bool:
    """Whether it may change a tensor that exists already; what has no schema is taken to do so."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    is_number = isinstance(value(node), torch.SymInt | torch.SymFloat | torch.SymBool | int | float)
    return not is_number and node.target not in (operator.getitem, torch.tensor)


def inputs_of(nodes: Iterable[Node]) -> list[Node]:
    """What the nodes read and are not themselves, in order, each once."""
    inside = list(nodes)
    found = [one for node in inside for one in node.all_input_nodes if one not in inside]
    return list(dict.fromkeys(found))


def differentiable_nodes(graph: fx.Graph, wanted: Sequence[bool], is_enabled: bool) -> set[Node]:
    """Nodes whose tensors may want a gradient; `wanted` says it of the placeholders, in order.

    A write of a tensor with a gradient gives one to whatever shares that memory: from there on every tensor counts.
    """
    found: set[Node] = set()
    of_placeholders = iter(wanted)
    is_written = False
    for node in graph.nodes:
        if node.op == "placeholder":
            if next(of_placeholders):
                found.add(node)
        elif is_call(node, _GRADIENT_SWITCH):
            is_enabled = bool(node.args[0])
        elif is_enabled and not is_call(node, aten.detach.default):
            reads = any(one in found for one in node.all_input_nodes)
            is_written = is_written or (reads and is_write(node))
            if (reads or is_written) and _has_gradient(value(node)):
                found.add(node)
    return found


def _has_gradient(found: Any) -> bool:
    if isinstance(found, list | tuple):
        return any(_has_gradient(one) for one in found)
    return isinstance(found, Tensor) and (found.is_floating_point() or found.is_complex())


class Emitter:
    """Adds calls to a graph and computes what they give on fake tensors. `without_dropout`: for a comparison."""

    def __init__(self, graph: fx.Graph, mode: Any, wants_gradient: bool, without_dropout: bool = False) -> None:
        self.graph, self.mode, self.wants_gradient = graph, mode, wants_gradient
        self.without_dropout = without_dropout

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode, torch.no_grad(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            node.meta["val"] = target(*map_arg(args, value), **map_arg(kwargs, value))
        return node

    def op(self, name: str, *args: Any) -> list[Node]:
        """The results of one of our ops: with a gradient of `<name>_forward`, whose further outputs it keeps."""
        plain = getattr(ours, name).default
        target = getattr(ours, f"{name}_forward").default if self.wants_gradient else plain
        results = len(plain._schema.returns)
        node = self.call(target, *args)
        if len(target._schema.returns) == 1:
            return [node]
        return [self.item(node, i) for i in range(results)]

    def item(self, node: Node, index: int) -> Node:
        picked = self.graph.call_function(operator.getitem, (node, index))
        picked.meta["val"] = value(node)[index]
        return picked

    def cast(self, node: Node, to: torch.dtype) -> Node:
        return node if dtype(node) is to else self.call(aten.to.dtype, node, to)
