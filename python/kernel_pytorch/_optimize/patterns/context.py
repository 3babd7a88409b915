"""What patterns know besides the module before them: the goal, the device, and what earlier patterns recognised."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._modules import has_hooks
from ..changes import ours
from ..record import Recording
from .deferred.summed import Late


@dataclass
class Context:
    """The context of one call of `optimize`."""

    model: nn.Module
    goal: str
    accuracy: str
    device: torch.device
    recording: Recording
    compiled: bool = False
    weights: str | None = None  # the format of few bits, or "auto"
    norms: dict[nn.Module, Any] = field(default_factory=dict)
    activations: dict[nn.Module, str] = field(default_factory=dict)
    perceptrons: dict[nn.Module, Any] = field(default_factory=dict)
    attentions: set[nn.Module] = field(default_factory=set)
    deferred: Counter[nn.Module] | None = None  # modules that attend in torch's functions, how often
    flows: dict[nn.Module, nn.Module] | None = None  # linear layers, and the activations that get their output

    @property
    def trains(self) -> bool:
        return self.goal == "train"

    @property
    def runs_compiled_code(self) -> bool:
        """Whether the model or a part of it is compiled, which a mode around it would compile anew."""
        return self.compiled or bool(self.recording.closed)


def is_plain(module: nn.Module, kind: type[nn.Module] | None = None) -> bool:
    """Whether what the module computes is its class's forward and nothing else: no hooks, no foreign forward."""
    if kind is not None and type(module) is not kind:
        return False
    if has_hooks(module):
        return False
    own = vars(module).get("forward")  # a model that was pickled while it was optimised has its class's
    return own is None or ours(module) or getattr(own, "__func__", None) is type(module).forward


def why_not_plain(path: str, module: nn.Module) -> str | None:
    """In words, or None where it is plain."""
    if is_plain(module):
        return None
    if has_hooks(module):
        return f"{path or 'it'} has hooks, which a fused part would pass by"
    return f"the forward of {path or 'it'} was replaced by someone else"


def silent(module: nn.Module, called: Collection[str] = ()) -> bool:
    """Whether the children that a replacement does not call have no hooks: an activation, an Identity."""
    for name, child in module._modules.items():
        if child is None or name in called:
            continue
        if any(map(has_hooks, child.modules())):
            return False
    return True


def weight_reason(module: nn.Module) -> str | None:
    """Why the parameters cannot be used as they are, or None."""
    for name, parameter in module.named_parameters():
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            kind = type(parameter.data).__name__
            return (
                f"{name} is a {kind}, and what would replace it reads plain weights; "
                f"call kernel_pytorch.optimize first and shard or parallelise afterwards"
            )
        if parameter.is_meta:
            return f"{name} has no memory yet (a meta tensor)"
    return None


def why_not_around(module: nn.Module) -> str | None:
    """Why a forward that calls the module's own layers cannot replace its forward, or None. Layers with DTensors are
    called as they are, and so are their hooks."""
    if is_parallel(module) and "forward" not in vars(module):
        return None
    return why_not_plain("", module) or weight_reason(module)


def is_parallel(module: nn.Module) -> bool:
    """Whether each part with parameters has DTensors and hooks that make DTensors of its inputs, which is what
    parallelize_module does. (Parts inside a module of FSDP2 have no hooks: alone they cannot run.)"""
    tensor = sys.modules.get("torch.distributed.tensor")
    parts = [part for part in module.modules() if part._parameters]
    return (
        tensor is not None
        and bool(parts)
        and all(part._forward_pre_hooks for part in parts)
        and all(isinstance(p.data, tensor.DTensor) for p in module.parameters())
    )


def owners(model: nn.Module, parameter: Tensor) -> list[nn.Module]:
    """The modules that hold a parameter as their own."""
    return [part for part in model.modules() if any(p is parameter for p in part._parameters.values())]


@contextmanager
def undisturbed() -> Iterator[None]:
    """For probing: no gradients, no autocast, and the user's random numbers left alone."""
    on_gpu = torch.autocast("cuda", enabled=False) if torch.cuda.is_available() else nullcontext()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), on_gpu:
        yield


def probe(*shape: int, like: Tensor, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Random numbers of a parameter's type and device."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(like.device, like.dtype)


def _is_on_mesh(module: nn.Module, x: Any) -> bool:
    """Whether a module without children and its input are DTensors, which our ops take together."""
    return hasattr(x, "placements") and is_parallel(module)


def single_input(
    function: Callable[[nn.Module, Tensor], Any], name: str, original: Callable[..., Any], takes_late: bool = False
) -> Any:
    """A forward of one tensor, given by position or by the name the class gave it; any other call, and one with a
    tensor of another class (a DTensor, a nested one), is the original's. One that is not computed yet (deferred/
    summed.py) is computed first, unless the function knows how to take it.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        x: Any = (
            args[0] if len(args) == 1 and not kwargs else kwargs.get(name) if not args and len(kwargs) == 1 else None
        )
        if type(x) is Tensor or type(x) is nn.Parameter or _is_on_mesh(self, x):
            return function(self, x)
        if isinstance(x, Late):
            return function(self, x if takes_late else x.compute())
        return original(self, *args, **kwargs)

    return forward
