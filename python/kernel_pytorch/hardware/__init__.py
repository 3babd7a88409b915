"""What this machine can compute on. Works without torch: devices are then named by strings.

>>> from kernel_pytorch.hardware import detect_available_devices
>>> detect_available_devices()["cpu"]
[device(type='cpu')]
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, cast

from .._devices import (
    CpuDetails,
    CudaDetails,
    DeviceInfo,
    LaunchCounts,
    cuda_absence,
    device_info,
    devices,
    launch_counts,
)
from .inventory import DeviceDescription, describe_devices

if TYPE_CHECKING:
    import torch

    from .abstraction import HardwareAbstractionLayer

__all__ = [
    "CpuDetails",
    "CudaDetails",
    "DeviceDescription",
    "DeviceInfo",
    "HardwareAbstractionLayer",
    "LaunchCounts",
    "cuda_absence",
    "describe_devices",
    "detect_available_devices",
    "device_info",
    "devices",
    "launch_counts",
]


def detect_available_devices() -> dict[str, list[torch.device]]:
    """Every device that torch can use here, by torch's name of its kind, fastest kinds first:
    {'cuda': [device(type='cuda', index=0), ...], 'xpu': [], 'mps': [], 'xla': [], 'cpu': [device(type='cpu')]}.

    The five kinds are always there, empty where nothing was found; another accelerator that torch knows has its own
    key. 'cuda' holds NVIDIA's GPUs, or AMD's under a ROCm build of torch, which calls them so; 'xla' holds TPUs. The
    library has kernels for NVIDIA's GPUs and for CPUs; on the others its ops run as torch operations. Of each,
    describe_devices() says what it has and what is missing. Without torch the devices are the strings "cuda:0" and
    "cpu".
    """
    names = [info.device for info in devices() if info.device.startswith("cuda")]
    if importlib.util.find_spec("torch") is None:
        found: dict[str, list[Any]] = {"cuda": names, "xpu": [], "mps": [], "xla": [], "cpu": ["cpu"]}
        return cast("dict[str, list[torch.device]]", found)
    import torch  # optional here: without it devices are named by strings

    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not getattr(torch.version, "hip", None):
        cuda = min(cuda, len(names))  # a device that KERNEL_PYTORCH_DISABLE_CUDA disables counts as absent
    counts = {
        "cuda": cuda,
        "xpu": torch.xpu.device_count() if torch.xpu.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    other = torch.accelerator.current_accelerator()
    if other is not None and other.type not in counts:
        counts[other.type] = torch.accelerator.device_count()
    listed = {kind: [torch.device(kind, index) for index in range(count)] for kind, count in counts.items()}
    return {**listed, "xla": _xla_devices(), "cpu": [torch.device("cpu")]}


def _xla_devices() -> list[torch.device]:
    from ..backends.tpu import TPUBackend  # needs torch, which this module does not

    return TPUBackend().all_devices()


def __getattr__(name: str) -> Any:
    if name == "HardwareAbstractionLayer":
        from .abstraction import HardwareAbstractionLayer  # needs torch, which the rest does not

        return HardwareAbstractionLayer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
