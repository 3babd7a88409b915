"""NVIDIA GPUs: CUDA kernels compiled on first use (NVRTC), so both a CUDA build of torch and libnvrtc are needed."""

from __future__ import annotations

from typing import Any

from .. import _library
from .._devices import cuda_absence, device_info
from .base import Backend, BackendUnavailableError

import torch  # isort: skip

__all__ = ["BackendUnavailableError", "NVIDIABackend"]

_LEAST_CAPABILITY = (8, 0)


class NVIDIABackend(Backend):
    """CUDA devices of compute capability 8.0 and newer."""

    name = "nvidia"
    has_our_kernels = True

    def missing(self) -> str:
        if getattr(torch.version, "hip", None):
            return f"torch {torch.__version__} is built for AMD GPUs; install a CUDA build of torch"
        if torch.version.cuda is None:
            return (
                f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch "
                f"(pip install torch, or the index that pytorch.org names for your driver)"
            )
        if not torch.cuda.is_available():
            why = cuda_absence() or "torch sees no device although the driver has one; look at CUDA_VISIBLE_DEVICES"
            return f"no CUDA device: {why}"
        if self.index >= torch.cuda.device_count():
            return f"no device cuda:{self.index}; there are {torch.cuda.device_count()}"
        capability = torch.cuda.get_device_capability(self.index)
        if capability < _LEAST_CAPABILITY:
            return (
                f"{torch.cuda.get_device_name(self.index)} has compute capability {capability[0]}.{capability[1]}; "
                f"the kernels need 8.0 (Ampere) or newer"
            )
        nvrtc = _library.call("nvrtc", has_request=False)
        if not nvrtc["found"]:
            return (
                f"NVRTC, which compiles the kernels, is not found ({nvrtc['absence']}); pip install nvidia-cuda-nvrtc"
            )
        return ""

    def _device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def _describe(self) -> list[dict[str, Any]]:
        return [self._describe_one(index) for index in range(torch.cuda.device_count())]

    def _describe_one(self, index: int) -> dict[str, Any]:
        info = device_info(f"cuda:{index}")
        assert info.cuda is not None
        return {
            "device": info.device,
            "name": info.name,
            "memory_bytes": info.memory_bytes,
            "compute_capability": info.cuda.compute_capability,
            "multiprocessors": info.cuda.multiprocessors,
            "driver_version": info.cuda.driver_version,
            "supports_fp8": info.cuda.compute_capability >= (8, 9),
        }

    @property
    def compute_capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    @property
    def is_h100(self) -> bool:
        """Whether it is of the Hopper generation (H100, H200, GH200)."""
        return self.compute_capability[0] == 9

    @property
    def is_blackwell(self) -> bool:
        return self.compute_capability[0] in (10, 11, 12)

    @property
    def supports_fp8(self) -> bool:
        return self.compute_capability >= (8, 9)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def get_memory_stats(self) -> dict[str, int]:
        """Bytes: allocated and reserved by torch, their peak, and the device's free and total memory."""
        device = self.device
        free, total = torch.cuda.mem_get_info(device)
        return {
            "allocated_bytes": torch.cuda.memory_allocated(device),
            "reserved_bytes": torch.cuda.memory_reserved(device),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
            "free_bytes": free,
            "total_bytes": total,
        }
