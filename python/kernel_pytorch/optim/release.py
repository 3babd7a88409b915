"""Gradients that live no longer than needed: a parameter is stepped as soon as its gradient is complete."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from .steps import ListOptimizer


class GradientRelease:
    """What `release_gradients` returns. `remove()` ends it: gradients stay and `optimizer.step()` works as before."""

    def __init__(self, optimizer: ListOptimizer, handles: list[Any]) -> None:
        self._optimizer = optimizer  # hooks do not hold it
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def release_gradients(optimizer: ListOptimizer, *, gradients_are_local: bool = False) -> GradientRelease:
    """Steps each parameter inside `backward`, when its gradient is complete, and frees the gradient.

    Gradients of a model are then never all alive. `optimizer.step()` finds nothing left to do and may still be called,
    as may `zero_grad()` and schedulers; the numbers are those of a step after backward. Every backward is a step:
    gradients cannot be accumulated over several. It ends with `remove()`, or when nobody holds the optimizer or the
    object that this function returns any more; gradients that come then stay, with a warning.

    Args:
        optimizer: an optimizer of this package without max_grad_norm, since the norm of all gradients is known only
            after the last one.
        gradients_are_local: with torch.distributed in several processes, that gradients need no reduction over them.
            DistributedDataParallel reduces gradients after these hooks have run and cannot be used with them.
    """
    if not isinstance(optimizer, ListOptimizer):
        raise TypeError(
            f"release_gradients: the optimizer is {type(optimizer).__name__}; it must be one of kernel_pytorch.optim"
        )
    if optimizer.max_grad_norm is not None:
        raise ValueError(
            f"release_gradients: max_grad_norm is {optimizer.max_grad_norm}, and the norm is not known before the last "
            "gradient is; leave it out"
        )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size() > 1 and not gradients_are_local:
        raise ValueError(
            "release_gradients: there are several processes, and parameters would be stepped before their gradients "
            "are reduced; say gradients_are_local=True if they need not be"
        )
    handles = []
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad:
                hook = _hook(weakref.ref(optimizer), number, place)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
    return GradientRelease(optimizer, handles)


def _hook(held: weakref.ref[ListOptimizer], number: int, place: int) -> Any:
    """Holds neither the optimizer nor its groups: those hold the parameters, and parameters hold their hooks where no
    garbage collector sees them."""

    @torch.no_grad()
    def step(parameter: Tensor) -> None:
        optimizer = held()
        if optimizer is None:
            warnings.warn("release_gradients: nobody holds the optimizer any more, gradients stay", stacklevel=2)
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError("release_gradients: a GradScaler knows of infinities only after backward; go without it")
        group = optimizer.param_groups[number]
        for batch in optimizer._batches({**group, "params": [parameter]}):
            optimizer._step_batch(group, batch, number * 64 + place, (None, None, None))
        parameter.grad = None

    return step
