"""The sample: how the model is called, on which device, and what one step of the goal is.

A training step without a loss goes backward from gradients drawn once: a loss of our own would be measured as if it
were the model's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._modules import evaluating
from .agreement import is_shared
from .sites import Call
from .state import Repeated
from .verify import random_like


@dataclass
class Sample:
    """The user's inputs and goal."""

    call: Call
    goal: str
    device: torch.device
    dtype: torch.dtype
    loss: Callable[[Any], Tensor] | None = None
    drawn: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def forward(self, model: nn.Module) -> object:
        """One forward, in the mode of the goal."""
        with evaluating(model) if self.goal == "inference" else nullcontext():
            return Repeated(self.call, lambda call: call.run(model))()

    def step(self, model: nn.Module) -> Callable[[], object]:
        """What is measured: forward, or forward and backward with gradients cleared first."""
        step = self._infer if self.goal == "inference" else self._train
        return Repeated(self.call, functools.partial(step, model))

    def _infer(self, model: nn.Module, call: Call) -> object:
        with torch.no_grad():
            return call.run(model)

    def clear(self, model: nn.Module, call: Call | None = None) -> None:
        """No gradients of earlier steps."""
        for tensor in (*model.parameters(), *(call or self.call).tensors()):
            tensor.grad = None

    def _train(self, model: nn.Module, call: Call) -> object:
        self.clear(model, call)
        with torch.enable_grad():
            roots, gradients = self.roots(call.run(model))
            torch.autograd.backward(roots, gradients)
        return None

    def roots(self, output: Any) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where backward begins, and with which gradients: the loss, or every output."""
        if self.loss is not None:
            return [self.loss(output)], [None]
        own = getattr(output, "loss", None)
        if own is None and isinstance(output, dict):
            own = output.get("loss")
        if isinstance(own, Tensor):
            return [own], [None]
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves:
            raise ValueError("optimize: goal is train, and no output of the model requires a gradient; give loss=")
        return leaves, [self._gradient(index, leaf) for index, leaf in enumerate(leaves)]

    def _gradient(self, index: int, output: Tensor) -> Tensor:
        key = (index, output.shape, output.dtype, output.device)
        if key not in self.drawn:
            self.drawn[key] = random_like(output, index)
        return self.drawn[key]


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Steps inside leave the user's gradients as they were."""
    _reshard(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _reshard(model: nn.Module) -> None:
    """After a forward alone FSDP2's parameters are whole ones, which are not those that gradients are kept in."""
    if is_shared():
        from torch.distributed.fsdp import FSDPModule  # slow to load, and few models are sharded

        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _leaf(value: Any) -> Any:
    """The same memory without its history: the sample gets no gradients, and a graph can be used only once."""
    if type(value) is not Tensor or not value.requires_grad:
        return value
    return value.detach().requires_grad_()


def sample_of(model: nn.Module, inputs: Any, goal: str, loss: Callable[[Any], Tensor] | None) -> Sample:
    """Reads the user's inputs: a tensor, positional arguments in a tuple or list, or named ones in a mapping."""
    if isinstance(inputs, Tensor):
        call = Call((inputs,), {}, True)
    elif hasattr(inputs, "keys"):
        call = Call((), dict(inputs), True)
    elif isinstance(inputs, (tuple, list)):
        call = Call(tuple(inputs), {}, True)
    else:
        raise TypeError(
            f"optimize: sample_inputs is a {type(inputs).__name__}; "
            f"give a tensor, a tuple of arguments or a dict of named ones"
        )
    if goal == "train":
        call = call.of(*pytree.tree_map(_leaf, (call.args, call.kwargs)))
    tensor: Tensor | None = next(model.parameters(), None)
    if tensor is None:
        tensor = next(iter(call.tensors()), None)
    device = tensor.device if tensor is not None else torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"optimize: the model is on {device}; there are kernels for cpu and cuda")
    dtype = tensor.dtype if tensor is not None and tensor.is_floating_point() else torch.float32
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return Sample(call, goal, device, dtype, loss)
