"""How many of a model's parts `optimize` recognised: seen from outside, by what still runs as before.

A part counts as recognised where, in the optimised model, its module has a forward of this library or is passed by.
Attention counts by the ops that run. It exists where torch's fused attention runs, or, inside a module of that name, a
softmax of what a product of two batches of matrices gave; weights that come from a linear layer (deformable attention)
are none. It was recognised where that no longer runs and this library's attention does: at most as many as run of it,
less those that are left, be the softmax torch's or ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from kernel_pytorch._optimize.changes import ours
from torch import nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .case import Case
from .checks import outputs_of

KINDS = ("norms", "attention", "qkv", "mlp", "moe")
_ATTENTION = re.compile(r"att(en|n)|mha|self_?att", re.I)
_ROUTER = re.compile(r"router|gate|moe|expert", re.I)
_SOFTMAX = ("aten::_softmax", "aten::_safe_softmax", "kernel_pytorch::softmax", "kernel_pytorch::softmax_forward")
_BATCH_PRODUCTS = ("aten::bmm", "aten::baddbmm")
# What a product of batches goes into and is no longer to be seen in.
_ENDS = ("aten::mm", "aten::addmm", "aten::linear", "aten::convolution", "aten::native_layer_norm", *_SOFTMAX)
_QUERY = re.compile(r"(^|_)(q|k|v|query|key|value|wq|wk|wv)(_|$|proj|lin)", re.I)


class _Ops(TorchDispatchMode):
    """Counts attention: torch's, written out or fused, and this library's."""

    def __init__(self, stack: list[nn.Module]) -> None:
        super().__init__()
        self.stack, self.count, self.ours = stack, 0, 0
        self._products: dict[int, Any] = {}  # tensors made of a product of batches, alive, so that ids are their own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        is_fused = "scaled_dot_product" in name or "multi_head_attention" in name
        is_softmax = name in _SOFTMAX and args[0].dim() >= 3 and id(args[0]) in self._products
        self.count += is_fused or (is_softmax and self._attends())
        is_ours = name.startswith("kernel_pytorch::")
        self.ours += name.startswith("kernel_pytorch::attention")
        made = func(*args, **(kwargs or {}))
        if name in _BATCH_PRODUCTS or (name not in _ENDS and not is_ours and self._is_of_product(args)):
            for tensor in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(tensor, torch.Tensor):
                    self._products[id(tensor)] = tensor
        return made

    def _is_of_product(self, args: Any) -> bool:
        return any(isinstance(one, torch.Tensor) and id(one) in self._products for one in args)

    def _attends(self) -> bool:
        kinds = [type(module).__name__ for module in self.stack]
        return any(_ATTENTION.search(kind) for kind in kinds[-4:]) and not any(map(_ROUTER.search, kinds[-2:]))


def _watched(case: Case) -> tuple[set[int], _Ops, dict[int, dict[str, int]]]:
    """Ids of the modules that are called, attention that ran, and inputs of each module's linear children."""
    called: set[int] = set()
    stack: list[nn.Module] = []
    read: dict[int, dict[str, int]] = {}
    held: list[Any] = []  # inputs stay alive, so that ids are their own

    def enters(module: nn.Module, args: tuple[Any, ...]) -> None:
        called.add(id(module))
        if stack and isinstance(module, nn.Linear) and args:
            held.append(args[0])
            name = next((n for n, child in stack[-1].named_children() if child is module), None)
            if name is not None:
                read.setdefault(id(stack[-1]), {})[name] = id(args[0])
        stack.append(module)

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        if stack and stack[-1] is module:
            stack.pop()

    handles = [hooks.register_module_forward_pre_hook(enters), hooks.register_module_forward_hook(leaves)]
    ops = _Ops(stack)
    try:
        with ops:
            outputs_of(case.model, case.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return called, ops, read


class Coverage:
    """Counts before `optimize`; `after` counts what became of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        called, ops, read = _watched(case)
        self.attention = ops.count
        self.parts: dict[str, list[nn.Module]] = {kind: [] for kind in KINDS}
        for module in case.model.modules():
            kind = _kind(module, read.get(id(module), {}))
            if kind is not None and (id(module) in called or kind == "qkv"):
                self.parts[kind].append(module)

    def after(self) -> dict[str, list[int]]:
        """By kind: recognised, and how many there are."""
        called, ops, _ = _watched(self.case)
        tests: dict[str, Callable[[nn.Module], bool]] = {
            "norms": lambda module: ours(module) or id(module) not in called,
            "mlp": lambda module: _is_replaced(module, called),
            "qkv": lambda module: (
                any("_kernel_pytorch_shared" in vars(one) for one in module.children()) or id(module) not in called
            ),
            "moe": lambda module: ours(module),
        }
        found = {kind: [sum(map(test, self.parts[kind])), len(self.parts[kind])] for kind, test in tests.items()}
        found["attention"] = [max(min(ops.ours, self.attention - ops.count), 0), self.attention]
        return found


def _is_replaced(module: nn.Module, called: set[int]) -> bool:
    return ours(module) or id(module) not in called


def _kind(module: nn.Module, read: dict[str, int]) -> str | None:
    name = type(module).__name__
    if re.search(r"experts$|moe(block|mlp)?$|sparsem", name, re.I) and any(True for _ in module.parameters()):
        return (
            "moe" if not any(_kind(child, {}) == "moe" for child in module.modules() if child is not module) else None
        )
    if _is_norm(module):
        return "norms"
    asked = [read[one] for one in read if _QUERY.search(one)]
    if len(asked) >= 3 and any(asked.count(one) >= 3 for one in asked):
        return "qkv"
    return "mlp" if _is_mlp(module) else None


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    is_leaf = not any(True for _ in module.children())
    return is_leaf and bool(re.search(r"(layer|rms)_?norm|^T5.*Norm", name, re.I))


def _is_mlp(module: nn.Module) -> bool:
    """Two or three linear layers that fit one another, and nothing else with parameters."""
    layers = [child for child in module.children() if isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"]
    others = [c for c in module.children() if c not in layers and any(True for _ in c.parameters())]
    if len(layers) not in (2, 3) or others or _ATTENTION.search(type(module).__name__):
        return False
    shapes = [tuple(one.weight.shape if isinstance(one, nn.Linear) else one.weight.shape[::-1]) for one in layers]
    (first, _), (_, last) = shapes[0], shapes[-1]
    return first in (last, 2 * last) and not isinstance(module, nn.ModuleList)
