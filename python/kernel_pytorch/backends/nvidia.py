"""NVIDIA GPUs: CUDA kernels compiled on first use (NVRTC), so both a CUDA build of torch and libnvrtc are needed."""

from __future__ import annotations

from typing import Any

from .. import _library
from .._devices import cuda_absence, device_info
from .._supports import supports
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

    @property
    def devices(self) -> list[torch.device]:
        """Every CUDA device of torch, empty where there is none."""
        count = torch.cuda.device_count() if torch.cuda.is_available() and torch.version.cuda else 0
        return [torch.device("cuda", index) for index in range(count)]

    def set_device(self, index: int) -> None:
        """Makes this device the backend's and torch's current one."""
        if not 0 <= index < max(len(self.devices), 1):
            raise ValueError(f"NVIDIABackend: no device cuda:{index}; there are {len(self.devices)}")
        self.index = index
        torch.cuda.set_device(self.device)

    def get_optimal_attention_kernel(self, head_dim: int, precision: torch.dtype | str = torch.bfloat16) -> str:
        """The kernel that attention with heads of this size gets here ("sm90_wgmma", "cuda_mma", ...), by the core's
        own choice for 1 x 8 x 2048 positions."""
        asked = supports("attention_forward", (1, 8, 2048, 2048, head_dim), precision, self.device)
        best = next((kernel.kernel for kernel in asked if kernel.supported), "")
        if not best:
            reasons = "; ".join(f"{kernel.kernel}: {kernel.reason}" for kernel in asked)
            raise ValueError(f"NVIDIABackend: no attention kernel for head_dim {head_dim}, {precision} ({reasons})")
        return best

    def prepare_model_with_custom_kernels(self, model: torch.nn.Module) -> torch.nn.Module:
        """prepare_model, whose kernels are the library's own."""
        return self.prepare_model(model)
