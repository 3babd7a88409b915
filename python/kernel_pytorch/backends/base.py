"""What all backends share: availability in words, and preparing a model."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from .. import _torch as _torch  # first: it says what is missing where torch is missing or old
from .._devices import device_info

import torch  # isort: skip
from torch import nn  # isort: skip

__all__ = ["Backend", "BackendUnavailableError"]

_ACCURACY = {None: "exact", "conservative": "exact", "balanced": "exact", "aggressive": "tolerant"}


class BackendUnavailableError(RuntimeError):
    """This machine has no such device, or torch cannot use it; the message says which, and the cure."""


class Backend(ABC):
    """A vendor's devices.

    Args:
        config: kept as `config`; backends read nothing of it but `device_id` (a number, the first device by default).
    """

    name: ClassVar[str]
    has_our_kernels: ClassVar[bool]

    def __init__(self, config: Any = None) -> None:
        self.config = config
        index = getattr(config, "device_id", None)
        self.index = 0 if index is None else int(index)

    @abstractmethod
    def missing(self) -> str:
        """What keeps this backend from being used, and the cure; empty where nothing does."""

    @abstractmethod
    def _device(self) -> torch.device: ...

    @abstractmethod
    def _describe(self) -> list[dict[str, Any]]: ...

    def __repr__(self) -> str:
        missing = self.missing()
        return f"{type(self).__name__}({'not available: ' + missing if missing else self._device()})"

    def is_available(self) -> bool:
        return not self.missing()

    @property
    def device(self) -> torch.device:
        """Where models go; raises where the backend is not available."""
        missing = self.missing()
        if missing:
            raise BackendUnavailableError(f"{type(self).__name__}: {missing}")
        return self._device()

    def get_device_info(self) -> dict[str, Any]:
        """{"backend", "available", "missing", "kernels": whose run there, "devices": a dict for each}; never raises for
        a device that is not there."""
        missing = self.missing()
        return {
            "backend": self.name,
            "available": not missing,
            "missing": missing,
            "kernels": "kernel_pytorch" if self.has_our_kernels else "torch",
            "devices": [] if missing else self._describe(),
        }

    def get_all_devices(self) -> list[dict[str, Any]]:
        """The "devices" of get_device_info."""
        devices: list[dict[str, Any]] = self.get_device_info()["devices"]
        return devices

    def synchronize(self) -> None:
        """Waits for what is queued on the device."""
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize(self.device)

    def empty_cache(self) -> None:
        """Gives memory that torch keeps for later back to the device; nothing on a CPU."""
        if self.device.type != "cpu":
            with torch.get_device_module(self.device).device(self.device):
                torch.get_device_module(self.device).empty_cache()

    clear_cache = empty_cache

    def cleanup(self) -> None:
        """Waits for the device, then empties the cache."""
        self.synchronize()
        self.empty_cache()

    def get_memory_stats(self) -> dict[str, int]:
        """Bytes: allocated and reserved by torch, their peak, and the device's free and total memory. Of a CPU, for
        which torch counts none, free and total alone."""
        device = self.device
        if device.type == "cpu":
            free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            return {"free_bytes": free, "total_bytes": device_info("cpu").memory_bytes}
        module = torch.get_device_module(device)
        free, total = module.mem_get_info(device)
        return {
            "allocated_bytes": module.memory_allocated(device),
            "reserved_bytes": module.memory_reserved(device),
            "peak_allocated_bytes": module.max_memory_allocated(device),
            "free_bytes": free,
            "total_bytes": total,
        }

    def prepare_data(self, data: Any) -> Any:
        """The same structure with every tensor on this backend's device."""
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), data)

    def prepare_model(
        self,
        model: nn.Module,
        optimization_level: str | None = None,
        sample_inputs: Any = None,
        budget_seconds: float = 20.0,
    ) -> nn.Module:
        """The model on this backend's device and, where the library has kernels for it, optimised.

        Args:
            model: moved and changed in place; kernel_pytorch.restore(model) undoes the optimisation.
            optimization_level: "conservative" and "balanced" (the usual) keep the precision, "aggressive" lets products
                be narrower (accuracy="tolerant").
            sample_inputs: what to optimise for, as kernel_pytorch.optimize takes it. Without it the model's first call
                is the sample: that call takes up to about `budget_seconds` more.
        """
        level = getattr(optimization_level, "value", optimization_level)
        if level not in _ACCURACY:
            names = ", ".join(str(name) for name in _ACCURACY if name)
            raise ValueError(f"{type(self).__name__}: optimization_level is {level!r}; it is one of {names}")
        from .._optimize.first_call import goal_now, optimize_at_first_call  # slow to load, and only needed here
        from .._optimize.optimize import optimize, restore  # slow to load, and only needed here

        model = restore(model).to(self.device)
        if not self.has_our_kernels:
            return model
        if sample_inputs is None:
            return optimize_at_first_call(model, _ACCURACY[level], budget_seconds)
        moved = self.prepare_data(sample_inputs)
        return optimize(model, moved, goal_now(model), budget_seconds, _ACCURACY[level]).model
