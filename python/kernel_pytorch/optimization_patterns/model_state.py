"""What a captured training step depends on in its model, read anew before every call: which modules there are and in
which mode, where parameters and buffers lie, which of them want gradients, and what stands in the way of a graph.

Some hundred microseconds for a thousand tensors, compared with a step of milliseconds.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from .._modules import HOOKS, has_hooks

__all__ = ["ModelState", "obstacle_now", "state_of"]

_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)


@dataclass
class ModelState:
    """Attributes:
    flags: modules, modes and types; another value means another graph.
    addresses: where the tensors lie; another value means that the graph is out of date.
    wanting: the parameters that want gradients, each once.
    versions: of those, how often they were written to.
    obstacle: why there can be no graph, or "".
    """

    flags: Hashable = ()
    addresses: tuple[int, ...] = ()
    wanting: list[Tensor] = field(default_factory=list)
    buffers: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    obstacle: str = ""


def state_of(root: nn.Module) -> ModelState:
    """The current state of a model. Hooks of the root itself run outside the graph and are no obstacle."""
    state = ModelState()
    flags: list[Hashable] = []
    addresses: list[int] = []
    known: set[int] = set()
    rest: list[nn.Module] = [root]
    while rest:
        part = rest.pop()
        if id(part) in known:
            continue
        known.add(id(part))
        values = part.__dict__
        flags += (id(part), part.training)
        if part is not root and has_hooks(part):
            state.obstacle = f"a {type(part).__name__} inside has hooks, which a replay would pass by"
        for parameter in values["_parameters"].values():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter:
                state.obstacle = f"a parameter is a {type(parameter).__name__}; shard or parallelise without graphs"
                return state
            if parameter._backward_hooks:
                state.obstacle = "a parameter has hooks, which the capture would run"
            flags += (parameter.requires_grad, parameter.dtype)
            addresses.append(parameter.data_ptr())
            if parameter.requires_grad and id(parameter) not in known:
                known.add(id(parameter))
                state.wanting.append(parameter)
                state.versions.append(parameter._version)
        for buffer in values["_buffers"].values():
            if buffer is not None:
                if type(buffer) is not Tensor:
                    state.obstacle = f"a buffer is a {type(buffer).__name__}"
                    return state
                addresses.append(buffer.data_ptr())
                state.buffers.append(buffer)
        rest += [child for child in values["_modules"].values() if child is not None]
    state.flags, state.addresses = tuple(flags), tuple(addresses)
    return state


def obstacle_now() -> str:
    """What surrounds this call and could not see into a replay, or ""."""
    if any(getattr(torch_modules, name, None) for name in _GLOBAL_HOOKS):
        return "there are hooks on all modules, which a replay would pass by"
    if torch._C._len_torch_dispatch_stack() or any(map(_looks, range(torch._C._len_torch_function_stack()))):
        return "a mode looks at every op"
    if torch._C._are_functorch_transforms_active():
        return "it is being transformed by torch.func"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks want the tensors that are saved for backward"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    if torch.compiler.is_compiling():
        return "it is being traced"
    return ""


def _looks(index: int) -> bool:
    """Whether a mode of torch's functions is more than torch.set_default_device."""
    return type(torch._C._get_function_stack_at(index)).__name__ != "DeviceContext"
