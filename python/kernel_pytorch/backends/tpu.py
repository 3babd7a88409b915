"""TPUs through torch_xla. The library has no kernels for them: a model is moved there, XLA compiles it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from .base import Backend, BackendUnavailableError

import torch  # isort: skip

__all__ = ["BackendUnavailableError", "TPUBackend"]


class TPUBackend(Backend):
    """XLA devices of kind TPU."""

    name = "tpu"
    has_our_kernels = False

    def missing(self) -> str:
        if importlib.util.find_spec("torch_xla") is None:
            return (
                "torch_xla is not installed; on a Cloud TPU machine: pip install 'torch_xla[tpu]'. There are no "
                "kernels of kernel_pytorch for TPUs; on this machine's CPU use kernel_pytorch.optimize"
            )
        try:
            runtime = importlib.import_module("torch_xla.runtime")
            kind = runtime.device_type()
        except Exception as error:  # whatever torch_xla raises where its runtime finds no device
            return f"torch_xla finds no device ({type(error).__name__}: {error}); look at PJRT_DEVICE"
        if kind != "TPU":
            asked = os.environ.get("PJRT_DEVICE", "")
            return f"torch_xla's device is a {kind}, not a TPU (PJRT_DEVICE is {asked!r}); set PJRT_DEVICE=TPU on a TPU"
        return ""

    def _device(self) -> torch.device:
        device: torch.device = importlib.import_module("torch_xla").device(self.index)
        return device

    def _describe(self) -> list[dict[str, Any]]:
        return [{"device": str(device), "name": "TPU"} for device in self.all_devices()]

    def all_devices(self) -> list[torch.device]:
        """Those of torch_xla, empty where there is no TPU."""
        return [] if self.missing() else [torch.device("xla", index) for index in range(self._count())]

    @staticmethod
    def _count() -> int:
        return int(importlib.import_module("torch_xla.runtime").addressable_device_count())

    def synchronize(self) -> None:
        """Runs what is pending and waits for it."""
        device = self.device
        xla = importlib.import_module("torch_xla")
        xla.sync()
        importlib.import_module("torch_xla.core.xla_model").wait_device_ops([str(device)])

    def empty_cache(self) -> None:
        """Runs what is pending, which frees its buffers; XLA's runtime keeps no others that could be given back."""
        self.synchronize()

    clear_cache = empty_cache

    def get_memory_stats(self) -> dict[str, int]:
        """Bytes in use and in all, as the runtime tells them."""
        device = str(self.device)
        info = self._xla_model().get_memory_info(device)
        used, total = int(info["bytes_used"]), int(info["bytes_limit"])
        return {"allocated_bytes": used, "free_bytes": total - used, "total_bytes": total}

    def save_model(self, model: torch.nn.Module, path: str | os.PathLike[str]) -> None:
        """The model's state on the host's memory, as torch.save writes it."""
        self.synchronize()
        torch.save({name: value.cpu() for name, value in model.state_dict().items()}, path)

    def load_model(self, model: torch.nn.Module, path: str | os.PathLike[str]) -> torch.nn.Module:
        """The model with the state of `path` (of save_model, read without code), on the TPU."""
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return model.to(self.device)

    @staticmethod
    def _xla_model() -> Any:
        return importlib.import_module("torch_xla.core.xla_model")
