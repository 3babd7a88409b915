"""What several parts of the package do with modules: evaluation mode for a while, replacing some, hooks, names of a
wrapper's state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["HOOKS", "evaluating", "has_hooks", "hide_name", "replace_modules"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether something of its own runs around its forward or backward, which whoever passes by its call would miss."""
    values = vars(module)
    return any(values.get(name) for name in HOOKS)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """All of the module in evaluation mode, and afterwards each part as it was."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
    except NotImplementedError:  # by code of torch.export, which has one mode; the parts around it have two
        for part, _ in modes:
            part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def replace_modules(model: nn.Module, replaced: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Puts modules in the places of others, in every place that has one; the model, or what it is replaced by."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and child in replaced:
                module._modules[name] = replaced[child]
    return replaced.get(model, model)


def hide_name(wrapper: nn.Module, name: str) -> None:
    """Makes a wrapper's state_dict that of the module inside it: `name`, the attribute that holds it, is left out.

    A state_dict with the name in it loads as well.
    """
    wrapper.register_state_dict_post_hook(functools.partial(_leave_out, name))  # type: ignore[no-untyped-call]
    wrapper.register_load_state_dict_pre_hook(functools.partial(_put_in, name))  # type: ignore[no-untyped-call]


def _leave_out(name: str, _wrapper: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}{name}.")]:
        state[prefix + key.removeprefix(f"{prefix}{name}.")] = state.pop(key)


def _put_in(name: str, wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    inner = getattr(wrapper, name)
    others = tuple(f"{prefix}{other}." for other in wrapper._modules if other != name and other not in inner._modules)
    keys = [key for key in state if key.startswith(prefix) and not key.startswith(others)]
    is_there = all(key.startswith(f"{prefix}{name}.") for key in keys) and name not in inner._modules
    for key in keys if not is_there else ():
        state[f"{prefix}{name}.{key.removeprefix(prefix)}"] = state.pop(key)
