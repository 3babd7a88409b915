"""Bytes alive on a device: those of the allocator on CUDA, of the storages that ops return on a CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Meter:
    """Bytes alive on a device and their greatest number since the last reset."""

    def __init__(self, device: torch.device, alive: list[Tensor]) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.own = 0  # bytes of activations, which the plan counts by itself
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._own: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._now = self._greatest = 0
        self.ops = 0
        self.others = 0  # greatest of all but activations, op by op, since it was last set to 0
        if not self.is_cuda:
            for tensor in alive:
                self.note(tensor)

    def now(self) -> int:
        return int(self._stats()["current"]) if self.is_cuda else self._now

    def greatest(self) -> int:
        return int(self._stats()["peak"]) if self.is_cuda else self._greatest

    def reset(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._greatest = self._now

    def _stats(self) -> Any:
        return torch._C._cuda_memoryStats(self.device.index or 0)["allocated_bytes"]["all"]

    def note(self, tensor: Tensor) -> bool:
        """Its storage; whether that is new."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if tensor.device.type != self.device.type or key in self._known:
            return False
        self._known[key] = (weakref.ref(storage, lambda _: self._gone(key)), size)
        self._now += size
        self._greatest = max(self._greatest, self._now)
        return True

    def _gone(self, key: int) -> None:
        self._now -= self._known.pop(key)[1]

    def claim(self, tensor: Tensor) -> None:
        """Its storage is an activation's from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._own:
            return
        size = -(-storage.nbytes() // 512) * 512 if self.is_cuda else self._known[key][1] if key in self._known else 0
        if key not in self._known:  # made by the runtime itself, which no mode sees
            self._known[key] = (weakref.ref(storage, lambda _: self._gone(key)), 0)
        self.own += size
        self._own[key] = (weakref.ref(storage, lambda _: self._disowned(key)), size)

    def _disowned(self, key: int) -> None:
        self.own -= self._own.pop(key)[1]


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a meter of every storage that an op returns."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meter = self._meter
        own = meter.own
        meter.ops += function is not torch.ops.aten.detach.default  # which autograd does with what it has read
        if meter.is_cuda:
            meter.reset()
        result = function(*args, **(kwargs or {}))
        if not meter.is_cuda:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    meter.note(leaf)
        meter.others = max(meter.others, (meter.greatest() if meter.is_cuda else meter.now()) - own)
        return result


def tensors_of(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Those of a step that are there before it."""
    found = [*model.parameters(), *model.buffers()]
    found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return found + [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
