"""Optimising a model with the inputs of its first call, for callers that have a model and no sample yet."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from .optimize import OptimizationResult, optimize
from .pending import Pending, forget_first_call
from .state import random_numbers_kept

__all__ = ["apart_from_the_call", "goal_now", "optimize_at_first_call", "sample_inputs_of"]


def goal_now(model: nn.Module) -> str:
    """What a call at this moment is for."""
    return "train" if model.training and torch.is_grad_enabled() else "inference"


def sample_inputs_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments in the form that `optimize` takes: a tuple, or a dict where some were named."""
    if not kwargs:
        return args
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}: {error}; its forward takes {signature}") from None
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
    goal: str | None = None,
) -> nn.Module:
    """The model; its first call optimises it for that call's arguments before it answers.

    That call takes up to about `budget_seconds` more. `then` gets the result. Where optimising fails its exception is
    the first call's, and the model is left as it was. `restore` before the first call takes the intent back; asking
    again replaces it. A copy of the model, pickled or not, is optimised at its own first call.

    Args:
        goal: None takes what the first call is for, see goal_now.
    """
    forget_first_call(model)
    model.register_forward_pre_hook(FirstCall(accuracy, budget_seconds, goal, then), with_kwargs=True, prepend=True)
    return model


class FirstCall(Pending):
    """A hook before a model's forward that optimises the model and is then gone."""

    def __init__(
        self,
        accuracy: str,
        budget_seconds: float,
        goal: str | None = None,
        then: Callable[[OptimizationResult], None] | None = None,
    ) -> None:
        self.accuracy, self.budget_seconds, self.goal, self.then = accuracy, budget_seconds, goal, then

    @_disable_dynamo  # torch.compiler.disable, which would import the compiler now
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forget_first_call(module)
        with apart_from_the_call(module):
            inputs = sample_inputs_of(module, args, kwargs)
            result = optimize(module, inputs, self.goal or goal_now(module), self.budget_seconds, self.accuracy)
        if self.then is not None:
            self.then(result)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "then": None}  # a copy has no callback


@contextmanager
def apart_from_the_call(model: nn.Module) -> Iterator[None]:
    """Runs of a sample inside a call are no part of it. Hooks on saved tensors (torch.utils.checkpoint's too) see none
    of them: they are lifted off and put back in their order. Random numbers go on as if nothing was drawn.
    """
    lifted = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        lifted.append(pair)
    try:
        with random_numbers_kept(model):
            yield
    finally:
        for pack, unpack in reversed(lifted):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
