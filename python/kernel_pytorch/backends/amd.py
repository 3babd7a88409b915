"""AMD GPUs through a ROCm build of torch. A model is moved there and torch's kernels run; functions of kernel_pytorch
run there as torch operations. With KERNEL_PYTORCH_AMD=1 the library's kernels run: compiled and emulated, never run on
hardware."""

from __future__ import annotations

from typing import Any

from .._devices import has_amd_kernels
from .base import Backend, BackendUnavailableError

import torch  # isort: skip

__all__ = ["AMDBackend", "BackendUnavailableError"]


class AMDBackend(Backend):
    """Devices of a ROCm torch, which calls them cuda."""

    name = "amd"
    has_our_kernels = False

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.has_our_kernels = has_amd_kernels()  # type: ignore[misc]

    def missing(self) -> str:
        if not getattr(torch.version, "hip", None):
            return (
                f"torch {torch.__version__} is not built for ROCm; on a machine with an AMD GPU install the ROCm build "
                f"(pytorch.org, Compute Platform ROCm). On this machine's CPU use kernel_pytorch.optimize"
            )
        if not torch.cuda.is_available():
            return "torch is built for ROCm and sees no GPU; look at rocminfo and at membership in the group render"
        if self.index >= torch.cuda.device_count():
            return f"no device {self.index}; there are {torch.cuda.device_count()}"
        return ""

    def _device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def _describe(self) -> list[dict[str, Any]]:
        found = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found.append(
                {
                    "device": f"cuda:{index}",
                    "name": properties.name,
                    "memory_bytes": properties.total_memory,
                    "architecture": getattr(properties, "gcnArchName", ""),
                    "multiprocessors": properties.multi_processor_count,
                }
            )
        return found
