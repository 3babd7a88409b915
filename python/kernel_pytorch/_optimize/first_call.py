"""Optimising a model with the inputs of its first call, for callers that have a model and no sample yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .optimize import OptimizationResult, optimize

__all__ = ["goal_now", "optimize_at_first_call", "sample_inputs_of"]


def goal_now(model: nn.Module) -> str:
    """What a call at this moment is for."""
    return "train" if model.training and torch.is_grad_enabled() else "inference"


def sample_inputs_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments in the form that `optimize` takes: a tuple, or a dict where some were named."""
    if not kwargs:
        return args
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise ValueError(
                f"optimize: {type(model).__name__} was called with named arguments and with {name}, which has no name; "
                f"call it with positional ones only, or call kernel_pytorch.optimize"
            )
        else:
            named[name] = value
    return named


def optimize_at_first_call(
    model: nn.Module,
    accuracy: str = "exact",
    budget_seconds: float = 20.0,
    then: Callable[[OptimizationResult], None] | None = None,
) -> nn.Module:
    """The model; its first call optimises it for that call's arguments and mode before it answers.

    That call takes up to about `budget_seconds` more. `then` gets the result. Where optimising fails its exception is
    the first call's, and the model is left as it was.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle.remove()
        inputs = sample_inputs_of(module, args, kwargs)
        result = optimize(module, inputs, goal_now(module), budget_seconds, accuracy)
        if then is not None:
            then(result)

    handle = model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    return model
