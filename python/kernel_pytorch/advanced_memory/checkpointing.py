"""The seeds' names for recomputation and offload, on `fit_memory` and torch's checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ._step import find_blocks, parse_bytes
from .fit import MemoryFit, fit_memory

__all__ = [
    "AdaptiveCheckpointing",
    "DynamicActivationOffloading",
    "MemoryEfficientBackprop",
    "SelectiveGradientCheckpointing",
]

_PRESSURE = 0.7  # share of the memory in use above which a layer that is not important is checkpointed


class SelectiveGradientCheckpointing:
    """Keeps the activations of important layers and fits the others into the budget.

    Args:
        importance_threshold: layers whose importance is at least this are left as they are. A layer that was never
            told has importance 0.5.
    """

    def __init__(self, importance_threshold: float = 0.5) -> None:
        self.importance_threshold = importance_threshold
        self.importance: dict[str, float] = {}

    def update_importance(self, layer: str, importance: float) -> None:
        """`layer` is a module's name in its model."""
        self.importance[layer] = importance

    def should_checkpoint(self, layer: str, memory_pressure: float = 1.0) -> bool:
        """Whether the layer would be treated at this share of memory in use."""
        return memory_pressure > _PRESSURE and self.importance.get(layer, 0.5) < self.importance_threshold

    def apply(
        self, model: nn.Module, sample: Any, budget: str | int | float | None = None, **options: Any
    ) -> MemoryFit:
        """`fit_memory` of the layers that are not important."""
        blocks = find_blocks(model)
        names = [name for name in blocks if self.should_checkpoint(name)]
        unknown = sorted(set(self.importance) - set(blocks))
        if unknown or not names:
            what = f'"{unknown[0]}" is no block of the model' if unknown else "no block's importance is below it"
            raise ValueError(
                f"SelectiveGradientCheckpointing: importance_threshold is {self.importance_threshold}, and {what}; "
                f"call update_importance with names among {', '.join(blocks)}, or raise the threshold above 0.5"
            )
        return fit_memory(model, sample, budget, blocks=names, **options)


class AdaptiveCheckpointing:
    """Calls a function so that backward recomputes it, if what it would save does not fit into the memory that is left.

    The first call of a function at a shape is checkpointed or not by what there is; it measures what is saved. Later
    calls know: a call is plain where the saved bytes of it leave `headroom` of the memory free.

    Args:
        budget: bytes that activations may take together; None: what the GPU has free. On a CPU without a budget there
            is no limit, and nothing is recomputed.
        headroom: share of the budget, or of the GPU's memory, to leave free.
    """

    def __init__(self, budget: str | int | float | None = None, headroom: float = 0.1) -> None:
        if not 0 <= headroom < 1:
            raise ValueError(f"AdaptiveCheckpointing: headroom is {headroom}; it must be a share, from 0 to below 1")
        self.budget = None if budget is None else parse_bytes(budget)
        self.headroom = headroom
        self.alive = 0  # bytes that plain calls have saved and backward has not read
        self.last_was_checkpointed = False
        self._saved: dict[Any, int] = {}

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        key = self._key(function, args)
        self.last_was_checkpointed = self._is_short_of(self._saved.get(key, 0), args)
        if self.last_was_checkpointed or not torch.is_grad_enabled():
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        before = self.alive
        inner = _parameters_of(function)
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._count(tensor, inner), _Counted.get):
            output = function(*args, **kwargs)
        self._saved[key] = self.alive - before
        return output

    __call__ = forward

    @staticmethod
    def _key(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return id(function), tuple(tuple(arg.shape) if isinstance(arg, Tensor) else None for arg in args)

    def _is_short_of(self, needed: int, args: tuple[Any, ...]) -> bool:
        if self.budget is not None:
            return self.alive + needed > (1 - self.headroom) * self.budget
        device = next((arg.device for arg in args if isinstance(arg, Tensor)), torch.device("cpu"))
        if device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free - needed < self.headroom * total

    def _count(self, tensor: Tensor, inner: set[int]) -> Any:
        size = 0 if tensor.untyped_storage()._cdata in inner else tensor.nbytes
        return _Counted(self, tensor.detach(), size)


class _Counted:
    """A saved tensor that tells when it goes."""

    def __init__(self, owner: AdaptiveCheckpointing, tensor: Tensor, size: int) -> None:
        self.tensor = tensor
        owner.alive += size
        weakref.finalize(self, _give_back, weakref.ref(owner), size)

    def get(self) -> Tensor:
        return self.tensor


def _give_back(owner: weakref.ref[AdaptiveCheckpointing], size: int) -> None:
    alive = owner()
    if alive is not None:
        alive.alive -= size


def _parameters_of(function: Any) -> set[int]:
    """Storages of a module's own tensors, which are alive whatever is saved."""
    if not isinstance(function, nn.Module):
        return set()
    return {tensor.untyped_storage()._cdata for tensor in (*function.parameters(), *function.buffers())}


class DynamicActivationOffloading:
    """Activations on the host: by a plan for a model (`apply`), or by hand for a tensor.

    Args:
        offload_device: where to; "cpu" is the one place there is.
    """

    def __init__(self, offload_device: str = "cpu") -> None:
        if torch.device(offload_device).type != "cpu":
            raise ValueError(f'DynamicActivationOffloading: offload_device is "{offload_device}"; it must be "cpu"')
        self._streams: dict[torch.device, Any] = {}

    def apply(
        self, model: nn.Module, sample: Any, budget: str | int | float | None = None, **options: Any
    ) -> MemoryFit:
        """`fit_memory` that moves and recomputes nothing: copies run beside the layers' work."""
        return fit_memory(model, sample, budget, recompute=False, **options)

    def offload_activations(self, activations: Tensor) -> Tensor:
        """A copy in pinned memory of the host, complete when this returns. Work queued on the GPU goes on meanwhile."""
        if activations.device.type != "cuda":
            return activations.detach().clone()
        device = activations.device
        stream = self._stream(device)
        there = torch.empty(activations.shape, dtype=activations.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            there.copy_(activations.detach(), non_blocking=True)
        stream.record_event().synchronize()
        return there

    def reload_activations(self, activations: Tensor, device: torch.device | str) -> Tensor:
        """On the device; what is queued on its current stream afterwards finds it there."""
        device = torch.device(device)
        if device.type != "cuda":
            return activations.to(device, copy=True)
        back = torch.empty_like(activations, device=device)  # of the current stream, which waits for the copy
        compute, stream = torch.cuda.current_stream(device), self._stream(device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            back.copy_(activations, non_blocking=True)
        compute.wait_stream(stream)
        return back

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class MemoryEfficientBackprop:
    """`fit_memory` under the seeds' name."""

    def apply(
        self, model: nn.Module, sample: Any, budget: str | int | float | None = None, **options: Any
    ) -> MemoryFit:
        return fit_memory(model, sample, budget, **options)
