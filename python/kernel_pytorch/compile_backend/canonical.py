"""The graph that Dynamo captured as pre-dispatch ATen: one spelling for every operation, and still before autograd.

`linear`, `scaled_dot_product_attention`, `silu`, `layer_norm` and `cross_entropy_loss` stay whole in this form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from .nodes import CASTS, Node, aten, dtype, inputs_of, is_call, is_write, same_shape, shape, value

_LARGEST_CONSTANT = 1024
_LAST = 2**63 - 1
_PRODUCTS = (
    aten.linear.default,
    aten.addmm.default,
    aten.mm.default,
    aten.bmm.default,
    aten.matmul.default,
    aten.scaled_dot_product_attention.default,
)


class Unfit(Exception):
    """Why a graph stays as it is."""


def examples_of(graph: fx.Graph) -> list[Any]:
    """What Dynamo traced the placeholders with."""
    placeholders = graph.find_nodes(op="placeholder")
    return [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]


def higher_order_calls(graph: fx.Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.target, HigherOrderOperator)]


def canonical(module: fx.GraphModule, examples: list[Any]) -> tuple[fx.GraphModule, Any]:
    """The graph in its canonical form, and the fake mode of its tensors. Raises Unfit where there is none."""
    if any(node.op == "get_attr" for node in module.graph.nodes):
        raise Unfit("the graph holds tensors of its own")
    odd = [one for one in examples if isinstance(one, Tensor) and type(one) not in (FakeTensor, torch.nn.Parameter)]
    if odd:
        raise Unfit(f"an input is a {type(odd[0]).__name__}")
    mode = next((one.fake_mode for one in examples if isinstance(one, FakeTensor)), None)
    if mode is None:
        raise Unfit("no input is a tensor")
    with mode, torch.fx.traceback.preserve_node_meta():
        inputs = [_fresh(one) for one in examples]
        made = make_fx(_Interpreter(module).run, pre_dispatch=True)(*inputs)
    _construct_constants(made)
    _keep_metadata(module, made)
    _specialise_floats(made.graph)
    _drop_aliases(made.graph)
    _show_casts(made.graph, mode)
    return made, mode


class _Interpreter(fx.Interpreter):
    """Enters the graph's regions of autocast, which tracing only notes: types behind them would be wrong."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.amp.autocast_mode._enter_autocast:
            region = torch.amp.autocast_mode.autocast(*args, **kwargs)
            region.__enter__()  # type: ignore[no-untyped-call]
            return region
        if target is torch.amp.autocast_mode._exit_autocast:
            return args[0].__exit__(None, None, None)
        return super().call_function(target, args, kwargs)


def _fresh(example: Any) -> Any:
    """A fake tensor like this one: tracing changes what it is given."""
    if not isinstance(example, Tensor) or (example.dim() == 0 and example.dtype is torch.float64):
        return example  # a number; a float of Dynamo's is such a tensor, which knows its symbol
    made = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype, device=example.device)
    if example.requires_grad:
        made.requires_grad_()
        return made if example.is_leaf else made.view_as(made)
    return made


def _construct_constants(module: fx.GraphModule) -> None:
    """torch.tensor([...]) becomes an attribute in tracing, which AOTAutograd refuses; it becomes a call again."""
    for node in module.graph.find_nodes(op="get_attr"):
        constant = getattr(module, node.target)
        constant = getattr(constant, "constant", None) if isinstance(constant, FakeTensor) else constant
        if not isinstance(constant, Tensor) or constant.numel() > _LARGEST_CONSTANT:
            raise Unfit(f"a constant of the graph ({node.target}) cannot be written as a call")
        with module.graph.inserting_before(node):
            made = module.graph.call_function(
                torch.tensor, (constant.tolist(),), {"dtype": constant.dtype, "device": value(node).device}
            )
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        module.graph.erase_node(node)
        delattr(module, node.target)
        for user in list(made.users):  # what torch.tensor does besides
            if is_call(user, aten.lift_fresh_copy.default, aten.lift_fresh.default):
                user.replace_all_uses_with(made)
                module.graph.erase_node(user)
        for user in list(made.users):
            if is_call(user, aten.detach_.default):
                user.replace_all_uses_with(made)
                module.graph.erase_node(user)


def _keep_metadata(old: fx.GraphModule, new: fx.GraphModule) -> None:
    """What AOTAutograd reads: which inputs are static, where each comes from, names of parameters."""
    new.meta.update(old.meta)
    if hasattr(old, "_param_name_to_source"):
        new._param_name_to_source = old._param_name_to_source
    for before, after in zip(old.graph.find_nodes(op="placeholder"), new.graph.find_nodes(op="placeholder")):
        after.meta = {**before.meta, "val": value(after)}
        if hasattr(before, "_dynamo_source"):
            after._dynamo_source = before._dynamo_source


def _specialise_floats(graph: fx.Graph) -> None:
    """With dynamic shapes a float such as an epsilon is a symbolic input: its value is taken, which adds a guard."""
    for node in graph.find_nodes(op="call_function", target=aten.item.default):
        if isinstance(value(node), torch.SymFloat) and node.args[0].op == "placeholder":
            number = float(value(node))
            for user in list(node.users):
                user.args = _with_number(user.args, node, number)
                user.kwargs = _with_number(user.kwargs, node, number)
            graph.erase_node(node)


def _with_number(given: Any, node: Node, number: float) -> Any:
    return map_arg(given, lambda one: number if one is node else one)


def _drop_aliases(graph: fx.Graph) -> None:
    """Drops calls that return their argument: casts to the type it has, whole slices, dropout in evaluation."""
    for node in list(graph.nodes):
        source = node.args[0] if node.op == "call_function" and node.args else None
        if not isinstance(source, fx.Node) or not isinstance(value(source), Tensor):
            continue
        is_same = dtype(node) is dtype(source) and same_shape(shape(node), shape(source))
        if not is_same or value(node).device != value(source).device:
            continue
        copies = node.kwargs.get("copy") or (is_call(node, aten.to.dtype) and node.args[3:4] == (True,))
        if (is_call(node, *CASTS) and not is_call(node, aten._to_copy.default) and not copies) or _is_identity(node):
            node.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")
            if not node.users:
                graph.erase_node(node)


def _is_identity(node: Node) -> bool:
    if is_call(node, aten.alias.default):
        return True
    if is_call(node, aten.dropout.default):
        return not node.args[2] or node.args[1] == 0
    return is_call(node, aten.slice.Tensor) and node.args[2:] in ((0, _LAST), (None, None), ())


def _show_casts(graph: fx.Graph, mode: Any) -> None:
    """Under autocast a product's operands are cast below this form. The casts are written out: our ops have none."""
    for node in list(graph.nodes):
        if not is_call(node, *_PRODUCTS):
            continue
        to = dtype(node)
        for source in inputs_of([node]):
            if to in (torch.bfloat16, torch.float16) and dtype(source) is torch.float32:
                with graph.inserting_before(node):
                    cast = graph.call_function(aten.to.dtype, (source, to))
                with mode, torch.no_grad():
                    cast.meta["val"] = value(source).to(to)
                node.replace_input_with(source, cast)


def writes_between(nodes: list[Node], graph: fx.Graph) -> bool:
    """Whether something is written between the first and the last of the nodes: none may move then."""
    inside, seen = set(nodes), 0
    for node in graph.nodes:
        if node in inside:
            seen += 1
            if seen == len(inside):
                return False
        elif seen and is_write(node):
            return True
    raise ValueError("a node is not of this graph")
