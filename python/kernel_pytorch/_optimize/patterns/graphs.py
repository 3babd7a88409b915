"""The whole model as a CUDA graph, for inference at shapes that come back: launches cost nothing any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..changes import Change, SetForward, Several, mark
from ..sites import Call, Found, Proposal, Refusal, Way
from ..verify import evaluating
from .context import Context, why_not_plain

NAME = "cuda graph"
_KEY = "_kernel_pytorch_graph"


class Inner(nn.Module):
    """A model by the forward that it had before the graph."""

    def __init__(self, model: nn.Module, forward: Any) -> None:
        super().__init__()
        self.model = model
        self.before = forward
        self.training = model.training  # of this shell alone

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.before(*args, **kwargs)


class Holder:
    """The graphs of one model; a copy of the model begins with none."""

    def __init__(self) -> None:
        self.runner: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Holder:
        return Holder()


class Hold(Change):
    """A place for graphs on the model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.holder = model, Holder()

    def apply(self) -> None:
        self.model.__dict__[_KEY] = self.holder

    def undo(self) -> None:
        self.model.__dict__.pop(_KEY, None)


def find(context: Context, path: str, module: nn.Module, call: Call) -> Found:
    if path != "" or context.device.type != "cuda" or context.trains or context.compiled:
        return None
    reason = why_not_plain("", module)
    with torch.no_grad(), evaluating(module):
        leaves = pytree.tree_leaves(call.run(module))
    others = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, (Tensor, int, float, bool))]
    if others:
        reason = f"it returns a {type(others[0]).__name__}, which a graph cannot give anew in each call"
    if reason:
        return Refusal(path, NAME, reason)
    way = Way("replays of a CUDA graph, one for each shape", lambda: _change(module))
    return Proposal(NAME, path, module, f"{type(module).__name__}, its launches one by one", [way])


def _change(module: nn.Module) -> Several:
    before = module.__dict__.get("forward")  # ours, of the model as a part
    function = type(module).forward if before is None else before.__func__

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from ...optimization_patterns import PyGraph

        holder: Holder = self.__dict__[_KEY]
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return function(self, *args, **kwargs)
        if holder.runner is None:
            holder.runner = PyGraph(Inner(self, lambda *a, **k: function(self, *a, **k)), always=True)
        holder.runner.module.training = self.training
        return holder.runner(*args, **kwargs)

    return Several(Hold(module), SetForward(module, mark(forward)))
