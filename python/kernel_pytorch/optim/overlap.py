"""Steps that run under the next forward: each layer waits for its own weights, not for those of all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .adamw import AdamW
from .shards import is_sharded


class ForwardOverlap:
    """What `overlap_forward` returns. `remove()` ends it: steps have ended when `step()` returns to the stream."""

    def __init__(self, optimizer: AdamW, handles: list[Any]) -> None:
        self._optimizer, self._handles = optimizer, handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizer._joins_late = False
        self._optimizer._offloaded.join()

    def __enter__(self) -> ForwardOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def overlap_forward(optimizer: AdamW, model: nn.Module) -> ForwardOverlap:
    """Lets `optimizer.step()`, whose states are on the host, go on while the next forward runs.

    A layer's forward waits until the step has reached its parameters; the order of parameters in the optimizer is that
    of the layers, as a rule. Numbers are those of a step that ends before forward: with `max_grad_norm` too, whose norm
    is known before the first state is sent, which `release_gradients` cannot have. `step()` takes the gradients, which
    are None afterwards. Whoever reads weights elsewhere than in the forward of the module that owns them, or from
    `model.state_dict()`, waits with `torch.cuda.synchronize()` first.

    Args:
        optimizer: an AdamW with `offload`, whose rates are numbers (a tensor could change under the step) and whose
            gradients no GradScaler scales.
        model: whose parameters it has. Of a compiled model the forward waits as a whole.
    """
    if not isinstance(optimizer, AdamW) or optimizer._offload is None:
        raise TypeError(
            f"overlap_forward: the optimizer is {type(optimizer).__name__}; it must be an AdamW of this package with "
            "offload, since only states on their way take time"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(map(is_sharded, parameters)):
        raise ValueError("overlap_forward: a parameter is a DTensor, which FSDP reads before its layer's forward")
    own = {id(parameter) for parameter in model.parameters()}
    if not all(id(parameter) in own for parameter in parameters):
        raise ValueError("overlap_forward: the optimizer has parameters that are not the model's")

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait_for_own(module: nn.Module, *_: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None:
                optimizer._offloaded.join_one(parameter)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait_for_all(*_: Any) -> None:
        optimizer._offloaded.join()

    def begin(*_: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise RuntimeError("overlap_forward: a GradScaler changes its scale under the step; go without it")
        if any(isinstance(group["lr"], torch.Tensor) for group in optimizer.param_groups):
            raise RuntimeError("overlap_forward: lr is a tensor, which may change under the step; give a number")
        optimizer._offloaded.join()

    def end(*_: Any) -> None:
        for parameter in parameters:
            parameter.grad = None

    handles: list[Any] = [
        optimizer.register_step_pre_hook(begin),
        optimizer.register_step_post_hook(end),
        model.register_state_dict_pre_hook(wait_for_all),  # type: ignore[no-untyped-call]
    ]
    if hasattr(model, "_orig_mod"):
        handles.append(model.register_forward_pre_hook(wait_for_all))
    else:
        handles += [
            module.register_forward_pre_hook(wait_for_own, prepend=True)
            for module in model.modules()
            if any(parameter is not None for parameter in module._parameters.values())
        ]
    optimizer._joins_late = True
    return ForwardOverlap(optimizer, handles)
