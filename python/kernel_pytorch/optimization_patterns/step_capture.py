"""The capture of a model's forward and backward as two CUDA graphs that share their memory.

Both read and write the memory that they were captured with: static inputs and output gradients are written by the
caller before a replay, outputs and gradients copied afterwards. Before the capture the step runs as it is, to see what
a graph could not hold; random numbers and buffers are as if it had not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from . import capturing
from .model_state import ModelState

__all__ = ["CannotCapture", "CapturedStep", "capture_step", "duplicate", "undisturbed"]

_CONSTANTS = (int, float, bool, str, type(None))
_MOST_PADDING = 1.25  # of a tensor's elements: rows that lie further apart are copied one by one


class CannotCapture(Exception):
    """The reason, for people."""


@dataclass
class CapturedStep:
    """Two graphs with the tensors that they read and write.

    Attributes:
        leaves, spec: the output; its tensors are those that forward writes.
        wanted: which outputs' gradients backward reads, in the order of the output's tensors.
        gradients: of the inputs and then the parameters that want one; None where the outputs do not depend on it.
        draws: whether forward takes random numbers of the device.
    """

    device: torch.device
    forward: Any
    backward: Any
    inputs: list[Tensor]
    leaves: list[Any]
    spec: Any
    differentiable: list[bool]
    wanted: tuple[bool, ...]
    output_gradients: list[Tensor]
    gradients: list[Tensor | None]
    draws: bool
    addresses: tuple[int, ...]
    bytes: int = 0
    outputs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def answer(self, outputs: list[Tensor]) -> Any:
        """The output's structure with other tensors in it."""
        given = iter(outputs)
        return pytree.tree_unflatten([next(given) if isinstance(x, Tensor) else x for x in self.leaves], self.spec)


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def undisturbed(buffers: list[Tensor], device: torch.device, start: Tensor | None = None) -> Iterator[None]:
    """Random numbers (from `start`, where it is given) and buffers that are afterwards what they were."""
    kept = [buffer.clone() for buffer in buffers]
    states = (torch.get_rng_state(), random_state(device), random.getstate())
    if start is not None:
        set_random_state(start, device)
    try:
        yield
    finally:
        for buffer, value in zip(buffers, kept, strict=True):
            buffer.data.copy_(value)  # past autograd's version: nobody is to notice
        torch.set_rng_state(states[0])
        set_random_state(states[1], device)
        random.setstate(states[2])


def duplicate(tensor: Tensor) -> Tensor:
    """A copy with the tensor's strides; rows that are padded a little are copied with what lies between them."""
    sizes, strides = tensor.shape, tensor.stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides)) if tensor.numel() else 0
    if not tensor.numel() < extent <= _MOST_PADDING * tensor.numel():
        return tensor.clone()
    made = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
    made.as_strided((extent,), (1,)).copy_(tensor.as_strided((extent,), (1,)))
    return made


@contextmanager
def aliased(root: nn.Module, wanting: list[Tensor]) -> Iterator[list[Tensor]]:
    """Other leaves of the same memory in the parameters' places; those of `wanting`. Autograd ties a leaf to the stream
    on which it was first used while anything of that graph is alive (the last step's loss, autocast's cache), and a
    capture must not wait for that stream."""
    made: dict[int, nn.Parameter] = {}
    places = []
    for part in root.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                places.append((part._parameters, name, parameter))
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
                    made[id(parameter)].__dict__.update(parameter.__dict__)
    try:
        for table, name, parameter in places:
            table[name] = made[id(parameter)]
        yield [made[id(parameter)] for parameter in wanting]
    finally:
        for table, name, parameter in places:
            table[name] = parameter


class StepRunner:
    """One step on static inputs: forward to the output's leaves, backward from gradients of the wanted ones."""

    def __init__(self, function: Callable[[list[Tensor]], Any], inputs: list[Tensor], parameters: list[Tensor]) -> None:
        self.function, self.inputs = function, inputs
        self.differentiated = [x for x in inputs if x.requires_grad] + parameters
        self.known: list[Any] = []  # numbers that the host need not ask for

    def known_forward(self) -> tuple[list[Any], Any]:
        with capturing.knowing(self.known):
            return self.forward()

    def forward(self) -> tuple[list[Any], Any]:
        with torch.enable_grad(), capturing.uncached_autocast():
            return pytree.tree_flatten(self.function(self.inputs))

    def backward(
        self, roots: list[Tensor], gradients: list[Tensor], create_graph: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Outside autocast, as torch advises for backward."""
        with capturing.autocast_as((False, None)):
            return torch.autograd.grad(
                roots, self.differentiated, gradients, create_graph=create_graph, allow_unused=True
            )

    def whole(self, wanted: tuple[bool, ...]) -> None:
        leaves, _ = self.forward()
        roots = roots_of(leaves, wanted)
        self.backward(roots, [torch.ones_like(root) for root in roots])


def roots_of(leaves: list[Any], wanted: tuple[bool, ...]) -> list[Tensor]:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if len(tensors) != len(wanted) or not all(t.requires_grad for t, want in zip(tensors, wanted) if want):
        raise CannotCapture("its outputs are not the same in every call")
    return [tensor for tensor, want in zip(tensors, wanted) if want]


def capture_step(
    module: nn.Module,
    function: Callable[[list[Tensor]], Any],
    examples: list[Tensor],
    state: ModelState,
    wanted: tuple[bool, ...],
    device: torch.device,
    pool: Any,
    stream: Any,
) -> CapturedStep:
    """Raises CannotCapture, or whatever the model raises while it is captured; all is then as it was before."""
    inputs = [example.detach().clone().requires_grad_(example.requires_grad) for example in examples]
    with (
        torch.cuda.device(device),
        undisturbed(state.buffers, device),
        aliased(module, state.wanting) as parameters,
    ):
        step = StepRunner(function, inputs, parameters)
        draws = _try_out(step, wanted, device, stream)
        torch.cuda.empty_cache()  # so that what is reserved beyond this is the graphs'
        held = torch.cuda.memory_reserved(device)
        forward, (leaves, spec) = capturing.capture(step.known_forward, device, pool, stream)
        _check_leaves(leaves, step.differentiated)
        roots = roots_of(leaves, wanted)
        given = [torch.zeros_like(root) for root in roots]
        # Not kept for a second time: what backward has used up is room for what it computes next.
        backward, gradients = capturing.capture(lambda: step.backward(roots, given), device, pool, stream)
        differentiable = [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    made = CapturedStep(
        device,
        forward,
        backward,
        inputs,
        leaves,
        spec,
        differentiable,
        wanted,
        given,
        list(gradients),
        draws,
        state.addresses,
    )
    grown = max(torch.cuda.memory_reserved(device) - held, 0)
    made.bytes = grown + sum(tensor.nbytes for tensor in inputs)
    return made


def _try_out(step: StepRunner, wanted: tuple[bool, ...], device: torch.device, stream: Any) -> bool:
    """Runs the step twice on the stream of the capture; whether it takes random numbers of the device."""
    before, host = random_state(device), (torch.get_rng_state(), random.getstate())
    versions = [tensor._version for tensor in step.inputs]
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            waits, step.known = capturing.numbers_asked_for(lambda: step.whole(wanted))
            if waits:
                raise CannotCapture(f"it waits for the device in {waits}")
            draws = not torch.equal(before, random_state(device))
            step.whole(wanted)
    finally:  # whatever happened: the static inputs' memory is the other stream's to use again
        torch.cuda.current_stream(device).wait_stream(stream)
    if device.type == "cuda" and not (torch.equal(host[0], torch.get_rng_state()) and host[1] == random.getstate()):
        raise CannotCapture("it takes random numbers of the host, which a replay would not draw anew")
    if versions != [tensor._version for tensor in step.inputs]:
        raise CannotCapture("it writes to its inputs")
    return draws


def _check_leaves(leaves: list[Any], differentiated: list[Tensor]) -> None:
    """Outputs that can be given anew, and no gradient that would go to a tensor nobody knows of."""
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_CONSTANTS)):
            raise CannotCapture(f"it returns a {type(leaf).__name__}, which a graph cannot give anew in each call")
        if isinstance(leaf, Tensor) and (
            type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided
        ):
            raise CannotCapture(f"it returns a {type(leaf).__name__} of layout {leaf.layout}")
    known = {id(tensor) for tensor in differentiated}
    rest = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen: set[Any] = set()
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise CannotCapture(f"a tensor {tuple(variable.shape)} that is no parameter of it wants a gradient")
        rest += [function for function, _ in node.next_functions if function is not None]
