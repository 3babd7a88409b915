"""Intel CPUs, for which there are kernels (AVX2, AVX-512, AMX), and Intel GPUs (torch's xpu), for which there are none.

The CPU is what prepare_model prepares for; config.device_type = "xpu" asks for the GPU.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .._devices import device_info
from .base import Backend, BackendUnavailableError

import torch  # isort: skip

__all__ = ["BackendUnavailableError", "IntelBackend"]


class IntelBackend(Backend):
    """An Intel CPU, or with config.device_type = "xpu" an Intel GPU."""

    name = "intel"
    has_our_kernels = True

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.device_type = getattr(config, "device_type", None) or "cpu"
        if self.device_type not in ("cpu", "xpu"):
            raise ValueError(f'IntelBackend: config.device_type is {self.device_type!r}; it is "cpu" or "xpu"')
        if self.device_type == "xpu":
            self.has_our_kernels = False  # type: ignore[misc]

    def missing(self) -> str:
        if self.device_type == "xpu":
            if torch.xpu.is_available():
                return "" if self.index < torch.xpu.device_count() else f"no device xpu:{self.index}"
            return (
                f"torch {torch.__version__} sees no Intel GPU; install the xpu build of torch and the GPU's driver. "
                f"There are no kernels of kernel_pytorch for Intel GPUs"
            )
        name = device_info("cpu").name
        if "Intel" in name:
            return ""
        return f"this CPU is no Intel ({name}); use kernel_pytorch.optimize, whose kernels run on it all the same"

    def _device(self) -> torch.device:
        return torch.device("xpu", self.index) if self.device_type == "xpu" else torch.device("cpu")

    def _describe(self) -> list[dict[str, Any]]:
        if self.device_type == "xpu":
            names = [torch.xpu.get_device_name(index) for index in range(torch.xpu.device_count())]
            return [{"device": f"xpu:{index}", "name": name} for index, name in enumerate(names)]
        info = device_info("cpu")
        assert info.cpu is not None
        return [{"device": "cpu", "name": info.name, "memory_bytes": info.memory_bytes, **asdict(info.cpu)}]
