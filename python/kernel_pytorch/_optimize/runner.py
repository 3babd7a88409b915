"""One run of a part of the model, as it is timed and as its work is counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._modules import evaluating
from .costs import Cost, count
from .sites import Call
from .state import Repeated, prepare
from .verify import random_like

__all__ = ["cost_of", "runner", "working"]


def working(module: nn.Module, trains: bool) -> Any:
    """The mode in which the module is timed: as the user left it for training, evaluating for inference."""
    return nullcontext() if trains else evaluating(module)


def runner(module: nn.Module, call: Call, trains: bool) -> Callable[[], object]:
    """One run of a part: forward, and for training backward too, without writing any .grad."""
    if not trains:

        def infer(call: Call) -> object:
            with torch.no_grad():
                return call.run(module)

        return Repeated(call.fresh(), infer)
    parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
    gradients: list[Tensor] = []  # drawn in the first run: of ones a GPU draws less power than of numbers

    def step(call: Call) -> object:
        first = call.differentiated()
        leaves = parameters if first is None else [*parameters, first]
        outputs = [leaf for leaf in pytree.tree_leaves(call.run(module)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in outputs if leaf.requires_grad]
        if not outputs:
            return None
        if [one.shape for one in outputs] != [one.shape for one in gradients]:
            gradients[:] = [random_like(leaf, i) for i, leaf in enumerate(outputs)]
        return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)

    return Repeated(call.fresh(), step)


def cost_of(module: nn.Module, call: Call, trains: bool, ridge: float) -> Cost:
    """Counted in one run of the module as it is."""
    run = runner(module, call, trains)
    prepare(run)
    with working(module, trains):
        return count(run, ridge)
